"""The answer as JSON Lines; every field is described in docs/json.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TextIO

import numpy as np

from specdec_cli.render.memory import peak_memory_bytes
from specdec_cli.render.sink import BackgroundSink, can_encode
from specdec_cli.render.terminal import UNSAFE
from specdec_cli.stats import Comparison, NearTie, Stats
from specdec_cli.types import Event, Finish, Round, Token

SCHEMA = 1

STATS_FIELDS = (
    "num_prompt_tokens",
    "num_tokens",
    "num_closing",
    "num_first_tokens",
    "num_rounds",
    "num_drafted",
    "num_accepted",
    "num_trees",
    "num_branches",
    "drafted_by_position",
    "accepted_by_position",
    "acceptance_by_position",
    "drafted_by_drafter",
    "accepted_by_drafter",
    "acceptance_rate",
    "mean_acceptance_length",
    "tokens_per_s",
    "first_token_s",
    "first_round_s",
    "generation_s",
    "wall_s",
    "draft_s",
    "verify_s",
    "other_s",
    "time_shares",
)


CONVERSATION_FIELDS = ("num_target_decoded", "num_draft_decoded", "saved_s")
"""Those that only a conversation counts."""


class JsonRenderer:
    """One JSON object a line on stdout, each written at once; nothing on stderr.

    Args:
        stdout: takes the lines.
    """

    def __init__(self, stdout: TextIO) -> None:
        self._out = BackgroundSink(stdout)
        self._ascii = not can_encode(stdout, "\u00e9\u4e2d\U0001f600")
        self._texts: list[str] = []

    def start(self, info: Mapping[str, object]) -> None:
        """Write the `start` line."""
        self._texts = []
        self._line({"type": "start", "schema": SCHEMA, **info})

    def event(self, event: Event) -> None:
        """Write a `token` or a `round` line; the other events are part of the `end` line."""
        if isinstance(event, Token):
            self._line({"type": "token", "id": event.id, "text": event.text, "source": event.source})
        elif isinstance(event, Round):
            self._line({"type": "round", **asdict(event)})
        if isinstance(event, (Token, Finish)):
            self._texts.append(event.text)

    def end_text(self) -> None:
        """Nothing to add: the `end` line has the whole text."""
        self._out.drain()

    def end(self, stats: Stats, finish_reason: str | None, comparison: Comparison | None = None) -> None:
        """Write the `end` line."""
        self._line(
            {
                "type": "end",
                "reason": finish_reason,
                "text": "".join(self._texts),
                **stats_fields(stats),
                **({name: getattr(stats, name) for name in CONVERSATION_FIELDS} if stats.num_target_decoded else {}),
                "peak_memory_bytes": peak_memory_bytes(),
                "comparison": None if comparison is None else comparison_fields(comparison),
            }
        )
        self._out.drain()

    def _line(self, fields: Mapping[str, object]) -> None:
        line = json.dumps(fields, ensure_ascii=self._ascii, default=_as_json)
        # Such a character can only stand inside a string, where its escape means the same: safe on a terminal, and a
        # lone surrogate, which no encoding can write, keeps its value.
        self._out.write(UNSAFE.sub(_escape, line) + "\n")


def stats_fields(stats: Stats) -> dict[str, object]:
    """The counts and times of one answer, derived ones included."""
    return {name: getattr(stats, name) for name in STATS_FIELDS}


def comparison_fields(comparison: Comparison) -> dict[str, object]:
    """A comparison with the baseline."""
    return {
        "speculative": stats_fields(comparison.speculative),
        "baseline": stats_fields(comparison.baseline),
        "speedup": comparison.speedup,
        "agree": comparison.agree,
        "near_tie": None if comparison.near_tie is None else near_tie_fields(comparison.near_tie),
    }


def near_tie_fields(tie: NearTie) -> dict[str, object]:
    """Where two greedy answers part."""
    return {"position": tie.position, "texts": tie.texts, "logits": tie.logits, "gap": tie.gap, "noise": tie.noise}


def _as_json(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
