"""What a pair will cost, from sizes alone: a draft step in target steps, and memory.

A token is bound by the bytes of the weights that it reads: all of them, in a mixture of experts those of the chosen
experts. That is the draft's cost in units of the target's, before anything was measured on this machine.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec_cli.registry import ModelSpec

PAYING_RATIO = 0.35
"""Above this share of a target step a draft step gains little, however good the draft is."""

_UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
_MEMORY_FACTOR, _MEMORY_BASE = 1.1, 500_000_000


def num_params(text: str) -> float | None:
    """The number that `7.6B` stands for; None for an empty text."""
    return float(text[:-1]) * _UNITS[text[-1]] if text else None


def active_share(spec: ModelSpec) -> float:
    """The share of a model's weights that one token reads."""
    total, active = num_params(spec.params), num_params(spec.active_params)
    return active / total if total and active else 1.0


def cost_ratio(target: ModelSpec, draft: ModelSpec) -> float | None:
    """A draft step in target steps; None when nothing is known.

    By the bytes that a token reads, or by the weights that it reads where a size is not known.
    """
    sizes = [spec.size for spec in (target, draft)]
    if None in sizes:
        params = [num_params(spec.active_params or spec.params) for spec in (target, draft)]
        return params[1] / params[0] if params[0] and params[1] else None
    return ratio_of((sizes[0] or 0, active_share(target)), (sizes[1] or 0, active_share(draft)))


def ratio_of(target: tuple[int, float], draft: tuple[int, float]) -> float:
    """A draft step in target steps, from the size in bytes and the active share of each."""
    return draft[0] * draft[1] / (target[0] * target[1])


def objection(ratio: float | None) -> str:
    """What a draft's cost says against it; empty when nothing."""
    if ratio is None or ratio < PAYING_RATIO:
        return ""
    return f"a draft step costs {ratio:.2f} target steps: little gain"


def memory_needed(num_bytes: int) -> int:
    """Bytes of memory for models of so many bytes in all: a tenth more for caches and buffers, and half a gigabyte."""
    return int(_MEMORY_FACTOR * num_bytes) + _MEMORY_BASE


def expert_share(metadata: Callable[[str], str | None]) -> float:
    """The share of a GGUF file's weights that one token reads, from the sizes in its metadata.

    Args:
        metadata: the value of a key as text, None where the file has no such key.

    Returns:
        1.0 for a model without experts, or whose sizes are not told.
    """
    architecture = metadata("general.architecture") or ""

    def size(key: str) -> int:
        # Some models have a list here, one entry a layer: llama.cpp prints it in brackets.
        text = (metadata(f"{architecture}.{key}") or "0").strip("[] ").split(",")[0]
        return int(text) if text.isdecimal() else 0

    num_experts, num_used = size("expert_count"), size("expert_used_count")
    if not num_experts or not 0 < num_used < num_experts:
        return 1.0
    width, layers = size("embedding_length"), size("block_count")
    inner = size("expert_feed_forward_length") or size("feed_forward_length")
    experts = 3 * width * inner * num_experts * max(0, layers - size("leading_dense_block_count"))
    head = size("attention.key_length") or width // max(1, size("attention.head_count"))
    heads = 2 * (size("attention.head_count") + size("attention.head_count_kv"))
    # Half of the embedding and output matrices: one of the two is looked up, not read.
    total = experts + layers * width * head * heads + width * size("vocab_size")
    return 1 - experts / total * (1 - num_used / num_experts) if total else 1.0
