"""A model file that was never loaded here is loaded by a child process first: llama.cpp ends the process on some files.

What is remembered is that a file, by path, size and time, did no harm to this build of llama.cpp.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec_cli import measuring, paths, selfcheck
from specdec_cli.child import failure, forbid_core_dump, limit_memory
from specdec_cli.errors import ModelLoadError, SpecdecError
from specdec_cli.files import read_object, replace_text
from specdec_cli.gguf import Header, check_header

TIME_LIMIT_S = 600.0
"""A child that takes longer hangs: weights are mapped, and only those of small models are read."""

Command = Callable[[Path], Sequence[str]]
"""Model file -> the child's command line."""

# Part of the key: raise it when the child tests something else.
_TEST_VERSION = 1
_MAX_REMEMBERED = 256
_NUM_CTX = 64
_TEXT = "The quick brown fox — über 12 Äpfel, 「猫」\n"
_DECODED_BYTES = 2 << 30
"""Of larger models no weight is read: what their graph dies of is mostly found when it is built."""

_SPARE_BYTES = 4 << 30
"""What vocabulary, cache and buffers of any model may take beside the weights."""


def admit(path: Path, *, command: Command | None = None, time_limit_s: float = TIME_LIMIT_S) -> tuple[Header, ...]:
    """Let a file through that can be loaded without harm; whether it is a model that can be used shows later.

    Args:
        path: a GGUF file; of a split model the first part.
        command: builds the child's command line; exit code 0 means no harm.
        time_limit_s: seconds after which a child counts as hanging.

    Returns:
        The headers of all parts.

    Raises:
        ModelMissingError: the file or a part of it is not there.
        ModelLoadError: the header cannot be true, or the child died.
        BackendError: llama.cpp does not work on this machine, whatever the file.
    """
    headers = check_header(path)
    key = measuring.key([header.path for header in headers], {"trial": _TEST_VERSION})
    known = _read()
    if key is None or key not in known:
        _try(path, (command or _child_command)(path.absolute()), time_limit_s)
        if key is not None:
            replace_text(_file(), json.dumps({"harmless": [*known, key][-_MAX_REMEMBERED:]}))
    return headers


def _try(path: Path, command: Sequence[str], time_limit_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        reason = failure(command, time_limit_s, folder)
    if reason:
        # The library may be at fault and not the file: then this raises.
        selfcheck.check()
        raise ModelLoadError(
            f"`{path}` would crash llama.cpp: a test process {reason}",
            "the file is damaged, or made for another llama.cpp; download it again, or update llama-cpp-python",
        )


def _child_command(path: Path) -> Sequence[str]:
    return [sys.executable, "-m", "specdec_cli.trial", str(path)]


def _file() -> Path:
    return paths.cache_dir() / "trials.json"


def _read() -> list[str]:
    """Keys of the files that did no harm, oldest first."""
    known = read_object(_file()).get("harmless")
    return [key for key in known if isinstance(key, str)] if isinstance(known, list) else []


# --- the child -------------------------------------------------------------------------------------------------------


def _load_and_decode(path: Path) -> None:
    from specdec_cli.llama import Model
    from specdec_cli.types import ContextOptions

    num_bytes = sum(header.file_size for header in check_header(path))
    limit_memory(_SPARE_BYTES)
    is_large = num_bytes > _DECODED_BYTES
    # Weights stay in the file: nothing is repacked, nothing is copied to a GPU.
    with (
        Model(path, gpu_layers=0, use_extra_bufts=False, simulated=is_large) as model,
        # One thread: beside other work two would wait for each other.
        model.open_context(ContextOptions(_NUM_CTX, threads=1)) as context,
    ):
        _ = model.chat_template, model.bos, model.eos
        # Whoever needs a tokenizer refuses models without one, with the reason.
        tokens = model.tokenize(_TEXT, add_special=True, parse_special=True) if model.has_tokenizer else []
        for token in tokens[: _NUM_CTX // 2]:
            model.piece(token)
        if tokens and not is_large:
            context.sync(tokens[: _NUM_CTX // 2])
            context.score()


def _child_main(arguments: Sequence[str]) -> int:
    """`MODEL`: what `admit` runs; exit code 0 when the process lives, also where the model cannot be used."""
    forbid_core_dump()
    try:
        _load_and_decode(Path(arguments[0]))
    except SpecdecError as error:
        # The parent will meet the same error, and tell it.
        sys.stderr.write(f"{error.message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_child_main(sys.argv[1:]))
