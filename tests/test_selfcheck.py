from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specdec_cli import selfcheck
from specdec_cli.errors import BackendError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake children use POSIX signals")

DIE = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "import time; time.sleep(60)"
FINE = "pass"


class FakeChild:
    """A command whose process does what it is told, and a count of how often it was started."""

    def __init__(self, with_extra_bufts: str, without: str) -> None:
        self.scripts = {True: with_extra_bufts, False: without}
        self.calls: list[bool] = []

    def __call__(self, model: Path, use_extra_bufts: bool) -> list[str]:
        assert model.read_bytes()[:4] == b"GGUF"
        self.calls.append(use_extra_bufts)
        # No site-packages: these children start in milliseconds.
        return [sys.executable, "-I", "-S", "-c", self.scripts[use_extra_bufts]]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache and a library of two files."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    library = tmp_path / "lib"
    library.mkdir()
    for name in ("libllama.so", "libggml-cpu.so", "README.txt"):
        (library / name).write_text(name)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(library))
    return tmp_path


def cache_file(home: Path) -> Path:
    return home / "home" / "cache" / "selfcheck.json"


def test_good_library_is_checked_once(home):
    child = FakeChild(FINE, FINE)
    assert selfcheck.check(command=child) == selfcheck.Verdict(True, is_new=True)
    assert selfcheck.check(command=child) == selfcheck.Verdict(True, is_new=False)
    assert child.calls == [True]
    assert selfcheck.check(command=child).warning == ""


def test_crash_turns_repacking_off_and_is_remembered(home):
    child = FakeChild(DIE, FINE)
    assert selfcheck.check(command=child) == selfcheck.Verdict(False, is_new=True)
    assert selfcheck.check(command=child) == selfcheck.Verdict(False, is_new=False)
    assert child.calls == [True, False]
    assert [entry.name for entry in cache_file(home).parent.iterdir()] == ["selfcheck.json"]


def test_warning_names_the_command_that_repairs(home):
    command = selfcheck.check(command=FakeChild(DIE, FINE)).warning.partition(": ")[2]
    version = importlib.metadata.version("llama-cpp-python")
    assert command.startswith('CXXFLAGS="-fno-tree-dse -fno-dse" ')
    assert command.endswith(f" --no-binary llama-cpp-python llama-cpp-python=={version}")
    for flag in ("--no-cache-dir", "--force-reinstall", "--no-deps"):
        assert flag in command
    assert "\n" not in command
    assert subprocess.run(["sh", "-n", "-c", command]).returncode == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (DIE, "died of SIGSEGV"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("import sys; print('no such library\\n', file=sys.stderr); sys.exit(1)", "ended with code 1: no such library"),
    ],
)
def test_dying_both_times_is_an_error_and_not_remembered(home, script, reason):
    child = FakeChild(DIE, script)
    for _ in range(2):
        with pytest.raises(BackendError, match=reason) as caught:
            selfcheck.check(command=child)
    assert "--no-cache-dir" in caught.value.hint
    assert child.calls == [True, False] * 2
    assert not cache_file(home).exists()


def test_hanging_child_is_ended(home):
    started = time.monotonic()
    assert selfcheck.check(command=FakeChild(HANG, FINE), time_limit_s=1).use_extra_bufts is False
    assert time.monotonic() - started < 5


def test_hanging_both_times(home):
    with pytest.raises(BackendError, match=r"did not answer within 0\.2 s"):
        selfcheck.check(command=FakeChild(HANG, HANG), time_limit_s=0.2)


def test_command_that_cannot_be_started(home):
    with pytest.raises(BackendError, match="could not be started"):
        selfcheck.check(command=lambda model, extra: [str(home / "missing")])


def test_another_library_is_checked_anew(home):
    child = FakeChild(FINE, FINE)
    library = home / "lib" / "libggml-cpu.so"
    selfcheck.check(command=child)
    library.write_text("built again, and longer")
    selfcheck.check(command=child)
    os.utime(library, ns=(1, 1))
    selfcheck.check(command=child)
    assert len(child.calls) == 3
    (home / "lib" / "README.txt").write_text("something else")
    assert not selfcheck.check(command=child).is_new


def test_another_cpu_is_checked_anew(home, monkeypatch):
    child = FakeChild(FINE, FINE)
    selfcheck.check(command=child)
    monkeypatch.setattr(selfcheck, "_cpu", lambda: "another one")
    assert selfcheck.check(command=child).is_new


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b'{"use_extra_bufts": 1}', b'{"use_extra_bufts": {"x": 3}}', b"\xff" * 9, b"[" * 99999],
)
def test_corrupt_cache_is_ignored_and_replaced(home, content):
    cache_file(home).parent.mkdir(parents=True)
    cache_file(home).write_bytes(content)
    assert selfcheck.check(command=FakeChild(DIE, FINE)).is_new
    assert not selfcheck.check(command=FakeChild(DIE, FINE)).is_new


def test_cache_does_not_grow_without_end(home):
    for number in range(20):
        selfcheck._remember(f"library {number}", True)
    selfcheck.check(command=FakeChild(FINE, FINE))
    assert len(json.loads(cache_file(home).read_text())["use_extra_bufts"]) == 16
    assert not selfcheck.check(command=FakeChild(FINE, FINE)).is_new


def test_cache_that_cannot_be_written(home):
    (home / "home").write_text("a file where a folder should be")
    child = FakeChild(DIE, FINE)
    for _ in range(2):
        assert selfcheck.check(command=child) == selfcheck.Verdict(False, is_new=True)
    assert child.calls == [True, False] * 2


def test_without_a_library_nothing_is_remembered(home, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(home / "nowhere"))
    child = FakeChild(FINE, FINE)
    assert selfcheck.check(command=child).is_new
    assert selfcheck.check(command=child).is_new


def test_interruption_ends_the_child_and_nothing_is_remembered(home, tmp_path):
    pid_file = tmp_path / "pid"
    child = FakeChild(f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)", FINE)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        selfcheck.check(command=child)
    timer.join()
    assert time.monotonic() - started < 2
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert child.calls == [True]
    assert not cache_file(home).exists()


def test_known_answer_costs_little(home):
    child = FakeChild(FINE, FINE)
    selfcheck.check(command=child)
    durations = []
    for _ in range(20):
        started = time.perf_counter()
        selfcheck.check(command=child)
        durations.append(time.perf_counter() - started)
    assert sorted(durations)[10] < 0.002


def test_module_does_not_load_llama_cpp():
    script = "import specdec_cli.selfcheck, sys; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_real_library_real_child(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    # The child must not import what lies in the user's folder.
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert selfcheck.check().is_new
    assert not selfcheck.check().is_new


@pytest.mark.parametrize("use_extra_bufts", ["0", "1"])
def test_child_sees_what_the_flag_says(use_extra_bufts, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(selfcheck, "_decode_some", lambda model, extra: seen.append((model, extra)) or extra)
    code = selfcheck._child_main(["m.gguf", "--extra-bufts", use_extra_bufts])
    assert seen == [(Path("m.gguf"), use_extra_bufts == "1")]
    assert code == 1 - int(use_extra_bufts)
