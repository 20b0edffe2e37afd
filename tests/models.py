"""Tiny models for tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from specdec_cli.llama import LlamaContext, Model
from specdec_cli.tiny import CONTROL, NORMAL, Vocabulary, byte_level_vocabulary, write_tiny_model
from specdec_cli.types import ContextOptions, Logits

_BYTE, _UNKNOWN = 6, 2

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(folder: Path, name: str = "tiny", **kwargs) -> Path:
    """Write a tiny model into `folder` and return its path; see `write_tiny_model` for the arguments."""
    path = folder / f"{name}.gguf"
    write_tiny_model(path, **kwargs)
    return path


class ExactContext(LlamaContext):
    """Without flash attention, which works in half precision and rounds single tokens and batches differently."""

    @staticmethod
    def _params(options: ContextOptions, capacity: int) -> Any:
        params = LlamaContext._params(options, capacity)
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params


def open_context(model: Model, num_ctx: int = 256, max_leaves: int = 1) -> ExactContext:
    """Of a model in full precision one decode call and many agree to the fifth digit."""
    return ExactContext(model, ContextOptions(num_ctx, threads=1, kv_type="f32", max_leaves=max_leaves))


def fresh_logits(model: Model, tokens: Sequence[int], num_ctx: int = 256) -> Logits:
    """What a context that has seen nothing else computes."""
    return _fresh_logits(model, tuple(tokens), num_ctx)


@functools.lru_cache(2048)
def _fresh_logits(model: Model, tokens: tuple[int, ...], num_ctx: int) -> Logits:
    with open_context(model, num_ctx) as context:
        context.sync(tokens)
        return context.score()[0].copy()


def assert_logits(
    row: Logits, model: Model, tokens: Sequence[int], num_ctx: int = 256, tolerance: float = 1e-3
) -> None:
    """Logits are those of a context that has seen nothing else."""
    np.testing.assert_allclose(row, fresh_logits(model, tokens, num_ctx), atol=tolerance)


def random_tokens(num: int, seed: int = 0) -> list[int]:
    """Ids that mean bytes and words."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 270, num)]


WORDS = ("▁", "e", "t", "th", "▁th", "▁the", "a", "n")

OTHER_MERGES = ("i n", "o n", "Ġ t", "e r", "t h", "Ġ th", "Ġth e", "Ġ o", "Ġo n", "å Ń", "ðŁ ĺ")
"""Of which some are others than those of the usual tiny model, two within characters."""


def sentencepiece_vocabulary(words: tuple[str, ...] = WORDS, *, add_space: bool = False) -> Vocabulary:
    """A SentencePiece tokenizer with byte fallback and a few words; puts BOS and perhaps a space in front of a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [_UNKNOWN, CONTROL, CONTROL, *[_BYTE] * 256, *[NORMAL] * len(words)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words), 0, -1)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": add_space,
    }
    return Vocabulary(tuple(tokens), tuple(types), metadata, frozenset(range(259, len(tokens))))


def other_byte_level_vocabulary() -> Vocabulary:
    """Byte-pair encoding with other ids for everything and other merges."""
    return byte_level_vocabulary(384, merges=OTHER_MERGES)


def wordpiece_vocabulary() -> Vocabulary:
    """WordPiece, which loses spaces and what it has no letters for."""
    letters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    tokens = [*special, *(f"▁{letter}" for letter in letters), *letters, "▁the", "▁and", "ing"]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    types = [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4)
    return Vocabulary(tuple(tokens), tuple(types), metadata, frozenset(range(4, len(tokens))))


def no_vocabulary(num_vocab: int = 320) -> Vocabulary:
    """Token ids without any text."""
    return Vocabulary(("",) * num_vocab, (NORMAL,) * num_vocab, {"tokenizer.ggml.model": "no_vocab"})
