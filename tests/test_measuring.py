"""Costs are measured once for a setting, remembered for exactly that, and never in the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from specdec_cli import measuring
from specdec_cli.cost import CostModel, Timing
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.types import PLAIN_DECODING, Drafting, SamplingParams

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    return tmp_path


def files(tmp_path: Path, *names: str) -> list[Path | None]:
    for name in names:
        # Written once: another time of change is another file.
        if not (tmp_path / name).exists():
            (tmp_path / name).write_text(name)
    return [tmp_path / name for name in names]


# ------------------------------------------------------------------ measuring


@pytest.mark.parametrize("num_ctx", [2, 5, 17, 40, 256])
@pytest.mark.parametrize("can_forget", [True, False])
def test_measuring_fits_any_context_and_leaves_it_empty(num_ctx: int, can_forget: bool) -> None:
    target = FakeContext.random(1, num_ctx=num_ctx, can_forget=can_forget)
    draft = FakeContext.random(2, num_ctx=num_ctx)
    costs = measuring.measure(target, {"model": draft})
    assert 0 < costs.target(1) <= costs.target(9)
    assert costs.step_s("model") > 0
    assert not target.tokens
    assert not draft.tokens


@pytest.mark.parametrize("is_crowded", [False, True])
def test_times_that_others_have_stretched_are_not_remembered(monkeypatch: pytest.MonkeyPatch, is_crowded: bool) -> None:
    remembered: list[CostModel] = []
    monkeypatch.setattr(measuring, "remember", lambda _key, costs: remembered.append(costs))
    monkeypatch.setattr(measuring.Load, "is_crowded", lambda _: is_crowded)
    with Session(FakeModel(1), FakeModel(2), SessionOptions(num_ctx=256)) as session:
        assert session.costs.target(1) > 0
    assert len(remembered) == 1 - is_crowded


def test_an_answer_is_the_same_after_measuring() -> None:
    for drafting in (Drafting(), PLAIN_DECODING):
        with Session(FakeModel(1), FakeModel(2), SessionOptions(drafting)) as session:
            assert session.generate("abc", sampling=GREEDY, max_tokens=30).text == plain()


def plain() -> str:
    with Session(FakeModel(1)) as session:
        return session.generate("abc", sampling=GREEDY, max_tokens=30, drafting=PLAIN_DECODING).text


def test_only_sessions_that_need_costs_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> CostModel:
        raise AssertionError("measured")

    monkeypatch.setattr(measuring, "measure", refuse)
    for drafting in (PLAIN_DECODING, Drafting("model", 3), Drafting("ngram", 3)):
        with Session(FakeModel(1), FakeModel(2), SessionOptions(drafting)) as session:
            session.generate("abc", sampling=GREEDY, max_tokens=5)


# ------------------------------------------------------------------ remembering


def test_costs_come_back_as_they_were(tmp_path: Path) -> None:
    costs = CostModel(Timing({1: 0.03, 4: 0.09}), {"model": Timing({1: 0.01})}, rejected_s=0.02)
    measuring.remember("key", costs)
    again = measuring.recall("key")
    assert again is not None
    assert again.target.as_dict() == pytest.approx(costs.target.as_dict())
    assert again.step_s("model", 5) == pytest.approx(costs.step_s("model", 5))
    assert again.rejected_s == costs.rejected_s
    assert measuring.recall("other") is None


def test_the_key_names_machine_files_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = files(tmp_path, "t.gguf", "d.gguf")
    keys = {
        measuring.key(pair, {"threads": 2}),
        measuring.key(pair, {"threads": 1}),
        measuring.key(pair[:1], {"threads": 2}),
        measuring.key(pair[::-1], {"threads": 2}),
    }
    (tmp_path / "d.gguf").write_text("another file")
    keys.add(measuring.key(pair, {"threads": 2}))
    monkeypatch.setattr("specdec_cli.selfcheck.machine", lambda: ("library", "another cpu"))
    keys.add(measuring.key(pair, {"threads": 2}))
    monkeypatch.setattr("specdec_cli.selfcheck.machine", lambda: ("another library", "another cpu"))
    keys.add(measuring.key(pair, {"threads": 2}))
    assert len(keys) == 7
    assert None not in keys


def test_what_has_no_name_is_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    assert measuring.key([tmp_path / "gone.gguf"], {}) is None
    monkeypatch.setattr("specdec_cli.selfcheck.machine", lambda: ("", "cpu"))
    assert measuring.key(files(tmp_path, "t.gguf"), {}) is None
    measuring.remember(None, CostModel(Timing({1: 0.1})))
    assert not (home / "state").exists()


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"key": 3}', '{"key": {"target": {}, "drafts": {}}}',
        '{"key": {"target": {"1": -1}, "drafts": {}}}',
        '{"key": {"target": {"1": 1}, "drafts": {}, "rejected_s": "x"}}',
        '{"key": {"target": {"1": "x"}, "drafts": {}}}', '{"key": {"target": {"1": 1e99}, "drafts": {}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(content: str, home: Path) -> None:
    (home / "state").mkdir()
    (home / "state" / "costs.json").write_text(content)
    assert measuring.recall("key") is None
    measuring.remember("key", CostModel(Timing({1: 0.1})))
    assert measuring.recall("key") is not None


def test_a_bounded_number_is_remembered(home: Path) -> None:
    for number in range(80):
        measuring.remember(f"key {number}", CostModel(Timing({1: 0.1})))
    kept = json.loads((home / "state" / "costs.json").read_text())
    assert len(kept) == 64
    assert "key 79" in kept


def test_where_nothing_can_be_written_answers_come_all_the_same(home: Path) -> None:
    (home / "state").write_text("a file where a directory should be")
    with Session(FakeModel(1), FakeModel(2)) as session:
        assert session.generate("abc", sampling=GREEDY, max_tokens=30).text == plain()


# ------------------------------------------------------------------ sampled answers


def real_files(session: Session, tmp_path: Path) -> None:
    """Files that a key can be made of."""
    session.target.path, session.draft_model.path = files(tmp_path, "t.gguf", "d.gguf")  # type: ignore[misc, union-attr]


def test_a_seed_repeats_its_answer_at_once_and_in_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though passes never take the same time twice."""
    # Passes of microseconds on a busy machine change by more than what has costs replaced.
    monkeypatch.setattr("specdec_cli.session._MAX_CHANGE", 1e9)
    answers = set()
    for _ in range(4):
        with Session(FakeModel(1, sharpness=0.5), FakeModel(1, sharpness=0.6)) as session:
            real_files(session, tmp_path)
            sampling = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=5)
            for _ in range(2):
                session.clear()
                answers.add(session.generate("abc", sampling=sampling, max_tokens=200).tokens)
    assert len(answers) == 1


def test_costs_that_turn_out_wrong_are_replaced(tmp_path: Path) -> None:
    with Session(FakeModel(1), FakeModel(2)) as session:
        real_files(session, tmp_path)
        key = session._costs_key
        measuring.remember(key, CostModel(Timing({1: 1.0, 4: 1.1}), {"model": Timing({1: 0.5})}))
        session.generate("abc", sampling=GREEDY, max_tokens=100)
        seen = session.costs
        for _ in range(5):
            seen.target.learn(8, 50.0)
    again = measuring.recall(key)
    assert again is not None
    assert again.target(8) == pytest.approx(seen.target(8))


def test_what_was_guessed_in_a_small_context_is_not_remembered(tmp_path: Path) -> None:
    with Session(FakeModel(1), FakeModel(2), SessionOptions(num_ctx=20)) as session:
        real_files(session, tmp_path)
        session.generate("abc", sampling=GREEDY, max_tokens=10)
        assert measuring.recall(session._costs_key) is None


def test_a_model_that_cannot_drop_a_tail_is_not_drafted_for(tmp_path: Path) -> None:
    target = FakeContext.random(1, num_ctx=256, can_forget=False)
    costs = measuring.measure(target, {"model": FakeContext.random(2, num_ctx=256)})
    assert costs.rejected_s > 1000 * costs.target(1)


def test_a_rejection_costs_nothing_where_its_tokens_can_be_dropped() -> None:
    for kind in ({"can_forget": True}, {"can_forget": False, "num_snapshots": 4}):
        assert measuring.measure(FakeContext.random(1, **kind), {}).rejected_s == 0


def test_a_rejection_costs_what_reading_again_takes() -> None:
    """Three tokens more in the next pass, which are not for nothing."""
    target = SlowContext.random(1, can_forget=False, can_save=True)
    costs = measuring.measure(target, {})
    assert 1.5 * SlowContext.TOKEN_S < costs.rejected_s < 30 * SlowContext.TOKEN_S


class SlowContext(FakeContext):
    """Each token of a pass takes its time."""

    TOKEN_S = 0.002

    def _decode(self, tokens: Any, draft: Any, *, rows: bool, num_old: int = 0) -> Any:
        time.sleep(self.TOKEN_S * (len(tokens) + len(draft) - num_old))
        return super()._decode(tokens, draft, rows=rows, num_old=num_old)
