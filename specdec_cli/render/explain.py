"""For each round, why its draft got its length: the numbers of the cost rule as a table."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_cli.types import Round

_REASONS = {
    "cost": "one more did not pay",
    "off": "drafting does not pay",
    "probe": "tried, to see whether it pays",
    "fixed": "fixed length",
    "end": "nothing more to propose",
}
_HEAD = "round drafter   K  ok       A       p     R/s    d ms  t(n) ms  t(n+1) ms  why"


def explain_text(rounds: Sequence[Round]) -> str:
    """A line a round.

    K tokens were drafted and ok of them accepted; A is the probability that all are, p that of one more; R is what a
    second is worth in tokens, d one more draft step, t(n) the target's pass over this draft.
    """
    lines = [_HEAD, *(_line(record) for record in rounds)]
    return "".join(f"{line}\n" for line in lines)


def _line(record: Round) -> str:
    name = "+".join(dict.fromkeys(record.drafters)) or "-"
    line = f"{record.index:5} {name:8} {record.num_drafted:2}  {record.num_accepted:2}"
    decision = record.decision
    if decision is None:
        return line
    times = f"{decision.step_s * 1e3:7.1f} {decision.pass_s * 1e3:8.1f} {decision.next_pass_s * 1e3:10.1f}"
    numbers = f"  {decision.reach:6.3f}  {decision.acceptance:6.3f}  {decision.rate:6.1f} {times}"
    return f"{line}{numbers}  {_REASONS[decision.reason]}"
