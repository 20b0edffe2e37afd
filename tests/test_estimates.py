"""Costs and memory from sizes alone, against figures that are published or measured."""

from __future__ import annotations

import pytest

from specdec_cli.estimates import active_share, cost_ratio, expert_share, memory_needed, num_params
from specdec_cli.registry import ModelSpec, load_registry

QWEN3_30B_A3B = {
    "general.architecture": "qwen3moe",
    "qwen3moe.expert_count": "128",
    "qwen3moe.expert_used_count": "8",
    "qwen3moe.embedding_length": "2048",
    "qwen3moe.block_count": "48",
    "qwen3moe.expert_feed_forward_length": "768",
    "qwen3moe.feed_forward_length": "6144",
    "qwen3moe.attention.key_length": "128",
    "qwen3moe.attention.head_count": "32",
    "qwen3moe.attention.head_count_kv": "4",
    "qwen3moe.vocab_size": "151936",
}


def spec(**settings: object) -> ModelSpec:
    return ModelSpec("x", "x.gguf", ("hf:o/r/x.gguf",), **settings)  # type: ignore[arg-type]


def test_numbers_of_weights() -> None:
    assert [num_params(text) for text in ("7.6B", "270M", "1T", "")] == [7.6e9, 270e6, 1e12, None]


def test_the_default_pair() -> None:
    pair = load_registry().pair()
    assert cost_ratio(pair.target, pair.draft) == pytest.approx(491 / 1117, rel=0.01)


def test_experts_count_by_what_a_token_reads() -> None:
    target = spec(size=18_000, params="30B", active_params="3B")
    assert active_share(target) == pytest.approx(0.1)
    assert cost_ratio(target, spec(size=600, params="0.6B")) == pytest.approx(1 / 3)


def test_without_a_size_weights_are_compared() -> None:
    assert cost_ratio(spec(params="30B", active_params="3B"), spec(size=600, params="0.6B")) == pytest.approx(0.2)
    assert cost_ratio(spec(), spec(size=600)) is None


def test_experts_from_the_metadata_of_a_file() -> None:
    """30.5B weights, of which 3.3B are said to be active."""
    assert expert_share(QWEN3_30B_A3B.get) == pytest.approx(3.3 / 30.5, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"general.architecture": "llama"},
        {"qwen3moe.expert_count": "0"},
        {"qwen3moe.expert_used_count": "many"},
        {"qwen3moe.expert_used_count": "128"},
        {"qwen3moe.expert_used_count": "-1"},
    ],
)
def test_files_without_experts_are_read_whole(changes: dict[str, str]) -> None:
    assert expert_share((QWEN3_30B_A3B | changes).get) == 1.0


def test_metadata_that_makes_no_sense() -> None:
    zeros = dict.fromkeys(QWEN3_30B_A3B, "0")
    counts = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": "8", "qwen3moe.expert_used_count": "2"}
    assert expert_share((zeros | counts).get) == 1.0
    # one number a layer, as llama.cpp prints it
    assert 0 < expert_share((QWEN3_30B_A3B | {"qwen3moe.attention.head_count_kv": "[4, 4, 4]"}).get) < 0.2


def test_memory() -> None:
    assert memory_needed(10_000_000_000) == 11_500_000_000
