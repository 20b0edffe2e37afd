"""What decoding costs here: measured shortly when a pair is loaded, and remembered for that machine and setting."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from specdec_cli import paths, selfcheck
from specdec_cli.cost import BOUND, USUAL_DRAFT, CostModel, Timing
from specdec_cli.files import read_object, replace_text
from specdec_cli.llama import default_threads
from specdec_cli.types import Context, Draft

_TARGET_SIZES, _DRAFT_SIZES = (1, 2, 3, 4, 5, 8, 16, 32, 64), (1, 2, 8, 64)
_NUM_BEFORE = 32
"""Tokens in the cache while a pass is timed."""

_LONG_S, _NEVER, _NUM_REJECTED = 0.5, 1e4, 4
_MAX_REMEMBERED = 64
_SPARE_CORES, _SHORT_S = 0.3, 0.5

# Raise it when the numbers mean something else.
_VERSION = 4


def measure(target: Context, drafts: Mapping[str, Context]) -> CostModel:
    """Time passes of a few sizes; the caches are empty afterwards.

    Args:
        target: the target's context.
        drafts: for each drafter with a model, its context.
    """
    passes, rejected_s = _time(target, _TARGET_SIZES, _pass_s)
    steps = {name: _time(context, _DRAFT_SIZES, _step_s)[0] for name, context in drafts.items()}
    return CostModel(Timing(passes), {name: Timing(seconds) for name, seconds in steps.items()}, rejected_s)


def fits(context: Context) -> bool:
    """Whether all sizes can be timed in it: what was guessed is not to be remembered."""
    return context.num_ctx >= _NUM_BEFORE + max(*_TARGET_SIZES, *_DRAFT_SIZES)


def _time(
    context: Context, sizes: Sequence[int], timed: Callable[[Context, int, int], float]
) -> tuple[dict[int, float], float]:
    """Number of tokens -> seconds of a pass, for the sizes that fit; and what a rejection costs in the next pass."""
    num_before = max(1, min(_NUM_BEFORE, context.num_ctx - max(sizes) - 1))
    fitting = [size for size in sizes if num_before + size <= context.num_ctx] or [1]
    # The first pass pays for what is set up lazily. A draft, where there is room, has a checkpoint made before the last
    # token, if the model needs one: from there all passes begin.
    _pass_s(context, num_before, min(2, max(fitting)))
    seconds: dict[int, float] = {}
    for size in fitting:
        seconds[size] = timed(context, num_before, size)
        repeats = 0 if seconds[size] > _LONG_S else 2 if size <= 2 else 1 if size <= 5 else 0
        seconds[size] = min([seconds[size], *(timed(context, num_before, size) for _ in range(repeats))])
        # No draft gets longer where arithmetic bounds this pass already.
        if size >= USUAL_DRAFT and seconds[size] >= BOUND * seconds[1]:
            break
    rejected_s = _rejected_s(context, num_before, seconds[1])
    context.clear()
    return seconds, rejected_s


def _pass_s(context: Context, num_before: int, size: int) -> float:
    """A target pass: the last token and a draft, logits for all of them."""
    context.sync(_some_tokens(num_before, context.num_vocab))
    before = context.decode_s
    context.score(Draft.chain(_some_tokens(size - 1, context.num_vocab)))
    context.keep(())
    return context.decode_s - before


def _step_s(context: Context, num_before: int, size: int) -> float:
    """A draft step that reads what was missed, logits for the last token only."""
    context.sync(_some_tokens(num_before, context.num_vocab))
    before = context.decode_s
    context.sync(_some_tokens(num_before + size - 1, context.num_vocab))
    context.score()
    return context.decode_s - before


def _rejected_s(context: Context, num_before: int, plain_s: float) -> float:
    """What a rejected draft adds to the next pass, which takes `plain_s` otherwise; nothing where it can be dropped."""
    if num_before + 2 > context.num_ctx:
        return 0.0
    # As long as drafts are: that many tokens may be dropped, and fewer not.
    longest = min(_NUM_REJECTED, context.num_ctx - num_before)
    context.sync(_some_tokens(num_before, context.num_vocab))
    context.score(Draft.chain(_some_tokens(longest, context.num_vocab)))
    context.keep(range(longest // 2))
    num_kept = num_before + longest // 2
    if len(context.tokens) >= num_kept:
        return 0.0
    if not context.tokens:
        # The whole text is read again: far more than any draft can gain.
        return _NEVER * plain_s
    return max(0.0, _pass_s(context, num_kept + 1, 1) - plain_s)


def _some_tokens(num: int, num_vocab: int) -> list[int]:
    # All different: a mixture of experts would read fewer weights for equal ones.
    return [7919 * (index + 1) % num_vocab for index in range(num)]


class Load:
    """What other programs do while this exists."""

    def __init__(self) -> None:
        self._began = self._now()

    def is_crowded(self) -> bool:
        """Whether others left fewer cores than decoding wants; of half a second clocks of processes do not tell."""
        wall_s, others_s = (now - then for now, then in zip(self._now(), self._began, strict=True))
        cores = psutil.cpu_count() or 1
        return wall_s > _SHORT_S and cores - others_s / wall_s < default_threads() - _SPARE_CORES

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds of the clock, and of all cores in other programs."""
        times, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return time.perf_counter(), sum(times) - idle - own.user - own.system


# --- what is remembered ----------------------------------------------------------------------------------------------


def key(files: Sequence[Path | None], settings: Mapping[str, object]) -> str | None:
    """Names machine, build of llama.cpp, model files and settings; None when one of them cannot be named."""
    library, cpu = selfcheck.machine()
    try:
        known = [_identity(file) for file in files if file is not None]
    except OSError:
        return None
    text = json.dumps([_VERSION, library, cpu, known, dict(settings)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest() if library else None


def _identity(file: Path) -> list[object]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def recall(name: str | None) -> CostModel | None:
    """The costs remembered under this key."""
    entry: Any = read_object(_file()).get(name or "")
    try:
        drafts = {drafter: _timing(seconds) for drafter, seconds in entry["drafts"].items()}
        return CostModel(_timing(entry["target"]), drafts, _seconds(entry["rejected_s"]))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def remember(name: str | None, costs: CostModel) -> None:
    """Keep costs for the next time; where nothing can be written they are measured again."""
    if name is None:
        return
    drafts = {drafter: timing.as_dict() for drafter, timing in costs.drafts.items()}
    kept = {known: entry for known, entry in read_object(_file()).items() if known != name}
    kept[name] = {"target": costs.target.as_dict(), "drafts": drafts, "rejected_s": costs.rejected_s}
    replace_text(_file(), json.dumps(dict([*kept.items()][-_MAX_REMEMBERED:])))


def _timing(seconds: Mapping[str, float]) -> Timing:
    measured = {int(size): _seconds(value) for size, value in seconds.items()}
    if not all(measured.values()):
        raise ValueError("passes that take no time")
    return Timing(measured)


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError("not a time")
    return float(value)


def _file() -> Path:
    return paths.state_dir() / "costs.json"
