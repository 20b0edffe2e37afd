from __future__ import annotations

import pytest

from specdec_cli.stats import Comparison, NearTie, Stats
from specdec_cli.types import Event, Finish, Prefill, Round, Token

# (seconds after the start, event): a prompt of 7 tokens, then rounds of 3 + 1 + 2 tokens.
TIMED: list[tuple[float, Event]] = [
    (0.5, Prefill(7, 0.4)),
    (1.0, Token(1, "draft")),
    (1.0, Token(2, "draft")),
    (1.0, Token(3, "bonus")),
    (1.0, Round(0, 2, 2, 3, 0.1, 0.3, 0.5)),
    (1.5, Token(4, "recovered")),
    (1.5, Round(1, 4, 0, 1, 0.2, 0.25, 0.5)),
    (2.0, Token(5, "draft")),
    (2.0, Token(6, "recovered")),
    (2.0, Round(2, 2, 1, 2, 0.1, 0.2, 0.4)),
    (2.0, Finish("eog")),
]


def fed(monkeypatch: pytest.MonkeyPatch, timed: list[tuple[float, Event]]) -> Stats:
    stats = Stats(_started=100.0)
    for seconds, event in timed:
        monkeypatch.setattr("specdec_cli.stats.time.perf_counter", lambda now=100.0 + seconds: now)
        stats.add(event)
    return stats


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Stats:
    return fed(monkeypatch, TIMED)


def test_counts(stats: Stats) -> None:
    assert (stats.num_prompt_tokens, stats.num_tokens, stats.num_first_tokens) == (7, 6, 3)
    assert (stats.num_rounds, stats.num_drafted, stats.num_accepted) == (3, 8, 3)


def test_rates(stats: Stats) -> None:
    assert stats.acceptance_rate == pytest.approx(3 / 8)
    assert stats.mean_acceptance_length == pytest.approx(2.0)
    assert stats.drafted_by_position == [3, 3, 1, 1]
    assert stats.accepted_by_position == [2, 1, 0, 0]
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_a_tree_is_counted_by_depth_and_by_what_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the order of its tokens: the third is of the first level, and accepted."""
    tree = Round(
        0, 5, 2, 3, 0.1, 0.3, 0.5, drafters=("model", "model", "ngram", "model", "ngram"), parents=(-1, 0, -1, 1, 2),
        outcomes=(0.0, 1.0, 1.0), tried=(0, 2, 4), path=(2, 4),
    )  # fmt: skip
    assert (list(tree.depths), list(tree.ranks), tree.num_leaves) == ([1, 2, 1, 3, 2], [0, 0, 1, 0, 0], 2)
    stats = fed(monkeypatch, [(1.0, tree), (2.0, TIMED[4][1])])
    assert (stats.drafted_by_position, stats.accepted_by_position) == ([3, 3, 1], [2, 2, 0])
    assert stats.drafted_by_drafter == {"model": 3, "ngram": 2}
    assert stats.accepted_by_drafter == {"model": 0, "ngram": 2}
    assert (stats.num_trees, stats.num_branches) == (1, 2)


def test_a_cut_off_path_counts_as_far_as_it_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Round(0, 3, 1, 1, 0.1, 0.3, 0.5, parents=(-1, -1, 1), outcomes=(0.0, 1.0, 1.0), tried=(0, 1, 2), path=(1, 2))
    assert fed(monkeypatch, [(1.0, tree)]).accepted_by_position == [1, 0]


def test_times(stats: Stats) -> None:
    assert stats.first_token_s == pytest.approx(1.0)
    assert stats.first_round_s == pytest.approx(1.0)
    assert stats.wall_s == pytest.approx(2.0)
    assert stats.generation_s == pytest.approx(1.0)
    assert stats.tokens_per_s == pytest.approx(3.0)  # the 3 tokens of the first round came with the prompt
    assert stats.draft_s == pytest.approx(0.4)
    assert stats.verify_s == pytest.approx(1.15)
    assert stats.other_s == pytest.approx(0.45)
    assert stats.time_shares == pytest.approx({"draft": 0.2, "verify": 0.575, "other": 0.225})


def test_nothing_happened() -> None:
    stats = Stats()
    assert stats.first_token_s is None
    assert stats.tokens_per_s == stats.acceptance_rate == stats.mean_acceptance_length == stats.other_s == 0.0
    assert stats.acceptance_by_position == []
    assert stats.time_shares == {"draft": 0.0, "verify": 0.0, "other": 0.0}


def test_one_round_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = fed(monkeypatch, TIMED[:5])
    assert stats.tokens_per_s == 0.0
    assert stats.mean_acceptance_length == pytest.approx(3.0)


def test_interrupted_between_token_and_round(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = fed(monkeypatch, TIMED[:6])
    assert (stats.num_tokens, stats.num_rounds) == (4, 1)
    assert stats.tokens_per_s == pytest.approx(2.0)


def test_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[float, Event]] = []
    for index in range(3):
        rounds += [(index + 1.0, Token(index, "target")), (index + 1.0, Round(index, 0, 0, 1, 0.0, 0.9, 1.0))]
    stats = fed(monkeypatch, rounds)
    assert stats.tokens_per_s == pytest.approx(1.0)
    assert stats.mean_acceptance_length == 1.0
    assert stats.acceptance_rate == 0.0
    assert stats.time_shares == pytest.approx({"draft": 0.0, "verify": 0.9, "other": 0.1})


def test_decode_calls_longer_than_the_wall_leave_nothing_else() -> None:
    assert Stats(wall_s=1.0, draft_s=0.6, verify_s=0.5).other_s == 0.0


def test_speedup_is_the_ratio_of_the_rates() -> None:
    fast = Stats(num_tokens=31, num_first_tokens=1, wall_s=3.0, first_round_s=1.0)
    slow = Stats(num_tokens=31, num_first_tokens=1, wall_s=4.0, first_round_s=1.0)
    assert Comparison(fast, slow).speedup == pytest.approx(1.5)
    assert Comparison(slow, fast).speedup == pytest.approx(2 / 3)
    assert Comparison(fast, Stats()).speedup == 0.0
    assert Comparison(Stats(), slow).speedup == 0.0


def test_gap_of_a_near_tie() -> None:
    assert NearTie(3, ("a", "b"), (21.5, 21.25)).gap == 0.25


@pytest.mark.parametrize(
    ("gap", "noise", "explained"),
    [(0.0, 0.0, True), (0.009, 0.0, True), (0.02, 0.0, False), (0.17, 0.13, True), (0.5, 0.05, False)],
)
def test_a_near_tie_is_explained_by_what_batching_does(gap: float, noise: float, explained: bool) -> None:
    assert NearTie(3, ("a", "b"), (1.0 + gap, 1.0), noise).is_explained is explained


def test_several_answers_as_one(stats: Stats) -> None:
    other = Stats(num_tokens=4, num_rounds=1, num_drafted=5, num_accepted=5, wall_s=1.0, saved_s=0.5)
    other.drafted_by_position, other.accepted_by_position = [1] * 5, [1] * 5
    other.drafted_by_drafter = {"ngram": 5}
    whole = Stats.total([stats, other, Stats()])
    assert (whole.num_tokens, whole.num_rounds, whole.num_accepted) == (10, 4, 8)
    assert whole.accepted_by_position == [3, 2, 1, 1, 1]
    assert whole.drafted_by_drafter == {"ngram": 5}
    assert whole.wall_s == pytest.approx(stats.wall_s + 1.0)
    assert whole.first_token_s == stats.first_token_s
    assert whole.saved_s == 0.5
    assert stats.accepted_by_position == [2, 1, 0, 0]
    assert Stats.total([]).num_tokens == 0


def test_accepted_lengths(stats: Stats) -> None:
    # Of three rounds one had nothing accepted, one a token, one two.
    assert stats.accepted_lengths == [1, 1, 1, 0, 0]
    assert sum(stats.accepted_lengths) == stats.num_rounds
    assert Stats().accepted_lengths == [0]


def test_saved(stats: Stats) -> None:
    # Three tokens came after the first round, within a second.
    assert stats.saved_against(0.5) == pytest.approx(0.5)
    assert stats.saved_against(0.1) == pytest.approx(-0.7)
