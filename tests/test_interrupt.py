"""Ctrl-C while C code runs: the flag is raised at once, and everything is as it was afterwards."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec_cli import interrupt
from specdec_cli.interrupt import clear_stop, request_stop, stop_on_sigint, stop_requested

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    clear_stop()
    yield
    clear_stop()


def wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    return fd


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def polled(flag: Callable[[], bool], seconds: float = 2.0) -> bool:
    limit = time.monotonic() + seconds
    while not flag() and time.monotonic() < limit:
        time.sleep(0.005)
    return flag()


def test_request_and_clear() -> None:
    assert not stop_requested()
    request_stop()
    request_stop()
    assert stop_requested()
    clear_stop()
    assert not stop_requested()


def test_c_callback_sees_the_flag() -> None:
    function, argument = interrupt.abort_callback()
    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(function)
    assert callback(argument) is False
    request_stop()
    assert callback(argument) is True
    clear_stop()
    assert callback(argument) is False


def interrupted_while(work: Callable[[], object]) -> None:
    """Run `work` in a block of its own, which Ctrl-C ends."""
    with pytest.raises(KeyboardInterrupt):
        _in_block(work)


def _in_block(work: Callable[[], object]) -> None:
    with stop_on_sigint():
        work()
        time.sleep(1)


def long_call() -> None:
    """About half a second in C without the interpreter lock, and no signal ends it early."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)


def test_flag_is_up_while_the_main_thread_is_in_c() -> None:
    """The main thread cannot run its handler: a C call like a decode releases the lock and does not come back."""
    seen: list[float] = []

    def press() -> None:
        time.sleep(0.1)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)
        if polled(stop_requested):
            seen.append(time.monotonic() - began)

    thread = threading.Thread(target=press)

    def work() -> None:
        thread.start()
        long_call()
        polled(lambda: bool(seen))

    interrupted_while(work)
    assert polled(lambda: bool(seen))
    assert seen[0] < 0.3
    thread.join()


def test_decode_like_call_ends_early() -> None:
    """A loop that asks the callback, as llama.cpp does between graph nodes."""
    function, argument = interrupt.abort_callback()
    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(function)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    interrupted_while(lambda: polled(lambda: callback(argument), 5))
    assert time.monotonic() - began < 2


def test_everything_is_restored() -> None:
    handler = signal.getsignal(signal.SIGINT)
    threads, before = threading.active_count(), wakeup_fd()
    descriptors = num_descriptors()
    for _ in range(20):
        with stop_on_sigint():
            assert wakeup_fd() != before
    assert wakeup_fd() == before
    assert threading.active_count() == threads
    assert num_descriptors() == descriptors
    assert signal.getsignal(signal.SIGINT) is handler


def num_descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_restored_after_an_error() -> None:
    threads, before = threading.active_count(), wakeup_fd()
    with pytest.raises(ZeroDivisionError), stop_on_sigint():
        raise ZeroDivisionError
    assert (threading.active_count(), wakeup_fd()) == (threads, before)


def test_stop_does_not_outlive_the_block() -> None:
    """Whoever decodes next, without a block of their own, must not be stopped by an old Ctrl-C."""
    interrupted_while(press_ctrl_c)
    assert not stop_requested()


def test_new_block_forgets_an_old_stop() -> None:
    request_stop()
    with stop_on_sigint():
        assert not stop_requested()


def test_nested() -> None:
    threads, before = threading.active_count(), wakeup_fd()

    def work() -> None:
        outer = wakeup_fd()
        with stop_on_sigint():
            assert wakeup_fd() == outer
        assert wakeup_fd() == outer
        assert not stop_requested()
        # The outer one still works.
        press_ctrl_c()

    interrupted_while(work)
    assert (threading.active_count(), wakeup_fd()) == (threads, before)


def test_signal_in_the_inner_block_leaves_the_outer_one_whole() -> None:
    with stop_on_sigint():
        interrupted_while(press_ctrl_c)
    with stop_on_sigint():
        assert not stop_requested()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no other signal to send")
def test_what_is_held_is_done_whole() -> None:
    done: list[str] = []

    def work() -> None:
        with interrupt.hold():
            with interrupt.hold():
                press_ctrl_c()
                done.append("first")
            # Decoding gives up at once all the same.
            assert stop_requested()
            done.append("second")
        done.append("third")

    with pytest.raises(KeyboardInterrupt), stop_on_sigint():
        work()
    assert done == ["first", "second"]
    with stop_on_sigint(), interrupt.hold():
        """Nothing waits any more."""


def test_a_second_ctrl_c_does_not_wait() -> None:
    done: list[str] = []

    def work() -> None:
        for name in ("first", "second"):
            press_ctrl_c()
            done.append(name)

    with pytest.raises(KeyboardInterrupt), stop_on_sigint(), interrupt.hold():
        work()
    assert done == ["first"]
    with stop_on_sigint(), interrupt.hold():
        """Nothing waits any more."""


def test_other_signals_do_not_stop() -> None:
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with stop_on_sigint():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
            assert not stop_requested()
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_many_signals_fit() -> None:
    """A full buffer must neither block nor print."""
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with stop_on_sigint():
            for _ in range(2000):
                signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_outside_the_main_thread_it_does_nothing() -> None:
    before, found = wakeup_fd(), []

    def work() -> None:
        num = threading.active_count()
        with stop_on_sigint():
            found.append(threading.active_count() - num)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]
    assert wakeup_fd() == before


def test_process_stops_within_half_a_second() -> None:
    """A child in a C call that the flag ends, as `specdec run` is while it reads a prompt."""
    script = (
        "import ctypes, sys, time\n"
        "from specdec_cli import interrupt\n"
        "function, argument = interrupt.abort_callback()\n"
        "usleep = ctypes.CDLL(None).usleep\n"
        "asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(function)\n"
        "with interrupt.stop_on_sigint():\n"
        "    print('ready', flush=True)\n"
        "    try:\n"
        "        while not asked(argument): usleep(1000)\n"
        "    except KeyboardInterrupt: sys.exit(130)\n"
        "    time.sleep(1)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.wait(timeout=10)
        assert time.monotonic() - began < 1.5
    assert child.returncode != 0


def test_background_job_stays_deaf() -> None:
    """The shell starts `command &` with SIGINT ignored: Ctrl-C is meant for the job in front."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_sigint():
            press_ctrl_c()
            assert not stop_requested()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
