"""What careless or unlucky users do: threads, endless input, closed streams, damaged weights, forgotten sessions."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from models import tiny

from specdec_cli.choice import choose_models
from specdec_cli.cli import prompt as prompt_module
from specdec_cli.cli.app import invoke
from specdec_cli.errors import BackendError, ContextFullError, ModelLoadError, UsageError
from specdec_cli.gguf import check_header
from specdec_cli.llama import Model
from specdec_cli.sampling import Sampler
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeModel
from specdec_cli.types import Drafting, SamplingParams, Token

GREEDY = SamplingParams(temperature=0)


def fake_session() -> Session:
    return Session(FakeModel(1), FakeModel(2), SessionOptions(Drafting("model", 3, 0.0)))


def ids(events: object) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]  # type: ignore[attr-defined]


class TestSession:
    def test_threads_take_turns(self, tmp_path: Path) -> None:
        options = SessionOptions(Drafting("model", 3, 0.0), threads=1)
        with Session(Model(tiny(tmp_path, "t", seed=1)), Model(tiny(tmp_path, "d", seed=2)), options) as session:
            prompts = [[70 + number, 80, 90] for number in range(4)]
            alone = [session.generate(p, sampling=GREEDY, max_tokens=30).tokens for p in prompts]
            found: dict[int, tuple[int, ...]] = {}

            def work(number: int) -> None:
                found[number] = session.generate(prompts[number], sampling=GREEDY, max_tokens=30).tokens

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [found[number] for number in range(4)] == alone

    def test_streams_in_turns_with_a_growing_context(self) -> None:
        with fake_session() as session:
            alone = ids(session.stream("abc", sampling=GREEDY, max_tokens=40))
            stream = session.stream("abc", sampling=GREEDY, max_tokens=40)
            first = [next(stream) for _ in range(6)]
            session.generate("gfe", sampling=GREEDY, max_tokens=2000)
            assert ids([*first, *stream]) == alone

    def test_forgotten_session_is_freed(self) -> None:
        model = FakeModel(1)
        session = Session(model, None)
        session.generate("abc", max_tokens=3)
        del session
        gc.collect()
        assert model.is_closed

    def test_closed_session_says_so(self) -> None:
        session = fake_session()
        stream = session.stream("abc", max_tokens=50)
        next(stream)
        session.close()
        session.close()
        for call in (lambda: next(stream), lambda: session.generate("abc"), lambda: session.encode("abc")):
            with pytest.raises(UsageError, match="the session is closed"):
                call()

    @pytest.mark.parametrize("text", ["", "  \n"])
    def test_empty_prompt(self, text: str) -> None:
        with fake_session() as session, pytest.raises(UsageError, match="the prompt is empty"):
            session.generate(text)

    def test_no_tokens_wanted(self) -> None:
        with fake_session() as session, pytest.raises(UsageError, match="max_tokens must be 1 or more, not -1"):
            session.generate("abc", max_tokens=-1)

    def test_far_too_long_text_is_not_tokenized(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with fake_session() as session:
            monkeypatch.setattr(session.target, "tokenize", lambda *args, **kwargs: pytest.fail("tokenized"))
            with pytest.raises(ContextFullError, match="the model takes 4096 tokens"):
                session.generate("a" * 4096 * 40)

    def test_prompt_longer_than_the_model_has_a_hint_that_works(self) -> None:
        with fake_session() as session, pytest.raises(ContextFullError) as caught:
            session.generate("a" * 5000)
        assert caught.value.hint == "use a shorter prompt"


def test_damaged_weights_are_named() -> None:
    with pytest.raises(BackendError, match="no valid logits"):
        Sampler(GREEDY, 4).distribution(np.full(4, np.nan, dtype=np.float32))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        check_header(tmp_path / "pipe.gguf")


def test_two_targets() -> None:
    with pytest.raises(UsageError, match="two targets are named"):
        choose_models("a.gguf", Path("b.gguf"), None)


def test_endless_input_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prompt_module, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr("sys.stdin", None)
    path = tmp_path / "large"
    path.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="more than 1 MiB"):
        prompt_module.read_prompt("x", [path])


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    target = tiny(tmp_path, "target", seed=1)
    run = ["run", "--target", str(target), "-t", "0", "-n", "20", "--threads", "1", "--raw", "hello"]
    return [sys.executable, "-m", "specdec_cli", *run]


def shell(script: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    whole = ["bash", "-c", script, "bash", *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=60, env=environment)


def test_full_disk_while_streaming(command: list[str]) -> None:
    done = shell('"$@" </dev/null >/dev/full', command)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: cannot write the output: No space left on device")


def test_closed_streams(command: list[str]) -> None:
    without_stdout = shell('"$@" </dev/null >&-', command)
    assert without_stdout.returncode == 1
    assert without_stdout.stderr.startswith("Error: cannot write the output: standard output is closed")
    without_stderr = shell('"$@" </dev/null 2>&-', command)
    assert (without_stderr.returncode, without_stderr.stdout) == (0, shell('"$@" </dev/null', command).stdout)


def test_debug_counts_behind_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DEBUG", "")
    monkeypatch.setattr("sys.stdin", None)
    assert invoke(["run", "--debug", "--target", "nowhere.gguf", "hi"]) == 3
    assert "Traceback" in capsys.readouterr().err
