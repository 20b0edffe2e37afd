from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specdec_cli.render import ColorMode, jsonl, make_renderer, summary
from specdec_cli.render.explain import explain_text
from specdec_cli.render.memory import peak_memory_bytes
from specdec_cli.render.sink import BackgroundSink, TextSink, can_encode
from specdec_cli.render.terminal import color_level, make_console, neutralize
from specdec_cli.stats import Comparison, NearTie, Stats
from specdec_cli.text import TextDecoder
from specdec_cli.types import Decision, Event, Finish, Prefill, Round, Token

INFO: dict[str, object] = {
    "pair": "tiny",
    "target": "big.gguf",
    "draft": "small.gguf",
    "drafter": "model",
    "draft_format": None,
    "draft_method": "same-tokens",
    "num_draft_tokens": 4,
    "seed": 1234,
    "seed_drawn": True,
    "sampling": {"temperature": 0.8},
    "num_ctx": 4096,
    "draft_branches": 8,
    "draft_confidence": 0.5,
    "temperature": 0.8,
}
EVENTS: list[Event] = [
    Prefill(5, 0.2),
    Token(1, "draft", "Say"),
    Token(2, "recovered", " [bold]hi[/bold]"),
    Round(0, 3, 1, 2, 0.25, 0.5, 1.0),
    Token(3, "draft", ""),
    Token(4, "draft", "😀"),
    Token(5, "bonus", "\x1b[2Jx"),
    Round(1, 2, 2, 3, 0.25, 0.5, 1.0),
    Finish("length", "!"),
]
TEXT = "Say [bold]hi[/bold]😀\x1b[2Jx!"


def numbers() -> Stats:
    return Stats(
        num_prompt_tokens=5,
        num_tokens=5,
        num_first_tokens=2,
        num_rounds=2,
        num_drafted=5,
        num_accepted=3,
        drafted_by_position=[2, 2, 1],
        accepted_by_position=[2, 1, 0],
        first_token_s=0.5,
        first_round_s=1.0,
        wall_s=2.5,
        draft_s=0.5,
        verify_s=1.25,
    )


def plain_numbers() -> Stats:
    return Stats(
        num_prompt_tokens=5,
        num_tokens=5,
        num_first_tokens=1,
        num_rounds=5,
        first_token_s=0.5,
        first_round_s=0.5,
        wall_s=4.5,
        verify_s=4.0,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Encoded(io.TextIOWrapper):
    """A stream with an encoding of its own."""

    def __init__(self, encoding: str, tty: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        self.flush()
        return str(self.buffer.getvalue().decode(self.encoding))  # type: ignore[attr-defined]


class Flushes(io.StringIO):
    """Remembers what had been written at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for module in (summary, jsonl):
        monkeypatch.setattr(module, "peak_memory_bytes", lambda: 1_870_000_000)


def shown(
    *,
    out: io.StringIO | None = None,
    err: io.StringIO | None = None,
    color: ColorMode = "auto",
    comparison: Comparison | None = None,
    events: list[Event] = EVENTS,
    stats: Stats | None = None,
    info: dict[str, object] = INFO,
    reason: str = "length",
    **flags: bool,
) -> tuple[str, str]:
    out, err = out or io.StringIO(), err or io.StringIO()
    renderer = make_renderer(stdout=out, stderr=err, color=color, **flags)
    renderer.start(info)
    for event in events:
        renderer.event(event)
    renderer.end(stats or numbers(), reason, comparison)
    return out.getvalue(), err.getvalue()


def without_sgr(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


SUMMARY = """\
5 tokens · 2.0 tok/s · first token after 0.50 s · 2 rounds
acceptance rate 60% (3 of 5) · mean acceptance length 2.50
by position █▅▁ 100% 50% 0%
draft small.gguf
time 2.50 s · draft 20% · verify 50% · other 30% · peak memory 1.87 GB
seed 1234
stopped: at the limit of 5 tokens; `-n` raises it
"""
SUMMARY_40 = """\
5 tokens · 2.0 tok/s
first token after 0.50 s · 2 rounds
acceptance rate 60% (3 of 5)
mean acceptance length 2.50
by position █▅▁ 100% 50% 0%
draft small.gguf
time 2.50 s · draft 20% · verify 50%
other 30% · peak memory 1.87 GB
seed 1234
stopped: at the limit of 5 tokens; `-n`
raises it
"""
BOLD, DIM, DOT, END = "\x1b[1m", "\x1b[2m", "\x1b[2m · \x1b[0m", "\x1b[0m"
SUMMARY_COLOR = (
    f"{BOLD}5{END} tokens{DOT}\x1b[1;36m2.0{END} tok/s{DOT}first token after {BOLD}0.50{END} s{DOT}"
    f"{BOLD}2{END} rounds\n"
    f"acceptance rate \x1b[1;32m60%{END} (3 of 5){DOT}mean acceptance length {BOLD}2.50{END}\n"
    f"by position \x1b[32m█▅▁{END} 100% 50% 0%\n"
    f"draft {BOLD}small.gguf{END}\n"
    f"time {BOLD}2.50{END} s{DOT}draft {BOLD}20%{END}{DOT}verify {BOLD}50%{END}{DOT}other {BOLD}30%{END}{DOT}"
    f"peak memory {BOLD}1.87 GB{END}\n"
    f"seed {BOLD}1234{END}\n"
    f"stopped: \x1b[33mat the limit of 5 tokens; `-n` raises it{END}\n"
)
SUMMARY_MONO = re.sub(
    r"\x1b\[3\d[^m]*m([^\x1b]*)\x1b\[0m", r"\1", SUMMARY_COLOR.replace("1;36m", "1m").replace("1;32m", "1m")
)
LEGEND = f"\x1b[4;32munderlined green{END}{DIM}: accepted draft tokens; plain: the target's own{END}\n"
LEGEND_MONO = f"\x1b[4munderlined{END}{DIM}: accepted draft tokens; plain: the target's own{END}\n"
LEGEND_BARE = "underlined green: accepted draft tokens; plain: the target's own\n"
LIVE = f"\x1b[4;32mSay{END} [bold]hi[/bold]\x1b[4;32m😀{END}␛[2Jx!\n"
LIVE_MONO = LIVE.replace("4;32m", "4m")


class TestStreams:
    def test_pipe(self) -> None:
        assert shown() == (TEXT + "\n", SUMMARY)

    def test_pipe_with_the_summary_on_a_terminal(self) -> None:
        assert shown(err=Terminal()) == (TEXT + "\n", SUMMARY_COLOR)

    def test_terminal(self) -> None:
        assert shown(out=Terminal(), err=Terminal()) == (LIVE, LEGEND + "\n" + SUMMARY_COLOR)

    def test_terminal_with_stderr_in_a_file(self) -> None:
        assert shown(out=Terminal()) == (LIVE, LEGEND_BARE + SUMMARY)

    def test_no_color_keeps_the_underline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        assert shown(out=Terminal(), err=Terminal()) == (LIVE_MONO, LEGEND_MONO + "\n" + SUMMARY_MONO)
        assert shown() == (TEXT + "\n", SUMMARY)

    def test_force_color_leaves_the_text_of_a_pipe_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        out, err = shown()
        assert out == LIVE.replace("␛", "\x1b")
        assert without_sgr(out) == TEXT + "\n"
        assert err == LEGEND + SUMMARY_COLOR

    def test_color_always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        assert shown(color="always") == (LIVE.replace("␛", "\x1b"), LEGEND + SUMMARY_COLOR)

    def test_color_never(self) -> None:
        out, err = shown(out=Terminal(), err=Terminal(), color="never")
        assert (out, err) == (without_sgr(LIVE), "\n" + SUMMARY)

    def test_dumb_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "dumb")
        assert shown(out=Terminal(), err=Terminal()) == (without_sgr(LIVE), "\n" + SUMMARY)

    def test_width_40(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        out, err = shown(out=Terminal(), err=Terminal())
        assert out == LIVE
        assert without_sgr(err) == without_sgr(LEGEND) + "\n" + SUMMARY_40

    def test_quiet(self) -> None:
        assert shown(quiet=True) == (TEXT + "\n", "")
        assert shown(out=Terminal(), err=Terminal(), quiet=True) == (LIVE, "")

    def test_ascii(self) -> None:
        out, err = Encoded("ascii"), Encoded("ascii")
        renderer = make_renderer(stdout=out, stderr=err)
        renderer.start(INFO)
        for event in EVENTS:
            renderer.event(event)
        renderer.end(numbers(), "length")
        assert out.text() == TEXT.replace("😀", "?") + "\n"
        assert err.text() == SUMMARY.replace("·", "|").replace("█▅▁", "#=_")


class TestAnswer:
    @pytest.mark.parametrize(("text", "expected"), [("", "\n"), ("a", "a\n"), ("a\n", "a\n"), ("a\n\n", "a\n\n")])
    @pytest.mark.parametrize("kind", [io.StringIO, Terminal])
    @pytest.mark.parametrize("stream", [True, False])
    def test_one_final_newline(self, text: str, expected: str, kind: type[io.StringIO], stream: bool) -> None:
        events: list[Event] = [Token(1, "target", text), Token(2, "target", "")]
        assert shown(out=kind(), events=events, quiet=True, stream=stream)[0] == expected

    def test_each_token_is_flushed(self) -> None:
        out = Flushes()
        shown(out=out, events=[Token(1, "draft", "a"), Token(2, "bonus", "b")])
        assert out.seen == ["a", "ab", "ab\n"]

    def test_no_stream_writes_once(self) -> None:
        out = Flushes()
        shown(out=out, stream=False)
        assert out.seen == [TEXT + "\n"]

    def test_no_stream_on_a_terminal(self) -> None:
        assert shown(out=Terminal(), quiet=True, stream=False) == (LIVE, "")

    def test_emoji_cut_between_tokens(self) -> None:
        pieces = ["😀".encode()[:2], "😀".encode()[2:], b"!"]
        decoder = TextDecoder(pieces.__getitem__)
        events: list[Event] = [Token(i, "draft", decoder.push(i)) for i in range(3)]
        assert shown(events=events, quiet=True)[0] == "😀!\n"
        assert shown(out=Terminal(), events=events, quiet=True)[0] == f"\x1b[4;32m😀{END}\x1b[4;32m!{END}\n"

    def test_no_legend_without_a_drafter(self) -> None:
        assert "underlined" not in shown(out=Terminal(), err=Terminal(), info={**INFO, "drafter": "none"})[1]

    def test_long_lines_are_not_wrapped(self) -> None:
        line = "漢 " * 300
        assert shown(out=Terminal(), events=[Token(1, "target", line)], quiet=True)[0] == line + "\n"

    def test_a_renderer_serves_several_answers(self) -> None:
        out, err = io.StringIO(), io.StringIO()
        renderer = make_renderer(stdout=out, stderr=err, stream=False)
        for text in ("one\n", ""):
            renderer.start(INFO)
            renderer.event(Token(1, "target", text))
            renderer.end(numbers(), "eog")
        assert out.getvalue() == "one\n\n"

    def test_lone_surrogates_do_not_crash(self) -> None:
        for tty in (True, False):
            out = Encoded("utf-8", tty)
            make_renderer(stdout=out, stderr=io.StringIO()).event(Token(1, "target", "a\udc80b"))
            assert out.text() == ("a\ufffdb" if tty else "a?b")

    def test_a_token_costs_little(self) -> None:
        renderer = make_renderer(stdout=Terminal(), stderr=Terminal())
        tokens = [Token(i, "draft", " word") for i in range(5000)]
        started = time.perf_counter()
        for token in tokens:
            renderer.event(token)
        assert (time.perf_counter() - started) / len(tokens) < 100e-6


CUT: list[Event] = [
    Prefill(5, 0.2),
    Token(1, "draft", '{"a'),
    Round(0, 3, 1, 1, 0.25, 0.5, 1.0),
    Token(2, "closing", '":1'),
    Token(3, "closing", "}"),
    Finish("length"),
]


class TestClosing:
    def test_plain_on_a_terminal(self) -> None:
        assert shown(out=Terminal(), events=CUT, quiet=True)[0] == f'\x1b[4;32m{{"a{END}":1}}\n'

    def test_in_a_pipe(self) -> None:
        assert shown(events=CUT, quiet=True)[0] == '{"a":1}\n'

    def test_json(self) -> None:
        stats = numbers()
        stats.num_closing = 2
        lines = [json.loads(line) for line in shown(events=CUT, stats=stats, json=True)[0].splitlines()]
        assert [line.get("source") for line in lines] == [None, "draft", None, "closing", "closing", None]
        assert (lines[-1]["text"], lines[-1]["num_closing"], lines[-1]["num_tokens"]) == ('{"a":1}', 2, 5)


class TestNeutralize:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("\x1b]0;title\x07", "␛]0;title␇"),
            ("a\rb\x08\x00", "a␍b␈␀"),
            ("\x7f", "␡"),
            ("\x9b31m", "<U+009B>31m"),
            ("a\u202eb\u2066c\u2069", "a<U+202E>b<U+2066>c<U+2069>"),
            ("\ud83d", "\ufffd"),
        ],
    )
    def test_made_visible(self, text: str, expected: str) -> None:
        assert neutralize(text) == expected

    @pytest.mark.parametrize(
        "text", ["a\n\tb", "שלום مرحبا", "👩\u200d💻 😀", "漢字かな한글", "[bold]\\[/]", "\u200f\xa0é"]
    )
    def test_left_alone(self, text: str) -> None:
        assert neutralize(text) == text


class TestColorLevel:
    @pytest.mark.parametrize(
        ("mode", "tty", "environ", "expected"),
        [
            ("auto", True, {}, "full"),
            ("auto", False, {}, "none"),
            ("auto", True, {"TERM": "dumb"}, "none"),
            ("auto", True, {"NO_COLOR": "1"}, "mono"),
            ("auto", True, {"NO_COLOR": ""}, "full"),
            ("auto", False, {"FORCE_COLOR": "1"}, "full"),
            ("auto", False, {"FORCE_COLOR": ""}, "none"),
            ("auto", True, {"TERM": "dumb", "FORCE_COLOR": "1"}, "full"),
            ("auto", False, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, "none"),
            ("auto", True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, "mono"),
            ("auto", True, {"NO_COLOR": "1", "TERM": "dumb"}, "none"),
            ("always", False, {"NO_COLOR": "1", "TERM": "dumb"}, "full"),
            ("never", True, {"FORCE_COLOR": "1"}, "none"),
        ],
    )
    def test_decision(self, mode: ColorMode, tty: bool, environ: dict[str, str], expected: str) -> None:
        stream = Terminal() if tty else io.StringIO()
        assert color_level(stream, mode, environ) == expected

    def test_each_stream_for_itself(self) -> None:
        assert make_console(Terminal()).is_terminal
        assert not make_console(io.StringIO()).is_terminal

    def test_console_shows_text_literally(self) -> None:
        out = Terminal()
        make_console(out, "always").print("[bold]a[/bold] :smile: 42")
        assert out.getvalue() == "[bold]a[/bold] :smile: 42\n"


class TestSummary:
    def test_without_speculation(self) -> None:
        info = {**INFO, "drafter": "none", "draft": None, "seed_drawn": False}
        err = shown(stats=plain_numbers(), info=info, reason="eog")[1]
        assert err == (
            "5 tokens · 1.0 tok/s · first token after 0.50 s\n"
            "time 4.50 s · verify 89% · other 11% · peak memory 1.87 GB\n"
        )

    def test_trees_are_counted_where_there_were_some(self) -> None:
        stats = numbers()
        stats.num_trees, stats.num_branches = 2, 5
        assert "\n2 trees of 2.5 branches\n" in shown(stats=stats)[1]
        assert "tree" not in shown(stats=numbers())[1]

    def test_nothing_generated(self) -> None:
        err = shown(stats=Stats(wall_s=0.25), info={}, events=[], reason="interrupted")[1]
        assert err == ("0 tokens\ntime 0.25 s · peak memory 1.87 GB\nstopped: interrupted while reading the prompt\n")

    @pytest.mark.parametrize(
        ("reason", "last"),
        [
            ("length", "stopped: at the limit of 5 tokens; `-n` raises it"),
            ("context", "stopped: the context of 4096 tokens is full; `--ctx` makes it larger"),
            ("interrupted", "stopped: interrupted"),
            ("eog", "seed 1234"),
            ("stop", "seed 1234"),
        ],
    )
    def test_why_it_ended(self, reason: str, last: str) -> None:
        assert shown(reason=reason)[1].splitlines()[-1] == last

    @pytest.mark.parametrize(
        ("reason", "last"),
        [
            ("length", "at the limit of 5 tokens, closed with 3 more to keep to the grammar; `-n` raises it"),
            (
                "context",
                "the context of 4096 tokens is full, closed with 3 more to keep to the grammar;"
                " `--ctx` makes it larger",
            ),
            ("interrupted", "interrupted"),
        ],
    )
    def test_closed_answers_say_so(self, reason: str, last: str) -> None:
        stats = numbers()
        stats.num_closing = 3
        err = shown(reason=reason, stats=stats)[1]
        assert err.splitlines()[0].startswith("5 tokens")
        assert " ".join(err.splitlines()).endswith(f"stopped: {last}")

    def test_limit_of_one_token(self) -> None:
        assert (
            shown(stats=Stats(num_tokens=1))[1].splitlines()[-1] == "stopped: at the limit of 1 token; `-n` raises it"
        )

    def test_many_positions_stay_on_one_line(self) -> None:
        stats = numbers()
        stats.drafted_by_position = [100] * 16
        stats.accepted_by_position = [100 - 6 * position for position in range(16)]
        line = shown(stats=stats)[1].splitlines()[2]
        assert line == "by position ██▇▇▆▆▅▅▅▄▄▃▃▃▂▂ 100% 94% 88% 82% 76% 70% 64% 58% 52% 46% 40% 34% …"
        stats.drafted_by_position = stats.accepted_by_position = [1] * 64
        line = shown(stats=stats)[1].splitlines()[2]
        assert line == "by position " + "█" * 34 + " 100%" * 6 + " …"

    def test_comparison(self) -> None:
        err = shown(comparison=Comparison(numbers(), plain_numbers(), agree=True))[1]
        assert "speculative 2.0 tok/s · baseline 1.0 tok/s · speed-up 2.00x\ngreedy outputs agree\n" in err
        assert "Warning" not in err

    def test_comparison_when_sampling(self) -> None:
        err = shown(comparison=Comparison(numbers(), plain_numbers()))[1]
        assert "speed-up 2.00x" in err
        assert "greedy" not in err

    def test_near_tie(self) -> None:
        tie = NearTie(57, (" foo", "\x1b\n"), (21.5, 21.46875))
        err = shown(comparison=Comparison(numbers(), plain_numbers(), False, tie))[1]
        assert (
            "greedy outputs differ from position 57\nlogits ' foo' 21.5000 and '\\x1b\\n' 21.4688 · gap 0.031\n"
        ) in err.replace(" · logits", "\nlogits")

    def test_differ_without_a_known_place(self) -> None:
        err = shown(comparison=Comparison(numbers(), plain_numbers(), False))[1]
        assert "greedy outputs differ\n" in err

    @pytest.mark.parametrize(("k", "tries"), [(4, "`-k auto` or `--no-draft`"), (None, "`specdec bench`")])
    def test_slower(self, k: int, tries: str) -> None:
        err = shown(
            comparison=Comparison(plain_numbers(), numbers(), agree=True), info={**INFO, "num_draft_tokens": k}
        )[1]
        assert f"Warning: slower than plain decoding here (0.50x); try {tries}\n" in err

    def test_too_short_to_compare(self) -> None:
        err = shown(comparison=Comparison(numbers(), Stats(num_tokens=1), agree=True))[1]
        assert "too short for a speed-up" in err
        assert "Warning" not in err

    def test_tokens_of_an_ascii_stream_are_escaped(self) -> None:
        tie = NearTie(0, ("é", "😀"), (1.0, 1.0))
        text = summary.summary_text(
            Encoded("ascii"), "auto", INFO, numbers(), "eog", Comparison(numbers(), plain_numbers(), False, tie)
        )
        assert text.isascii()
        assert "'\\xe9' 1.0000 and '\\U0001f600' 1.0000" in text

    def test_peak_memory_is_that_of_a_process(self) -> None:
        assert 5e6 < peak_memory_bytes() < 1e12

    @pytest.mark.parametrize("width", [20, 40, 60, 80])
    def test_no_line_is_too_wide(self, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        tie = NearTie(57, (" foo", "\n"), (21.5, 21.46875))
        err = shown(comparison=Comparison(plain_numbers(), numbers(), False, tie))[1]
        assert all(len(line) <= width and line == line.rstrip() for line in err.splitlines())


def documented(section: str) -> set[str]:
    text = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")
    body = re.split(r"^## ", text, flags=re.MULTILINE)
    [part] = [part for part in body if part.startswith(section + "\n")]
    return set(re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE))


class TestJson:
    def lines(self, **options: object) -> list[dict[str, object]]:
        out, err = shown(json=True, **options)  # type: ignore[arg-type]
        assert err == ""
        assert out.endswith("}\n")
        return [json.loads(line) for line in out.splitlines()]

    def test_lines(self) -> None:
        lines = self.lines()
        assert [line["type"] for line in lines] == [
            "start", "token", "token", "round", "token", "token", "token", "round", "end",
        ]  # fmt: skip
        assert lines[0] == {"type": "start", "schema": 1, **INFO}
        assert lines[2] == {"type": "token", "id": 2, "text": " [bold]hi[/bold]", "source": "recovered"}
        assert lines[3] == {
            "type": "round", "index": 0, "num_drafted": 3, "num_accepted": 1, "num_tokens": 2,
            "draft_s": 0.25, "verify_s": 0.5, "total_s": 1.0, "propose_s": 0.0, "num_reread": 0,
            "drafters": [], "confidences": [], "outcomes": [], "target_confidence": 0.0, "decision": None,
            "parents": [], "tried": [], "path": [],
        }  # fmt: skip
        end = lines[-1]
        assert (end["reason"], end["text"], end["num_tokens"], end["comparison"]) == ("length", TEXT, 5, None)
        assert end["acceptance_by_position"] == [1.0, 0.5, 0.0]
        assert end["time_shares"] == {"draft": 0.2, "verify": 0.5, "other": pytest.approx(0.3)}
        assert end["peak_memory_bytes"] == 1_870_000_000

    def test_a_terminal_gets_the_same_lines(self) -> None:
        assert self.lines(out=Terminal(), err=Terminal(), color="always") == self.lines()

    def test_fields_are_documented(self) -> None:
        tie = NearTie(1, ("a", "b"), (1.5, 1.0))
        lines = self.lines(comparison=Comparison(numbers(), plain_numbers(), False, tie))
        statistics = documented("Statistics")
        assert set(lines[0]) == documented("start")
        assert set(lines[1]) == documented("token")
        assert set(lines[3]) == documented("round")
        end = lines[-1]
        assert set(end) == documented("end") | statistics
        comparison = end["comparison"]
        assert isinstance(comparison, dict)
        assert set(comparison) == documented("Comparison")
        assert set(comparison["speculative"]) == set(comparison["baseline"]) == statistics
        assert comparison["speedup"] == 2.0
        assert comparison["near_tie"] == {
            "position": 1,
            "texts": ["a", "b"],
            "logits": [1.5, 1.0],
            "gap": 0.5,
            "noise": 0.0,
        }
        assert set(comparison["near_tie"]) == documented("Near-tie")

    def test_all_numbers_of_stats_are_there(self) -> None:
        methods = {"add", "stop", "total", "saved_against", "accepted_lengths"}
        names = {name for name in dir(Stats) if not name.startswith("_")} - methods
        assert {*jsonl.STATS_FIELDS, *jsonl.CONVERSATION_FIELDS} == names

    def test_interrupted(self) -> None:
        end = self.lines(events=EVENTS[:2], reason="interrupted")[-1]
        assert (end["reason"], end["text"]) == ("interrupted", "Say")

    def test_each_line_is_flushed(self) -> None:
        out = Flushes()
        shown(out=out, json=True, stream=False)
        assert len(out.seen) == 9
        assert all(seen.endswith("}\n") for seen in out.seen)

    def test_text_survives_every_encoding(self) -> None:
        text = "é漢😀\x1b\x9b\u202e\udc80\n"
        for encoding in ("utf-8", "ascii", "cp1252"):
            out = Encoded(encoding)
            make_renderer(stdout=out, stderr=io.StringIO(), json=True).event(Token(1, "target", text))
            assert json.loads(out.text())["text"] == text
            assert ("漢" in out.text()) == (encoding == "utf-8")
            assert "\x9b" not in out.text()

    def test_values_of_other_types(self) -> None:
        out = io.StringIO()
        renderer = make_renderer(stdout=out, stderr=io.StringIO(), json=True)
        renderer.start({"target": Path("a.gguf"), "temperature": np.float32(0.5), "seed": np.uint64(3)})
        assert json.loads(out.getvalue()) == {
            "type": "start", "schema": 1, "target": "a.gguf", "temperature": 0.5, "seed": 3,
        }  # fmt: skip


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)


class Broken(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


CLOSED = """
import os, sys
from specdec_cli.render import make_renderer
from specdec_cli.types import Token
reader, writer = os.pipe()
os.dup2(writer, {fd})
os.close(writer)
os.close(reader)
try:
    {body}
except BrokenPipeError:
    os.write({other}, b"caught")
"""
ANSWER = (
    "r = make_renderer(stdout=sys.stdout, stderr=sys.stderr, json={json}, color={color!r}); "
    "r.event(Token(1, 'target', 'a')); r.end_text()"
)
CONSOLE = "from specdec_cli.render.terminal import make_console; make_console(sys.stdout).print('a')"
LEGEND_ONLY = "make_renderer(stdout=sys.stdout, stderr=sys.stderr, color='always').start({})"


class TestClosedPipe:
    @pytest.mark.parametrize("json", [True, False])
    @pytest.mark.parametrize("kind", ["pipe", "terminal"])
    def test_reaches_the_caller(self, json: bool, kind: str) -> None:
        color: ColorMode = "always" if kind == "terminal" else "auto"
        renderer = make_renderer(stdout=Broken(), stderr=io.StringIO(), json=json, color=color)
        with pytest.raises(BrokenPipeError):
            renderer.event(Token(1, "target", "a"))

    def test_at_the_end(self) -> None:
        renderer = make_renderer(stdout=Broken(), stderr=io.StringIO(), stream=False)
        renderer.event(Token(1, "target", "a"))
        with pytest.raises(BrokenPipeError):
            renderer.end(numbers(), "eog")

    @pytest.mark.parametrize(
        ("fd", "body"),
        [
            (1, ANSWER.format(json=False, color="auto")),
            (1, ANSWER.format(json=False, color="always")),
            (1, ANSWER.format(json=True, color="auto")),
            (1, CONSOLE),
            (2, LEGEND_ONLY),
        ],
    )
    def test_no_noise_at_exit(self, fd: int, body: str) -> None:
        script = CLOSED.format(fd=fd, other=3 - fd, body=body)
        done = run_python(script)
        assert done.returncode == 0
        assert done.stdout + done.stderr == "caught"


class TestSink:
    def test_replaces_only_what_the_encoding_lacks(self) -> None:
        out = Encoded("latin-1")
        TextSink(out).write("é漢")
        assert out.text() == "é?"

    def test_can_encode(self) -> None:
        assert can_encode(io.StringIO(), "漢")
        assert not can_encode(Encoded("cp1252"), "▁")


@pytest.mark.parametrize("module", ["plain", "live", "jsonl", "terminal"])
def test_rich_is_not_imported_for_the_answer(module: str) -> None:
    script = f"import sys, specdec_cli.render.{module}; sys.exit('rich' in sys.modules)"
    assert run_python(script).returncode == 0


def test_the_package_itself_is_cheap() -> None:
    script = "import sys, specdec_cli.render; sys.exit('numpy' in sys.modules or 'rich' in sys.modules)"
    assert run_python(script).returncode == 0


class TestBackground:
    """Writing must not hold up decoding, and nothing may be lost or reordered."""

    def test_a_blocked_pipe_does_not_block_the_writer(self) -> None:
        reader, writer = os.pipe()
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            sink = BackgroundSink(stream)
            started = time.perf_counter()
            text = "".join(chr(ord("a") + i % 26) * 1000 + "\n" for i in range(500))
            for line in text.splitlines(keepends=True):
                sink.write(line)
            assert time.perf_counter() - started < 0.5
            found = bytearray()
            while len(found) < len(text):
                found += os.read(reader, 1 << 16)
            sink.drain()
        os.close(reader)
        assert found.decode() == text

    def test_what_python_had_buffered_comes_first(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        with path.open("w", encoding="utf-8") as stream:
            stream.write("first ")
            sink = BackgroundSink(stream)
            sink.write("second é")
            sink.drain()
            assert path.read_text(encoding="utf-8") == "first second é"

    def test_a_reader_that_is_gone_is_reported(self) -> None:
        reader, writer = os.pipe()
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            sink = BackgroundSink(stream)
            os.close(reader)
            sink.write("x")
            with pytest.raises(BrokenPipeError):
                sink.drain()
            # Silenced from here on, at the exit of Python too.
            sink.write("y")
            sink.drain()

    def test_a_stream_without_a_descriptor_is_written_at_once(self) -> None:
        stream = io.StringIO()
        sink = BackgroundSink(stream)
        sink.write("x")
        assert stream.getvalue() == "x"
        sink.drain()


def test_explain_has_a_line_a_round_and_one_for_a_stretch_of_plain_decoding() -> None:
    def decision(reason: str) -> Decision:
        return Decision(reason, 0.9, 0.8, 12.5, 0.01, 0.08, 0.12)  # type: ignore[arg-type]

    def plain(index: int, reason: str) -> Round:
        return Round(index, 0, 0, 1, 0.0, 0.1, 0.1, decision=decision(reason))

    drafted = Round(
        4, 2, 1, 2, 0.1, 0.1, 0.2, drafters=("model", "model"), confidences=(0.9, 0.8), decision=decision("cost")
    )
    rounds = [plain(0, "off"), plain(1, "off"), plain(2, "off"), plain(3, "probe"), drafted, plain(5, "off")]
    head, *lines = explain_text([*rounds, Round(6, 3, 3, 4, 0.1, 0.1, 0.2)]).splitlines()
    assert "K" in head.split()
    assert [line.split()[0] for line in lines] == ["0-2", "3", "4", "5", "6"]
    assert lines[2].split()[:4] == ["4", "model", "2", "1"]
    assert "12.5" in lines[2]
    assert "drafting does not pay" in lines[0]
    assert lines[4].split() == ["6", "-", "3", "3"]


# --- a conversation --------------------------------------------------------------------------------------------------

THOUGHT: list[Event] = [
    Token(1, "target", "<thi"),
    Token(2, "target", "nk>we"),
    Token(3, "draft", "ll</think>"),
    Token(4, "target", "\n\n"),
    Token(5, "draft", "[b]yes"),
    Finish("eog", "!"),
]


class TestConversation:
    def test_one_line_for_an_answer(self) -> None:
        stats = dataclasses.replace(numbers(), saved_s=-0.26)
        out, err = shown(stats=stats, brief=True)
        assert out.endswith("\n")
        assert err == "5 tokens · 2.0 tok/s · 60% of 5 accepted · lost 0.3 s · the limit of `-n`\n"
        assert shown(stats=stats, brief=True, reason="interrupted")[1].endswith(" · (stopped)\n")
        assert shown(stats=stats, brief=True, err=Terminal())[1].startswith("\x1b[2m")
        assert shown(stats=stats, brief=True, quiet=True)[1] == ""

    def test_legend_once(self) -> None:
        out, err = Terminal(), Terminal()
        renderer = make_renderer(stdout=out, stderr=err, brief=True)
        for _ in range(2):
            renderer.start(INFO)
            renderer.end(numbers(), "eog")
        assert err.getvalue().count("accepted draft tokens; plain") == 1

    def test_thoughts_are_dim(self) -> None:
        out, _ = shown(out=Terminal(), events=THOUGHT, brief=True, thoughts="show")
        assert out == ("\x1b[2m<think>we\x1b[0m\x1b[2m\x1b[4;32mll</think>\x1b[0m\n\n\x1b[4;32m[b]yes\x1b[0m!\n")
        assert without_sgr(out) == "<think>well</think>\n\n[b]yes!\n"

    def test_thoughts_in_a_pipe(self) -> None:
        assert shown(events=THOUGHT, brief=True, thoughts="show")[0] == "<think>well</think>\n\n[b]yes!\n"
        out, err = shown(events=THOUGHT, brief=True, thoughts="hide")
        assert out == "[b]yes!\n"
        assert err.startswith("(thinking)\n5 tokens")
        assert shown(events=THOUGHT, thoughts="hide", quiet=True)[1] == ""

    def test_a_thought_that_the_prompt_began(self) -> None:
        events: list[Event] = [Token(1, "target", "well</th"), Token(2, "target", "ink>\nyes")]
        out, _ = shown(events=events, brief=True, thoughts="hide", info={**INFO, "thinking": True})
        assert out == "yes\n"
        out, _ = shown(events=events[:1], brief=True, thoughts="show", info={**INFO, "thinking": True})
        assert out == "well</th\n"

    def test_all_answers_together(self) -> None:
        stats = dataclasses.replace(numbers(), saved_s=1.5, num_target_decoded=30, num_draft_decoded=40)
        text = summary.session_text(io.StringIO(), "auto", stats, 2)
        assert text.startswith("2 answers · 5 tokens · 2.0 tok/s")
        assert "rounds by number of accepted draft tokens\n   0 " in text
        assert "saved 1.50 s against plain decoding" in text
        assert text.endswith("tokens of prompts 5 · of answers 5 · decoded by the target 30 · by the draft 40\n")
        many = dataclasses.replace(stats, num_rounds=64, num_accepted=2080, num_drafted=2080)
        many.accepted_by_position = many.drafted_by_position = list(range(64, 0, -1))
        assert "  9+ " in summary.session_text(io.StringIO(), "auto", many, 2)
        assert summary.session_text(io.StringIO(), "auto", Stats(), 0).startswith("0 answers · 0 tokens")

    def test_tables_fit(self) -> None:
        rows = [
            ("name", "a text that is longer than a narrow terminal is wide"),
            ("a-very-long-name-of-a-setting", "x\x1b[0m"),
        ]
        for width in (1, 10, 40, 200):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("COLUMNS", str(width))
                text = summary.table_text(io.StringIO(), "auto", rows)
            assert "\x1b" not in text
            assert "name" in text
        assert summary.table_text(io.StringIO(), "auto", []) == ""


def test_explain_tells_how_many_branches_a_tree_had() -> None:
    tree = Round(0, 4, 1, 2, 0.1, 0.1, 0.2, drafters=("model",) * 4, parents=(-1, -1, 0, 0), tried=(0,), path=(0,))
    assert explain_text([tree]).splitlines()[1].split() == ["0", "model/3", "4", "1"]
