"""What decoding costs here: measured shortly when a pair is loaded, and remembered for that machine and setting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_cli import paths, selfcheck
from specdec_cli.cost import CostModel, Timing
from specdec_cli.files import read_object, replace_text
from specdec_cli.types import Context, Draft

_TARGET_SIZES, _DRAFT_SIZES = (1, 2, 3, 4, 5, 8, 16), (1, 2, 8, 64)
_NUM_BEFORE = 32
"""Tokens in the cache while a pass is timed."""

_MAX_REMEMBERED = 64

# Raise it when the numbers mean something else.
_VERSION = 1


def measure(target: Context, drafts: Mapping[str, Context]) -> CostModel:
    """Time passes of a few sizes; the caches are empty afterwards.

    Args:
        target: the target's context.
        drafts: for each drafter with a model, its context.
    """
    return CostModel(
        Timing(_time(target, _TARGET_SIZES)),
        {name: Timing(_time(context, _DRAFT_SIZES)) for name, context in drafts.items()},
    )


def _time(context: Context, sizes: Sequence[int]) -> dict[int, float]:
    """Number of tokens -> seconds of a pass, for the sizes that fit."""
    room = context.num_ctx - max(sizes) - 1
    base = _some_tokens(max(1, min(_NUM_BEFORE, room)), context.num_vocab)
    fitting = [size for size in sizes if len(base) + size <= context.num_ctx] or [1]
    # The first pass pays for what is set up lazily.
    context.sync(base)
    context.score()
    seconds = {size: min(_pass_s(context, base, size) for _ in range(_repeats(size))) for size in fitting}
    context.clear()
    return seconds


def _repeats(size: int) -> int:
    # Noise matters less where a pass is long.
    return 3 if size <= 2 else 2 if size <= 5 else 1


def _pass_s(context: Context, base: list[int], size: int) -> float:
    context.sync(base)
    before = context.decode_s
    context.score(Draft.chain(_some_tokens(size - 1, context.num_vocab)))
    context.keep(())
    return context.decode_s - before


def _some_tokens(num: int, num_vocab: int) -> list[int]:
    # All different: a mixture of experts would read fewer weights for equal ones.
    return [7919 * (index + 1) % num_vocab for index in range(num)]


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
        return CostModel(_timing(entry["target"]), {drafter: _timing(t) for drafter, t in entry["drafts"].items()})
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def remember(name: str | None, costs: CostModel) -> None:
    """Keep costs for the next time; where nothing can be written they are measured again."""
    if name is None:
        return
    drafts = {drafter: timing.as_dict() for drafter, timing in costs.drafts.items()}
    kept = {known: entry for known, entry in read_object(_file()).items() if known != name}
    kept[name] = {"target": costs.target.as_dict(), "drafts": drafts}
    replace_text(_file(), json.dumps(dict([*kept.items()][-_MAX_REMEMBERED:])))


def forget(name: str | None) -> None:
    """Have costs measured again the next time."""
    entries = read_object(_file())
    if entries.pop(name or "", None) is not None:
        replace_text(_file(), json.dumps(entries))


def _timing(seconds: Mapping[str, float]) -> Timing:
    measured = {int(size): float(value) for size, value in seconds.items()}
    if not measured or not all(0 < value < 1e6 for value in measured.values()):
        raise ValueError("not a table of times")
    return Timing(measured)


def _file() -> Path:
    return paths.state_dir() / "costs.json"
