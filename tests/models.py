"""Tiny models for tests."""

from __future__ import annotations

from pathlib import Path

from specdec_cli.tiny import CONTROL, NORMAL, Vocabulary, write_tiny_model

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


def sentencepiece_vocabulary(words: tuple[str, ...] = ("▁", "e", "t", "th", "▁th", "▁the", "a", "n")) -> Vocabulary:
    """A SentencePiece tokenizer with byte fallback and a few words; puts BOS in front of a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [_UNKNOWN, CONTROL, CONTROL, *[_BYTE] * 256, *[NORMAL] * len(words)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(words), 0, -1)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return Vocabulary(tuple(tokens), tuple(types), metadata, frozenset(range(259, len(tokens))))
