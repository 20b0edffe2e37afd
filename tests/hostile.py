"""GGUF files that lie: strategies for Hypothesis, and a process that loads what the header check lets through."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from specdec_cli.tiny import MetadataValue, Tensor

HOSTILE_NUMBERS = (
    0, 1, 2, 3, 7, 31, 64, 255, 256, 511, 513, 4097, 2**16, 2**20, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
    2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip

# --- bytes -------------------------------------------------------------------------------------------------------


def mutated(original: bytes, header_size: int) -> st.SearchStrategy[bytes]:
    """A file after one to four changes in or near its header."""
    position = st.integers(0, header_size + 64)
    change = st.one_of(
        st.builds(_with_number, position, st.sampled_from(HOSTILE_NUMBERS), st.sampled_from((1, 4, 8))),
        st.builds(_with_bytes, position, st.binary(min_size=1, max_size=9)),
        st.builds(_without, position, st.integers(1, 4096)),
        st.builds(_with_inserted, position, st.binary(min_size=1, max_size=64)),
        st.builds(_swapped, position, position, st.sampled_from((4, 8))),
        st.builds(_cut, st.integers(0, len(original))),
    )
    return st.lists(change, min_size=1, max_size=4).map(lambda changes: _apply(original, changes))


Change = Callable[[bytes], bytes]


def _apply(data: bytes, changes: list[Change]) -> bytes:
    for change in changes:
        data = change(data)
    return data


def _with_number(at: int, number: int, size: int) -> Change:
    return _with_bytes(at, struct.pack("<Q", number)[:size])


def _with_bytes(at: int, new: bytes) -> Change:
    return lambda data: data[:at] + new + data[at + len(new) :]


def _without(at: int, num: int) -> Change:
    return lambda data: data[:at] + data[at + num :]


def _with_inserted(at: int, new: bytes) -> Change:
    return lambda data: data[:at] + new + data[at:]


def _swapped(first: int, second: int, size: int) -> Change:
    def swap(data: bytes) -> bytes:
        one, other = data[first : first + size], data[second : second + size]
        return _with_bytes(second, one)(_with_bytes(first, other)(data))

    return swap


def _cut(size: int) -> Change:
    return lambda data: data[:size]


# --- meaning -----------------------------------------------------------------------------------------------------

_NUMBERS = st.sampled_from((*HOSTILE_NUMBERS[:18], 4, 5, 8, 12, 32, 128, 275, 320, 1024))
_FLOATS = st.sampled_from((0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")))
_TEXTS = st.sampled_from(
    ("", "linear", "yarn", "none", "llama", "gpt2", "bert", "t5", "rwkv", "default", "é\x00\x1b", "x" * 999)
)
_LISTS = st.one_of(
    st.lists(st.sampled_from((-1, 0, 1, 2, 4, 2**30)), max_size=4),
    st.lists(_TEXTS, max_size=4),
    st.lists(_FLOATS, max_size=4),
)
VALUES: st.SearchStrategy[MetadataValue] = st.one_of(_NUMBERS, _NUMBERS, _FLOATS, _TEXTS, st.booleans(), _LISTS)

KEYS = (
    "general.architecture", "general.alignment", "general.file_type", "general.quantization_version", "split.count",
    "split.no", "llama.context_length", "llama.embedding_length", "llama.block_count", "llama.feed_forward_length",
    "llama.vocab_size", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.attention.value_length", "llama.attention.layer_norm_rms_epsilon", "llama.attention.sliding_window",
    "llama.attention.causal", "llama.pooling_type", "llama.rope.dimension_count", "llama.rope.freq_base",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.expert_count", "llama.expert_used_count", "llama.nextn_predict_layers", "llama.expert_group_count",
    "llama.expert_group_used_count", "llama.logit_scale", "llama.residual_scale", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores",
    "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.precompiled_charsmap", "tokenizer.chat_template",
)  # fmt: skip

ARCHITECTURES = (
    "llama", "qwen2", "qwen2moe", "qwen3", "gemma", "gemma2", "gemma3", "gemma3n", "phi2", "phi3", "mamba", "mamba2",
    "jamba", "rwkv6", "rwkv7", "falcon", "bert", "t5", "deepseek2", "gpt-oss", "lfm2", "nemotron_h", "granitehybrid",
    "eagle3", "deci", "llama4", "minicpm3", "starcoder2", "gptj", "nonsense",
)  # fmt: skip

TensorChange = Callable[[list[Tensor]], list[Tensor]]


def tensor_changes() -> st.SearchStrategy[TensorChange]:
    """One tensor gone, renamed, doubled, of another shape, or of another type."""
    index = st.integers(0, 11)
    return st.one_of(
        st.builds(_drop, index),
        st.builds(
            _rename,
            index,
            st.sampled_from(("output.weight", "blk.0.attn_q.bias", "blk.9.ffn_up.weight", "rope_freqs.weight")),
        ),
        st.builds(_reshape, index, st.sampled_from((1, 2, 3, 4))),
        st.builds(_retype, index, st.sampled_from((0, 1, 2, 8, 12, 14, 24, 26, 28, 30))),
    )


def _drop(index: int) -> TensorChange:
    return lambda tensors: tensors[:index] + tensors[index + 1 :]


def _rename(index: int, name: str) -> TensorChange:
    return lambda tensors: _with(tensors, index, lambda old: Tensor(name, old.shape, old.type_id, old.data))


def _reshape(index: int, num_dims: int) -> TensorChange:
    def change(old: Tensor) -> Tensor:
        size = 1
        for dim in old.shape:
            size *= dim
        shape = (1,) * (num_dims - 1) + (size,) if num_dims < 3 else (size // 256, 1, 256, 1)[:num_dims][::-1]
        return Tensor(old.name, shape, old.type_id, old.data)

    return lambda tensors: _with(tensors, index, change)


def _retype(index: int, type_id: int) -> TensorChange:
    return lambda tensors: _with(tensors, index, lambda old: _retyped(old, type_id))


def _retyped(old: Tensor, type_id: int) -> Tensor:
    from specdec_cli.gguf import TENSOR_TYPES

    _, block, block_bytes = TENSOR_TYPES[type_id]
    size = 1
    for dim in old.shape:
        size *= dim
    return Tensor(old.name, old.shape, type_id, bytes(size // block * block_bytes))


def _with(tensors: list[Tensor], index: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    index %= len(tensors)
    return [*tensors[:index], change(tensors[index]), *tensors[index + 1 :]]


# --- a process that loads what is let through -----------------------------------------------------------------------


def _in_fork(work: Callable[[], None]) -> int:
    """Exit code of a copy of this process that does the work; negative for a signal."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _trial(path: Path) -> None:
    from specdec_cli import trial

    trial._child_main([str(path)])


def _answer(path: Path) -> None:
    from specdec_cli.errors import SpecdecError
    from specdec_cli.session import Session, SessionOptions
    from specdec_cli.types import Drafting, SamplingParams

    try:
        with Session.open(path, None, SessionOptions(Drafting("ngram", 3), threads=1)) as session:
            session.generate("ab", sampling=SamplingParams(temperature=0), max_tokens=4)
        with Session.open(path, None, SessionOptions(threads=1)) as session:
            session.generate([65, 66], sampling=SamplingParams(seed=1), max_tokens=4)
    except SpecdecError as error:
        sys.stderr.write(f"refused: {error.message}\n")


def main() -> int:
    """For each path on standard input one JSON line: exit codes of the trial and, if it lived, of an answer."""
    from specdec_cli import session, trial
    from specdec_cli.gguf import check_header

    # The trial has just been made, in a process that was copied and not started anew.
    session.admit = trial.admit = check_header  # type: ignore[assignment]
    for line in sys.stdin:
        path = Path(json.loads(line))
        done: dict[str, Any] = {"path": str(path), "trial": _in_fork(lambda path=path: _trial(path))}
        if done["trial"] == 0:
            done["answer"] = _in_fork(lambda path=path: _answer(path))
        print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
