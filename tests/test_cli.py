"""The command line as a user meets it: streams, exit codes, messages; on fakes, then on tiny models in a process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import CHATML, no_vocabulary, sentencepiece_vocabulary, tiny

from specdec_cli.cli.app import invoke
from specdec_cli.cli.prompt import read_prompt
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.ngram_store import NgramStore
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.types import ContextOptions, Draft, Drafting, Logits

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "specdec_cli"]
STOP_S = 1.5
"""Half a second is promised; a shared machine may need longer."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from outside; the handler of Ctrl-C as it was."""
    for name in [name for name in os.environ if name.startswith("SPECDEC_") and name != "SPECDEC_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECDEC_THREADS", "1")
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


class FakeStdin(io.TextIOWrapper):
    def __init__(self, data: bytes, *, tty: bool = False) -> None:
        super().__init__(io.BytesIO(data), "utf-8")
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`specdec run ARGUMENTS` in this process."""

    def call(*arguments: str, stdin: bytes = b"", tty: bool = False) -> Done:
        monkeypatch.setattr(sys, "stdin", FakeStdin(stdin, tty=tty))
        capsys.readouterr()
        code = invoke(["run", *arguments])
        return Done(int(code), *capsys.readouterr())

    return call


# --- on fakes ----------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """What `Session.open` gives out."""

    target: FakeModel
    draft: FakeModel
    opened: list[tuple[Path, Path | None, SessionOptions]] = dataclasses.field(default_factory=list)

    def open(
        self, _cls: type[Session], target: Path, draft: Path | None = None, options: SessionOptions | None = None
    ) -> Session:
        assert options is not None
        self.opened.append((target, draft, options))
        return Session(self.target, self.draft if draft and options.drafting.uses_model else None, options)

    @property
    def options(self) -> SessionOptions:
        return self.opened[-1][2]


class TurningPoint:
    """A chance to do something at a later decode call of every context of a model."""

    def __init__(self, model: FakeModel, at: int, error: type[BaseException]) -> None:
        self._model, self._at, self._error, self.num_calls = model, at, error, 0
        self._open = model.open_context
        model.open_context = self.open_context  # type: ignore[method-assign]

    def open_context(self, options: ContextOptions) -> FakeContext:
        context = self._open(options)
        decode = context._decode

        def counting(*args: Any, **kwargs: Any) -> Logits | None:
            self.num_calls += 1
            if self.num_calls == self._at:
                context.fail_next = self._error()
            return decode(*args, **kwargs)

        context._decode = counting  # type: ignore[method-assign]
        return context


def set_end_logit(model: FakeModel, value: float) -> None:
    model._table[..., model.eos] = value


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    made = Pair(FakeModel(3), FakeModel(3, sharpness=1.6))
    for model in (made.target, made.draft):
        set_end_logit(model, -100.0)
    monkeypatch.setattr(Session, "open", classmethod(made.open))
    return made


FAKE = ("--target", "t.gguf", "--draft", "d.gguf", "-n", "40", "-k", "5")
GREEDY = (*FAKE, "-t", "0")
SGR = re.compile(r"\x1b\[[0-9;]*m")


class TestOnFakes:
    def test_answer_on_stdout_summary_on_stderr(self, run: Run, pair: Pair) -> None:
        done = run(*GREEDY, "abc")
        assert done.code == 0
        assert re.fullmatch("[a-g]{40}\n", done.out)
        assert "40 tokens" in done.err
        assert "acceptance rate" in done.err
        assert "\x1b" not in done.out + done.err
        assert pair.target.is_closed
        assert pair.draft.is_closed

    def test_budget(self, run: Run, pair: Pair) -> None:
        for budget in (1, 2, 7):
            done = run(*GREEDY, "-n", str(budget), "abc")
            assert (done.code, len(done.out)) == (0, budget + 1)
            assert "at the limit of" in done.err

    @pytest.mark.parametrize("flags", [("-k", "0"), ("--no-draft",), ("--drafter", "none")])
    def test_plain_decoding_gives_the_same_greedy_answer(self, run: Run, pair: Pair, flags: tuple[str, ...]) -> None:
        drafted, plain = run(*GREEDY, "abc"), run(*GREEDY, *flags, "abc")
        assert (drafted.code, plain.code) == (0, 0)
        assert plain.out == drafted.out
        assert "acceptance" not in plain.err
        assert pair.opened[-1][1] is None

    def test_no_stream_writes_the_same_text(self, run: Run, pair: Pair) -> None:
        assert run(*GREEDY, "--no-stream", "abc").out == run(*GREEDY, "abc").out

    def test_quiet(self, run: Run, pair: Pair) -> None:
        done = run(*GREEDY, "--quiet", "abc")
        assert (done.code, done.err) == (0, "")
        assert len(done.out) == 41

    def test_json_lines(self, run: Run, pair: Pair) -> None:
        done = run(*FAKE, "--seed", "5", "--json", "abc")
        assert (done.code, done.err) == (0, "")
        start, *middle, end = [json.loads(line) for line in done.out.splitlines()]
        assert (start["type"], start["schema"], start["pair"], start["seed"]) == ("start", 1, None, 5)
        assert (start["drafter"], start["num_draft_tokens"], start["seed_drawn"]) == ("auto", 5, False)
        tokens = [line for line in middle if line["type"] == "token"]
        rounds = [line for line in middle if line["type"] == "round"]
        assert len(tokens) + len(rounds) == len(middle)
        assert (end["type"], end["reason"], end["num_tokens"], end["num_rounds"]) == ("end", "length", 40, len(rounds))
        assert end["text"] == "".join(token["text"] for token in tokens)
        assert sum(line["num_tokens"] for line in rounds) == len(tokens)
        assert sum(line["num_accepted"] for line in rounds) == sum(token["source"] == "draft" for token in tokens)

    def test_json_and_text_agree(self, run: Run, pair: Pair) -> None:
        lines = run(*FAKE, "--seed", "5", "--json", "abc").out.splitlines()
        assert run(*FAKE, "--seed", "5", "abc").out == json.loads(lines[-1])["text"] + "\n"

    def test_drawn_seed_is_shown_and_repeats_the_answer(self, run: Run, pair: Pair) -> None:
        # Hot enough that no two seeds give the same answer.
        hot = (*FAKE, "-t", "5", "--min-p", "0")
        first = run(*hot, "abc")
        seed = re.search(r"seed (\d+)", first.err)
        assert seed is not None
        again = run(*hot, "--seed", seed[1], "abc")
        assert (again.code, again.out) == (0, first.out)
        assert "seed" not in again.err
        assert run(*hot, "abc").out != first.out

    def test_greedy_has_no_seed_to_show(self, run: Run, pair: Pair) -> None:
        assert "seed" not in run(*GREEDY, "abc").err

    def test_compare(self, run: Run, pair: Pair) -> None:
        done = run(*GREEDY, "--compare", "abc")
        assert done.code == 0
        assert re.fullmatch("[a-g]{40}\n", done.out)
        assert "greedy outputs agree" in done.err
        assert "baseline" in done.err

    def test_compare_sampled(self, run: Run, pair: Pair) -> None:
        done = run(*FAKE, "--compare", "--json", "abc")
        comparison = json.loads(done.out.splitlines()[-1])["comparison"]
        assert (done.code, comparison["agree"], comparison["near_tie"]) == (0, None, None)
        assert comparison["baseline"]["num_tokens"] == 40
        assert comparison["baseline"]["num_drafted"] == 0

    def test_compare_shows_a_near_tie(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        nearly_tied(pair.target, gap=0.001, monkeypatch=monkeypatch)
        done = run(*GREEDY, "--compare", "abc")
        assert done.code == 0
        assert re.search(r"greedy outputs differ from position \d+", done.err)
        assert re.search(r"gap 0\.001", done.err)
        tie = json.loads(run(*GREEDY, "--compare", "--json", "abc").out.splitlines()[-1])["comparison"]["near_tie"]
        assert tie["gap"] == pytest.approx(0.001, rel=0.05)
        assert len(set(tie["texts"])) == 2

    def test_color(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        plain, styled = run(*GREEDY, "abc"), run(*GREEDY, "--color", "always", "abc")
        assert (styled.code, SGR.sub("", styled.out)) == (0, plain.out)
        assert styled.out != plain.out
        assert "underlined green" in SGR.sub("", styled.err)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert run(*GREEDY, "abc").out == styled.out
        assert run(*GREEDY, "--color", "never", "abc").out == plain.out

    def test_context_full_in_the_middle(self, run: Run, pair: Pair) -> None:
        done = run(*GREEDY, "--ctx", "12", "abc")
        assert done.code == 0
        # Nine cells behind the prompt, and the token that needs no cell.
        assert len(done.out) == 12 - 3 + 1 + 1
        assert "context of 12 tokens is full; `--ctx`" in done.err

    def test_prompt_too_long(self, run: Run, pair: Pair) -> None:
        done = run(*GREEDY, "--ctx", "3", "abcd")
        assert (done.code, done.out) == (1, "")
        assert_error(done.err, "4 tokens, which leaves no room in a context of 3", "--ctx")
        assert pair.target.is_closed

    @pytest.mark.parametrize("flags", [(), ("--no-draft",), ("-t", "0.8")])
    def test_stop_token_first_is_an_empty_answer(self, run: Run, pair: Pair, flags: tuple[str, ...]) -> None:
        set_end_logit(pair.target, 100.0)
        done = run(*GREEDY, *flags, "abc")
        assert (done.code, done.out) == (0, "\n")
        assert "0 tokens" in done.err

    def test_stop_token_ends_the_answer_and_is_not_printed(self, run: Run, pair: Pair) -> None:
        letters = run(*GREEDY, "abc").out
        first, second = ("abcdefg".index(letter) for letter in letters[10:12])
        for model in (pair.target, pair.draft):
            model._table[first, second, model.eos] = 100.0
        done = run(*GREEDY, "-n", "400", "--json", "abc")
        end = json.loads(done.out.splitlines()[-1])
        assert (done.code, end["reason"]) == (0, "eog")
        assert 0 < end["num_tokens"] <= 12
        assert letters.startswith(end["text"])
        assert "<end>" not in done.out

    def test_interrupted_keeps_text_and_summary(self, run: Run, pair: Pair) -> None:
        TurningPoint(pair.target, 5, KeyboardInterrupt)
        whole = run(*GREEDY, "--no-draft", "abc").out
        pair.target.contexts.clear()
        done = run(*GREEDY, "--no-draft", "abc")
        assert done.code == ExitCode.OK
        assert done.out != whole
        TurningPoint(pair.target, 5, KeyboardInterrupt)
        done = run(*GREEDY, "--no-draft", "abc")
        assert (done.code, done.out) == (130, whole)
        assert whole != "\n"
        assert "interrupted" in done.err
        assert "Traceback" not in done.err
        assert pair.target.is_closed

    def test_interrupted_json_is_still_whole(self, run: Run, pair: Pair) -> None:
        TurningPoint(pair.target, 6, KeyboardInterrupt)
        done = run(*GREEDY, "--json", "abc" * 20)
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert done.code == 130
        assert (lines[-1]["type"], lines[-1]["reason"]) == ("end", "interrupted")
        assert lines[0]["type"] == "start"

    def test_interrupted_while_the_prompt_is_read(self, run: Run, pair: Pair) -> None:
        TurningPoint(pair.target, 1, KeyboardInterrupt)
        done = run(*GREEDY, "abc" * 20)
        assert (done.code, done.out) == (130, "\n")
        assert "interrupted" in done.err

    def test_interrupted_json_in_prefill_begins_with_start(self, run: Run, pair: Pair) -> None:
        TurningPoint(pair.target, 1, KeyboardInterrupt)
        done = run(*GREEDY, "--json", "abcdefg" * 20)
        assert done.code == 130
        assert [json.loads(line)["type"] for line in done.out.splitlines()] == ["start", "end"]

    def test_interrupted_comparison_keeps_the_answer(self, run: Run, pair: Pair) -> None:
        alone = run(*GREEDY, "abc").out
        calls = TurningPoint(pair.target, -1, KeyboardInterrupt)
        run(*GREEDY, "abc")
        TurningPoint(pair.target, calls.num_calls + 3, KeyboardInterrupt)
        done = run(*GREEDY, "--compare", "abc")
        assert (done.code, done.out) == (130, alone)
        assert "Traceback" not in done.err

    def test_bug_is_reported_without_traceback(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        TurningPoint(pair.target, 2, ZeroDivisionError)
        done = run(*GREEDY, "abc")
        assert done.code == 1
        assert "Error: internal error: ZeroDivisionError" in done.err
        assert "--debug" in done.err
        assert "Traceback" not in done.err
        monkeypatch.setenv("SPECDEC_DEBUG", "1")
        TurningPoint(pair.target, 2, ZeroDivisionError)
        assert "Traceback" in run(*GREEDY, "abc").err

    def test_interrupted_while_loading(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_args: object) -> Session:
            raise KeyboardInterrupt

        monkeypatch.setattr(Session, "open", interrupted)
        done = run(*GREEDY, "abc")
        assert (done.code, done.out) == (130, "")
        assert "Interrupted" in done.err

    def test_warning_of_the_backend_goes_to_stderr(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        def warned(*arguments: Any) -> Session:
            session = pair.open(Session, *arguments)
            session.warning = "slow kernels"
            return session

        monkeypatch.setattr(Session, "open", warned)
        done = run(*GREEDY, "abc")
        assert "Warning: slow kernels" in done.err
        assert len(done.out) == 41

    def test_sampling_flags_reach_the_sampler(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec_cli.trial.admit", lambda path: None)
        monkeypatch.setattr("specdec_cli.llama.Model", lambda path, *, vocab_only: contextlib.nullcontext(FakeModel(3)))
        # Everything but "c" is forbidden.
        bias = [flag for token in (0, 1, 3, 4, 5, 6) for flag in ("--logit-bias", f"{token}=-inf")]
        assert run(*GREEDY, *bias, "abc").out == "c" * 40 + "\n"
        assert run(*FAKE, *bias, "abc").out == "c" * 40 + "\n"
        assert run(*FAKE, "--top-k", "1", "abc").out == run(*GREEDY, "abc").out

    def test_penalties_keep_the_greedy_answer_lossless(self, run: Run, pair: Pair) -> None:
        flags = ("--repeat-penalty", "1.3", "--frequency-penalty", "0.4", "--repeat-last-n", "5")
        drafted = run(*GREEDY, *flags, "abc").out
        assert drafted == run(*GREEDY, *flags, "--no-draft", "abc").out
        assert drafted != run(*GREEDY, "abc").out


def nearly_tied(model: FakeModel, gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the target two best tokens that a batch of several tokens sees in the other order."""
    table = model._table
    order = np.argsort(table, axis=-1)
    best, second = order[..., -1:], order[..., -2:-1]
    np.put_along_axis(table, second, np.take_along_axis(table, best, -1) - gap, -1)
    decode = FakeContext._decode

    def rounding(self: FakeContext, tokens: Sequence[int], draft: Draft, **kwargs: Any) -> Logits | None:
        logits = decode(self, tokens, draft, **kwargs)
        if logits is not None and len(draft):
            places = np.argsort(logits, axis=-1)[:, -2:-1]
            np.put_along_axis(logits, places, np.take_along_axis(logits, places, -1) + 2 * gap, -1)
        return logits

    monkeypatch.setattr(FakeContext, "_decode", rounding)


# --- where the prompt comes from ---------------------------------------------------------------------------------


class TestPrompt:
    @pytest.fixture(autouse=True)
    def _raw_fakes(self, pair: Pair) -> None:
        """The fake template passes the prompt on as it is."""

    def prompt(self, monkeypatch: pytest.MonkeyPatch, argument: str | None, *files: Path, stdin: bytes = b"") -> str:
        monkeypatch.setattr(sys, "stdin", FakeStdin(stdin))
        return read_prompt(argument, files)

    def test_piped_text_then_files_then_argument(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        first, second = tmp_path / "1", tmp_path / "2"
        first.write_text("one\n")
        second.write_text("two\n")
        assert self.prompt(monkeypatch, "now", first, second, stdin=b"piped\n") == "piped\n\none\n\ntwo\n\nnow"
        assert self.prompt(monkeypatch, "now", first, Path("-"), stdin=b"piped") == "one\n\npiped\n\nnow"

    def test_dash_is_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.prompt(monkeypatch, "-", stdin=b"piped\n") == "piped"
        assert self.prompt(monkeypatch, None, Path("-"), stdin=b"piped\n") == "piped"
        assert self.prompt(monkeypatch, None, Path("-"), Path("-"), stdin=b"piped\n") == "piped"

    @pytest.mark.parametrize(
        ("stdin", "text"),
        [
            (b"\xef\xbb\xbfh\xc3\xa9\r\nyou\r\n", "hé\nyou"),
            (b"\xff\xfe\x00binary", "\ufffd\ufffd\x00binary"),
            (b"  indented\n\n    more\n\n", "  indented\n\n    more"),
        ],
    )
    def test_bytes_become_text(self, monkeypatch: pytest.MonkeyPatch, stdin: bytes, text: str) -> None:
        assert self.prompt(monkeypatch, None, stdin=stdin) == text

    def test_blank_pipe_counts_as_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.prompt(monkeypatch, "ask", stdin=b" \n\n") == "ask"

    @pytest.mark.parametrize("argument", [None, "", "  \n", "-"])
    def test_nothing_at_all(self, monkeypatch: pytest.MonkeyPatch, argument: str | None) -> None:
        with pytest.raises(UsageError, match="the prompt is empty"):
            self.prompt(monkeypatch, argument)

    def test_no_prompt_on_a_terminal_names_three_ways(self, run: Run) -> None:
        done = run(*GREEDY, tty=True)
        assert (done.code, done.out) == (2, "")
        assert_error(done.err, "no prompt", 'specdec run "question"', "-f FILE", "command |")

    def test_terminal_is_not_read_beside_an_argument(self, run: Run) -> None:
        assert run(*GREEDY, "abc", stdin=b"gg", tty=True).out == run(*GREEDY, "abc").out
        assert run(*GREEDY, "-", stdin=b"abc", tty=True).out == run(*GREEDY, "abc").out

    def test_dash_and_an_argument(self, run: Run) -> None:
        assert_usage(run(*GREEDY, "-", "abc"), "unexpected extra argument")


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, good and bad."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny(folder, "target", chat_template=CHATML, context_length=1 << 17)
    tiny(folder, "draft", quant="q4_0", num_layers=1, chat_template=CHATML, context_length=1 << 17)
    tiny(folder, "other", vocabulary=sentencepiece_vocabulary())
    tiny(folder, "none", vocabulary=no_vocabulary())
    tiny(folder, "bare")
    (folder / "cut.gguf").write_bytes(target.read_bytes()[:200_000])
    (folder / "head.gguf").write_bytes(target.read_bytes()[:12])
    (folder / "text.gguf").write_text("<html>Please log in</html>")
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "future.gguf").write_bytes(b"GGUF\x63\0\0\0" + bytes(100))
    (folder / "empty.txt").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all, so that llama.cpp is checked once."""
    return tmp_path_factory.mktemp("shared-home")


@pytest.fixture
def tiny_run(run: Run, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run` inside the folder of tiny models, with the good pair in the environment."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    monkeypatch.setenv("SPECDEC_TARGET", "target.gguf")
    monkeypatch.setenv("SPECDEC_DRAFT", "draft.gguf")
    monkeypatch.setenv("SPECDEC_MAX_TOKENS", "8")
    return run


def assert_error(err: str, message: str, *hints: str) -> None:
    """One `Error: ` line, then perhaps a `Hint: ` line."""
    lines = err.splitlines()
    assert lines[0].startswith("Error: "), err
    assert message in lines[0], err
    assert len(lines) == (3 if hints else len(lines)), err
    if hints:
        assert lines[1] == ""
        assert lines[2].startswith("Hint: ")
    for hint in hints:
        assert hint in lines[2]
    assert "Traceback" not in err


def assert_usage(done: Done, message: str, *hints: str) -> None:
    assert (done.code, done.out) == (2, ""), done
    assert_error(done.err, message, *(hints or ("",)))


BAD_USAGE = [
    (("",), "the prompt is empty"),
    (("-f", "empty.txt"), "the prompt is empty"),
    (("-f", "nowhere.txt"), "cannot read `nowhere.txt`: No such file"),
    (("-f", "."), "cannot read `.`: Is a directory"),
    (("-k", "-1", "x"), "draft-tokens must be from 0 to 64, or auto, not -1"),
    (("-k", "999", "x"), "draft-tokens must be from 0 to 64, or auto, not 999"),
    (("-k", "two", "x"), "--draft-tokens must be a number or auto, not `two`"),
    (("--draft-confidence", "2", "x"), "draft-confidence must be from 0 to 1, not 2.0"),
    (("--draft-confidence", "nan", "x"), "draft-confidence"),
    (("-n", "0", "x"), "--max-tokens must be 1 or more, not 0"),
    (("-n", "-3", "x"), "--max-tokens must be 1 or more, not -3"),
    (("-t", "-1", "x"), "temperature must be 0 (greedy) or more, not -1.0"),
    (("-t", "nan", "x"), "temperature must be 0 (greedy) or more, not nan"),
    (("--top-p", "0", "x"), "top-p must be above 0"),
    (("--top-p", "1.5", "x"), "top-p must be above 0"),
    (("--top-k", "-1", "x"), "top-k"),
    (("--min-p", "1.01", "x"), "min-p"),
    (("--repeat-last-n", "-2", "x"), "repeat-last-n"),
    (("--repeat-penalty", "0", "x"), "repeat-penalty"),
    (("--presence-penalty", "1e9", "x"), "presence-penalty"),
    (("--seed", "-1", "x"), "seed must be"),
    (("--seed", str(2**64), "x"), "seed must be"),
    (("--ctx", "0", "x"), "--ctx must be from 1 to 2^31 - 1, not 0"),
    (("--threads", "0", "x"), "--threads must be from 1 to 512, not 0"),
    (("--kv-type", "foo", "x"), "--kv-type must be one of f32, f16"),
    (("--logit-bias", "junk", "x"), "--logit-bias takes TOKEN=BIAS, not `junk`"),
    (("--logit-bias", "1=two", "x"), "--logit-bias takes TOKEN=BIAS, not `1=two`"),
    (("--logit-bias", "-1=2", "x"), "--logit-bias: '-1' is no single token but '-' = 45, '1' = 49"),
    (("--logit-bias", "=2", "x"), "--logit-bias takes TOKEN=BIAS, not `=2`"),
    (("--logit-bias", "99999=2", "x"), "--logit-bias: there is no token 99999; the model has 320"),
    (("--logit-bias", " house=-inf", "x"), "' house' is no single token but"),
    (("--logit-bias", "1=inf", "x"), "logit-bias of token 1 must be a number, not inf"),
    (("--logit-bias", "1=nan", "x"), "logit-bias of token 1"),
    (("--color", "blue", "x"), "'--color'"),
    (("--drafter", "oracle", "x"), "'--drafter'"),
    (("--nope", "x"), "No such option: --nope"),
    (("--target",), "'--target' requires an argument"),
    (("a", "b"), "unexpected extra argument"),
    (("--compare", "-k", "0", "x"), "--compare has nothing to compare"),
    (("--compare", "--no-draft", "x"), "--compare has nothing to compare"),
    (("--raw", "-s", "be brief", "x"), "--raw takes a bare text"),
]
BAD_MODELS = [
    (("--target", "nowhere.gguf", "x"), 3, "no model file `nowhere.gguf`", "specdec pull"),
    (("--draft", "nowhere.gguf", "x"), 3, "no model file `nowhere.gguf`", "specdec pull"),
    (("--pair", "nowhere", "x"), 3, "no pair is called `nowhere`", "`specdec models` lists the pairs"),
    (("--target", "text.gguf", "x"), 1, "`text.gguf` is not a GGUF file", "download"),
    (("--target", "empty.gguf", "x"), 1, "`empty.gguf` is not a GGUF file", "download"),
    (("--draft", "head.gguf", "x"), 1, "`head.gguf` is cut off", "download"),
    (("--target", "cut.gguf", "x"), 1, "`cut.gguf` is cut off: 200000 of 972800 bytes", "download"),
    (("--target", "future.gguf", "x"), 1, "has GGUF version 99", "update"),
    (("--target", ".", "x"), 1, "`.` is a directory", ".gguf"),
    (("--draft", "none.gguf", "x"), 4, "`none.gguf` has no tokenizer", "--no-draft"),
    (("--ctx", "16", "x" * 200), 1, "in a context of 16", "--ctx"),
    (("--target", "bare.gguf", "--no-draft", "x"), 1, "no chat template", "--raw"),
]


class TestBadInput:
    @pytest.mark.parametrize(("arguments", "message"), BAD_USAGE, ids=lambda value: str(value)[:40])
    def test_usage(self, tiny_run: Run, arguments: tuple[str, ...], message: str) -> None:
        assert_usage(tiny_run(*arguments), message)

    @pytest.mark.parametrize(("arguments", "code", "message", "hint"), BAD_MODELS, ids=lambda value: str(value)[:40])
    def test_models(self, tiny_run: Run, arguments: tuple[str, ...], code: int, message: str, hint: str) -> None:
        if "--pair" in arguments:
            os.environ.pop("SPECDEC_TARGET")
        done = tiny_run(*arguments)
        assert (done.code, done.out) == (code, "")
        assert_error(done.err, message, hint)

    def test_unreadable_model(self, tiny_run: Run, tmp_path: Path) -> None:
        secret = tmp_path / "secret.gguf"
        secret.write_bytes(bytes(100))
        secret.chmod(0)
        if os.access(secret, os.R_OK):
            pytest.skip("this user may read everything")
        done = tiny_run("--target", str(secret), "x")
        assert done.code == 1
        assert_error(done.err, "cannot read", "permissions")

    def test_mistaken_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        code = invoke(["rnu", "x"])
        assert_usage(Done(code, *capsys.readouterr()), "Did you mean 'run'?", "specdec --help")

    def test_command_of_the_hint_is_the_one_that_failed(self, tiny_run: Run) -> None:
        assert_usage(tiny_run("--target"), "requires an argument", "specdec run --help")

    def test_context_beyond_all_bounds_is_refused_before_memory_is_asked_for(self) -> None:
        # llama.cpp counts in 32 bits: more would wrap around, and take all memory on the way.
        with pytest.raises(UsageError, match="--ctx"):
            SessionOptions(num_ctx=1 << 40)

    def test_nothing_is_loaded_before_the_prompt_is_known(self, run: Run, pair: Pair) -> None:
        assert run(*GREEDY, "").code == 2
        assert pair.opened == []


class TestOtherTokenizer:
    NOTE = "Note: target and draft have different tokenizers, "

    def test_is_said_in_one_line(self, tiny_run: Run) -> None:
        arguments = ("--draft", "other.gguf", "--drafter", "model", "-k", "2")
        done = tiny_run(*arguments, "-t", "0", "hello")
        assert done.code == 0
        [line] = [line for line in done.err.splitlines() if "tokenizers" in line]
        assert line.startswith(self.NOTE)
        assert re.search(r"\d+% of a text in common; (drafts are translated as text|only the tokens of both)", line)
        assert done.out == tiny_run("-t", "0", "hello", "--no-draft").out
        assert self.NOTE not in tiny_run(*arguments, "-q", "hello").err
        assert self.NOTE not in tiny_run("-t", "0", "hello").err
        assert self.NOTE not in tiny_run(*arguments[:2], "-k", "0", "hello").err

    def test_is_in_the_json(self, tiny_run: Run) -> None:
        methods = []
        for arguments in (("--draft", "other.gguf", "-k", "2"), (), ("--no-draft",)):
            done = tiny_run(*arguments, "--json", "-t", "0", "hello")
            assert self.NOTE not in done.err
            methods.append(json.loads(done.out.splitlines()[0])["draft_method"])
        assert methods[0] in {"string-level", "token-level"}
        assert methods[1:] == ["same-tokens", None]


@pytest.mark.parametrize("recurrent", ["target", "draft"])
def test_trees_that_become_chains_are_told(recurrent: str, tiny_run: Run, tmp_path: Path) -> None:
    state = tiny(tmp_path, "state", architecture="mamba", chat_template=CHATML)
    files = {"target": "target.gguf", "draft": "draft.gguf"} | {recurrent: str(state)}
    given = ("--target", files["target"], "--draft", files["draft"], "-k", "2", "-t", "0", "hello")
    note = "Note: `state.gguf` is recurrent and takes no trees; drafts are chains\n"
    done = tiny_run("--drafter", "tree", *given)
    assert (done.code, done.err.count(note)) == (0, 1)
    for more in (("--drafter", "model"), ("--drafter", "tree", "--draft-branches", "1"), ("--drafter", "tree", "-q")):
        assert "Note" not in tiny_run(*more, *given).err
    assert "Note: Mirostat follows one path" in tiny_run("--drafter", "tree", "-k", "2", "--mirostat", "2", "hello").err
    assert "Note" not in tiny_run("--drafter", "tree", "-k", "2", "hello").err


class TestOptions:
    def test_llama_spellings(self, run: Run, pair: Pair) -> None:
        done = run(
            "-m", "big.gguf", "-md", "small.gguf", "--n-predict=5", "--temp", "0", "-ngl", "3", "-ngld=2", "-c", "99",
            "--draft-max", "4", "--draft-p-min", "0.25", "-ctk", "q8_0", "abc",
        )  # fmt: skip
        assert done.code == 0
        assert len(done.out) == 6
        target, draft, options = pair.opened[-1]
        assert (target, draft) == (Path("big.gguf"), Path("small.gguf"))
        assert options == SessionOptions(Drafting("auto", 4, 0.25), 99, 3, 2, 1, "q8_0")

    def test_prompt_that_looks_like_an_option(self, run: Run, pair: Pair) -> None:
        assert run(*GREEDY, "--", "-md").code == 0

    @pytest.mark.parametrize("text", ["-c", "--temp", "-md"])
    def test_value_that_looks_like_an_alias_is_a_value(self, run: Run, pair: Pair, text: str) -> None:
        assert run(*GREEDY, "--system", text, "abc").code == 0

    def test_flag_wins_over_environment(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = {
            "TARGET": "env.gguf", "DRAFT": "env-draft.gguf", "DRAFT_TOKENS": "3", "DRAFT_CONFIDENCE": "0.1",
            "CTX": "77", "KV_TYPE": "q4_0", "GPU_LAYERS": "1", "DRAFT_GPU_LAYERS": "2", "THREADS": "3",
            "TEMPERATURE": "0", "MAX_TOKENS": "9", "QUIET": "1", "COLOR": "always",
        }  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(f"SPECDEC_{name}", value)
        done = run("abc")
        assert (done.code, done.err, len(SGR.sub("", done.out))) == (0, "", 10)
        assert done.out != SGR.sub("", done.out)
        paths = (Path("env.gguf"), Path("env-draft.gguf"))
        assert pair.opened[-1] == (*paths, SessionOptions(Drafting("auto", 3, 0.1), 77, 1, 2, 3, "q4_0"))
        done = run("-k", "2", "--ctx", "50", "-n", "4", "--color", "never", "abc")
        assert (done.code, len(done.out)) == (0, 5)
        assert (pair.options.drafting.num_draft_tokens, pair.options.num_ctx) == (2, 50)

    def test_bad_environment_is_named(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_THREADS", "many")
        assert_usage(run(*GREEDY, "abc"), "SPECDEC_THREADS")

    def test_pair_gives_draft_tokens_and_name(self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdec_cli.choice.fetch", lambda spec, **_kwargs: Path(spec.file))
        done = run("-m", "qwen2.5-coder-1.5b", "--json", "-n", "3", "abc")
        assert json.loads(done.out.splitlines()[0])["pair"] == "qwen2.5-coder-1.5b"
        assert pair.opened[-1][0].name.startswith("qwen2.5-coder-1.5b-instruct")
        run("-n", "3", "-k", "7", "-d", "mine.gguf", "abc")
        assert pair.opened[-1][1] == Path("mine.gguf")
        assert pair.options.drafting.num_draft_tokens == 7

    def test_default_that_is_not_a_value_is_in_the_help(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        done = run("--help")
        assert done.code == 0
        text = " ".join(done.out.split())
        assert "default: (physical cores)]" in text
        assert "default: (drawn, and shown)]" in text

    def test_help_lists_every_option(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        done = run("-h")
        assert (done.code, done.err) == (0, "")
        for name in ("--target", "--draft-tokens", "--temperature", "--json", "SPECDEC_CTX", "Drafting", "Examples"):
            assert name in done.out


# --- a process, on tiny models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    """Of a child."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    kept |= {"SPECDEC_HOME": str(home), "SPECDEC_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": ""}
    return kept


@dataclass(frozen=True)
class Shell:
    """Starts `specdec` in the folder of tiny models."""

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str, **kwargs: Any) -> Done:
        kwargs.setdefault("stdin", None if "input" in kwargs else subprocess.DEVNULL)
        command = [*PROGRAM, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, timeout=60, **kwargs)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def bash(self, script: str) -> Done:
        """A script in which `$specdec` is the program with the pair."""
        program = f'specdec() {{ "{sys.executable}" -m specdec_cli "$@"; }}; set -o pipefail; '
        command = ["bash", "-c", program + script]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, timeout=60)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        command = [*PROGRAM, *arguments]
        kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | kwargs
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, start_new_session=True, **kwargs)


@pytest.fixture(scope="module")
def shell(folder: Path, environment: dict[str, str]) -> Shell:
    return Shell(folder, environment)


PAIR = ("run", "--target", "target.gguf", "--draft", "draft.gguf", "-t", "0")
PAIR_TEXT = " ".join(PAIR)


class TestProcess:
    def test_pipe_in_and_out(self, shell: Shell) -> None:
        done = shell.bash(f"echo some text | specdec {PAIR_TEXT} -n 20 'Summarise:' | cat")
        assert done.code == 0
        assert done.out.endswith("\n")
        assert "\x1b" not in done.out
        assert re.match(r"20 tokens · .* tok/s", done.err)
        alone = shell.run(*PAIR, "-n", "20", "some text\n\nSummarise:")
        assert alone.out == done.out

    def test_closed_pipe_ends_the_generation_quietly(self, shell: Shell) -> None:
        began = time.monotonic()
        done = shell.bash(f"specdec {PAIR_TEXT} -n 100000 hello </dev/null | head -c 5")
        assert len(done.out) == 5
        assert done.err == ""
        assert done.code == 1
        assert time.monotonic() - began < 20

    @pytest.mark.parametrize("flags", ["--json", "--no-stream -n 20", "--help"])
    def test_closed_pipe_in_other_modes(self, shell: Shell, flags: str) -> None:
        done = shell.bash(f"specdec {PAIR_TEXT} -n 100000 {flags} hello </dev/null | true")
        assert "Traceback" not in done.err
        assert "Exception" not in done.err

    def test_full_disk_is_an_error(self, shell: Shell) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full")
        done = shell.bash(f"specdec {PAIR_TEXT} -n 20 hello </dev/null >/dev/full")
        assert done.code == 1
        assert "Traceback" not in done.err
        assert "Error: " in done.err

    def test_standard_input_closed(self, shell: Shell) -> None:
        assert shell.bash(f"specdec {PAIR_TEXT} -n 5 hello <&-").code == 0
        done = shell.bash(f"specdec {PAIR_TEXT} -n 5 <&-")
        assert (done.code, done.out) == (2, "")
        assert_error(done.err, "no prompt", "specdec run")

    def test_standard_output_closed(self, shell: Shell) -> None:
        done = shell.bash(f"specdec {PAIR_TEXT} -n 5 hello </dev/null >&-")
        assert done.code == 1
        assert_error(done.err, "standard output is closed")

    def test_binary_input(self, shell: Shell) -> None:
        done = shell.run(*PAIR, "-n", "5", "-", input=bytes(range(256)) * 4)
        assert (done.code, done.out.count("\n") >= 1) == (0, True)
        assert "Traceback" not in done.err

    def test_bom_and_line_ends_change_nothing(self, shell: Shell) -> None:
        outs = {shell.run(*PAIR, "-n", "20", input=text).out for text in (b"a\nb\n", b"\xef\xbb\xbfa\r\nb\r\n")}
        assert len(outs) == 1

    def test_encoding_without_the_characters(self, shell: Shell) -> None:
        ascii_only = dataclasses.replace(shell, environment=shell.environment | {"PYTHONIOENCODING": "ascii"})
        done = ascii_only.run(*PAIR, "-n", "20", "hé 中")
        assert done.code == 0
        assert (done.out + done.err).isascii()

    def test_version(self, shell: Shell) -> None:
        done = shell.run("--version")
        assert (done.code, done.err) == (0, "")
        assert [line.split()[0] for line in done.out.splitlines()] == ["specdec", "llama-cpp-python", "llama.cpp"]

    def test_no_arguments_is_help(self, shell: Shell) -> None:
        done = shell.run()
        assert done.code == 2
        assert "Usage: specdec" in done.out + done.err


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process is gone afterwards, whatever happened."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt_and_wait(process: subprocess.Popen[bytes], *, group: bool, times: int = 1) -> tuple[float, str, str]:
    """Seconds from the first Ctrl-C to the end, and what was written."""
    assert process.poll() is None, "it ended too early"
    began = time.monotonic()
    for number in range(times):
        if number:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    return time.monotonic() - began, out.decode(), err.decode()


class TestCtrlC:
    @pytest.mark.parametrize("group", [True, False])
    def test_while_generating(self, shell: Shell, group: bool) -> None:
        with ended(shell.start(*PAIR, "-n", "100000", "hello")) as process:
            assert process.stdout is not None
            process.stdout.read(60)
            seconds, out, err = interrupt_and_wait(process, group=group)
        assert process.returncode == 130
        assert seconds < STOP_S
        assert out.endswith("\n")
        assert "acceptance rate" in err
        assert "stopped: interrupted" in err
        assert "Traceback" not in err

    def test_while_a_long_prompt_is_read(self, shell: Shell) -> None:
        with ended(shell.start(*PAIR, "-n", "50", "-f", long_prompt(shell.folder))) as process:
            wait_until_busy(process, 1.0)
            seconds, out, err = interrupt_and_wait(process, group=True)
        assert process.returncode == 130
        assert seconds < STOP_S
        assert out.strip() == ""
        assert "interrupted" in err
        assert "Traceback" not in err

    def test_while_a_long_prompt_is_read_with_json(self, shell: Shell) -> None:
        with ended(shell.start(*PAIR, "--json", "-n", "50", "-f", long_prompt(shell.folder))) as process:
            wait_until_busy(process, 1.0)
            _, out, _ = interrupt_and_wait(process, group=False)
        assert process.returncode == 130
        assert [json.loads(line)["type"] for line in out.splitlines()] == ["start", "end"]

    def test_twice(self, shell: Shell) -> None:
        with ended(shell.start(*PAIR, "-n", "100000", "hello")) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            seconds, _, err = interrupt_and_wait(process, group=True, times=2)
        assert process.returncode in (130, -signal.SIGINT)
        assert seconds < STOP_S
        assert "Traceback" not in err

    def test_while_comparing(self, shell: Shell) -> None:
        with ended(shell.start(*PAIR, "--compare", "-n", "1500", "hello")) as process:
            assert process.stdout is not None
            length = 0
            while process.poll() is None and length < 1500:
                length += len(process.stdout.read1())  # type: ignore[attr-defined]
            _, _, err = interrupt_and_wait(process, group=True)
        assert process.returncode == 130
        assert "acceptance rate" in err
        assert "Traceback" not in err


def long_prompt(folder: Path) -> str:
    path = folder / "long.txt"
    path.write_text("All work and no play makes Jack a dull boy. " * 2000)
    return path.name


def wait_until_busy(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the process has used this much processor time more than it needs to start."""
    import psutil

    clock, limit = psutil.Process(process.pid), time.monotonic() + 20
    while process.poll() is None and time.monotonic() < limit:
        times = clock.cpu_times()
        if times.user + times.system > seconds + 0.8:
            return
        time.sleep(0.02)


# --- a terminal --------------------------------------------------------------------------------------------------


def on_terminal(shell: Shell, *arguments: str, **variables: str) -> Done:
    """Everything on one pseudo-terminal; what it showed is in `out`."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    changed = dataclasses.replace(shell, environment=shell.environment | {"TERM": "xterm-256color"} | variables)
    try:
        process = changed.start(*arguments, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        shown = b""
        # Linux reports the end of a terminal as an error.
        with ended(process), contextlib.suppress(OSError):
            while block := os.read(master, 65536):
                shown += block
            process.wait(timeout=30)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    finally:
        os.close(master)
    return Done(process.returncode, shown.decode("utf-8", "replace").replace("\r\n", "\n"), "")


class TestTerminal:
    def test_answer(self, shell: Shell) -> None:
        done = on_terminal(shell, *PAIR, "-k", "4", "-n", "60", "hello")
        starting, loading, preparing, rest = done.out.split("\r\x1b[2K")
        assert (starting, loading, preparing) == ("Starting …", "Loading target.gguf …", "Preparing …")
        legend, _, rest = rest.partition("\n")
        assert SGR.sub("", legend) == "underlined green: accepted draft tokens; plain: the target's own"
        answer, _, summary = rest.partition("\n\n")
        plain = shell.run(*PAIR, "-k", "4", "-n", "60", "hello").out
        assert SGR.sub("", answer) == plain.rstrip("\n")
        assert "\x1b[4;32m" in answer
        assert "60 tokens" in SGR.sub("", summary)
        assert "\x1b[2K" not in rest

    def test_no_color_keeps_the_style(self, shell: Shell) -> None:
        done = on_terminal(shell, *PAIR, "-k", "4", "-n", "60", "hello", NO_COLOR="1")
        codes = set(SGR.findall(done.out))
        assert "\x1b[4m" in codes
        assert not any(re.search(r"\b3[0-7]\b", code) for code in codes)

    def test_no_prompt(self, shell: Shell) -> None:
        done = on_terminal(shell, *PAIR)
        assert "Loading" not in done.out
        assert_error(done.out, "no prompt", 'specdec run "question"', "-f FILE", "command |")

    def test_exit_code_of_no_prompt(self, shell: Shell) -> None:
        assert on_terminal(shell, *PAIR).code == 2

    def test_compare_leaves_no_status_behind(self, shell: Shell) -> None:
        done = on_terminal(shell, *PAIR, "--compare", "-n", "10", "hello")
        assert done.code == 0
        # Shown while it runs, erased afterwards, and not glued to the answer.
        assert "\nRunning the baseline …\r\x1b[2K" in done.out


class TestDrafting:
    """What proposes tokens and how many: flags, config, the rule's own words."""

    @pytest.fixture(autouse=True)
    def _own_places(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))

    BARE = ("--target", "t.gguf", "--draft", "d.gguf", "-n", "40", "-t", "0")

    @pytest.mark.parametrize("drafter", ["auto", "model", "ngram", "none"])
    @pytest.mark.parametrize("k", [(), ("-k", "auto"), ("-k", "3")], ids=str)
    def test_every_drafter_gives_the_same_answer(self, run: Run, pair: Pair, drafter: str, k: tuple[str, ...]) -> None:
        plain = run(*self.BARE, "--no-draft", "abc")
        done = run(*self.BARE, "--drafter", drafter, *k, "abc")
        assert (done.code, done.out) == (0, plain.out)

    def test_without_a_draft_model_auto_means_ngram(self, run: Run, pair: Pair) -> None:
        done = run("--target", "t.gguf", "-n", "40", "-t", "0", "--json", "abcabcabc")
        start, *_, end = [json.loads(line) for line in done.out.splitlines()]
        assert (start["drafter"], start["draft"], start["num_draft_tokens"]) == ("ngram", None, None)
        assert set(end["drafted_by_drafter"]) <= {"ngram"}

    def test_a_fixed_number_is_drafted_by_ngrams_too(self, run: Run, pair: Pair) -> None:
        set_end_logit(pair.target, -100.0)
        done = run("--target", "t.gguf", "-n", "300", "-t", "0", "-k", "4", "--draft-confidence", "0", "abc")
        assert re.search(r"ngram \d+ of \d+ accepted", done.err), done.err

    def test_the_model_drafter_needs_a_model(self, run: Run, pair: Pair) -> None:
        done = run("--target", "t.gguf", "--drafter", "model", "abc")
        assert (done.code, done.out) == (2, "")
        assert_error(done.err, "`--drafter model` needs a draft model", "--draft MODEL")

    def test_explain(self, run: Run, pair: Pair) -> None:
        done = run(*self.BARE, "--explain", "abc")
        head, *lines = [line for line in done.err.splitlines() if re.match(r" *(round|\d+ (model|ngram|-))", line)]
        assert head.split()[:4] == ["round", "drafter", "K", "ok"]
        assert len(lines) > 1
        assert all(re.search("pay|propose", line) for line in lines)
        assert run(*self.BARE, "abc").out == done.out

    def test_json_rounds_explain_themselves(self, run: Run, pair: Pair) -> None:
        done = run(*self.BARE, "--json", "abc")
        decisions = [json.loads(line)["decision"] for line in done.out.splitlines() if '"round"' in line]
        assert decisions
        for decision in decisions:
            assert set(decision) == {"reason", "reach", "acceptance", "rate", "step_s", "pass_s", "next_pass_s"}

    def test_saved_settings_apply_below_the_flags(
        self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("specdec_cli.choice.fetch", lambda spec, **_kwargs: Path(spec.file))
        (tmp_path / "config").mkdir()
        text = '[pairs."qwen2.5-coder-1.5b"]\ndrafter = "model"\ndraft_tokens = 2\ndraft_confidence = 0.25\n'
        (tmp_path / "config" / "config.toml").write_text(text)
        run("-n", "3", "abc")
        assert pair.options.drafting == Drafting("model", 2, 0.25)
        run("-n", "3", "-k", "auto", "--drafter", "auto", "--draft-confidence", "0.75", "abc")
        assert pair.options.drafting == Drafting("auto", None, 0.75)
        run("-n", "3", "-m", "qwen3-8b+0.6b", "abc")
        assert pair.options.drafting == Drafting()

    def test_saved_zeros_count_and_a_saved_none_yields_to_flags(
        self, run: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("specdec_cli.choice.fetch", lambda spec, **_kwargs: Path(spec.file))
        (tmp_path / "config").mkdir()
        config = tmp_path / "config" / "config.toml"
        config.write_text('[pairs."qwen2.5-coder-1.5b"]\ndraft_tokens = 5\ndraft_confidence = 0.0\n')
        run("-n", "3", "abc")
        assert pair.options.drafting == Drafting("auto", 5, 0.0)
        config.write_text('[pairs."qwen2.5-coder-1.5b"]\ndrafter = "none"\n')
        run("-n", "3", "abc")
        assert pair.opened[-1][1] is None
        assert "nothing to compare" in run("-n", "3", "--compare", "abc").err
        run("-n", "3", "-k", "auto", "abc")
        assert pair.options.drafting == Drafting()

    def test_own_ngrams_are_learned_and_drafted_from(self, run: Run, pair: Pair, tmp_path: Path) -> None:
        file = tmp_path / "own.sqlite"
        first = run(*self.BARE, "-k", "4", "--drafter", "ngram", "--ngram-cache", str(file), "abc")
        assert (first.code, file.exists()) == (0, True)
        again = run(*self.BARE, "-k", "4", "--drafter", "ngram", "--ngram-cache", str(file), "abc")
        assert again.out == first.out

    def test_a_damaged_ngram_file_is_reported_and_left(self, run: Run, pair: Pair, tmp_path: Path) -> None:
        file = tmp_path / "own.sqlite"
        file.write_bytes(b"not a database" * 100)
        done = run(*self.BARE, "--ngram-cache", str(file), "abc")
        assert done.code == 0
        assert done.err.startswith("Warning: ")
        assert file.read_bytes() == b"not a database" * 100

    def test_an_answer_that_no_ngram_file_takes_is_told(self, run: Run, pair: Pair, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run(*self.BARE, "--ngram-cache", str(tmp_path / "file" / "own.sqlite"), "abc")
        assert done.code == 0
        assert done.err.count("Warning: ") == 1

    def test_an_ngram_file_that_is_full_is_told_behind_the_answer(
        self, run: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(NgramStore, "_write", full)
        done = run(*self.BARE, "--ngram-cache", str(tmp_path / "own.sqlite"), "abc")
        assert done.code == 0
        assert "cannot be used: No space left on device; the answer was not added" in done.err

    def test_tuning_is_hinted_at_once(self, run: Run, pair: Pair) -> None:
        assert "`specdec tune --target fake-3.gguf --draft fake-3.gguf`" in run(*self.BARE, "abc").err
        assert "specdec tune" not in run(*self.BARE, "abc").err
