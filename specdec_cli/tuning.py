"""A draft made for the machine: the draft model in other formats, measured, and the best kept.

Whatever the draft says, the output stays the target's. So its file may be changed freely, and which format is fastest
depends on the kernels that this machine has.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from specdec_cli import calibration, interrupt, selfcheck, tuned
from specdec_cli.calibration import NUM_CTX, Text
from specdec_cli.errors import BackendError, OutOfMemoryError
from specdec_cli.llama import Model, default_threads, find_translator, supports_gpu_offload
from specdec_cli.measuring import Load
from specdec_cli.memory import ON_CPU, Fit, Headers, available, max_ctx
from specdec_cli.prediction import predict_rate
from specdec_cli.requantize import TEMPORARY, requantize
from specdec_cli.translation import Translator
from specdec_cli.trial import admit
from specdec_cli.tuned import PUBLISHED, Tuned, find_tuned, forget
from specdec_cli.types import Context, ContextOptions

__all__ = ["CANDIDATES", "Candidate", "Measurement", "Setting", "TuneReport", "Tuned", "find_tuned", "forget", "tune"]

OnProgress = Callable[[str, float], None]
"""Told what is being done, and the share of all work that is done, from 0 to 1."""

MIN_GAIN = 1.03
"""Less is within the noise of a machine that does other things too: then nothing is changed."""

ANSWERS_S, PASSES_S, STEPS_S = 9.0, 6.0, 5.0
"""What each kind of measurement may take; converting 0.5 B weights four times takes about 15 s."""

_SPARE_BYTES = 256 << 20
_MEMORY_SHARE = 0.6
_LOST_AGREEMENT = 0.05
_CROWDED = "other programs took cores meanwhile, which makes times worthless: nothing was decided"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A format to try.

    Attributes:
        label: for people.
        ftype: a name of `specdec_cli.llama.FORMATS`.
        pure: the same format for every matrix.
        bits: the most bits a weight takes in the file, some matrices being spared.
    """

    label: str
    ftype: str
    pure: bool
    bits: float


CANDIDATES = (
    Candidate("Q8_0", "Q8_0", False, 8.6),
    Candidate("Q4_0", "Q4_0", False, 5.8),
    Candidate("Q4_0 pure", "Q4_0", True, 4.6),
    Candidate("Q4_K_S", "Q4_K_S", False, 6.6),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One file.

    Attributes:
        label: its format.
        size: bytes.
        step_s: median seconds of one draft step.
        agreement: share of positions at which its likeliest token is the target's, or in its own tokens the text's.
        rate: predicted tokens per second of the pair.
        best_rate: the same where the target always agrees, as it nearly does when it repeats or edits a text.
    """

    label: str
    size: int
    step_s: float
    agreement: float
    rate: float
    best_rate: float


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the chosen file.

    Attributes:
        label: what is different.
        gain: how many times as fast a draft step is, the median over rounds.
        tuned: the settings.
    """

    label: str
    gain: float
    tuned: Tuned


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was measured and chosen.

    Attributes:
        chosen: what to draft with; after a dry run its path is the published file's.
        reason: why, in a sentence without a period.
        num_positions: tokens of the target's text that agreement was measured on.
        pass_s: number of tokens -> seconds of a pass of the target.
        measurements: the published file first.
        settings: other ways to run the chosen file.
        failures: formats that could not be made, with the reason.
        is_crowded: other programs took cores meanwhile; then nothing is decided and what was found before stays.
        wall_s: seconds that all of it took.
    """

    chosen: Tuned
    reason: str
    num_positions: int = 0
    pass_s: dict[int, float] | None = None
    measurements: tuple[Measurement, ...] = ()
    settings: tuple[Setting, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    is_crowded: bool = False
    wall_s: float = 0.0

    @property
    def baseline_rate(self) -> float | None:
        """Tokens per second of the target alone."""
        return 1 / self.pass_s[1] if self.pass_s else None

    def document(self) -> dict[str, object]:
        """Everything in plain values, as docs/json.md describes it."""
        return {
            "chosen": _plain(self.chosen),
            "reason": self.reason,
            "num_positions": self.num_positions,
            "baseline_rate": self.baseline_rate,
            "pass_s": {str(size): seconds for size, seconds in (self.pass_s or {}).items()},
            "measurements": [asdict(row) for row in self.measurements],
            "settings": [
                {"label": row.label, "gain": row.gain, **_plain(row.tuned, only_settings=True)} for row in self.settings
            ],
            "failures": dict(self.failures),
            "is_crowded": self.is_crowded,
            "wall_s": self.wall_s,
        }


def _plain(choice: Tuned, *, only_settings: bool = False) -> dict[str, object]:
    values: dict[str, object] = asdict(choice) | {"path": str(choice.path)}
    return {key: value for key, value in values.items() if not only_settings or key not in ("path", "label")}


def tune(
    target: Path,
    draft: Path,
    *,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
    candidates: Sequence[Candidate] = CANDIDATES,
) -> TuneReport:
    """Make the draft model in several formats, measure them with the target, keep the best and remember it.

    Formats that an interrupted call has finished are used again. Ctrl-C ends it within a moment.

    Args:
        target: the target; it is never changed.
        draft: the draft model as published.
        dry_run: keep nothing, remember nothing.
        on_progress: told what is being done.
        candidates: formats to try.

    Raises:
        ModelMissingError: a file is not there.
        ModelLoadError: a file is not a model that this llama.cpp can load, or too small a one to measure.
        IncompatibleModelsError: the draft model's tokens cannot be translated.
        OutOfMemoryError: both models together do not fit into the memory.
        BackendError: llama.cpp does not work here, the disk is too full, or another process is tuning.
        OSError: a file could not be written.
    """
    _check_memory(admit(target), admit(draft))
    began = time.perf_counter()
    with interrupt.stop_on_sigint(), tuned.locked(), _work_folder(dry_run) as folder:
        sha256 = tuned.sha256_of(draft)
        if supports_gpu_offload():
            report = TuneReport(Tuned(draft), "this build of llama.cpp decodes on a GPU, where formats matter little")
        else:
            report = _Tuning((target, draft), sha256, folder, on_progress or _silent, candidates).run()
        report = replace(report, wall_s=time.perf_counter() - began)
        if dry_run:
            return replace(report, chosen=replace(report.chosen, path=draft))
        if report.is_crowded:
            tuned.sweep()
            return report
        tuned.remember(target, draft, report.chosen, sha256, report.document())
    return report


def _silent(_text: str, _share: float) -> None:
    """Show nothing."""


@contextlib.contextmanager
def _work_folder(dry_run: bool) -> Iterator[Path]:
    """The folder for candidates, without what a killed process left in it; for a dry run one that vanishes."""
    home = tuned.folder()
    for path in home.glob(f".*{TEMPORARY}"):
        path.unlink(missing_ok=True)
    for path in home.glob(".dry-*"):
        shutil.rmtree(path, ignore_errors=True)
    if not dry_run:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix=".dry-", dir=home) as name:
        yield Path(name)


def _check_memory(target: Headers, draft: Headers) -> None:
    try:
        Fit(target, draft, ON_CPU, available()).check(min(NUM_CTX, max_ctx(target)))
    except OutOfMemoryError as error:
        raise OutOfMemoryError(
            error.message, "tuning needs both models in memory; draft with the published file"
        ) from None


class _Tuning:
    """One run: what each part of it needs of the others."""

    def __init__(
        self,
        files: tuple[Path, Path],
        sha256: str,
        folder: Path,
        on_progress: OnProgress,
        candidates: Sequence[Candidate],
    ) -> None:
        self._target, self._draft = files
        self._folder = folder
        # Named after the source's content and the library: what an earlier call left there can be used again.
        self._prefix = f"{self._draft.stem}.{sha256[:8]}{selfcheck.machine()[0][:8]}"
        self._on_progress = on_progress
        self._candidates = candidates
        self._extra = selfcheck.check().use_extra_bufts
        self._texts: list[Text] = []
        self._pass_s: dict[int, float] = {}
        self._num_shared = 0
        self._draft_texts: list[Text] = []
        self._draft_tokens = 1.0
        self._failures: list[tuple[str, str]] = []

    def run(self) -> TuneReport:
        """Read, convert, measure, choose; nothing is chosen by times that other programs have stretched."""
        load = Load()
        self._read_target()
        if load.is_crowded():
            return self._report(Tuned(self._draft), _CROWDED, is_crowded=True)
        files = [(PUBLISHED, self._draft), *self._convert()]
        load = Load()
        measurements = self._measure(files)
        chosen, reason = _choose(measurements, dict(files), 1 / self._pass_s[1])
        settings = self._try_settings(chosen)
        if load.is_crowded():
            return self._report(Tuned(self._draft), _CROWDED, measurements, settings, is_crowded=True)
        if settings and settings[0].gain > MIN_GAIN:
            chosen, reason = settings[0].tuned, f"{reason}; with {settings[0].label} a step is faster still"
        return self._report(chosen, reason, measurements, settings)

    def _report(
        self,
        chosen: Tuned,
        reason: str,
        measurements: Sequence[Measurement] = (),
        settings: Sequence[Setting] = (),
        *,
        is_crowded: bool = False,
    ) -> TuneReport:
        return TuneReport(
            chosen,
            reason,
            sum(len(text.answer) for text in self._texts),
            self._pass_s,
            tuple(measurements),
            tuple(settings),
            tuple(self._failures),
            is_crowded,
        )

    def _read_target(self) -> None:
        """The target's answers and the times of its passes; it is closed again before any draft is measured."""
        self._on_progress("loading the target", 0.0)
        # The draft is only looked into, so not repacked.
        with (
            self._model(self._target) as target,
            Model(self._draft, gpu_layers=0, use_extra_bufts=False) as draft,
        ):
            translator = find_translator(target, draft)
            self._check_space(draft.num_params)
            with target.open_context(ContextOptions(min(NUM_CTX, target.max_ctx))) as context:
                told = self._part("reading answers of the target", 0.04, 0.30)
                self._texts = calibration.greedy_answers(target, context, ANSWERS_S, told)
                self._on_progress("timing passes of the target", 0.30)
                self._pass_s = calibration.time_passes(context, self._texts, PASSES_S)
            self._read_as_draft(translator, min(target.num_vocab, draft.num_vocab))

    def _read_as_draft(self, translator: Translator | None, num_common: int) -> None:
        """The texts as the draft model reads them, and what a step counts for."""
        self._num_shared, self._draft_texts = num_common, self._texts
        if translator is not None:
            self._num_shared = translator.draft.model.num_vocab
            self._draft_tokens = translator.efficiency.draft_tokens
            self._draft_texts = [calibration.translated(text, translator) for text in self._texts]

    def _check_space(self, num_params: int) -> None:
        missing = [candidate for candidate in self._candidates if not self._file(candidate).exists()]
        needed = sum(int(num_params * candidate.bits / 8) for candidate in missing) + _SPARE_BYTES
        free = shutil.disk_usage(self._folder).free
        if missing and free < needed:
            raise BackendError(
                f"tuning needs {needed / 1e9:.1f} GB in {self._folder}, {free / 1e9:.1f} GB are free",
                "make room, or set `SPECDEC_HOME` to a directory on a larger disk",
            )

    def _convert(self) -> Iterator[tuple[str, Path]]:
        """Label and path of every format that could be made."""
        for number, candidate in enumerate(self._candidates):
            self._on_progress(
                f"converting the draft to {candidate.label}", 0.36 + 0.24 * number / len(self._candidates)
            )
            path = self._file(candidate)
            try:
                if not path.exists() or not path.stat().st_size:
                    requantize(self._draft, path, candidate.ftype, pure=candidate.pure, threads=default_threads())
            except BackendError as error:
                self._failures.append((candidate.label, error.message))
            else:
                yield candidate.label, path

    def _file(self, candidate: Candidate) -> Path:
        return self._folder / f"{self._prefix}.{candidate.label.replace(' ', '-')}.gguf"

    def _measure(self, files: Sequence[tuple[str, Path]]) -> list[Measurement]:
        """Each file's steps and agreement; as many together as memory holds, because only those can take turns."""
        sizes = [path.stat().st_size for _, path in files]
        together = sum(sizes) < _MEMORY_SHARE * available().ram
        groups = [list(files)] if together else [[file] for file in files]
        found: list[Measurement] = []
        share = 0.30 / len(groups)
        for number, group in enumerate(groups):
            told = self._part("measuring drafts", 0.60 + share * number, 0.60 + share * (number + 1))
            found += self._measure_group(group, told)
        return found

    def _measure_group(self, files: Sequence[tuple[str, Path]], told: calibration.OnStep) -> list[Measurement]:
        with contextlib.ExitStack() as stack:
            contexts = [self._context(stack, stack.enter_context(self._model(path)), Tuned(path)) for _, path in files]
            agreements = []
            for index, context in enumerate(contexts):
                agreements.append(calibration.follow(context, self._draft_texts, self._num_shared))
                told(0.6 * (index + 1) / len(contexts))
            times = calibration.time_steps(
                contexts,
                self._draft_texts,
                STEPS_S,
                num_rounds=5,
                num_steps=6,
                on_step=lambda share: told(0.6 + 0.4 * share),
            )
        return [
            Measurement(
                label,
                path.stat().st_size,
                step_s := float(np.median(row)),
                float(np.mean(matches)),
                predict_rate(confidences, matches, step_s * self._draft_tokens, self._pass_s),
                predict_rate([1.0] * len(matches), [True] * len(matches), step_s * self._draft_tokens, self._pass_s),
            )
            for (label, path), (confidences, matches), row in zip(files, agreements, times, strict=True)
        ]

    def _try_settings(self, chosen: Tuned) -> list[Setting]:
        """Other settings for the chosen file, the fastest first; they are compared round by round."""
        told = self._part("trying settings", 0.90, 1.0)
        told(0.0)
        options = _variants(chosen)
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(self._model(chosen.path))
            opened: list[tuple[str, Tuned, Context]] = []
            for label, variant in options:
                # llama.cpp refuses what a model's shapes do not allow.
                with contextlib.suppress(BackendError):
                    opened.append((label, variant, self._context(stack, model, variant)))
            times = calibration.time_steps(
                [context for *_, context in opened], self._draft_texts, STEPS_S, num_rounds=5, num_steps=4, on_step=told
            )
        settings = [
            Setting(label, float(np.median(times[0] / row)), variant)
            for (label, variant, _), row in zip(opened[1:], times[1:], strict=True)
        ]
        return sorted(settings, key=lambda setting: -setting.gain)

    def _model(self, path: Path) -> Model:
        return Model(path, gpu_layers=0, use_extra_bufts=self._extra)

    @staticmethod
    def _context(stack: contextlib.ExitStack, model: Model, choice: Tuned) -> Context:
        num_ctx = min(NUM_CTX, model.max_ctx)
        return stack.enter_context(
            model.open_context(
                ContextOptions(num_ctx, choice.threads, choice.kv_type, flash_attention=choice.flash_attention)
            )
        )

    def _part(self, text: str, first: float, last: float) -> calibration.OnStep:
        return lambda share: self._on_progress(text, first + (last - first) * share)


def _choose(measurements: Sequence[Measurement], files: dict[str, Path], baseline: float) -> tuple[Tuned, str]:
    """The file to use, and why."""
    published = measurements[0]
    best = max(measurements, key=lambda row: row.rate)
    gain = best.rate / published.rate
    if gain >= MIN_GAIN:
        return Tuned(files[best.label], best.label), f"{best.label} promises {gain:.2f} times the published file's rate"
    if best.rate < MIN_GAIN * baseline:
        # None pays with this text, so all are equally fast: what differs is how soon one pays with another text.
        close = [row for row in measurements if row.agreement >= published.agreement - _LOST_AGREEMENT]
        best = max(close, key=lambda row: row.best_rate)
        gain = best.best_rate / published.best_rate
        if gain >= MIN_GAIN:
            reason = f"drafting pays with predictable text only here, and there {best.label} promises {gain:.2f} times"
            return Tuned(files[best.label], best.label), f"{reason} the published file's rate"
    return Tuned(files[PUBLISHED]), f"no other format promises {MIN_GAIN - 1:.0%} more than the published one"


def _variants(chosen: Tuned) -> list[tuple[str, Tuned]]:
    """The chosen file as it is, then each setting changed alone."""
    variants = [("default settings", chosen)]
    half = default_threads() // 2
    if half:
        variants.append((f"{half} of {default_threads()} threads", replace(chosen, threads=half)))
    return [
        *variants,
        # Left to itself, llama.cpp turns it on wherever it can.
        ("flash attention off", replace(chosen, flash_attention=False)),
        ("q8_0 cache", replace(chosen, kv_type="q8_0", flash_attention=True)),
    ]
