"""`specdec bench`: fair turns, right statistics, a report that travels, and refusals before anything is measured."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import CHATML, tiny
from test_docs import EXAMPLES

from specdec_cli import provenance
from specdec_cli.bench import (
    BASELINE,
    Answer,
    Measurement,
    Part,
    Plan,
    Setting,
    disagreements,
    doubts,
    measure,
    merged,
    oracle_round_s,
    select,
    sweep_settings,
)
from specdec_cli.cli.app import invoke
from specdec_cli.config import PairSettings, config_file, load_pair_settings, save_pair_settings
from specdec_cli.cost import CostModel, Timing
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.interval import geometric_mean, t_quantile
from specdec_cli.prompts import BUILT_IN, Prompt
from specdec_cli.render.bench import bench_document, chosen_result, document_text, print_bench, read_document
from specdec_cli.render.bench_files import CSV_COLUMNS, csv_text, markdown_text
from specdec_cli.render.compare import compare_documents, print_comparison
from specdec_cli.render.countdown import Countdown
from specdec_cli.session import Session, SessionOptions
from specdec_cli.stats import NearTie, Stats
from specdec_cli.testing import FakeModel
from specdec_cli.types import PLAIN_DECODING, ContextOptions, Drafting, Round, SamplingParams

ROOT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0)
TARGET = {1: 0.10, 2: 0.11, 3: 0.12, 4: 0.13, 5: 0.14, 6: 0.15, 7: 0.16, 8: 0.17, 9: 0.18}
COSTS = CostModel(Timing(TARGET), {"model": Timing({1: 0.02})})
MODEL = Setting.of(Drafting("model", 4, 0.0))


def record(drafted: int, accepted: int, total_s: float = 0.5, drafter: str = "model", index: int = 1) -> Round:
    return Round(index, drafted, accepted, accepted + 1, 0.0, 0.0, total_s, drafters=(drafter,) * drafted)


def answer(
    setting: str, prompt: int, repeat: int, tokens_per_s: float, *, category: str = "a", rounds: Sequence[Round] = ()
) -> Answer:
    stats = Stats(num_tokens=101, num_first_tokens=1, first_round_s=1.0, wall_s=1.0 + 100 / tokens_per_s)
    stats.first_token_s = 0.9
    return Answer(setting, prompt, category, repeat, None, "length", (prompt,) * 101, stats, tuple(rounds))


def measurement(speeds: dict[tuple[int, int], tuple[float, float]], categories: str = "aabb") -> Measurement:
    """From (prompt, repeat) -> baseline's and setting's tokens per second."""
    plan = Plan([Prompt(c, str(i)) for i, c in enumerate(categories)], [MODEL], GREEDY, 101, 3)
    made = Measurement(plan, COSTS)
    for (prompt, repeat), pair in speeds.items():
        for setting, speed in zip((BASELINE, MODEL), pair, strict=True):
            made.answers.append(answer(setting.name, prompt, repeat, speed, category=categories[prompt]))
    return made


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 23, 71, 200])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_t_quantile(freedom: int, confidence: float) -> None:
    from scipy.stats import t

    assert t_quantile(freedom, confidence) == pytest.approx(t.ppf(0.5 + confidence / 2, freedom), rel=1e-9)


def test_interval_is_that_of_the_prompts_means() -> None:
    from scipy.stats import t

    groups = [[0.1, 0.2, 0.3], [0.5], [-0.1, 0.1], []]
    units = np.array([0.2, 0.5, 0.0])
    low, high = t.interval(0.95, 2, loc=units.mean(), scale=units.std(ddof=1) / math.sqrt(3))
    found = geometric_mean(groups)
    assert found is not None
    assert (found.mean, found.num_units) == (pytest.approx(math.exp(units.mean())), 3)
    assert found.interval == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))


def test_one_prompt_has_its_repeats_and_one_number_no_interval() -> None:
    repeats = geometric_mean([[0.1, 0.2]])
    assert repeats is not None
    assert repeats.num_units == 2
    assert not repeats.beats_one()
    single = geometric_mean([[0.1]])
    assert single is not None
    assert (single.mean, single.interval, single.beats_one()) == (pytest.approx(math.exp(0.1)), None, False)
    assert geometric_mean([[], []]) is None


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [geometric_mean(rng.normal(0.3, 0.2, size=(6, 1)).tolist()) for _ in range(2000)]
    intervals = [ratio.interval for ratio in found if ratio is not None and ratio.interval is not None]
    hits = sum(low < math.exp(0.3) < high for low, high in intervals)
    assert hits / len(found) == pytest.approx(0.95, abs=0.015)


def test_the_best_of_many_must_be_better_than_luck() -> None:
    """Sweeps over settings that gain nothing name one only in a few of a hundred."""
    rng = np.random.default_rng(2)
    named = 0
    for _ in range(1000):
        found = [geometric_mean(rng.normal(0.0, 0.1, size=(8, 1)).tolist()) for _ in range(11)]
        named += any(ratio is not None and ratio.beats_one(11) for ratio in found)
    assert named / 1000 < 0.05


def test_wild_intervals_stay_numbers() -> None:
    found = geometric_mean([[-50.0], [90.0]])
    assert found is not None
    assert found.interval is not None
    assert all(map(math.isfinite, found.interval))


def test_speedup_pairs_answers_of_the_same_repeat() -> None:
    """A machine that slows down by half for a repeat changes no ratio."""
    speeds = {(p, r): (base / (1 + r), 1.5 * base / (1 + r)) for p, base in enumerate((8, 10, 12, 14)) for r in (0, 1)}
    part = measurement(speeds).part(MODEL.name)
    assert part.speedup is not None
    assert (part.speedup.mean, part.num_pairs, part.num_prompts) == (pytest.approx(1.5), 8, 4)
    assert part.speedup.interval == (pytest.approx(1.5), pytest.approx(1.5))


def test_categories_are_kept_apart() -> None:
    made = measurement({(0, 0): (10, 20), (1, 0): (10, 20), (2, 0): (10, 5), (3, 0): (10, 5)})
    means = {name: made.part(MODEL.name, name).speedup for name in made.categories}
    assert {name: speedup.mean for name, speedup in means.items() if speedup} == {
        "a": pytest.approx(2),
        "b": pytest.approx(0.5),
    }
    overall = made.part(MODEL.name).speedup
    assert overall is not None
    assert overall.mean == pytest.approx(1)
    assert made.best is None


def test_answers_without_partner_do_not_count() -> None:
    made = measurement({(0, 0): (10, 20), (1, 0): (10, 20)})
    made.answers.append(answer(BASELINE.name, 2, 0, 10, category="b"))
    made.answers.append(answer(MODEL.name, 3, 0, 10, category="b"))
    assert made.part(MODEL.name).num_pairs == 2
    assert made.part(MODEL.name, "b").speedup is None


def test_short_answers_are_left_out_and_told() -> None:
    made = measurement({(0, 0): (10, 20), (1, 0): (10, 20)})
    short = dataclasses.replace(made.answers[0], stats=Stats(num_tokens=1, num_first_tokens=1, wall_s=1.0))
    made.answers[0] = short
    part = made.part(MODEL.name)
    assert (part.num_pairs, part.num_short, part.num_equal) == (1, 1, 2)
    assert "1 pair of answers was too short" in doubts(made, 0.0)[0]


def test_merged_rates_are_those_of_all_tokens() -> None:
    one = Stats(num_rounds=2, num_drafted=3, num_accepted=1, drafted_by_position=[2, 1], accepted_by_position=[1, 0])
    two = Stats(num_rounds=1, num_drafted=1, num_accepted=1, drafted_by_position=[1], accepted_by_position=[1])
    total = merged([one, two])
    assert (total.acceptance_rate, total.mean_acceptance_length) == (0.5, pytest.approx(1 + 2 / 3))
    assert total.acceptance_by_position == [pytest.approx(2 / 3), 0.0]


def test_best_needs_an_interval_above_one() -> None:
    good = measurement({(p, 0): (10, 12 + 0.1 * p) for p in range(4)})
    assert good.best == MODEL
    wild = measurement({(p, 0): (10, speed) for p, speed in enumerate((5, 30, 8, 25))})
    speedup = wild.part(MODEL.name).speedup
    assert speedup is not None
    assert speedup.mean > 1
    assert wild.best is None


def test_doubts() -> None:
    calm = {(p, r): (10 + 0.2 * r, 12.0) for p in range(4) for r in range(3)}
    assert doubts(measurement(calm), 0.1) == []
    wild = {(p, r): (10 + 2 * r, 12.0) for p in range(4) for r in range(3)}
    noisy, busy = doubts(measurement(wild), 0.0), doubts(measurement(calm), 0.5)
    assert "differ by 33%" in noisy[0]
    assert "50% of the CPUs" in busy[0]


# --- the oracle ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "seconds"),
    [
        (record(4, 4), 0.5),
        (record(0, 0), 0.5),
        (record(4, 0), 0.10),
        (record(4, 2), 2 * 0.02 + 0.12),
        (record(4, 2, drafter="ngram"), 0.12),
        (dataclasses.replace(record(4, 1), drafters=()), 0.02 + 0.11),
    ],
)
def test_oracle_stops_at_the_last_accepted_token(made: Round, seconds: float) -> None:
    assert oracle_round_s(made, COSTS) == pytest.approx(seconds)


def test_oracle_speed_leaves_the_first_round_and_all_else_as_it_was() -> None:
    rounds = [record(4, 0, index=0), record(4, 0, 0.3), record(4, 4, 0.4)]
    made = answer(MODEL.name, 0, 0, 100.0, rounds=rounds)
    assert made.stats.generation_s == pytest.approx(1.0)
    assert made.oracle_s(COSTS) == pytest.approx(1.0 - 0.3 + 0.1)
    assert made.oracle_per_s(COSTS) == pytest.approx(100 / 0.8)


def test_oracle_speedup_of_a_part() -> None:
    made = measurement({(0, 0): (50.0, 100.0)})
    made.answers[1] = answer(MODEL.name, 0, 0, 100.0, rounds=[record(4, 0, index=0), record(4, 0, 0.3)])
    part = Part.of(made.pairs(MODEL.name), COSTS)
    assert part.oracle is not None
    assert part.oracle.mean == pytest.approx(100 / 0.8 / 50)


# --- measuring -------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt("one", "abcabc"), Prompt("two", "gfegfegfe"), Prompt("one", "aab")]


@contextlib.contextmanager
def fake_session(num: int | None = 4) -> Iterator[Session]:
    with Session(FakeModel(1), FakeModel(2), SessionOptions(Drafting("model", num, 0.0))) as session:
        yield session


def test_a_target_without_a_template_continues_bare_text() -> None:
    plan = Plan(PROMPTS, [Setting.of(Drafting("model", 2, 0.0))], GREEDY, 10, 1)
    with Session(FakeModel(1, template=None), FakeModel(2), SessionOptions()) as session:
        measurement = measure(session, plan)
        assert len(measurement.answers) == plan.num_answers == 6
        assert disagreements(session, measurement) == []


def test_turns_rotate_and_are_fair() -> None:
    settings = [Setting.of(Drafting("ngram", num)) for num in (1, 2)]
    plan = Plan(PROMPTS, settings, GREEDY, 10, 3)
    turns = [*plan.turns()]
    assert len(turns) == plan.num_answers == len(set(turns)) == 27
    first = [setting.name for _, _, setting in turns[::3]]
    assert first[:4] == ["baseline", "ngram k=1 p=0.5", "ngram k=2 p=0.5", "ngram k=1 p=0.5"]
    assert all(first.count(name) == 3 for name in set(first))


def test_every_answer_begins_with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_context = FakeModel.open_context

    def counting(model: FakeModel, options: ContextOptions) -> Any:
        opened.append(options.num_ctx)
        return open_context(model, options)

    monkeypatch.setattr(FakeModel, "open_context", counting)
    steps: list[tuple[int, int]] = []
    with fake_session() as session:
        cleared = 0
        clear = session.clear

        def counted() -> None:
            nonlocal cleared
            cleared += 1
            clear()

        monkeypatch.setattr(session, "clear", counted)
        made = measure(session, Plan(PROMPTS, [MODEL], GREEDY, 40, 2), lambda *step: steps.append(step))
        assert cleared == 2 + 12
    assert opened == [49, 49], "opened once, for the longest prompt"
    assert [a.stats.num_prompt_tokens for a in made.answers[:4]] == [6, 6, 9, 9]
    assert steps[0] == (0, 12)
    assert steps[-1] == (12, 12)
    assert not made.interrupted
    part = made.part(MODEL.name)
    assert (part.num_pairs + part.num_short, part.num_equal) == (6, 6)
    assert all(sum(r.num_tokens for r in a.rounds) == a.stats.num_tokens for a in made.answers)


def test_sampled_repeats_have_seeds_of_their_own() -> None:
    with fake_session() as session:
        made = measure(session, Plan(PROMPTS[:1], [MODEL], SamplingParams(seed=2**64 - 1), 30, 2))
    assert [a.seed for a in made.answers] == [2**64 - 1] * 2 + [0] * 2


@pytest.mark.parametrize("has_model", [True, False])
def test_sweep(has_model: bool) -> None:
    settings = sweep_settings(has_model)
    assert len({setting.name for setting in settings}) == len(settings)
    drafters = {setting.drafting.drafter for setting in settings}
    assert drafters == ({"auto", "model", "tree", "ngram"} if has_model else {"ngram"})
    main = "model" if has_model else "ngram"
    lengths = {s.drafting.num_draft_tokens for s in settings if s.drafting.drafter == main}
    assert lengths == {None, 1, 2, 3, 5, 8}
    assert {s.drafting.min_confidence for s in settings if s.drafting.num_draft_tokens == 5} == {0.0, 0.5, 0.75}


def test_select() -> None:
    assert len(select(BUILT_IN)) == 24
    assert [p.category for p in select(BUILT_IN, ["json", "code"], 1)] == ["code", "json"]
    assert select([PROMPTS[0], PROMPTS[0], PROMPTS[1]]) == PROMPTS[:2]
    with pytest.raises(UsageError, match="category `poem`") as caught:
        select(BUILT_IN, ["poem"])
    assert "code, json" in caught.value.hint


# --- the report ------------------------------------------------------------------------------------------------------


def info(**settings: object) -> dict[str, Any]:
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "pair": "some-pair",
        "versions": {"specdec": "1", "llama_cpp_python": "2", "llama_cpp": "3", "python": "3.11"},
        "machine": {
            "cpu": "A CPU", "num_cores": 4, "num_threads": 8, "memory_bytes": 1, "platform": "OS", "build": "AVX",
        },
        "models": {"target": {"file": "t.gguf", "size_bytes": 2, "sha256": "ab" * 32}, "draft": None},
        "settings": {
            "prompts": "digest", "prompts_file": None, "num_prompts": 4, "num_repeats": 3, "max_tokens": 101,
            "num_ctx": 200, "threads": 4, "kv_type": "f16", "gpu_layers": None, "draft_gpu_layers": None,
            "sampling": {"temperature": 0, "seed": None, "top_k": 40}, **settings,
        },
    }  # fmt: skip


def document(factor: float = 1.5, **settings: object) -> dict[str, Any]:
    speeds = {(p, r): (10.0 + p, (10 + p) * factor * (1 + 0.01 * p)) for p in range(4) for r in range(3)}
    made = measurement(speeds)
    return bench_document(made, info(**settings), ["something is odd"], swept=False)


def stored(folder: Path, made: dict[str, Any], name: str = "old.json") -> Path:
    path = folder / name
    path.write_text(document_text(made))
    return path


def test_json_round_trip(tmp_path: Path) -> None:
    made = document()
    assert read_document(stored(tmp_path, made), "--report") == json.loads(json.dumps(made))
    assert math.isclose(made["results"][0]["parts"]["all"]["speedup"], 1.5, rel_tol=0.02)


def test_csv_round_trip() -> None:
    made = document()
    rows = [*csv.DictReader(io.StringIO(csv_text(made)))]
    assert [row["category"] for row in rows] == ["all", "a", "b"]
    part = made["results"][0]["parts"]["all"]
    assert set(rows[0]) == set(CSV_COLUMNS)
    assert float(rows[0]["speedup"]) == part["speedup"]
    assert [float(rows[0]["interval_low"]), float(rows[0]["interval_high"])] == part["interval"]
    assert rows[0]["num_draft_tokens"] == "4"


def test_markdown() -> None:
    text = markdown_text(document())
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert [line.split("|")[1].strip() for line in table] == ["model k=4 p=0", "---", "a", "b", "all"]
    for said in ("A CPU, 4 cores", "t.gguf, sha256 abababababababab", "Note: something is odd"):
        assert said in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_table_fits(width: int, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_bench(document(), stream, "never")
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert all(len(line) <= width and line == line.rstrip() for line in text.splitlines())
    assert "1.5" in text
    assert "\x1b" not in text
    assert ("##" if encoding == "ascii" else "██") in text or width < 79


def test_color_tells_what_the_interval_says() -> None:
    stream = io.StringIO()
    print_bench(document(), stream, "always")
    assert re.search(r"\x1b\[32m *1\.5", stream.getvalue())
    stream = io.StringIO()
    print_bench(document(0.5), stream, "always")
    assert re.search(r"\x1b\[31m *0\.5", stream.getvalue())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "results": []}', "\xff"])
def test_files_that_are_no_reports(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"x\.json"):
        read_document(path, "--compare")
    with pytest.raises(UsageError, match="cannot read"):
        read_document(tmp_path / "nowhere.json", "--compare")


@pytest.mark.parametrize(
    "change",
    [{"models": {}}, {"models": "x"}, {"settings": []}, {"settings": "x"}, {"checks": "x"}],
    ids=str,
)
def test_reports_that_were_changed_by_hand(change: dict[str, object], tmp_path: Path) -> None:
    path = stored(tmp_path, {**document(), **change})
    with pytest.raises(UsageError, match="is not a report of"):
        read_document(path, "--report")


def test_documented_fields() -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.split("\n## specdec bench --json\n")[1].split("\n## ")[0]
    tables = {
        block.split("\n")[0].strip(): set(re.findall(r"^\| `(\w+)` \|", block, flags=re.MULTILINE))
        for block in ("document\n" + section).split("\n### ")
    }
    statistics = page.split("\n## Statistics\n")[1].split("\n## ")[0]
    made = document()
    assert tables["document"] == set(made)
    assert tables["Result"] == set(made["results"][0])
    assert tables["Part"] == set(made["results"][0]["parts"]["all"])
    counts = set(re.findall(r"^\| `(\w+)` \|", statistics, flags=re.MULTILINE))
    assert tables["Answer"] | counts == set(made["answers"][0])
    comparison = compare_documents(made, made)
    assert tables["Comparison of reports"] == set(comparison) | set(comparison["rows"][0])
    for name in ("versions", "machine", "models", "settings", "costs"):
        assert all(f"`{key}`" in section for key in made[name]), name


# --- two reports -----------------------------------------------------------------------------------------------------


def test_no_change_is_within_the_intervals() -> None:
    compared = compare_documents(document(), document())
    assert compared["warnings"] == []
    assert [(row["category"], row["ratio"], row["within"]) for row in compared["rows"]] == [
        ("a", 1.0, True), ("b", 1.0, True), ("all", 1.0, True),
    ]  # fmt: skip


def test_a_change_is_seen() -> None:
    compared = compare_documents(document(1.5), document(1.8))
    overall = compared["rows"][-1]
    assert (overall["ratio"], overall["within"]) == (pytest.approx(1.2), False)
    stream = io.StringIO()
    print_comparison(compared, stream, "never")
    assert re.search(r"all +1.52x +1.83x +1.200 +faster", stream.getvalue())


def test_what_makes_reports_hard_to_compare() -> None:
    other = document(max_tokens=50, sampling={"temperature": 0.8, "seed": 3, "top_k": 40})
    other["machine"] = {**other["machine"], "cpu": "Another"}
    other["models"] = {**other["models"], "target": {"file": "t.gguf", "size_bytes": 2, "sha256": "cd" * 32}}
    other["versions"] = {**other["versions"], "llama_cpp": "4"}
    other["results"][0]["setting"] = "auto"
    warnings = "\n".join(compare_documents(document(), other)["warnings"])
    for said in (
        "cpu A CPU, now Another", "target model differs", "`max_tokens` differs: 101, now 50",
        "`temperature` differs: 0, now 0.8", "setting differs: model k=4 p=0, now auto", "llama-cpp differs: 3, now 4",
    ):  # fmt: skip
        assert said in warnings
    assert "seed" not in warnings


def test_settings_are_matched_by_name() -> None:
    old, new = document(1.5), document(1.5)
    for made in (old, new):
        made["results"] = [{**made["results"][0], "setting": name} for name in ("x", "y" if made is old else "z")]
    assert [row["setting"] for row in compare_documents(old, new)["rows"]] == ["x"] * 3
    assert [row["setting"] for row in compare_documents(old, old)["rows"]] == ["x", "y"]
    new["results"] = [{**new["results"][0], "setting": "other"}] * 2
    assert "no setting in common" in compare_documents(old, new)["warnings"][0]


# --- charts ----------------------------------------------------------------------------------------------------------


def swept_document() -> dict[str, Any]:
    made, results = document(), []
    for num in (1, 2, 5):
        result = json.loads(json.dumps(made["results"][0]))
        result["num_draft_tokens"], result["setting"] = num, f"model k={num}"
        result["parts"]["all"]["acceptance_by_position"] = [0.9, 0.5, 0.1][:num]
        results.append(result)
    return {**made, "results": results, "best": "model k=2"}


@pytest.mark.parametrize("name", ["x.png", "x.svg", "X.SVG"])
@pytest.mark.parametrize("swept", [True, False])
def test_plot(name: str, swept: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specdec_cli.render.plot import check_plot, save_plot

    path = tmp_path / name
    check_plot(path)
    save_plot(swept_document() if swept else document(), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in content


def test_plot_of_a_report_without_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from specdec_cli.render.plot import save_plot

    save_plot(bench_document(measurement({}), info(), [], swept=True), tmp_path / "x.svg")


def test_best_result_is_shown() -> None:
    assert chosen_result(swept_document())["setting"] == "model k=2"
    stream = io.StringIO()
    print_bench(swept_document(), stream, "never")
    assert "best: model k=2, 1.52x" in stream.getvalue()
    assert "by category, model k=2" in stream.getvalue()


# --- settings of pairs -----------------------------------------------------------------------------------------------


def write_config(text: str) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text(text)


def test_no_file_no_settings() -> None:
    assert load_pair_settings("any") == load_pair_settings(None) == PairSettings()


def test_saved_settings_come_back() -> None:
    save_pair_settings("a+b.c", Drafting("model", 3, 0.75))
    assert load_pair_settings("a+b.c") == PairSettings("model", 3, 0.75)
    save_pair_settings("a+b.c", Drafting("auto"))
    assert load_pair_settings("a+b.c") == PairSettings("auto", "auto", None)
    save_pair_settings("other", PLAIN_DECODING)
    assert load_pair_settings("other") == PairSettings("none")
    assert load_pair_settings("a+b.c").drafter == "auto"


def test_comments_are_kept() -> None:
    write_config(
        '# mine\n\n[pairs."x"]  # a pair\ndrafter = "ngram" # why not\n\n[pairs."y"]\ndraft_tokens = 2\n# end\n'
    )
    save_pair_settings("x", Drafting("model", 5, 0.0))
    text = config_file().read_text()
    for kept in ("# mine", "# a pair", "# why not", "# end", '[pairs."y"]\ndraft_tokens = 2'):
        assert kept in text
    assert load_pair_settings("x") == PairSettings("model", 5, 0.0)
    assert load_pair_settings("y") == PairSettings(None, 2, None)


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text("# here\n")
    config_file().parent.mkdir(parents=True)
    config_file().symlink_to(real)
    save_pair_settings("x", Drafting("model", 5))
    assert config_file().is_symlink()
    assert "# here" in real.read_text()
    assert 'drafter = "model"' in real.read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pairs = 3", "`pairs` must be tables"),
        ("pair = {}", "unknown key `pair`; did you mean `pairs`?"),
        ("[pairs", "not valid TOML"),
        ('[pairs."x"]\ndraft_token = 3', '[pairs."x"]: unknown key `draft_token`; did you mean `draft_tokens`?'),
        ('[pairs."x"]\ndrafter = "modle"', "not `modle`; did you mean `model`?"),
        ('[pairs."x"]\ndrafter = 3', "`drafter` must be one of"),
        ('[pairs."x"]\ndraft_tokens = 65', "from 0 to 64"),
        ('[pairs."x"]\ndraft_tokens = true', "from 0 to 64"),
        ('[pairs."x"]\ndraft_confidence = 2', "from 0 to 1"),
        ("[pairs]\nx = 1", "must be a table"),
    ],
)
def test_bad_config(text: str, said: str) -> None:
    write_config(text)
    for attempt in (lambda: load_pair_settings("y"), lambda: save_pair_settings("y", PLAIN_DECODING)):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert said in caught.value.message
        assert str(config_file()) in caught.value.message


def test_unwritable_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("specdec_cli.config.write_whole", refuse)
    with pytest.raises(SpecdecError, match="cannot write"):
        save_pair_settings("x", PLAIN_DECODING)


# --- where it comes from ---------------------------------------------------------------------------------------------


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import os

    path = tmp_path / "m.gguf"
    path.write_bytes(b"abc")
    found = provenance.model_file(path)
    assert found == {"file": "m.gguf", "size_bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.sha256", None)
        assert provenance.model_file(path) == found
    path.write_bytes(b"abd")
    os.utime(path, ns=(1, 1))
    assert provenance.model_file(path)["sha256"] == hashlib.sha256(b"abd").hexdigest()


def test_machine_and_versions() -> None:
    assert provenance.cpu_name()
    assert provenance.machine()["memory_bytes"] > 0
    assert set(provenance.versions()) == {"specdec", "llama_cpp_python", "llama_cpp", "python"}
    assert 0 <= provenance.load() <= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_countdown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("specdec_cli.render.countdown.time.monotonic", lambda: now)
    stream = io.StringIO()
    with Countdown(stream, "Measuring", quiet=False) as countdown:
        for done in range(11):
            countdown(done, 10)
            now += 10.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Measuring: 2 of 10, 1.3 min left"
    assert len(lines) == 4
    for quiet, terminal in ((True, Terminal()), (False, Terminal())):
        with Countdown(terminal, "Measuring", quiet=quiet) as countdown:
            countdown(3, 10)
        assert bool(terminal.getvalue()) is not quiet
        assert ("3/10" in terminal.getvalue()) is not quiet


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """The target that the next session gets."""
    pair = [FakeModel(1), FakeModel(2)]

    def opened(cls: object, target: Path, draft: Path | None, options: SessionOptions) -> Session:
        return Session(pair[0], pair[1] if draft else None, options)

    monkeypatch.setattr(Session, "open", classmethod(opened))
    monkeypatch.setattr("specdec_cli.choice.fetch", lambda spec, **_: Path(spec.file))
    monkeypatch.setattr("specdec_cli.provenance.load", lambda: 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    return pair


FILES = ["bench", "--target", "t.gguf", "--draft", "d.gguf"]
SHORT = ["-n", "25", "--limit", "1", "--repeat", "2"]
ARGUMENTS = [*FILES, *SHORT]


@pytest.mark.usefixtures("models")
class TestCommand:
    def test_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "-k", "3"]) == 0
        out = capsys.readouterr().out
        for said in ("6 prompts, 2 repeats", "temperature 0,", "by category, auto k=3 p=0.5", "oracle", "by position"):
            assert said in out
        assert [line.split()[0] for line in out.splitlines()[3:10]] == [
            "code", "json", "summary", "chat", "edit", "story", "all",
        ]  # fmt: skip

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--json", "--categories", "code, json", "--quiet"]) == 0
        captured = capsys.readouterr()
        made = json.loads(captured.out)
        assert captured.err == ""
        assert (made["schema"], made["best"], made["interrupted"]) == (1, None, False)
        assert [result["setting"] for result in made["results"]] == ["auto"]
        assert set(made["results"][0]["parts"]) == {"all", "code", "json"}
        assert len(made["answers"]) == 2 * 2 * 2
        assert made["settings"]["sampling"]["temperature"] == 0
        assert made["settings"]["num_ctx"] > 25
        assert made["models"]["target"] == {"file": "fake-1.gguf", "size_bytes": None, "sha256": None}

    def test_temperature_of_the_user(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--json", "-t", "0.7", "--categories", "code", "-q"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert made["settings"]["sampling"]["temperature"] == 0.7
        assert isinstance(made["settings"]["sampling"]["seed"], int)

    def test_without_a_draft_model_text_is_repeated(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke(["bench", "--target", "t.gguf", *SHORT, "--json", "--categories", "code"]) == 0
        assert json.loads(capsys.readouterr().out)["results"][0]["setting"] == "ngram"

    def test_prompts_from_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text('{"category": "mine", "turns": ["abcabcd"]}\n')
        assert invoke([*ARGUMENTS, "--prompts", str(path)]) == 0
        assert "mine" in capsys.readouterr().out

    def test_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib")
        table, chart = tmp_path / "x.csv", tmp_path / "x.svg"
        assert invoke([*ARGUMENTS, "--csv", str(table), "--plot", str(chart), "--markdown"]) == 0
        assert capsys.readouterr().out.startswith("**fake-1.gguf + fake-2.gguf")
        assert table.read_text().startswith("setting,")
        assert "<svg" in chart.read_text()

    def test_csv_on_stdout(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--csv", "-"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 8

    def test_compare(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--json"]) == 0
        old = tmp_path / "old.json"
        old.write_text(capsys.readouterr().out)
        assert invoke([*ARGUMENTS, "--compare", str(old), "-n", "30"]) == 0
        out = capsys.readouterr().out
        assert "Against the report of" in out
        assert "Warning: the setting `max_tokens` differs: 25, now 30" in out

    def test_sweep_says_off_and_saves_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Measurement, "best", None)
        monkeypatch.setattr(Measurement, "is_off", True)
        name = "qwen2.5-coder-1.5b"
        write_config(f'# mine\n[pairs."{name}"]\ndraft_tokens = 3 # old\n')
        assert invoke(["bench", name, *SHORT, "--categories", "code", "--sweep", "--save"]) == 0
        captured = capsys.readouterr()
        assert "best: off" in captured.out
        assert f"saved for {name}: off, in {config_file()}" in captured.err
        assert load_pair_settings(name) == PairSettings("none")
        assert "# mine" in config_file().read_text()

    def test_best_is_saved(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        best = Setting.of(Drafting("model", 2, 0.5))
        monkeypatch.setattr(Measurement, "best", best)
        name = "qwen2.5-coder-1.5b"
        assert invoke(["bench", name, *SHORT, "--categories", "code", "--sweep", "--save", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["best"] == best.name
        assert load_pair_settings(name) == PairSettings("model", 2, 0.5)

    def test_min_speedup(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--min-speedup", "0.0001"]) == 0
        capsys.readouterr()
        assert invoke([*ARGUMENTS, "--json", "--min-speedup", "1000"]) == 5
        captured = capsys.readouterr()
        check = json.loads(captured.out)["checks"]["min_speedup"]
        assert (check["passed"], check["wanted"], len(check["below"])) == (False, 1000, 6)
        assert re.search(r"Error: the speed-up is \d.\d\dx, 1000x were wanted; below it: code, json", captured.err)

    def test_check_lossless(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke([*ARGUMENTS, "--check-lossless", "--json"]) == 0
        checks = json.loads(capsys.readouterr().out)["checks"]
        assert checks["lossless"] == {"passed": True, "disagreements": []}

    @pytest.mark.parametrize(("gap", "code"), [(0.001, 0), (3.0, 5)])
    def test_answers_that_differ(
        self, gap: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from specdec_cli import engine

        real = engine.verify

        def wrong(draft: Any, *args: Any, **kwargs: Any) -> Any:
            verdict = real(draft, *args, **kwargs)
            token = 0 if len(draft) == 3 and verdict.token else verdict.token
            return dataclasses.replace(verdict, token=token)

        monkeypatch.setattr(engine, "verify", wrong)
        monkeypatch.setattr(Session, "near_tie", lambda *_: NearTie(7, ("\n", "b"), (1 + gap, 1.0)))
        extra = ["--drafter", "model", "-k", "3", "--draft-confidence", "0", "--check-lossless"]
        assert invoke([*ARGUMENTS, *extra]) == code
        captured = capsys.readouterr()
        assert "differs from token 7: '\\n'" in captured.out
        assert ("NOT a near-tie" in captured.out) is bool(code)
        assert ("differ from the baseline's by no near-tie" in captured.err) is bool(code)

    @pytest.mark.parametrize(
        ("extra", "said"),
        [
            (["--repeat", "0"], "--repeat must be 1 or more"),
            (["--limit", "0"], "--limit must be 1 or more"),
            (["-n", "0"], "--max-tokens must be 1 or more"),
            (["--categories", "poem"], "category `poem`"),
            (["--no-draft"], "nothing to compare"),
            (["-k", "0"], "nothing to compare"),
            (["--sweep", "-k", "3"], "--sweep chooses"),
            (["--save"], "add `--sweep`"),
            (["--sweep", "--save"], "models are given as files"),
            (["--explain"], "belongs to `specdec run`"),
            (["--check-lossless", "-t", "1"], "specdec check"),
            (["--min-speedup", "0"], "above 0"),
            (["--json", "--markdown"], "both write to stdout"),
            (["--markdown", "--csv", "-"], "both write to stdout"),
            (["--compare", "nowhere.json"], "cannot read `nowhere.json`"),
            (["--csv", "no/such/folder/x.csv"], "cannot write `no/such/folder/x.csv`"),
            (["--plot", "no/such/folder/x.png"], "cannot write `no/such/folder/x.png`"),
            (["--plot", "x.gif"], ".png or .svg"),
            (["--prompts", "nowhere.jsonl"], "cannot read `nowhere.jsonl`"),
        ],
    )
    def test_refused_before_anything_is_measured(
        self, extra: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def never(*_: object) -> None:
            raise AssertionError("it was measured")

        monkeypatch.setattr("specdec_cli.bench.measure", never)
        assert invoke([*ARGUMENTS, *extra]) == 2
        assert said in capsys.readouterr().err

    def test_a_checked_path_leaves_no_file(self, tmp_path: Path) -> None:
        assert invoke([*ARGUMENTS, "--csv", str(tmp_path / "x.csv"), "--repeat", "0"]) == 2
        assert [*tmp_path.iterdir()] == []

    def test_matplotlib_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert invoke([*ARGUMENTS, "--plot", str(tmp_path / "x.png")]) == 2
        err = capsys.readouterr().err
        assert "needs matplotlib" in err
        assert f"{sys.executable} -m pip install matplotlib" in err

    def test_notes(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("specdec_cli.provenance.load", lambda: 0.6)
        assert invoke(ARGUMENTS) == 0
        assert "Note: other processes load the machine: 60% of the CPUs" in capsys.readouterr().out


def interrupt_at(model: FakeModel, call: int) -> None:
    """Ctrl-C at a decode call of the model's contexts."""
    open_context, calls = model.open_context, 0

    def opened(options: ContextOptions) -> Any:
        context = open_context(options)
        decode = context._decode

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                context.fail_next = KeyboardInterrupt()
            return decode(*args, **kwargs)

        context._decode = counting  # type: ignore[method-assign]
        return context

    model.open_context = opened  # type: ignore[method-assign]


@pytest.fixture
def _handler() -> Iterator[None]:
    import signal

    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("_handler")
class TestInterrupted:
    def test_what_is_done_is_shown(self, models: list[FakeModel], capsys: pytest.CaptureFixture[str]) -> None:
        interrupt_at(models[0], 180)
        assert invoke([*ARGUMENTS, "--min-speedup", "1000", "--check-lossless", "--json"]) == 130
        made = json.loads(capsys.readouterr().out)
        assert made["interrupted"] is True
        assert 0 < len(made["answers"]) < 24
        assert made["checks"] is None
        assert made["results"][0]["parts"]["all"]["num_pairs"] > 0

    def test_table_says_so(self, models: list[FakeModel], capsys: pytest.CaptureFixture[str]) -> None:
        interrupt_at(models[0], 180)
        assert invoke(ARGUMENTS) == 130
        assert "interrupted: only the answers up to there are counted" in capsys.readouterr().out

    def test_too_early(self, models: list[FakeModel], capsys: pytest.CaptureFixture[str]) -> None:
        interrupt_at(models[0], 30)
        assert invoke([*ARGUMENTS, "-k", "2"]) == 130
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Interrupted before there was anything to compare" in captured.err

    def test_nothing_is_saved(self, models: list[FakeModel]) -> None:
        interrupt_at(models[0], 180)
        assert invoke(["bench", "qwen2.5-coder-1.5b", *SHORT, "--sweep", "--save"]) == 130
        assert not config_file().exists()

    def test_while_differences_are_looked_at(
        self, models: list[FakeModel], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stopped(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("specdec_cli.bench.disagreements", stopped)
        assert invoke([*ARGUMENTS, "--check-lossless", "--json"]) == 130
        assert len(json.loads(capsys.readouterr().out)["answers"]) == 24


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("arguments", [words for words in EXAMPLES if words[0] == "bench"], ids=" ".join)
def test_documented_examples(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    stored(tmp_path, document(), "before.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECDEC_MAX_TOKENS", "20")
    monkeypatch.setattr("specdec_cli.cli.bench.MeasureFlags.chosen", lambda _: PROMPTS)
    words = arguments[: arguments.index(">")] if ">" in arguments else arguments
    # The fakes gain nothing, which is what that example looks for.
    assert invoke(words) == (5 if "--min-speedup" in words else 0), capsys.readouterr().err
    assert capsys.readouterr().out


class TestStoredReports:
    def test_is_shown_without_a_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke(["bench", "--report", str(stored(tmp_path, document()))]) == 0
        assert "by category, model k=4 p=0" in capsys.readouterr().out

    def test_two_are_compared(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        old, new = stored(tmp_path, document(1.5)), stored(tmp_path, document(1.2), "new.json")
        assert invoke(["bench", "--compare", str(old), "--report", str(new)]) == 0
        out = capsys.readouterr().out
        assert "slower" in out
        assert "by category" not in out
        assert invoke(["bench", "--compare", str(old), "--report", str(new), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["comparison"]["rows"]
        assert rows[-1]["ratio"] == pytest.approx(0.8)

    def test_min_speedup_of_a_report(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = str(stored(tmp_path, document()))
        assert invoke(["bench", "--report", path, "--min-speedup", "1.4"]) == 0
        assert invoke(["bench", "--report", path, "--min-speedup", "1.6"]) == 5
        assert "1.52x, 1.6x were wanted; below it: a, b" in capsys.readouterr().err

    @pytest.mark.parametrize("flag", ["--report", "--compare"])
    def test_a_report_is_not_written_over(self, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = stored(tmp_path, document())
        before = path.read_bytes()
        more = [] if flag == "--report" else ["--report", str(stored(tmp_path, document(), "new.json"))]
        assert invoke(["bench", flag, str(path), *more, "--csv", str(tmp_path / "." / path.name)]) == 2
        assert f"is the report that {flag} reads" in capsys.readouterr().err
        assert path.read_bytes() == before

    @pytest.mark.parametrize("flag", ["--save", "--check-lossless"])
    def test_needs_a_measurement(self, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert invoke(["bench", "--report", str(stored(tmp_path, document())), flag]) == 2
        assert f"{flag} needs a measurement" in capsys.readouterr().err


# --- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "num_columns"), [([], 7), (["--chains"], 10)])
def test_the_script_that_takes_turns_prints_a_table(flags: list[str], num_columns: int, tmp_path: Path) -> None:
    files = [tiny(tmp_path, name, seed=seed, chat_template=CHATML) for name, seed in (("target", 1), ("draft", 2))]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"category": name, "turns": [name * 9]}) + "\n" for name in ("code", "story"))
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "turns.py"), *map(str, files), "--prompts", str(prompts)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *flags, "-n", "12", "--repeat", "2"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.strip("|\n ").split(" | ") for line in done.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == ["code", "story", "all"]
    assert {len(row) for row in rows if "---" not in row[0]} == {num_columns}
    rates = [float(cell.removesuffix("x")) for row in rows[2:] for cell in row[1:3]]
    assert all(rate > 0 for rate in rates)


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("models")
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("specdec_cli.cli.prompt._is_terminal", lambda: True)
    monkeypatch.setattr("specdec_cli.cli.prompt._read_stdin", lambda *, wanted: "")
    assert invoke(["run", *FILES[1:], "-n", "20", "-t", "0", "-k", "2", "--compare", "--json", "abcabc"]) == 0
    recorded = tmp_path / "run.jsonl"
    recorded.write_text(capsys.readouterr().out)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(ROOT / "docs" / "make_pictures.py"), "--out", str(tmp_path)]
    files = ["--run", str(recorded), "--bench", str(stored(tmp_path, document())), "--command", "specdec run abcabc"]
    done = subprocess.run([*script, *files], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    picture = (tmp_path / "run.svg").read_text().replace("&#160;", " ")
    for said in ("$ specdec run abcabc", "mean acceptance length", "speed-up", "text-decoration: underline"):
        assert said in picture
    assert "<svg" in (tmp_path / "bench.svg").read_text()
