"""Tiny random models in GGUF files: they load, tokenize any text and decode in microseconds, but know nothing.

The self-check decodes one in a child process; tests use them wherever a real llama.cpp is wanted without a download.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
MetadataValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

# --- the file format ---------------------------------------------------------------------------------------------

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it stands in the file.

    Attributes:
        name: llama.cpp's name.
        shape: sizes, slowest dimension first, as NumPy counts.
        type_id: number of the ggml type.
        data: the encoded rows, back to back.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    data: bytes


def write_gguf(path: Path, metadata: Mapping[str, MetadataValue], tensors: Sequence[Tensor]) -> None:
    """Write a GGUF version 3 file; an existing one is replaced as a whole.

    Args:
        path: its folder exists.
        metadata: integers are stored as uint32, in lists as int32.
        tensors: in file order.

    Raises:
        OSError: the file cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _write_file(file, metadata, tensors)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_file(file: BinaryIO, metadata: Mapping[str, MetadataValue], tensors: Sequence[Tensor]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        file.write(_string(key) + _typed(value))
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        file.write(_string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        file.write(struct.pack("<IQ", tensor.type_id, offset))
        offset += len(tensor.data) + _padding(len(tensor.data))
    file.write(bytes(_padding(file.tell())))
    for tensor in tensors:
        file.write(tensor.data + bytes(_padding(len(tensor.data))))


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: MetadataValue) -> bytes:
    """A metadata value behind its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return _typed_array(value)


def _typed_array(values: Sequence[Any]) -> bytes:
    if values and isinstance(values[0], str):
        kind, data = _STRING, b"".join(map(_string, values))
    elif values and isinstance(values[0], float):
        kind, data = _FLOAT32, struct.pack(f"<{len(values)}f", *values)
    else:
        kind, data = _INT32, struct.pack(f"<{len(values)}i", *values)
    return struct.pack("<IIQ", _ARRAY, kind, len(values)) + data


# --- block formats -----------------------------------------------------------------------------------------------


def _encode_f32(weights: Floats) -> bytes:
    return weights.astype("<f4").tobytes()


def _encode_q8_0(weights: Floats) -> bytes:
    """Blocks of 32: half-precision scale, 32 signed bytes."""
    blocks = weights.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    levels = np.rint(blocks * _inverse(scale)).astype(np.int8)
    return _pack(_half(scale), levels.view(np.uint8))


def _encode_q4_0(weights: Floats) -> bytes:
    """Blocks of 32: half-precision scale, 16 bytes with value i in the low and i + 16 in the high nibble."""
    blocks = weights.reshape(-1, 32)
    extreme: Floats = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    # The largest value becomes level -8, the end of the range that the other sign does not have.
    scale = extreme / np.float32(-8)
    levels: Bytes = np.clip(np.rint(blocks * _inverse(scale)) + 8, 0, 15).astype(np.uint8)
    return _pack(_half(scale), _nibbles(levels[:, :16], levels[:, 16:]))


def _encode_q4_k(weights: Floats) -> bytes:
    """Blocks of 256: two half-precision factors, eight 6-bit scales and minima for 32 values each, 4-bit levels."""
    blocks = weights.reshape(-1, 8, 32)
    minima = np.maximum(-blocks.min(axis=2), 0)
    scales = (blocks.max(axis=2) + minima) / 15
    scale_factor = scales.max(axis=1, keepdims=True) / 63
    minimum_factor = minima.max(axis=1, keepdims=True) / 63
    scale_levels = np.rint(scales * _inverse(scale_factor)).astype(np.uint8)
    minimum_levels = np.rint(minima * _inverse(minimum_factor)).astype(np.uint8)
    shifted = blocks + (minimum_factor * minimum_levels)[:, :, None]
    levels = np.rint(shifted * _inverse((scale_factor * scale_levels)[:, :, None]))
    return _pack(
        _half(scale_factor),
        _half(minimum_factor),
        _pack_six_bits(scale_levels, minimum_levels),
        _pack_nibbles(np.clip(levels, 0, 15).astype(np.uint8)),
    )


def _pack_six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Twelve bytes: the first four of each whole, the last four in nibbles with their top bits above the first four."""
    low_scales, high_scales = scales[:, :4], scales[:, 4:]
    low_minima, high_minima = minima[:, :4], minima[:, 4:]
    return np.concatenate(
        [
            low_scales | high_scales >> 4 << 6,
            low_minima | high_minima >> 4 << 6,
            high_scales & 15 | (high_minima & 15) << 4,
        ],
        axis=1,
    )


def _pack_nibbles(levels: Bytes) -> Bytes:
    """Shape (n, 8, 32) -> (n, 128): an even sub-block in the low nibbles, the one behind it in the high ones."""
    return _nibbles(levels[:, 0::2], levels[:, 1::2]).reshape(len(levels), -1)


def _nibbles(low: Bytes, high: Bytes) -> Bytes:
    return np.asarray(low | high << 4, dtype=np.uint8)


def _inverse(scale: Floats) -> Floats:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _half(values: Floats) -> Bytes:
    return np.ascontiguousarray(values, dtype="<f2").view(np.uint8)


def _pack(*parts: Bytes) -> bytes:
    return np.concatenate(parts, axis=1).tobytes()


_Encoder = Callable[[Floats], bytes]
_ENCODERS: dict[str, tuple[int, _Encoder]] = {
    "f32": (0, _encode_f32),
    "q4_0": (2, _encode_q4_0),
    "q8_0": (8, _encode_q8_0),
    "q4_k": (12, _encode_q4_k),
}

# --- the vocabulary ----------------------------------------------------------------------------------------------

NORMAL, CONTROL, UNUSED = 1, 3, 5
"""Token types as GGUF numbers them."""

# fmt: off
_MERGES = (
    "h e", "i n", "Ġ t", "Ġ a", "e r", "o n", "r e", "Ġt he", "n d", "Ġa nd", "in g", "Ġ w", "o r", "Ġ s", "e d", "Ġ i",
)
# fmt: on
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer stored in a model.

    Attributes:
        tokens: their texts as the file spells them.
        types: `NORMAL`, `CONTROL`, `UNUSED`, ... for each token.
        metadata: everything else below `tokenizer.`.
        favored: tokens that the model shall prefer, so that its text is mostly readable.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    favored: frozenset[int] = frozenset()


def byte_level_vocabulary(
    num_vocab: int = 320, *, add_bos: bool = False, merges: Sequence[str] = _MERGES
) -> Vocabulary:
    """Byte-pair encoding over all 256 bytes with a few merges and ChatML's special tokens.

    Args:
        num_vocab: 275 or more; what is left over becomes padding that is marked as unused.
        add_bos: put `<|endoftext|>` in front of a text.
        merges: pairs of tokens that become one, the first ones first.

    Raises:
        ValueError: `num_vocab` is too small.
    """
    letters = _byte_letters()
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *_SPECIAL]
    num_padding = num_vocab - len(tokens)
    if num_padding < 0:
        raise ValueError(f"at least {len(tokens)} tokens are needed, not {num_vocab}")
    num_normal = len(tokens) - len(_SPECIAL)
    first_special = tokens.index(_SPECIAL[0])
    types = [NORMAL] * num_normal + [CONTROL] * len(_SPECIAL) + [UNUSED] * num_padding
    tokens += [f"[PAD{index}]" for index in range(len(tokens), num_vocab)]
    metadata: dict[str, MetadataValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": tuple(merges),
        "tokenizer.ggml.bos_token_id": first_special,
        "tokenizer.ggml.eos_token_id": first_special + 2,
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    favored = frozenset([*range(0x20, 0x7F), *range(256, num_normal)])
    return Vocabulary(tuple(tokens), tuple(types), metadata, favored)


def _byte_letters() -> list[str]:
    """The visible letter that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


# --- the model ---------------------------------------------------------------------------------------------------

Quant = Literal["mixed", "f32", "q4_0", "q8_0", "q4_k"]
Architecture = Literal["llama", "gemma3", "mamba", "jamba", "lfm2", "qwen35"]
"""Attention, attention with a sliding window, a recurrent model, and hybrids of attention with Mamba, with short
convolutions and with gated delta nets."""

_NUM_EMBD = 256
_NUM_HEADS, _NUM_KV_HEADS = 4, 2
_NUM_HEAD_EMBD = _NUM_EMBD // _NUM_HEADS
_NUM_KV = _NUM_HEAD_EMBD * _NUM_KV_HEADS
_NUM_FF = 512
_NUM_INNER, _NUM_STATE, _NUM_STEP, _NUM_CONV = 512, 16, 16, 4
_MIXED = ("q8_0", "q4_0", "q4_k")

_Part = Callable[[np.random.Generator], Floats]


def _matrix(num_out: int, num_in: int, gain: float) -> _Part:
    """Normal weights under which an input of variance 1 leaves with deviation `gain`."""
    factor = np.float32(gain / num_in**0.5)
    return lambda rng: np.asarray(rng.standard_normal((num_out, num_in), np.float32) * factor)


def _constant(num: int, value: float = 1.0) -> _Part:
    return lambda _rng: np.full(num, value, np.float32)


def _rates(*shape: int) -> _Part:
    """Rates of forgetting, of which the slowest remember a hundred tokens and more."""
    return lambda rng: -(10 ** rng.uniform(-2.5, -0.5, shape)).astype(np.float32)


# Attention is peaked and weighs more than the token itself: what comes next depends on the whole context, and
# greedy text does not fall into short loops.
_NORMS = {"attn_norm": _constant(_NUM_EMBD), "ffn_norm": _constant(_NUM_EMBD)}
_ATTENTION = {
    "attn_q": _matrix(_NUM_EMBD, _NUM_EMBD, 1.7),
    "attn_k": _matrix(_NUM_KV, _NUM_EMBD, 1.7),
    "attn_v": _matrix(_NUM_KV, _NUM_EMBD, 2.0),
    "attn_output": _matrix(_NUM_EMBD, _NUM_EMBD, 2.0),
}
_HEAD_NORMS = {"attn_q_norm": _constant(_NUM_HEAD_EMBD, 1.7), "attn_k_norm": _constant(_NUM_HEAD_EMBD, 1.7)}
_FEED_FORWARD = {
    "ffn_gate": _matrix(_NUM_FF, _NUM_EMBD, 1.0),
    "ffn_up": _matrix(_NUM_FF, _NUM_EMBD, 1.0),
    "ffn_down": _matrix(_NUM_EMBD, _NUM_FF, 1.0),
}
_POST_NORMS = {"post_attention_norm": _constant(_NUM_EMBD, 2.0), "post_ffw_norm": _constant(_NUM_EMBD)}
_MAMBA = {
    "ssm_in": _matrix(2 * _NUM_INNER, _NUM_EMBD, 1.0),
    "ssm_conv1d": _matrix(_NUM_INNER, _NUM_CONV, 2.0),
    "ssm_conv1d.bias": _constant(_NUM_INNER, 0.0),
    "ssm_x": _matrix(_NUM_STEP + 2 * _NUM_STATE, _NUM_INNER, 2.0),
    "ssm_dt": _matrix(_NUM_INNER, _NUM_STEP, 1.0),
    "ssm_dt.bias": _constant(_NUM_INNER, -1.0),
    "ssm_a": _rates(_NUM_INNER, _NUM_STATE),
    "ssm_d": _constant(_NUM_INNER),
    "ssm_out": _matrix(_NUM_EMBD, _NUM_INNER, 2.0),
}
_MAMBA_NORMS = {
    "ssm_dt_norm": _constant(_NUM_STEP), "ssm_b_norm": _constant(_NUM_STATE), "ssm_c_norm": _constant(_NUM_STATE),
}  # fmt: skip
_CONVOLUTION = {
    "shortconv.conv": _matrix(_NUM_EMBD, _NUM_CONV, 2.0),
    "shortconv.in_proj": _matrix(3 * _NUM_EMBD, _NUM_EMBD, 1.5),
    "shortconv.out_proj": _matrix(_NUM_EMBD, _NUM_EMBD, 2.0),
}
_DELTA_HEADS = 2
_DELTA_INNER = _DELTA_HEADS * _NUM_HEAD_EMBD
_DELTA_NET = {
    "attn_qkv": _matrix(2 * _NUM_HEAD_EMBD + _DELTA_INNER, _NUM_EMBD, 1.0),
    "attn_gate": _matrix(_DELTA_INNER, _NUM_EMBD, 1.0),
    "ssm_conv1d": _matrix(2 * _NUM_HEAD_EMBD + _DELTA_INNER, _NUM_CONV, 2.0),
    "ssm_dt.bias": _constant(_DELTA_HEADS, -1.0),
    "ssm_a": _rates(_DELTA_HEADS),
    "ssm_beta": _matrix(_DELTA_HEADS, _NUM_EMBD, 1.0),
    "ssm_alpha": _matrix(_DELTA_HEADS, _NUM_EMBD, 1.0),
    "ssm_norm": _constant(_NUM_HEAD_EMBD),
    "ssm_out": _matrix(_NUM_EMBD, _DELTA_INNER, 3.0),
}
_GATED_ATTENTION = _ATTENTION | {"attn_q": _matrix(2 * _NUM_EMBD, _NUM_EMBD, 1.7)}
_QWEN_NORMS = {"attn_norm": _constant(_NUM_EMBD), "post_attention_norm": _constant(_NUM_EMBD)}

_LAYERS: dict[Architecture, Sequence[Mapping[str, _Part]]] = {
    "llama": [_NORMS | _ATTENTION | _FEED_FORWARD],
    "gemma3": [_NORMS | _POST_NORMS | _HEAD_NORMS | _ATTENTION | _FEED_FORWARD],
    "mamba": [{"attn_norm": _constant(_NUM_EMBD)} | _MAMBA],
    "jamba": [_NORMS | _MAMBA | _MAMBA_NORMS | _FEED_FORWARD, _NORMS | _ATTENTION | _FEED_FORWARD],
    "lfm2": [_NORMS | _CONVOLUTION | _FEED_FORWARD, _NORMS | _HEAD_NORMS | _ATTENTION | _FEED_FORWARD],
    "qwen35": [_QWEN_NORMS | _DELTA_NET | _FEED_FORWARD, _QWEN_NORMS | _HEAD_NORMS | _GATED_ATTENTION | _FEED_FORWARD],
}
"""Layers take turns."""

_NAMED_AS_THEY_ARE = ("ssm_a", "ssm_d")


def write_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    quant: Quant = "mixed",
    num_vocab: int = 320,
    num_layers: int = 2,
    context_length: int = 2048,
    chat_template: str | None = None,
    add_bos: bool = False,
    vocabulary: Vocabulary | None = None,
    metadata: Mapping[str, MetadataValue] | None = None,
    architecture: Architecture = "llama",
    window: int = 64,
) -> None:
    """Write a random model, one of the llama architecture with 0.5 MB a layer in 4 bits.

    The same seed gives the same weights whatever the other arguments are, up to rounding: models that differ in
    `quant` or `num_layers` alone are a target and a draft that often agree. Control and padding tokens are never
    preferred, so that only a limit ends a text.

    Args:
        path: replaced as a whole; its folder exists.
        seed: of the weights.
        quant: type of all matrices; "mixed" takes turns with the types that CPU backends repack.
        num_vocab: number of tokens, 275 or more; a multiple of 64 suits all kernels.
        num_layers: number of blocks, one or more; a hybrid needs two.
        context_length: tokens of context the file claims to be trained for.
        chat_template: Jinja source.
        add_bos: see `byte_level_vocabulary`.
        vocabulary: another tokenizer; `num_vocab` and `add_bos` are then without meaning.
        metadata: further values, or others than the model's own.
        architecture: what its layers are.
        window: tokens that every other layer of gemma3 looks back.

    Raises:
        OSError: the file cannot be written.
        ValueError: `num_vocab` is too small.
    """
    words = vocabulary or byte_level_vocabulary(num_vocab, add_bos=add_bos)
    values: dict[str, MetadataValue] = {
        "general.architecture": architecture,
        "general.name": "tiny random model",
        "general.quantization_version": 2,
        **{f"{architecture}.{key}": value for key, value in _sizes(architecture, num_layers, window).items()},
        f"{architecture}.context_length": context_length,
        f"{architecture}.vocab_size": len(words.tokens),
        **_tokenizer(words, chat_template),
        **(metadata or {}),
    }
    weights = [*_embeddings(seed, words, architecture), *_blocks(seed, num_layers, architecture)]
    kinds = _MIXED if quant == "mixed" else (quant,)
    write_gguf(path, values, [_encode(name, w, kinds[i % len(kinds)]) for i, (name, w) in enumerate(weights)])


def _sizes(architecture: Architecture, num_layers: int, window: int) -> dict[str, MetadataValue]:
    num_kv_heads: MetadataValue = _NUM_KV_HEADS
    if architecture in ("jamba", "lfm2"):
        num_kv_heads = [_NUM_KV_HEADS * (layer % 2) for layer in range(num_layers)]
    sizes: dict[str, MetadataValue] = {
        "embedding_length": _NUM_EMBD,
        "block_count": num_layers,
        "feed_forward_length": _NUM_FF,
        "attention.head_count": _NUM_HEADS,
        "attention.head_count_kv": num_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    state = {"conv_kernel": _NUM_CONV, "inner_size": _NUM_INNER, "state_size": _NUM_STATE, "time_step_rank": _NUM_STEP}
    if architecture == "qwen35":
        state |= {"inner_size": _DELTA_INNER, "state_size": _NUM_HEAD_EMBD, "time_step_rank": _DELTA_HEADS}
        # Positions of text count in three ways at once.
        sizes |= {"full_attention_interval": 2, "rope.dimension_sections": [11, 11, 10, 0], "ssm.group_count": 1}
    if architecture in ("mamba", "jamba", "qwen35"):
        sizes |= {f"ssm.{name}": size for name, size in state.items()}
    if architecture == "lfm2":
        sizes["shortconv.l_cache"] = _NUM_CONV
    if architecture == "gemma3":
        sizes |= {"attention.sliding_window": window, "attention.sliding_window_pattern": 2}
    return sizes


def _tokenizer(vocabulary: Vocabulary, chat_template: str | None) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {
        **vocabulary.metadata,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
    }
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    return metadata


def _embeddings(seed: int, vocabulary: Vocabulary, architecture: Architecture) -> Iterable[tuple[str, Floats]]:
    num = len(vocabulary.tokens)
    # An embedding has one input; Gemma multiplies it by the root of its length.
    gain = _NUM_EMBD**0.5 / (_NUM_EMBD**0.5 if architecture == "gemma3" else 1.0)
    yield _made(seed, "token_embd.weight", _matrix(num, _NUM_EMBD, gain))
    norm = "token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"
    yield _made(seed, norm, _constant(_NUM_EMBD))
    # Logits of the favored tokens get a deviation of 4: their best two are rarely close to each other.
    name, output = _made(seed, "output.weight", _matrix(num, _NUM_EMBD, 4.0))
    normal = np.array([kind == NORMAL for kind in vocabulary.types])
    favored = np.isin(np.arange(num), list(vocabulary.favored))
    yield name, output * np.where(favored, 1.0, np.where(normal, 0.4, 0.0)).astype(np.float32)[:, None]


def _blocks(seed: int, num_layers: int, architecture: Architecture) -> Iterable[tuple[str, Floats]]:
    kinds = _LAYERS[architecture]
    for layer in range(num_layers):
        for part, make in kinds[layer % len(kinds)].items():
            named = part in _NAMED_AS_THEY_ARE or part.endswith(".bias")
            yield _made(seed, f"blk.{layer}.{part}" if named else f"blk.{layer}.{part}.weight", make)


def _made(seed: int, name: str, make: _Part) -> tuple[str, Floats]:
    return name, make(np.random.default_rng([seed, zlib.crc32(name.encode())]))


def _encode(name: str, weights: Floats, kind: str) -> Tensor:
    # llama.cpp multiplies by norms, and adds up states, in full precision only; a block of a row has up to 256 values.
    is_matrix = weights.ndim == 2 and weights.shape[1] % 256 == 0
    type_id, encoder = _ENCODERS[kind if is_matrix else "f32"]
    return Tensor(name, weights.shape, type_id, encoder(weights))
