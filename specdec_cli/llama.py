"""llama.cpp behind the `Context` seam: the only module that imports llama_cpp."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil

from specdec_cli import compatibility, interrupt
from specdec_cli.context import CachedContext
from specdec_cli.errors import BackendError, IncompatibleModelsError, ModelLoadError
from specdec_cli.limits import CHUNK
from specdec_cli.translation import Translator
from specdec_cli.types import MAX_DRAFT_TOKENS, ContextOptions, Draft, Logits

MAX_SNAPSHOTS = 8
"""A longer draft is covered by a checkpoint: every pass writes the snapshots, few drafts need more."""

_SNAPSHOT_SHARE = 1 / 16
"""Snapshots take no more of the memory than this, in sizes of the model."""

KV_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
"""Names of the cache types that `--kv-type` takes."""

FORMATS = {
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_S": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
}
"""Names of the file formats that `quantize` makes."""

_FLASH_ATTENTION = {
    None: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_REPACKED: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (frozenset({"REPACK", "AVX2"}), ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4")),
    (frozenset({"REPACK", "AVX512"}), ("Q2_K",)),
    (frozenset({"REPACK", "NEON", "DOTPROD"}), ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4", "Q1_0")),
    (frozenset({"AMX_INT8"}), ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")),
)
"""Instruction sets -> tensor types; llama.cpp's own choices in ggml-cpu."""

_TOKENIZERS = {
    llama_cpp.LLAMA_VOCAB_TYPE_SPM: "SentencePiece",
    llama_cpp.LLAMA_VOCAB_TYPE_BPE: "BPE",
    llama_cpp.LLAMA_VOCAB_TYPE_WPM: "WordPiece",
    llama_cpp.LLAMA_VOCAB_TYPE_UGM: "Unigram",
    llama_cpp.LLAMA_VOCAB_TYPE_RWKV: "RWKV",
}
_LOG_DEBUG, _LOG_ERROR, _LOG_CONT = 1, 4, 5

_log_lines: deque[str] = deque(maxlen=200)
_log_level = _LOG_DEBUG


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
@interrupt.callback_from_c
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    """Keep errors; the bindings' own callback is off by one level and drops errors."""
    global _log_level
    _log_level = _log_level if level == _LOG_CONT else level
    line = text.decode("utf-8", "replace").strip()
    if line and _log_level == _LOG_ERROR:
        _log_lines.append(line)


llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))


def last_error() -> str:
    """The first error since the log was cleared: later lines only pass it on. Empty when there is none."""
    line = _log_lines[0] if _log_lines else ""
    return line.removeprefix("llama_model_load: error loading model: ")


def supports_gpu_offload() -> bool:
    """Whether this build can put layers on a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())


@dataclass(frozen=True, slots=True)
class Device:
    """Something that llama.cpp can compute on.

    Attributes:
        backend: what drives it: CPU, CUDA, Metal, Vulkan, RPC, ...
        kind: "cpu", "gpu", "igpu" (one that shares the CPU's memory), "accel" (a helper of the CPU) or "other".
        name: as llama.cpp calls it.
        description: the maker's name.
        free_bytes: of its memory.
        total_bytes: of its memory; 0 when unknown.
    """

    backend: str
    kind: str
    name: str
    description: str
    free_bytes: int
    total_bytes: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be put there; accelerators share the CPU's memory."""
        return self.kind in {"gpu", "igpu"}


_DEVICE_KINDS = ("cpu", "gpu", "igpu", "accel")


def devices() -> list[Device]:
    """The devices of this build, in llama.cpp's order; none where the library cannot be asked."""
    llama_cpp.llama_backend_init()
    try:
        count, get = _ggml("dev_count", ctypes.c_size_t), _ggml("dev_get", ctypes.c_void_p, ctypes.c_size_t)
        return [_device(get(index)) for index in range(count())]
    except AttributeError:
        return []


def _device(handle: int) -> Device:
    def text(function: str, argument: int) -> str:
        found = _ggml(function, ctypes.c_char_p, ctypes.c_void_p)(argument)
        return found.decode("utf-8", "replace") if found else ""

    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _ggml("dev_memory", None, *[ctypes.c_void_p] * 3)(handle, ctypes.byref(free), ctypes.byref(total))
    kind = _ggml("dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    registry = _ggml("dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(handle)
    return Device(
        text("reg_name", registry), _DEVICE_KINDS[kind] if kind < len(_DEVICE_KINDS) else "other",
        text("dev_name", handle), text("dev_description", handle), free.value, total.value,
    )  # fmt: skip


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    """A function that the bindings leave out; the library of llama.cpp brings it along.

    Raises:
        AttributeError: it does not.
    """
    function = getattr(llama_cpp.llama_cpp._lib, f"ggml_backend_{name}")
    function.restype, function.argtypes = result, arguments
    return function


def versions() -> dict[str, str]:
    """Versions of the bindings and of llama.cpp, and the CPU features the library was built for."""
    return {
        "llama-cpp-python": str(llama_cpp.__version__),
        "llama.cpp": llama_cpp.llama_version().decode(),
        "system": llama_cpp.llama_print_system_info().decode(),
    }


def repacked_types() -> frozenset[str]:
    """Tensor types that the CPU's kernels keep a copy of in another order, as far as the build tells."""
    features = {name for name, _, value in _features() if value == "1"}
    return frozenset(kind for needed, kinds in _REPACKED if needed <= features for kind in kinds)


def _features() -> Iterator[tuple[str, str, str]]:
    for item in versions()["system"].replace(":", "|").split("|"):
        yield tuple(part.strip() for part in item.partition("="))  # type: ignore[misc]


def default_threads() -> int:
    """Physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class Model:
    """A loaded GGUF file.

    Args:
        path: the file; of a split model the first shard.
        gpu_layers: layers on the GPU; -1 is all, also the default when the build supports offload.
        use_extra_bufts: whether weights may be repacked for special instructions (see `specdec_cli.selfcheck`).
        vocab_only: load the vocabulary and metadata, no weights.
        simulated: read no weights and take no memory; contexts can be made, but not decoded with.

    Raises:
        ModelLoadError: with llama.cpp's own reason.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int | None = None,
        use_extra_bufts: bool = True,
        vocab_only: bool = False,
        simulated: bool = False,
    ) -> None:
        self.path = path
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = use_extra_bufts
        params.vocab_only = vocab_only
        if simulated:
            # A mapped file would be read as a whole.
            params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
        params.n_gpu_layers = (-1 if supports_gpu_offload() else 0) if gpu_layers is None else gpu_layers
        params.progress_callback = _on_load_progress
        _log_lines.clear()
        self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if interrupt.stop_requested():
            self.close()
            raise KeyboardInterrupt
        if not self._handle:
            reason = last_error() or "llama.cpp gave no reason"
            hint = (
                "the file may be cut off or made for a newer llama.cpp; download it again, or update llama-cpp-python"
            )
            if "unknown model architecture" in reason:
                hint = (
                    "this build of llama.cpp does not know such models: update llama-cpp-python, or take another model"
                )
            raise ModelLoadError(f"cannot load `{path}`: {reason}", hint)
        self._piece_buffer = ctypes.create_string_buffer(1024)

    def close(self) -> None:
        """Free the weights; contexts of this model must be closed before."""
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def handle(self) -> Any:
        """The llama_model pointer."""
        if not self._handle:
            raise ValueError("the model is closed")
        return self._handle

    @property
    def vocab(self) -> Any:
        """The llama_vocab pointer."""
        return llama_cpp.llama_model_get_vocab(self.handle)

    @cached_property
    def num_vocab(self) -> int:
        """Number of token ids, padding included."""
        return int(llama_cpp.llama_vocab_n_tokens(self.vocab))

    @cached_property
    def num_params(self) -> int:
        """Number of weights."""
        return int(llama_cpp.llama_model_n_params(self.handle))

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether all or some layers have a state instead of a cell for each token, so that no tail can be dropped."""
        return bool(llama_cpp.llama_model_is_recurrent(self.handle) or llama_cpp.llama_model_is_hybrid(self.handle))

    @cached_property
    def window(self) -> int:
        """Tokens that layers with sliding-window attention look back; 0 without such layers."""
        return max(0, int(llama_cpp.llama_model_n_swa(self.handle)))

    @cached_property
    def num_snapshots(self) -> int:
        """States before the last ones that a context shall hold: as many as a share of the model's own memory takes."""
        size = _snapshot_size(self) if self.is_recurrent else 0
        budget = _SNAPSHOT_SHARE * int(llama_cpp.llama_model_size(self.handle))
        return min(MAX_SNAPSHOTS, int(budget / size)) if size else 0

    @cached_property
    def max_ctx(self) -> int:
        """Tokens of context that the model was trained for."""
        return int(llama_cpp.llama_model_n_ctx_train(self.handle))

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """All end-of-generation tokens."""
        is_eog, vocab = llama_cpp.llama_vocab_is_eog, self.vocab
        return frozenset(token for token in range(self.num_vocab) if is_eog(vocab, token))

    def is_stop(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    @cached_property
    def bos(self) -> int | None:
        """Beginning-of-sequence token, if the model has one."""
        token = int(llama_cpp.llama_vocab_bos(self.vocab))
        return token if token >= 0 else None

    @cached_property
    def eos(self) -> int | None:
        """End-of-sequence token, if the model has one."""
        token = int(llama_cpp.llama_vocab_eos(self.vocab))
        return token if token >= 0 else None

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer puts BOS in front of a text."""
        return bool(llama_cpp.llama_vocab_get_add_bos(self.vocab))

    @cached_property
    def adds_eos(self) -> bool:
        """Whether the tokenizer puts EOS behind a text."""
        return bool(llama_cpp.llama_vocab_get_add_eos(self.vocab))

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source stored in the file."""
        template = llama_cpp.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    @cached_property
    def tokenizer_kind(self) -> int:
        """llama.cpp's vocabulary type: BPE, SentencePiece, ..."""
        return int(llama_cpp.llama_vocab_type(self.vocab))

    @property
    def tokenizer_name(self) -> str:
        """The same in words."""
        return _TOKENIZERS.get(self.tokenizer_kind, "unknown")

    @property
    def has_tokenizer(self) -> bool:
        """Whether it can turn text into tokens; without, llama.cpp ends the process when it is asked to."""
        return self.tokenizer_kind != int(llama_cpp.LLAMA_VOCAB_TYPE_NONE)

    @cached_property
    def description(self) -> str:
        """Architecture, size and quantization in words."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def token_entries(self) -> list[bytes]:
        """The vocabulary's entry for every token, not decoded: what two vocabularies are compared by."""
        get_text, vocab = llama_cpp.llama_vocab_get_text, self.vocab
        return [get_text(vocab, token) or b"" for token in range(self.num_vocab)]

    def token_text(self, token: int) -> str:
        """One of these entries as text."""
        text = llama_cpp.llama_vocab_get_text(self.vocab, token)
        return text.decode("utf-8", "replace") if text else ""

    def token_attr(self, token: int) -> int:
        """llama.cpp's attribute bits of a token."""
        return int(llama_cpp.llama_vocab_get_attr(self.vocab, token))

    def metadata(self, key: str) -> str | None:
        """The value of a metadata key as text; None when the file has no such key."""
        buffer = ctypes.create_string_buffer(1024)
        size = llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    def open_context(self, options: ContextOptions) -> LlamaContext:
        """A new context of this model, which must be closed before the model.

        Raises:
            BackendError: it could not be made, usually for want of memory.
        """
        return LlamaContext(self, options)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; lone surrogates are replaced.
            add_special: add BOS and the like where the model wants them.
            parse_special: take the text of special tokens for these tokens.
        """
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * capacity)()
            num = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, capacity, add_special, parse_special)
            if num >= 0:
                return list(buffer[:num])
            capacity = -num

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token as they appear in the answer; special tokens are empty unless `special`."""
        num = llama_cpp.llama_token_to_piece(self.vocab, token, self._piece_buffer, len(self._piece_buffer), 0, special)
        if num < 0:
            self._piece_buffer = ctypes.create_string_buffer(-num)
            return self.piece(token, special=special)
        return self._piece_buffer.raw[:num]


@llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
@interrupt.callback_from_c
def _on_load_progress(_share: float, _user_data: ctypes.c_void_p) -> bool:
    """Whether to go on loading."""
    return not interrupt.stop_requested()


def quantize(source: Path, destination: Path, ftype: str, *, pure: bool, threads: int) -> None:
    """Write a model in another format, whatever format it has now.

    What llama.cpp cannot do may end the process, and a failure leaves half a file: `specdec_cli.requantize` is safe.

    Args:
        source: a GGUF file.
        destination: overwritten.
        ftype: a name of `FORMATS`.
        pure: the same format for every matrix; llama.cpp otherwise spares some that matter more.
        threads: how many to use.

    Raises:
        BackendError: with llama.cpp's own reason.
    """
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FORMATS[ftype]
    params.allow_requantize = True
    params.pure = pure
    params.nthread = threads
    _log_lines.clear()
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(destination), ctypes.byref(params)) != 0:
        raise BackendError(
            f"llama.cpp could not convert `{source.name}` to {ftype}: {last_error() or 'no reason given'}"
        )


def check_vocabularies(target: Model, draft: Model) -> int:
    """Number of leading token ids that both models have in common.

    Raises:
        IncompatibleModelsError: they do not fit (`specdec_cli.compatibility`); it names the first differing token.
    """
    found = compatibility.compare(target, draft)
    if not found.fits:
        hint = "use a draft model of the same family, or `--no-draft`; `specdec pull` fetches a pair that fits"
        raise IncompatibleModelsError(found.reason, hint)
    return found.num_shared


def find_translator(target: Model, draft: Model) -> Translator | None:
    """What drafts have to go through because the tokenizers differ; None for models that share a vocabulary.

    Raises:
        ModelLoadError: the target has no tokenizer.
        IncompatibleModelsError: there is nothing to translate with.
    """
    require_tokenizer(target)
    hint = "use another draft model, or `--no-draft`"
    if not draft.has_tokenizer:
        raise IncompatibleModelsError(f"`{draft.path.name}` has no tokenizer, so its drafts cannot be read", hint)
    try:
        check_vocabularies(target, draft)
    except IncompatibleModelsError as difference:
        translator = Translator(target, draft)
        if not translator.is_possible:
            message = f"{difference.message}, and one of the two has no tokens for plain text"
            raise IncompatibleModelsError(message, hint) from None
        return translator
    return None


def require_tokenizer(model: Model) -> None:
    """Refuse a model that cannot read text.

    Raises:
        ModelLoadError: it has no tokenizer.
    """
    if not model.has_tokenizer:
        raise ModelLoadError(f"`{model.path.name}` has no tokenizer", "use a file that was converted with one")


def _snapshot_size(model: Model) -> int:
    """Bytes of a recurrent state; 0 where this build of llama.cpp keeps no earlier ones for the architecture."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 8
    params.n_rs_seq, params.no_perf = 1, True
    handle = llama_cpp.llama_init_from_model(model.handle, params)
    if not handle:
        return 0
    try:
        if not llama_cpp.llama_n_rs_seq(handle):
            return 0
        # An empty sequence has no state.
        token = (llama_cpp.llama_token * 1)(0)
        if llama_cpp.llama_decode(handle, llama_cpp.llama_batch_get_one(token, 1)) != 0:
            return 0
        return int(llama_cpp.llama_state_seq_get_size_ext(handle, 0, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY))
    finally:
        llama_cpp.llama_free(handle)


class LlamaContext(CachedContext):
    """A llama.cpp context; see `CachedContext` for the contract.

    Recurrent and hybrid models take chains only: `max_leaves` is 1 whatever was asked for.

    Args:
        model: stays open as long as the context.
        options: sizes and threads.

    Raises:
        BackendError: the context could not be made, usually for want of memory, or a decode call failed.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        self._handle = None
        capacity = CHUNK + MAX_DRAFT_TOKENS
        # A state that cannot drop its tail cannot drop a branch either.
        options = replace(options, max_leaves=1 if model.is_recurrent else options.max_leaves)
        super().__init__(options.num_ctx, model.num_vocab, CHUNK, options.max_leaves)
        params = self._params(options, capacity)
        params.n_rs_seq = model.num_snapshots
        # Cells of several sequences are never evicted from a small cache, and a hybrid's tell nobody which are left.
        params.swa_full = model.is_recurrent or options.max_leaves > 1
        self._handle = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise BackendError(
                f"no context of {options.num_ctx} tokens for `{model.path.name}`: {last_error()}",
                "use a smaller `--ctx`, or `--kv-type q8_0`",
            )
        self._num_snapshots = int(llama_cpp.llama_n_rs_seq(self._handle)) if model.is_recurrent else None
        self._window = 0 if model.is_recurrent else model.window
        self._state = (ctypes.c_uint8 * 0)()
        self._branches = _Branches()
        self._batch = _Batch(capacity, options.max_leaves)

    @staticmethod
    def _params(options: ContextOptions, capacity: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.num_ctx
        params.n_batch = capacity
        params.n_ubatch = CHUNK
        params.n_outputs_max = MAX_DRAFT_TOKENS + 1
        params.n_seq_max = options.max_leaves
        params.kv_unified = options.max_leaves > 1
        params.n_threads = params.n_threads_batch = options.threads or default_threads()
        params.type_k = params.type_v = KV_TYPES[options.kv_type]
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.no_perf = True
        function, argument = interrupt.abort_callback()
        params.abort_callback = llama_cpp.ggml_abort_callback(function)
        params.abort_callback_data = argument
        return params

    def close(self) -> None:
        """Free the cache."""
        if self._handle:
            llama_cpp.llama_free(self._handle)
            self._handle = None
            self._batch.close()

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def _open_handle(self) -> Any:
        if not self._handle:
            raise ValueError("the context is closed")
        return self._handle

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self._open_handle)

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        handle = self._open_handle
        num_before, num_rows = len(self._cached), bool(tokens) + len(draft) - num_old
        self._check_size(draft)
        depths, (copies, members) = draft.depths, self._branches.place(draft, num_old)
        for source, copy, node in copies:
            end = num_before + (depths[node] if node >= 0 else 0)
            llama_cpp.llama_memory_seq_rm(self._memory, copy, -1, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, source, copy, 0, end)
        self._batch.fill([*tokens, *draft.tokens[num_old:]], num_before, num_rows if rows else 0)
        self._batch.spread(len(tokens), num_before + len(tokens), depths[num_old:], members, self._branches.num)
        code = llama_cpp.llama_decode(handle, self._batch.struct)
        if code == 2:
            raise KeyboardInterrupt
        if code != 0:
            raise BackendError(f"llama.cpp could not decode (code {code}): {last_error()}", "try a smaller `--ctx`")
        if not rows:
            return None
        logits = llama_cpp.llama_get_logits(handle)
        return np.ctypeslib.as_array(logits, (num_rows, self._num_vocab))

    def _check_size(self, draft: Draft) -> None:
        """Before anything is written: the C arrays have no bounds."""
        if len(draft) > MAX_DRAFT_TOKENS:
            raise ValueError(f"a draft of {len(draft)} tokens; the most is {MAX_DRAFT_TOKENS}")
        if draft.num_leaves > self._max_leaves:
            raise ValueError(f"a draft with {draft.num_leaves} leaves; this context takes {self._max_leaves}")

    def _keep_path(self, draft: Draft, path: Sequence[int], num_before: int) -> bool:  # noqa: ARG002
        end = num_before + len(path)
        winner = self._branches.of(path[-1]) if path else 0
        if winner:
            llama_cpp.llama_memory_seq_rm(self._memory, 0, num_before, -1)
            llama_cpp.llama_memory_seq_cp(self._memory, winner, 0, num_before, end)
        return self._drop_tail(end)

    def _drop_tail(self, num_kept: int) -> bool:
        for sequence in range(1, self._branches.num):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._branches.reset()
        return self._remove(num_kept) and self._reaches_back(num_kept)

    def _remove(self, num_kept: int) -> bool:
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, 0, num_kept, -1))

    def _reaches_back(self, num_kept: int) -> bool:
        """Whether everything is there that the next token looks at: what has left a sliding window is overwritten."""
        if not self._window or not num_kept:
            return True
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, 0))
        return 0 <= first <= max(0, num_kept - self._window)

    def _save(self) -> bool:
        flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = llama_cpp.llama_state_seq_get_size_ext(self._open_handle, 0, flags)
        if size != len(self._state):
            self._state = (ctypes.c_uint8 * size)()
        return bool(size == llama_cpp.llama_state_seq_get_data_ext(self._open_handle, self._state, size, 0, flags))

    def _restore(self) -> bool:
        flags, size = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY, len(self._state)
        num_read = llama_cpp.llama_state_seq_set_data_ext(self._open_handle, self._state, size, 0, flags)
        # A hybrid's attention layers still hold what came after.
        return num_read == size and self._remove(self._num_saved)

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._branches.reset()


class _Branches:
    """Which sequence of the cache holds which branch of a draft; the committed text is in sequence 0, and so in all."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Only sequence 0, without a draft."""
        self._tips = [-1]
        self._of_node: list[int] = []

    @property
    def num(self) -> int:
        """Sequences in use."""
        return len(self._tips)

    def of(self, node: int) -> int:
        """A sequence with a node, and all before it in its branch."""
        return self._of_node[node] if node >= 0 else 0

    def place(self, draft: Draft, num_old: int) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
        """Find a sequence for each node behind the first `num_old`.

        The first child of a tip goes on in its sequence; every other child needs its own, which begins as a copy.

        Returns:
            Copies to make before, as (source, new sequence, last node in the cache to copy, -1 for none), and for each
            new node all sequences that it belongs to.
        """
        if not num_old:
            self.reset()
        copies: list[tuple[int, int, int]] = []
        members: list[list[int]] = []
        for node in range(num_old, len(draft)):
            parent = draft.parents[node]
            sequence = self.of(parent)
            if self._tips[sequence] == parent:
                self._tips[sequence] = node
            else:
                sequence = len(self._tips)
                self._tips.append(node)
                # What is in the cache is copied; nodes of the same batch are put into both sequences.
                while parent >= num_old:
                    members[parent - num_old].append(sequence)
                    parent = draft.parents[parent]
                copies.append((self.of(parent), sequence, parent))
            self._of_node.append(sequence)
            members.append([sequence])
        return copies, members


class _Batch:
    """A llama_batch with NumPy views over its arrays."""

    def __init__(self, capacity: int, max_leaves: int) -> None:
        self.struct = llama_cpp.llama_batch_init(capacity, 0, max_leaves)
        self._token, self._pos, self._num_seq, self._logits = (
            np.ctypeslib.as_array(field, (capacity,))
            for field in (self.struct.token, self.struct.pos, self.struct.n_seq_id, self.struct.logits)
        )
        self._num_seq[:] = 1
        self._num_tree_slots = 0
        for index in range(capacity):
            self.struct.seq_id[index][0] = 0

    def fill(self, tokens: Sequence[int], first_pos: int, num_rows: int) -> None:
        """Tokens, the first at `first_pos`, as a chain in sequence 0; logits for the last `num_rows`."""
        size = len(tokens)
        self._token[:size] = tokens
        self._pos[:size] = np.arange(first_pos, first_pos + size)
        self._logits[: size - num_rows] = 0
        self._logits[size - num_rows : size] = 1
        self.struct.n_tokens = size
        # A tree leaves its sequences behind in the slots it used.
        for index in range(self._num_tree_slots):
            self._set_sequences(index, (0,))
        self._num_tree_slots = 0

    def spread(
        self, offset: int, first_pos: int, depths: Sequence[int], members: Sequence[Sequence[int]], num_all: int
    ) -> None:
        """Make a tree of what stands at `offset` and behind.

        Args:
            offset: tokens of the text before it, which belong to all sequences.
            first_pos: position behind the text.
            depths: of each node, from 1.
            members: sequences of each node.
            num_all: sequences in use.
        """
        size = offset + len(depths)
        self._pos[offset:size] = first_pos - 1 + np.array(depths, np.int32)
        if num_all == 1:
            return
        self._num_tree_slots = size
        for index in range(offset):
            self._set_sequences(index, range(num_all))
        for index, sequences in enumerate(members, offset):
            self._set_sequences(index, sequences)

    def _set_sequences(self, index: int, sequences: Sequence[int]) -> None:
        self._num_seq[index] = len(sequences)
        for slot, sequence in enumerate(sequences):
            self.struct.seq_id[index][slot] = sequence

    def close(self) -> None:
        """Free the arrays."""
        llama_cpp.llama_batch_free(self.struct)
