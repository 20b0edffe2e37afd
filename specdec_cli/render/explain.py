"""For each round, why its draft got its length: the numbers of the cost rule as a table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specdec_cli.types import Round

_REASONS = {
    "cost": "one more did not pay",
    "off": "drafting does not pay",
    "probe": "tried, to see whether it pays",
    "check": "left out, to see what it saves",
    "end": "nothing more to propose",
}
_HEAD = "    round drafter   K  ok       A       p     R/s    d ms  t(n) ms  t(n+1) ms  why"


def explain_text(rounds: Sequence[Round]) -> str:
    """A line a round, one for neighbors that are plain decoding.

    K tokens were drafted and ok of them accepted, in a tree of as many branches as the drafter's name is followed by; A
    is the probability that all are, in a tree that one of the last is, p that of one more; R is what a second is worth
    in tokens, d one more draft step, t(n) the target's pass over this draft.
    """
    # Long stretches of plain decoding say the same thing in every round.
    runs = [list(run) for _, run in itertools.groupby(rounds, _kind)]
    return "".join(f"{line}\n" for line in [_HEAD, *(_line(run) for run in runs)])


def _kind(record: Round) -> tuple[int, bool]:
    """What lets neighboring rounds share a line."""
    off = not record.num_drafted and record.decision is not None and record.decision.reason == "off"
    return (0, True) if off else (record.index, False)


def _line(run: Sequence[Round]) -> str:
    record = run[-1]
    index = str(record.index) if len(run) == 1 else f"{run[0].index}-{record.index}"
    name = "+".join(dict.fromkeys(record.drafters)) or "-"
    name += f"/{record.num_leaves}" if record.parents else ""
    line = f"{index:>9} {name:8} {record.num_drafted:2}  {record.num_accepted:2}"
    decision = record.decision
    if decision is None:
        return line
    times = f"{decision.step_s * 1e3:7.1f} {decision.pass_s * 1e3:8.1f} {decision.next_pass_s * 1e3:10.1f}"
    numbers = f"  {decision.reach:6.3f}  {decision.acceptance:6.3f}  {decision.rate:6.1f} {times}"
    return f"{line}{numbers}  {_REASONS[decision.reason]}"
