"""How much memory a pair takes, told from the files' headers, and how much this machine has free.

Weights and caches follow from the tensors exactly; buffers are modeled on what llama.cpp allocates for a pass.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from specdec_cli.errors import OutOfMemoryError, UsageError
from specdec_cli.gguf import TENSOR_TYPES, Header, Skipped, TensorInfo, check_header
from specdec_cli.limits import CHUNK

LIMIT_VARIABLE = "SPECDEC_MEMORY_LIMIT"
"""Environment variable: at most so much memory is counted as free, such as `8GB` or `500MB`."""

LEAST_CTX = 512
"""Context that is reckoned with before any prompt is known."""

_BASE_BYTES = 56 << 20
"""Python, NumPy and the libraries, before any model."""

_TOKEN_BYTES, _MERGE_BYTES = 160, 155
"""Of llama.cpp's tables for each entry of a vocabulary."""

_ROWS = 17
"""Rows of logits in the largest pass that is usual; longer drafts touch more, and are rare."""

_CTX_STEP = 256
"""llama.cpp rounds contexts up to a multiple."""

_WINDOW_PERIODS = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "exaone4": 4, "olmo2": 4, "llama4": 4,
}  # fmt: skip
"""Of so many layers the last one sees everything, where the file does not tell (llama.cpp, src/models)."""

_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and usage of a control group, of the second and of the first version."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

Headers = Sequence[Header]
"""Of all parts of a model, the first one with the metadata."""


# --- what a model takes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model takes, in bytes.

    Attributes:
        weights: as they stand in the file, which is mapped.
        repacked: copies of weights in another order, for special instructions of the CPU.
        cache: keys and values of the whole context, and recurrent states.
        compute: buffers of a pass, logits among them.
        vocabulary: llama.cpp's tables of tokens.
        on_gpu: how much of weights, cache and buffers lies on a GPU and not in the main memory.
    """

    weights: int
    repacked: int
    cache: int
    compute: int
    vocabulary: int
    on_gpu: int = 0

    @property
    def in_ram(self) -> int:
        """Most of the main memory that is resident at a time."""
        return self.weights + self.repacked + self.cache + self.compute + self.vocabulary - self.on_gpu


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a pair takes, in bytes.

    Attributes:
        num_ctx: tokens of context.
        target: the target's part.
        draft: the draft model's part; None without one.
        base: Python and libraries.
    """

    num_ctx: int
    target: ModelMemory
    draft: ModelMemory | None
    base: int = _BASE_BYTES

    @property
    def models(self) -> tuple[ModelMemory, ...]:
        """Target and draft model."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def peak(self) -> int:
        """Most of the main memory that is resident at a time."""
        return self.base + sum(model.in_ram for model in self.models)

    @property
    def needed(self) -> int:
        """Main memory without which it does not run: what was repacked is not needed in the file's order any more."""
        return self.peak - sum(model.repacked for model in self.models)

    @property
    def on_gpu(self) -> int:
        """Memory of GPUs."""
        return sum(model.on_gpu for model in self.models)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a pair is loaded.

    Attributes:
        kv_type: type of the target's cache, a name of `specdec_cli.llama.KV_TYPES`.
        draft_kv_type: of the draft model's cache; None is the same.
        gpu_layers: of the target; the output counts as one more.
        draft_gpu_layers: of the draft model.
        repacks: names of the tensor types that the CPU's kernels keep a copy of.
        draft_ctx_ratio: tokens of the draft model's context for each of the target's.
        keeps_windows: whether layers with sliding-window attention cache their window only, as where only chains are
            drafted.
    """

    kv_type: str = "f16"
    draft_kv_type: str | None = None
    gpu_layers: int = 0
    draft_gpu_layers: int = 0
    repacks: AbstractSet[str] = frozenset()
    draft_ctx_ratio: float = 1.0
    keeps_windows: bool = False


ON_CPU = Placement()


def estimate_files(target: Path, draft: Path | None, num_ctx: int, placement: Placement = ON_CPU) -> Estimate:
    """What a pair of files takes.

    Raises:
        ModelMissingError: a file is not there.
        ModelLoadError: a file cannot be a model.
    """
    return estimate(check_header(target), None if draft is None else check_header(draft), num_ctx, placement)


def estimate(target: Headers, draft: Headers | None, num_ctx: int, placement: Placement = ON_CPU) -> Estimate:
    """What a pair takes.

    Args:
        target: headers of the target.
        draft: of the draft model, or None.
        num_ctx: tokens of context; the draft model gets no more than it was trained for.
        placement: where and how they are loaded.
    """
    first = _model(target, num_ctx, placement, placement.kv_type, placement.gpu_layers, _ROWS)
    if draft is None:
        return Estimate(num_ctx, first, None)
    kv_type = placement.draft_kv_type or placement.kv_type
    draft_ctx = min(int(num_ctx * placement.draft_ctx_ratio), max_ctx(draft))
    second = _model(draft, draft_ctx, placement, kv_type, placement.draft_gpu_layers, 1)
    return Estimate(num_ctx, first, second)


def max_ctx(headers: Headers) -> int:
    """Tokens of context that a model was trained for."""
    return headers[0].number(f"{headers[0].architecture}.context_length")


def _model(
    headers: Headers, num_ctx: int, placement: Placement, kv_type: str, gpu_layers: int, num_rows: int
) -> ModelMemory:
    shape = _Shape(headers)
    tensors = [tensor for header in headers for tensor in header.tensors]
    # Never the embeddings: they are looked up in the file.
    first_on_gpu = max(0, shape.num_layers + 1 - gpu_layers)
    on_gpu = sum(tensor.num_bytes for tensor in tensors if _place(tensor, shape.num_layers) >= first_on_gpu)
    kept = [tensor for tensor in tensors if _place(tensor, shape.num_layers) < first_on_gpu]
    padded = num_ctx + -num_ctx % _CTX_STEP
    sizes = [shape.num_cells(layer, padded) if placement.keeps_windows else padded for layer in range(shape.num_layers)]
    caches = [shape.cache_bytes(layer, cells, kv_type) for layer, cells in enumerate(sizes)]
    compute = shape.compute_bytes(padded)
    if gpu_layers > 0:
        # Both sides get buffers; the GPU's are the larger ones.
        on_gpu += sum(caches[first_on_gpu:]) + compute
        compute *= 2
    return ModelMemory(
        weights=sum(tensor.num_bytes for tensor in tensors),
        repacked=sum(tensor.num_bytes for tensor in kept if _is_repacked(tensor, placement.repacks, shape)),
        cache=sum(caches),
        compute=compute + 4 * shape.num_vocab * num_rows,
        vocabulary=_TOKEN_BYTES * shape.num_vocab + _MERGE_BYTES * shape.num_merges,
        on_gpu=on_gpu,
    )


_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def _place(tensor: TensorInfo, num_layers: int) -> int:
    """Which layer a tensor goes with: embeddings stay with the CPU, the output comes behind the last block."""
    match = _LAYER.match(tensor.name)
    if match:
        return int(match[1])
    return num_layers if tensor.name.startswith("output") else -1


def _is_repacked(tensor: TensorInfo, repacks: AbstractSet[str], shape: _Shape) -> bool:
    if tensor.type_name not in repacks or len(tensor.shape) < 2 or tensor.shape[-2] % 8:
        return False
    # Embeddings are only looked up, unless they serve as the output too.
    return not tensor.name.startswith("token_embd") or shape.ties_embeddings


class _Shape:
    """The sizes of a model that its memory depends on."""

    def __init__(self, headers: Headers) -> None:
        self._header = headers[0]
        self.num_layers = self._number("block_count") - self._number("nextn_predict_layers")
        self._tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
        self.ties_embeddings = "output.weight" not in self._tensors
        self._num_embd = self._number("embedding_length")
        self.num_vocab = self._count("tokenizer.ggml.tokens")
        self.num_merges = self._count("tokenizer.ggml.merges")
        self._num_cached = self._cached_layers()

    def num_cells(self, layer: int, num_ctx: int) -> int:
        """Tokens that one layer's cache holds where windows are kept only: those of the window and of one pass."""
        window = self._number("attention.sliding_window")
        # A hybrid's cache is never cut.
        if window <= 0 or not self._has_window(layer) or any(map(self._state, range(self.num_layers))):
            return num_ctx
        cells = window + CHUNK
        return min(num_ctx, cells + -cells % _CTX_STEP)

    def cache_bytes(self, layer: int, num_ctx: int, kv_type: str) -> int:
        """Bytes of what one layer keeps: keys and values, a recurrent state, or both."""
        width = self._cached_width(layer) if layer < self._num_cached else 0
        _, block, block_bytes = next(kind for kind in TENSOR_TYPES.values() if kind[0] == kv_type.upper())
        return width * num_ctx * block_bytes // block + 4 * self._state(layer)

    def compute_bytes(self, num_ctx: int) -> int:
        """Bytes of the buffers for a pass over a chunk of the prompt, or over a draft.

        Two moments take the most: a block's inner vectors beside the attention mask, and the logits. Rows that no pass
        asked for are allocated and never touched: they do not count.
        """
        rows = min(CHUNK, num_ctx)
        inner = 3 * max(self._per_layer("feed_forward_length"), self._attention_width())
        experts = self._number("expert_used_count")
        inner = max(inner, experts * (3 * self._number("expert_feed_forward_length") + self._num_embd))
        inner = max(inner, 6 * self._number("ssm.inner_size"))
        block = 4 * rows * (inner + 4 * self._num_embd) + 2 * rows * num_ctx
        logits = 4 * _ROWS * self.num_vocab + 8 * rows * self._num_embd
        return max(block, logits)

    # --- one layer --------------------------------------------------------------------------------------------------

    def _cached_width(self, layer: int) -> int:
        """Values that are kept for each token."""
        if self._has(layer, "attn_kv_a_mqa"):
            # Multi-head latent attention keeps one compressed vector; older files without `attn_k_b` keep all heads.
            if self._has(layer, "attn_k_b"):
                return self._number("attention.key_length")
        elif not (self._has(layer, "attn_k") or self._has(layer, "attn_qkv") or self._has(layer, "attn_kv")):
            return 0
        if keys := self._width(layer, "attn_k"):
            return keys + (self._width(layer, "attn_v") or keys)
        heads = self._item("attention.head_count_kv", layer, self._item("attention.head_count", layer, 1))
        return heads * (self._head_size("key") + self._head_size("value"))

    def _has_window(self, layer: int) -> bool:
        """Whether a layer looks back no further than the window; of an unknown architecture none is believed to."""
        pattern = self._header.parameter("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return layer < len(pattern) and bool(pattern[layer])
        period = pattern if type(pattern) is int else _WINDOW_PERIODS.get(self._header.architecture, 1)
        return period == 0 or (period > 0 and layer % period < period - 1)

    def _head_size(self, which: str) -> int:
        default = self._num_embd // max(1, self._per_layer("attention.head_count"))
        return self._number(f"attention.{which}_length") or default

    def _state(self, layer: int) -> int:
        """Values of a recurrent layer's state."""
        if self._has(layer, "shortconv.conv"):
            return self._num_embd * max(0, self._number("shortconv.l_cache") - 1)
        if self._has(layer, "time_mix_key") or self._has(layer, "time_mix_w0"):
            return self._num_embd * (self._number("wkv.head_size") + 2)
        inner, state = self._number("ssm.inner_size"), self._number("ssm.state_size")
        if any(self._has(layer, f"ssm_{part}") for part in ("in", "conv1d", "out", "a")):
            kernel = max(0, self._number("ssm.conv_kernel") - 1)
            return kernel * (inner + 2 * self._number("ssm.group_count") * state) + inner * state
        return 0

    def _cached_layers(self) -> int:
        """Layers with a cache of their own; the last ones of some models share."""
        if self._header.architecture == "gemma3n":
            return min(20, self.num_layers)
        return self.num_layers - self._number("attention.shared_kv_layers")

    def _attention_width(self) -> int:
        return self._per_layer("attention.head_count") * self._head_size("key")

    # --- metadata ---------------------------------------------------------------------------------------------------

    def _number(self, name: str) -> int:
        value = self._header.parameter(name)
        return value if type(value) is int else 0

    def _per_layer(self, name: str) -> int:
        """The largest value over all layers."""
        value = self._header.parameter(name)
        return max((int(item) for item in value), default=0) if isinstance(value, tuple) else self._number(name)

    def _item(self, name: str, layer: int, default: int) -> int:
        value = self._header.parameter(name)
        if isinstance(value, tuple):
            return int(value[layer]) if layer < len(value) else default
        return value if type(value) is int else default

    def _count(self, key: str) -> int:
        value = self._header.metadata.get(key)
        return value.length if isinstance(value, Skipped) else len(value) if isinstance(value, tuple) else 0

    def _has(self, layer: int, part: str) -> bool:
        return f"blk.{layer}.{part}.weight" in self._tensors or f"blk.{layer}.{part}" in self._tensors

    def _width(self, layer: int, part: str) -> int:
        tensor = self._tensors.get(f"blk.{layer}.{part}.weight")
        return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else 0


# --- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Available:
    """Memory that can be had, in bytes.

    Attributes:
        ram: main memory, without what other programs use.
        gpu: of all GPUs; 0 where none is used.
        is_set: whether `SPECDEC_MEMORY_LIMIT` is what makes it so little.
    """

    ram: int
    gpu: int = 0
    is_set: bool = False


def available(gpu: int = 0) -> Available:
    """What is free here: by the system, by the control groups this process is in, and by `SPECDEC_MEMORY_LIMIT`.

    Args:
        gpu: bytes free on GPUs, from `specdec_cli.llama.devices`.

    Raises:
        UsageError: the variable holds no size.
    """
    memory = psutil.virtual_memory()
    free = int(memory.available)
    if sys.platform == "darwin":
        # It compresses and swaps what is idle: two thirds can be had, which is also what a GPU is given.
        free = max(free, int(memory.total) * 2 // 3)
    free = min([free, *(group.left for group in _group_limits(Path("/")))])
    text = os.environ.get(LIMIT_VARIABLE)
    limit = parse_size(text) if text else free
    return Available(min(free, limit), gpu, limit < free)


def parse_size(text: str) -> int:
    """Bytes of a size such as `8GB`, `500m` or `1.5GiB`.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"`{text}` is not a size", f"write {LIMIT_VARIABLE} as `8GB` or `500MB`")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True)
class _GroupLimit:
    """Bytes that a control group may use, and those that are left of it."""

    total: int
    left: int


def container_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups of this process allow; None without a limit below what the machine has."""
    limits = [group.total for group in _group_limits(root)]
    return min((limit for limit in limits if limit < psutil.virtual_memory().total), default=None)


def _group_limits(root: Path) -> Iterator[_GroupLimit]:
    for group in control_groups("memory", root):
        for limit_file, usage_file in _GROUP_FILES:
            limit, usage = _number_in(group / limit_file), _number_in(group / usage_file)
            if limit is not None and usage is not None:
                yield _GroupLimit(limit, max(0, limit - usage + _page_cache(group / "memory.stat")))


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of the control groups that this process is in, as containers and services have them.

    Args:
        controller: such as "cpu", for groups of the first version.
        root: of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = base / name.lstrip("/")
        # Inside a container the name may be that of the host: then only the base is there.
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(base))


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        # Not there, or `max`.
        return None


def _page_cache(path: Path) -> int:
    """Bytes of files in memory, which give way."""
    try:
        values = dict(line.split(" ", 1) for line in path.read_text("utf-8").splitlines())
        return int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    except (OSError, ValueError):
        return 0


def free_here() -> Available:
    """What is free on this machine and its GPUs; loads llama.cpp to ask for these.

    Raises:
        UsageError: `SPECDEC_MEMORY_LIMIT` holds no size.
    """
    from specdec_cli.llama import devices

    return available(sum(device.free_bytes for device in devices() if device.is_gpu))


# --- does it fit -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """A pair against the memory of this machine.

    Attributes:
        target: headers of the target.
        draft: of the draft model, or None.
        placement: where and how they are loaded.
        free: what could be had before anything was loaded.
    """

    target: Headers
    draft: Headers | None
    placement: Placement
    free: Available

    def check(self, num_ctx: int, least_ctx: int = LEAST_CTX) -> Estimate:
        """Refuse a context for which the memory does not suffice.

        Args:
            num_ctx: tokens of context.
            least_ctx: a smaller context would be of no use.

        Raises:
            OutOfMemoryError: with the numbers, and the flags with which it would fit.
        """
        found = self._estimate(num_ctx)
        if found.needed > self.free.ram:
            message = f"{self._names()} needs {_size(found.needed)} of memory at `--ctx {num_ctx}` ({_parts(found)})"
            raise OutOfMemoryError(f"{message}; {self._free_text()}", self._ways_out(num_ctx, least_ctx))
        if found.on_gpu > self.free.gpu:
            message = f"{self._names()} needs {_size(found.on_gpu)} on the GPU at `--ctx {num_ctx}`"
            raise OutOfMemoryError(f"{message}; {_size(self.free.gpu)} are free", self._ways_out(num_ctx, least_ctx))
        return found

    def with_draft_ctx(self, ratio: float) -> Fit:
        """The same with so many tokens of the draft model's context for each of the target's."""
        return replace(self, placement=replace(self.placement, draft_ctx_ratio=ratio))

    def _free_text(self) -> str:
        size = _size(self.free.ram)
        return f"{size} are free" + (f", by `{LIMIT_VARIABLE}`" if self.free.is_set else "")

    def holds(self, num_ctx: int, **changes: Any) -> bool:
        """Whether a context fits."""
        found = self._estimate(num_ctx, **changes)
        return found.needed <= self.free.ram and found.on_gpu <= self.free.gpu

    def largest_ctx(self, most: int, **changes: Any) -> int:
        """The largest context up to `most` that fits, a multiple of 256; 0 when none does."""
        low, high = 0, most // _CTX_STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(middle * _CTX_STEP, **changes) else (low, middle - 1)
        return low * _CTX_STEP

    def _estimate(self, num_ctx: int, *, no_draft: bool = False, **changes: Any) -> Estimate:
        draft = None if no_draft else self.draft
        return estimate(self.target, draft, num_ctx, replace(self.placement, **changes))

    def _names(self) -> str:
        names = [f"`{headers[0].path.name}`" for headers in (self.target, self.draft) if headers is not None]
        return " with ".join(names)

    def _ways_out(self, num_ctx: int, least_ctx: int) -> str:
        ways = [*self._flags(num_ctx, least_ctx), "a smaller quantization"]
        return f"try {' or '.join(ways)}; `--force` loads all the same"

    def _flags(self, num_ctx: int, least_ctx: int) -> Iterator[str]:
        """Flags with which it would fit, those that cost least first."""
        smaller = self.placement.kv_type in ("f32", "f16")
        if smaller and self.holds(num_ctx, kv_type="q8_0", draft_kv_type="q8_0"):
            yield "`--kv-type q8_0`"
        if (fitting := self.largest_ctx(num_ctx)) >= least_ctx:
            yield f"`--ctx {fitting}`"
        yield from self._gpu_flags(num_ctx)
        if self.draft is not None:
            if self.holds(num_ctx, no_draft=True):
                yield "`--no-draft`"
            elif not fitting and (fitting := self.largest_ctx(num_ctx, no_draft=True)) >= least_ctx:
                yield f"`--no-draft --ctx {fitting}`"

    def _gpu_flags(self, num_ctx: int) -> Iterator[str]:
        placement = self.placement
        if self.draft is not None and placement.draft_gpu_layers and self.holds(num_ctx, draft_gpu_layers=0):
            yield "`--draft-gpu-layers 0`"
        fewer = range(min(placement.gpu_layers - 1, _Shape(self.target).num_layers), -1, -1)
        layers = next((number for number in fewer if self.holds(num_ctx, gpu_layers=number)), None)
        if layers is not None:
            yield f"`--gpu-layers {layers}`"


def _parts(found: Estimate) -> str:
    def total(part: Callable[[ModelMemory], int]) -> int:
        return sum(part(model) for model in found.models)

    weights, caches = total(lambda model: model.weights), total(lambda model: model.cache)
    rest = total(lambda model: model.compute + model.vocabulary) + found.base
    return f"weights {_size(weights)}, caches {_size(caches)}, the rest {_size(rest)}"


def _size(num_bytes: int) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e9:.{2 if num_bytes < 1e10 else 1}f} GB"
