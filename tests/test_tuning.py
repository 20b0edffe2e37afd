"""`specdec tune`: what is measured, chosen, kept and remembered, and what is left when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from models import CHATML, no_vocabulary, sentencepiece_vocabulary, tiny

from specdec_cli import calibration, llama, measuring, requantize, selfcheck, tuned, tuning
from specdec_cli.calibration import Text
from specdec_cli.cli import pull as pull_module
from specdec_cli.cli.app import invoke
from specdec_cli.cli.tune import tune_after_pull
from specdec_cli.errors import BackendError, ExitCode, IncompatibleModelsError, ModelLoadError, ModelMissingError
from specdec_cli.llama import FORMATS, LlamaContext, Model, quantize
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.translation import Translator
from specdec_cli.tuning import CANDIDATES, Candidate, Tuned, find_tuned, forget, tune
from specdec_cli.types import ContextOptions

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and limits")

IS_CROWDED = measuring.Load.is_crowded
LABELS = [candidate.label for candidate in CANDIDATES]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other programs do meanwhile does not matter: no threads wait for each other, and answers are short."""
    monkeypatch.setattr(llama, "default_threads", lambda: 1)
    monkeypatch.setattr(tuning, "default_threads", lambda: 1)
    monkeypatch.setattr(calibration, "MAX_ANSWER", 12)
    monkeypatch.setattr(measuring.Load, "is_crowded", lambda _: False)


def convert_here(source: Path, destination: Path, ftype: str, *, pure: bool, threads: int) -> None:
    quantize(source, destination, ftype, pure=pure, threads=threads)


@pytest.fixture(autouse=True)
def _no_child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting an interpreter takes longer than all that is done with tiny models."""
    if "child" not in request.node.name:
        monkeypatch.setattr(tuning, "requantize", convert_here)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny(folder, "target", num_layers=3, chat_template=CHATML)
    tiny(folder, "other", num_layers=2, chat_template=CHATML, quant="q8_0")
    tiny(folder, "draft", num_layers=1, quant="f32", chat_template=CHATML)
    return folder


@pytest.fixture
def pair(models: Path) -> tuple[Path, Path]:
    return models / "target.gguf", models / "draft.gguf"


@pytest.fixture
def favor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let one format be predicted to be twice as fast as every other."""

    def favored(label: str) -> None:
        order = iter([name for name in (tuned.PUBLISHED, *LABELS) for _ in range(2)] * 10)
        monkeypatch.setattr(tuning, "predict_rate", lambda *_: 2e9 if next(order) == label else 1e9)
        # A gain of settings is noise here.
        monkeypatch.setattr(tuning, "_variants", lambda chosen: [("as it is", chosen)])

    return favored


def kept() -> list[str]:
    """Names of the model files in the folder, shortened to their format."""
    return sorted(path.name.split(".")[-2] for path in tuned.folder().rglob("*.gguf"))


def leftovers() -> list[str]:
    """Everything in the folder that is neither a record, a model, nor the lock."""
    return [path.name for path in tuned.folder().rglob("*") if path.suffix not in {".json", ".gguf", ".lock"}
            and path.name != ".lock"]  # fmt: skip


# --- choosing ----------------------------------------------------------------------------------------------------


def test_the_best_format_is_made_by_a_child_kept_and_found(
    pair: tuple[Path, Path], favor: Callable[[str], None]
) -> None:
    favor("Q4_0 pure")
    steps: list[tuple[str, float]] = []
    report = tune(*pair, on_progress=lambda text, share: steps.append((text, share)))
    assert [row.label for row in report.measurements] == [tuned.PUBLISHED, *LABELS]
    assert all(row.step_s > 0 and 0 <= row.agreement <= 1 and row.size > 1000 for row in report.measurements)
    assert (report.chosen.label, report.failures, report.num_positions) == ("Q4_0 pure", (), 36)
    assert set(report.pass_s or {}) == set(calibration.PASS_SIZES)
    assert find_tuned(*pair) == report.chosen
    assert kept() == ["Q4_0-pure"]
    assert leftovers() == []
    with Model(report.chosen.path) as model, Model(pair[1]) as published:
        assert "Q4_0" in model.description
        assert llama.check_vocabularies(published, model) == published.num_vocab
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_sources_are_not_touched(pair: tuple[Path, Path], favor: Callable[[str], None]) -> None:
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in pair]
    favor("Q8_0")
    tune(*pair)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in pair] == before


def test_a_small_gain_changes_nothing(
    pair: tuple[Path, Path], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("")
    rates = iter([1e9, 1e9, 1.01e9, 5e9, 1.02e9, 1e9, 1.025e9, 1e9, 1e9, 1e9])
    monkeypatch.setattr(tuning, "predict_rate", lambda *_: next(rates))
    report = tune(*pair)
    assert report.chosen == Tuned(pair[1])
    assert "no other format promises 3% more" in report.reason
    assert kept() == []
    # Remembered all the same: there is nothing left to find out.
    assert find_tuned(*pair) == Tuned(pair[1])


@pytest.mark.parametrize(
    ("agreement", "best_rate", "label"),
    [(0.78, 1.2, "Q4_0"), (0.70, 1.2, tuned.PUBLISHED), (0.80, 1.02, tuned.PUBLISHED)],
    ids=["cheaper", "agrees less", "hardly cheaper"],
)
def test_where_nothing_pays_the_cheapest_that_agrees_is_ready(agreement: float, best_rate: float, label: str) -> None:
    rows = [
        tuning.Measurement(tuned.PUBLISHED, 1, 0.02, 0.8, 1.0, 1.0),
        tuning.Measurement("Q4_0", 1, 0.01, agreement, 1.01, best_rate),
    ]
    files = {row.label: Path(row.label) for row in rows}
    assert tuning._choose(rows, files, 1.0)[0] == Tuned(files[label], label)
    # Where drafting pays anyway, the prediction decides.
    faster = [tuning.replace(row, rate=1.5) for row in rows]
    assert tuning._choose(faster, files, 1.0)[0].label == tuned.PUBLISHED


def test_settings_are_adopted_only_for_a_gain(
    pair: tuple[Path, Path], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("Q8_0")
    monkeypatch.setattr(tuning, "_variants", lambda c: [("", c), ("two threads", tuning.replace(c, threads=2))])
    gains = iter([1.02, 1.1])

    def timed(contexts: list[object], *_: object, **__: object) -> np.ndarray:
        count = len(contexts)
        return np.ones((count, 3)) if count > 2 else np.array([[1.0] * 3, [1 / next(gains)] * 3])

    monkeypatch.setattr(calibration, "time_steps", timed)
    for threads in (None, 2):
        assert tune(*pair).chosen.threads == threads
        assert find_tuned(*pair).threads == threads


def test_variants() -> None:
    chosen = Tuned(Path("x.gguf"))
    labels = [label for label, _ in tuning._variants(chosen)]
    assert labels == ["default settings", "flash attention off", "q8_0 cache"]


def test_half_the_threads_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "default_threads", lambda: 4)
    assert dict(tuning._variants(Tuned(Path("x"))))["2 of 4 threads"].threads == 2


@pytest.mark.parametrize("phase", [0, 1], ids=["at once", "later"])
def test_beside_other_programs_nothing_is_decided(
    done: tuple[Path, Path], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    before = find_tuned(*done)
    favor("Q8_0")
    crowded = [phase == 0, phase == 1]
    monkeypatch.setattr(measuring.Load, "is_crowded", lambda _: crowded.pop(0))
    report = tune(*done)
    assert report.is_crowded
    assert report.chosen == Tuned(done[1])
    assert len(report.measurements) == (0, 5)[phase]
    assert (find_tuned(*done), kept()) == (before, ["Q4_0"])


def test_other_programs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(measuring, "default_threads", lambda: 2)
    now = [(0.0, 0.0), (10.0, 1.0), (20.0, 9.0)]
    monkeypatch.setattr(measuring.Load, "_now", staticmethod(lambda: now.pop(0)))
    load = measuring.Load()
    assert not IS_CROWDED(load)
    assert IS_CROWDED(load)


def test_on_a_gpu_nothing_is_measured(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "supports_gpu_offload", lambda: True)
    report = tune(*pair)
    assert (report.chosen, report.measurements) == (Tuned(pair[1]), ())
    assert "GPU" in report.reason
    assert find_tuned(*pair) == Tuned(pair[1])


def test_models_that_cannot_be_tuned(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError):
        tune(pair[0], tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(ModelLoadError):
        tune(pair[0], tmp_path / "text.gguf")
    with pytest.raises(IncompatibleModelsError):
        tune(pair[0], tiny(tmp_path, "none", vocabulary=no_vocabulary()))
    with pytest.raises(ModelLoadError, match="too few"):
        tune(tiny(tmp_path, "short", context_length=32), pair[1])
    assert kept() == []


def test_a_draft_of_another_tokenizer_is_measured_in_its_own_tokens(
    pair: tuple[Path, Path], favor: Callable[[str], None], tmp_path: Path
) -> None:
    favor("Q4_0")
    other = tiny(tmp_path, "sp", vocabulary=sentencepiece_vocabulary())
    report = tune(pair[0], other, candidates=[CANDIDATES[1]])
    assert report.chosen.label in {tuned.PUBLISHED, "Q4_0"}
    assert all(0 <= row.agreement <= 1 for row in report.measurements)
    with Model(pair[0], vocab_only=True) as target, Model(other, vocab_only=True) as draft:
        translator = Translator(target, draft)
        text = calibration.Text(tuple(target.tokenize("a then b", add_special=False, parse_special=False)), (97, 98))
        read = calibration.translated(text, translator)
        assert translator.draft.decode([*read.prompt, *read.answer]) == b"a then bab"
        assert translator.draft.decode(read.answer) == b"ab"
        empty = calibration.translated(calibration.Text((target.eos or 0,), (target.eos or 0,)), translator)
        assert empty.prompt
        assert empty.answer


def test_drafts_are_measured_one_by_one_where_memory_is_short(
    pair: tuple[Path, Path], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("Q4_0")
    monkeypatch.setattr(tuning, "_MEMORY_SHARE", 1e-9)
    groups: list[int] = []
    timed = calibration.time_steps
    monkeypatch.setattr(calibration, "time_steps", lambda c, *a, **k: groups.append(len(c)) or timed(c, *a, **k))
    assert tune(*pair).chosen.label == "Q4_0"
    assert groups == [1] * 6


# --- measuring ---------------------------------------------------------------------------------------------------


def test_answers_are_shorter_where_the_target_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_ANSWER", 48)
    model = FakeModel(0, "".join(map(chr, range(32, 127))))
    context = model.open_context(ContextOptions(512))
    for budget_s, length, num in ((0.0, calibration.MIN_ANSWER, 1), (1000.0, 48, len(calibration.PROMPTS))):
        texts = calibration.greedy_answers(model, context, budget_s, lambda _: None)
        assert len(texts) == num
        assert all(len(t.answer) == length or t.answer[-1] in model.stop_tokens for t in texts)


def test_agreement_is_that_of_step_by_step(pair: tuple[Path, Path]) -> None:
    rng = np.random.default_rng(3)
    texts = [Text(tuple(rng.integers(32, 90, 30)), tuple(rng.integers(32, 90, 20))) for _ in range(2)]
    with Model(pair[1]) as model, LlamaContext(model, ContextOptions(256)) as context:
        likeliest = []
        for text in texts:
            for position in range(20):
                context.sync([*text.prompt, *text.answer[:position]])
                likeliest.append(int(context.score()[0].argmax()))
        hits = [Text(text.prompt, (*text.answer[:-1], likeliest[20 * index + 19])) for index, text in enumerate(texts)]
        confidences, matches = calibration.follow(context, hits, model.num_vocab)
        expected = [token == answer for token, answer in zip(likeliest, hits[0].answer + hits[1].answer, strict=True)]
    assert matches == expected
    assert matches[19]
    assert matches[39]
    assert all(0 < confidence <= 1 for confidence in confidences)


def test_steps_are_timed_in_turns() -> None:
    contexts = [FakeContext.random(seed) for seed in range(3)]
    texts = [Text(tuple([1] * 40), tuple([2, 3] * 20))]
    shares: list[float] = []
    times = calibration.time_steps(contexts, texts, 100.0, num_rounds=4, num_steps=5, on_step=shares.append)
    assert times.shape == (3, 4)
    assert (times > 0).all()
    assert (len(shares), shares[-1]) == (12, 1.0)
    few = calibration.time_steps(contexts, texts, 0.0, num_rounds=4, num_steps=5, on_step=shares.append)
    assert few.shape == (3, 1)


def test_passes_are_timed_within_a_budget() -> None:
    for budget_s in (0.0, 100.0):
        context = FakeContext.random(1)
        passes = calibration.time_passes(context, [Text(tuple([1] * 40), tuple([2, 3] * 20))], budget_s)
        assert set(passes) == set(calibration.PASS_SIZES)
        assert all(seconds > 0 for seconds in passes.values())
        assert budget_s or context.num_calls < 3 * len(passes)


# --- what is remembered ------------------------------------------------------------------------------------------


@pytest.fixture
def done(pair: tuple[Path, Path], favor: Callable[[str], None], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the pair, tuned to Q4_0."""
    copies = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for source, copy in zip(pair, copies, strict=True):
        copy.write_bytes(source.read_bytes())
    favor("Q4_0")
    tune(*copies)
    return copies


def record_file() -> Path:
    [path] = tuned.folder().glob("*.json")
    return path


def test_looking_up_is_fast(done: tuple[Path, Path]) -> None:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert find_tuned(*done) is not None
        times.append(time.perf_counter() - began)
    assert min(times) < 0.005


@pytest.mark.parametrize("changed", [0, 1], ids=["target", "draft"])
def test_not_for_other_files(done: tuple[Path, Path], changed: int, tmp_path: Path) -> None:
    os.utime(done[changed], ns=(1, 1))
    assert find_tuned(*done) is None
    assert find_tuned(done[0], tmp_path / "gone.gguf") is None


def test_not_for_another_build_or_cpu(done: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "versions", lambda: {"llama.cpp": "9", "llama-cpp-python": "9", "system": ""})
        assert find_tuned(*done) is None
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "_cpu", lambda: "another")
        assert find_tuned(*done) is None
    assert find_tuned(*done) is not None


def test_a_changed_or_lost_file_is_not_used(done: tuple[Path, Path]) -> None:
    found = find_tuned(*done)
    assert found is not None
    with found.path.open("ab") as stream:
        stream.write(b"x")
    assert find_tuned(*done) is None
    found.path.unlink()
    assert find_tuned(*done) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"schema": 2}', '{"schema": 1, "chosen": 3}', "[" * 100_000, "\ud800"],
    ids=range(9),
)
def test_a_broken_record_is_none(done: tuple[Path, Path], content: str, favor: Callable[[str], None]) -> None:
    record_file().write_bytes(content.encode("utf-8", "surrogatepass"))
    assert find_tuned(*done) is None
    assert not forget(*done)
    favor("Q8_0")
    assert tune(*done).chosen.label == "Q8_0"
    assert find_tuned(*done) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_type", "q3"),
        ("threads", -1),
        ("threads", "2"),
        ("flash_attention", "on"),
        ("file", "../x.gguf"),
        ("size", 1),
    ],
)
def test_a_record_with_wrong_values_is_none(done: tuple[Path, Path], key: str, value: object) -> None:
    record = json.loads(record_file().read_text())
    record["chosen"][key] = value
    record_file().write_text(json.dumps(record))
    assert find_tuned(*done) is None


def test_record_holds_what_was_measured(done: tuple[Path, Path]) -> None:
    record = json.loads(record_file().read_text())
    assert len(record["draft"]["sha256"]) == 64
    assert record["build"] == llama.versions()
    assert len(record["measured"]["measurements"]) == 1 + len(CANDIDATES)


def test_undo(done: tuple[Path, Path]) -> None:
    assert forget(*done)
    assert find_tuned(*done) is None
    assert (kept(), leftovers(), list(tuned.folder().glob("*.json"))) == ([], [], [])
    assert not forget(*done)
    assert done[1].exists()


def test_tuning_again_replaces(done: tuple[Path, Path], favor: Callable[[str], None]) -> None:
    os.utime(done[1], ns=(1, 1))
    favor("Q8_0")
    tune(*done)
    assert kept() == ["Q8_0"]
    assert record_file().exists()


def test_a_file_that_another_target_uses_stays(
    done: tuple[Path, Path], models: Path, favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("Q4_0")
    other = models / "other.gguf"
    # The hash is known from the first record.
    monkeypatch.setattr(tuned, "_BLOCK", None)
    tune(other, done[1])
    assert forget(*done)
    assert find_tuned(*done) is None
    found = find_tuned(other, done[1])
    assert found is not None
    assert found.path.exists()


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_dry_run_keeps_nothing(pair: tuple[Path, Path], favor: Callable[[str], None]) -> None:
    favor("Q4_0")
    report = tune(*pair, dry_run=True)
    assert (report.chosen.label, report.chosen.path) == ("Q4_0", pair[1])
    assert find_tuned(*pair) is None
    assert [path.name for path in tuned.folder().iterdir()] == [".lock"]


def test_interrupted_between_and_resumed(
    pair: tuple[Path, Path], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("Q4_0")

    def stop(text: str, _share: float) -> None:
        if "Q4_K_S" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(*pair, on_progress=stop)
    assert find_tuned(*pair) is None
    assert kept() == ["Q4_0", "Q4_0-pure", "Q8_0"]
    made: list[str] = []
    monkeypatch.setattr(tuning, "requantize", lambda s, d, f, **k: made.append(f) or convert_here(s, d, f, **k))
    assert tune(*pair).chosen.label == "Q4_0"
    assert made == ["Q4_K_S"]
    assert kept() == ["Q4_0"]


def test_what_a_killed_process_left_is_cleared(pair: tuple[Path, Path], favor: Callable[[str], None]) -> None:
    folder = tuned.folder()
    (folder / ".dry-x").mkdir(parents=True)
    (folder / ".dry-x" / "y.gguf").write_text("y")
    (folder / ".half.gguf.123.part").write_text("half")
    favor("Q4_0")
    tune(*pair)
    assert (kept(), leftovers()) == (["Q4_0"], [])


def child(script: str) -> requantize.Command:
    """A quantizer that writes half a file and then does what the script says."""
    before = "import os, signal, sys, time; open(sys.argv[1], 'w').write('half')\n"
    return lambda _source, destination, *_: [sys.executable, "-I", "-S", "-c", before + script, str(destination)]


@posix
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGABRT)", "died of SIGABRT"),
        ("sys.exit('no such format')", "ended with code 1: no such format"),
    ],
)
def test_a_failing_quantizer_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path, script: str, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        requantize.requantize(pair[1], tmp_path / "new.gguf", "Q4_0", pure=False, threads=1, command=child(script))
    assert list(tmp_path.iterdir()) == []


@posix
def test_ctrl_c_ends_the_quantizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        requantize.requantize(
            pair[1], tmp_path / "new.gguf", "Q4_0", pure=False, threads=1, command=child("time.sleep(60)")
        )
    assert time.monotonic() - began < 5
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_full_disk_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The real quantizer, stopped by a limit in the middle of its file."""

    def limited(*arguments: object) -> list[str]:
        return ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh", *requantize._child_command(*arguments)]  # type: ignore[arg-type]

    with pytest.raises(BackendError, match="quantizer"):
        requantize.requantize(pair[1], tmp_path / "new.gguf", "Q8_0", pure=False, threads=1, command=limited)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_the_work(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(BackendError, match=r"tuning needs 0\.3 GB in .*, 0\.0 GB are free") as caught:
        tune(*pair)
    assert "SPECDEC_HOME" in caught.value.hint
    assert kept() == []


def test_formats_that_fail_are_told_and_left_out(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, destination: Path, ftype: str, **options: object) -> None:
        if ftype != "Q8_0":
            raise BackendError(f"cannot do {ftype}")
        convert_here(source, destination, ftype, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "requantize", broken)
    report = tune(*pair, candidates=[Candidate("A", "Q4_0", True, 5), Candidate("B", "Q8_0", False, 9)])
    assert [row.label for row in report.measurements] == [tuned.PUBLISHED, "B"]
    assert report.failures == (("A", "cannot do Q4_0"),)


def test_one_at_a_time(pair: tuple[Path, Path]) -> None:
    with tuned.locked(), pytest.raises(BackendError, match="another process is tuning"):
        tune(*pair)
    with tuned.locked(), pytest.raises(BackendError, match="another process is tuning"):
        forget(*pair)


@pytest.mark.parametrize("ftype", FORMATS)
@pytest.mark.parametrize("source", ["draft", "target"], ids=["f32", "mixed"])
def test_every_format_can_be_made_and_read(models: Path, tmp_path: Path, source: str, ftype: str) -> None:
    made = tmp_path / "made.gguf"
    quantize(models / f"{source}.gguf", made, ftype, pure=False, threads=1)
    with Model(made) as model, LlamaContext(model, ContextOptions(64, flash_attention=True)) as context:
        context.sync(model.tokenize("hello", add_special=True, parse_special=False))
        assert np.isfinite(context.score()[0]).all()


def test_quantizer_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"could not convert `none\.gguf` to Q8_0: ."):
        quantize(tmp_path / "none.gguf", tmp_path / "new.gguf", "Q8_0", pure=False, threads=1)


# --- the commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    def call(*arguments: str) -> SimpleNamespace:
        code = invoke(["tune", "--target", str(pair[0]), "--draft", str(pair[1]), *arguments])
        out, err = capfd.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def test_command(
    run: Callable[..., SimpleNamespace], favor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    favor("Q4_0")
    monkeypatch.setenv("COLUMNS", "200")
    result = run()
    assert result.code == 0
    assert result.err.splitlines() == [
        "loading the target",
        "reading answers of the target",
        "timing passes of the target",
        *(f"converting the draft to {label}" for label in LABELS),
        "measuring drafts",
        "trying settings",
    ]
    lines = result.out.splitlines()
    assert lines[0].split() == ["draft", "size", "step", "agreement", "predicted", "at", "best"]
    assert sum(line.endswith("x)") and line.startswith(("as published", *LABELS)) for line in lines) == 5
    assert " ".join(lines[-2:]).count("from now on: Q4_0 (") == 1
    undone = run("--undo")
    assert (undone.code, undone.out, undone.err) == (0, "", "back to the published draft\n")
    assert run("--undo").err == "nothing was tuned\n"


def test_command_as_json(
    run: Callable[..., SimpleNamespace], pair: tuple[Path, Path], favor: Callable[[str], None]
) -> None:
    favor("Q4_0")
    result = run("--json", "--dry-run")
    document = json.loads(result.out)
    assert result.err == ""
    assert (document["schema"], document["pair"], document["dry_run"]) == (1, None, True)
    assert document["chosen"]["label"] == "Q4_0"
    assert find_tuned(*pair) is None
    page = (Path(__file__).parents[1] / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.split("## specdec tune --json")[1]
    assert all(f"`{name}`" in section for name in document)
    assert json.loads(run("--json", "--undo").out) == {"schema": 1, "pair": None, "undone": False}


def test_quiet(run: Callable[..., SimpleNamespace], favor: Callable[[str], None]) -> None:
    favor("Q4_0")
    assert run("-q").err == ""


def test_usage(run: Callable[..., SimpleNamespace], pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--undo", "--dry-run").code == ExitCode.USAGE
    assert invoke(["tune", "--target", str(pair[0])]) == ExitCode.USAGE
    assert "there is no draft model to tune" in capfd.readouterr().err


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    calls: list[tuple[Path, Path]] = []

    def pretended(target: Path, draft: Path, **_: object) -> tuning.TuneReport:
        calls.append((target, draft))
        return tuning.TuneReport(Tuned(draft, "Q4_0"), "because")

    monkeypatch.setattr(tuning, "tune", pretended)
    return calls


def test_after_a_pull(
    pair: tuple[Path, Path], tunings: list[tuple[Path, Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    tune_after_pull(*pair, quiet=False)
    assert tunings == [pair]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "draft for this machine: Q4_0 (because)\n")
    tune_after_pull(*pair, quiet=True)
    assert capfd.readouterr().err == ""


def test_pull_ends_with_tuning(
    pair: tuple[Path, Path],
    tunings: list[tuple[Path, Path]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pull_module, "pull_models", lambda *_, **__: [(path, None) for path in pair])
    name = "qwen2.5-coder-1.5b"
    assert invoke(["pull", "--no-tune"]) == 0
    assert (tunings, capfd.readouterr()) == ([], (f"{pair[0]}\n{pair[1]}\n", ""))
    assert invoke(["pull"]) == 0
    assert (tunings, capfd.readouterr().out) == ([pair], f"{pair[0]}\n{pair[1]}\n")
    assert invoke(["pull", "--json"]) == 0
    out, err = capfd.readouterr()
    assert (json.loads(out)["pair"], err) == (name, "")


def test_after_a_pull_only_once_and_only_models(
    done: tuple[Path, Path], tunings: list[tuple[Path, Path]], tmp_path: Path
) -> None:
    tune_after_pull(*done, quiet=False)
    (tmp_path / "text.gguf").write_bytes(b"GGUF target" * 10)
    tune_after_pull(done[0], tmp_path / "text.gguf", quiet=False)
    assert tunings == []


@pytest.mark.parametrize("error", [BackendError("no"), OSError(28, "no")])
def test_a_failure_after_a_pull_is_a_warning(
    pair: tuple[Path, Path], error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tuning, "tune", failing)
    tune_after_pull(*pair, quiet=True)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("Warning: the draft was not tuned: ")
    assert "no" in line
