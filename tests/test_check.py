"""`specdec check`: passes when all is well, and notices when it is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdec_cli import engine
from specdec_cli.check import ALPHA, Acceptance, check, compare_counts
from specdec_cli.cli.app import invoke
from specdec_cli.distribution import Distribution
from specdec_cli.errors import UsageError
from specdec_cli.prompts import BUILT_IN, Prompt, built_in, read_prompts
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeModel
from specdec_cli.types import Drafting, SamplingParams, Verdict

PROMPTS = [Prompt("one", "abcabc"), Prompt("two", "gfe"), Prompt("three", "aab")]
WIDE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, seed=3)


def session() -> Session:
    return Session(FakeModel(1), FakeModel(2), SessionOptions(Drafting("model", 3, 0.0)))


def run(**kwargs: object) -> object:
    with session() as opened:
        settings = {"max_tokens": 60, "num_first": 300, **kwargs}
        return check(opened, PROMPTS, WIDE, **settings)  # type: ignore[arg-type]


def test_right_program_passes() -> None:
    report = run()
    assert report.passed  # type: ignore[attr-defined]
    total = report.total  # type: ignore[attr-defined]
    assert total.num_tried > 100
    assert 0.05 < total.expected < 0.95
    assert [case.category for case in report.greedy] == ["one", "two", "three"]  # type: ignore[attr-defined]
    assert all(case.near_tie is None for case in report.greedy)  # type: ignore[attr-defined]


def test_a_target_without_a_template_continues_bare_text() -> None:
    with Session(FakeModel(1, template=None), FakeModel(2), SessionOptions(Drafting("model", 3, 0.0))) as session:
        report = check(session, PROMPTS, WIDE, max_tokens=60, num_first=300)
    assert report.passed


def test_accepting_too_often_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.verify._accept", lambda target, proposal, token, rng: True)
    report = run()
    assert not report.passed  # type: ignore[attr-defined]
    assert not report.total.passed  # type: ignore[attr-defined]


def test_wrong_greedy_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.verify

    def wrong(draft, *args, **kwargs) -> Verdict:  # type: ignore[no-untyped-def]
        verdict = real(draft, *args, **kwargs)
        return Verdict(verdict.path, 0 if len(draft) == 3 and verdict.token else verdict.token, verdict.source)

    monkeypatch.setattr(engine, "verify", wrong)
    assert not all(case.passed for case in run().greedy)  # type: ignore[attr-defined]


def test_first_tokens_of_the_draft_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bonus or recovered token from the wrong place shifts the first token's distribution."""
    monkeypatch.setattr("specdec_cli.verify._accept", lambda target, proposal, token, rng: True)
    assert not run().first_token.passed  # type: ignore[attr-defined]


def test_acceptance_counts() -> None:
    part = Acceptance()
    target = Distribution(np.array([1, 4]), np.array([0.25, 0.75]))
    part.add(target, Distribution(np.array([1, 2]), np.array([0.6, 0.4])), True)
    part.add(target, Distribution.point(4), False)
    assert (part.num_tried, part.num_accepted, part.rate) == (2, 1, 0.5)
    assert part.expected == pytest.approx((0.25 + 0.75) / 2)
    assert part.match_rate == pytest.approx((0.25 + 0.75) / 2)
    assert part.sum_variance == pytest.approx(2 * 0.25 * 0.75)
    low, high = part.interval
    assert low < part.rate < high


@pytest.mark.parametrize("num", [50, 500])
def test_simulated_p_value(num: int) -> None:
    expected = Distribution(np.array([3, 5, 9]), np.array([0.5, 0.3, 0.2]))
    rng = np.random.default_rng(1)
    right = rng.choice([3, 5, 9], p=[0.5, 0.3, 0.2], size=num).tolist()
    wrong = rng.choice([3, 5, 9], p=[0.2, 0.3, 0.5], size=num).tolist()
    assert compare_counts(right, expected, frozenset(), 0).p_value > 0.01
    assert compare_counts(wrong, expected, frozenset(), 0).p_value < ALPHA
    assert compare_counts([*right[1:], 4], expected, frozenset(), 0).p_value < ALPHA


def test_p_value_agrees_with_the_chi_squared_distribution() -> None:
    from scipy.stats import chi2

    probs = np.array([0.4, 0.3, 0.2, 0.1])
    found = [0] * 450 + [1] * 270 + [2] * 195 + [3] * 85
    result = compare_counts(found, Distribution(None, probs), frozenset(), 0)
    # The bin of everything else is impossible here and adds no degree of freedom.
    assert result.p_value == pytest.approx(chi2.sf(result.statistic, 3), abs=0.01)


def test_answers_that_end_at_once_are_one_bin() -> None:
    expected = Distribution(np.array([0, 7]), np.array([0.5, 0.5]))
    assert compare_counts([0] * 48 + [-1] * 52, expected, frozenset({7}), 0).passed
    assert not compare_counts([0] * 10 + [-1] * 90, expected, frozenset({7}), 0).passed


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(cls: object, target: Path, draft: Path | None, options: SessionOptions) -> Session:
        return Session(FakeModel(1), FakeModel(2) if draft else None, options)

    monkeypatch.setattr(Session, "open", classmethod(opened))


ARGUMENTS = ["check", "--target", "t.gguf", "--draft", "d.gguf", "-n", "40", "--first", "60", "-t", "1", "--seed", "5"]


@pytest.mark.usefixtures("fakes")
class TestCommand:
    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--top-k", "0", "--min-p", "0"]) == 0
        out = capsys.readouterr().out
        assert "Greedy answers against the baseline" in out
        assert "argmax and match" in out
        assert out.rstrip().endswith("check passed")

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--json", "--limit", "2"]) == 0
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        assert document["passed"] is True
        assert len(document["greedy"]) == 2
        assert set(document["acceptance"]) == {"all", "code", "json"}
        assert document["first_token"]["num_samples"] == 60
        assert captured.err == ""

    def test_failure_is_exit_code_5(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("specdec_cli.verify._accept", lambda target, proposal, token, rng: True)
        assert invoke([*ARGUMENTS, "--top-k", "0", "--min-p", "0"]) == 5
        assert "check FAILED" in capsys.readouterr().out

    def test_prompts_from_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"category": "mine", "turns": ["abc", "def"]}\n\n{"turns": ["x"]}\n')
        assert invoke([*ARGUMENTS, "--prompts", str(path)]) == 0
        assert "mine" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("extra", "said"),
        [
            (["-t", "0"], "--temperature must be above 0"),
            (["-k", "0"], "--draft-tokens must be 1 or more"),
            (["--first", "0"], "--first must be 1 or more"),
            (["--prompts", "nowhere.jsonl"], "cannot read `nowhere.jsonl`"),
            (["a", "-m", "b"], "two pairs are named"),
        ],
    )
    def test_bad_input(self, extra: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, *extra]) == 2
        assert said in capsys.readouterr().err

    def test_whoever_set_the_temperature_to_0_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPECDEC_TEMPERATURE", "0")
        assert invoke(["check", "--target", "t.gguf", "--draft", "d.gguf"]) == 2
        assert "Hint: it is set by SPECDEC_TEMPERATURE" in capsys.readouterr().err

    def test_without_a_draft_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke(["check", "--target", "t.gguf"]) == 2
        assert "no draft model" in capsys.readouterr().err


def test_built_in_prompts() -> None:
    assert len(BUILT_IN) == 24
    assert [prompt.category for prompt in built_in(1)] == ["code", "json", "summary", "chat", "edit", "story"]
    assert len({prompt.text for prompt in BUILT_IN}) == 24


@pytest.mark.parametrize(
    "text", ["", "\n", "{}", "[]", "no json", '{"turns": []}', '{"turns": [1]}', '{"turns": [""]}']
)
def test_files_that_are_no_prompts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"p\.jsonl"):
        read_prompts(path)
