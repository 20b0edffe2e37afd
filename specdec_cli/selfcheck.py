"""Does the installed llama.cpp survive its first decode? A crash inside the library takes the process: a child tries.

Some builds die in the kernels for repacked weights: on x86 machines with AMX, GCC before 13.3 drops the stores that
fill the tile configuration. Without repacking they work, slower. The verdict is remembered for library and CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec_cli import paths
from specdec_cli.child import failure, forbid_core_dump
from specdec_cli.errors import BackendError
from specdec_cli.files import read_object, replace_text
from specdec_cli.tiny import write_tiny_model

TIME_LIMIT_S = 60.0
"""A child that takes longer hangs; a healthy one needs about a second."""

Command = Callable[[Path, bool], Sequence[str]]
"""Model file, whether to repack -> the child's command line."""

# Part of the key: raise it when the child tests something else.
_TEST_VERSION = 1
_TEXT = "The quick brown fox jumps over the lazy dog, and then?"
_MAX_REMEMBERED = 16
_DISTRIBUTION = "llama-cpp-python"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found.

    Attributes:
        use_extra_bufts: whether weights may be repacked for special instructions.
        is_new: found just now, not remembered: the moment to show `warning`.
    """

    use_extra_bufts: bool
    is_new: bool = False

    @property
    def warning(self) -> str:
        """What to tell the user, with the command that repairs it; empty when all is well."""
        if self.use_extra_bufts:
            return ""
        return (
            "this build of llama.cpp crashes in its fastest kernels, so they are left out, which costs 25-40 % of the"
            f" speed; to repair it: {repair_command()}"
        )


def check(*, command: Command | None = None, time_limit_s: float = TIME_LIMIT_S) -> Verdict:
    """Decode a few tokens of a tiny model in a child process, unless the answer is known.

    Args:
        command: builds the child's command line; exit code 0 is success.
        time_limit_s: seconds after which a child counts as hanging.

    Raises:
        BackendError: llama.cpp works neither with repacked weights nor without.
        OSError: no temporary file could be written.
    """
    key = _key(_library_files())
    remembered = _read().get(key) if key else None
    if remembered is not None:
        return Verdict(remembered)
    verdict = _try_both(command or _child_command, time_limit_s)
    if key:
        _remember(key, verdict.use_extra_bufts)
    return verdict


def machine() -> tuple[str, str]:
    """Digests of the library's files and of the CPU: where either differs, other kernels are at work."""
    files = _library_files()
    return _key(files) or "", hashlib.sha256(_cpu().encode()).hexdigest()


def repair_command() -> str:
    """The shell command that builds the installed version of llama.cpp anew, without the faulty optimization.

    pip reuses a wheel it built earlier whatever the flags were then, so its cache has to be left aside.
    """
    try:
        requirement = f"{_DISTRIBUTION}=={importlib.metadata.version(_DISTRIBUTION)}"
    except importlib.metadata.PackageNotFoundError:
        requirement = _DISTRIBUTION
    return (
        f'CXXFLAGS="-fno-tree-dse -fno-dse" {shlex.quote(sys.executable)} -m pip install --no-cache-dir'
        f" --force-reinstall --no-deps --no-binary {_DISTRIBUTION} {requirement}"
    )


# --- the child, seen from the parent -------------------------------------------------------------------------------


def _try_both(command: Command, time_limit_s: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        model = Path(folder, "tiny.gguf")
        write_tiny_model(model)
        if not failure(command(model, True), time_limit_s, folder):
            return Verdict(True, is_new=True)
        reason = failure(command(model, False), time_limit_s, folder)
    if reason:
        raise BackendError(
            f"llama.cpp does not work on this machine: a test process {reason}",
            f"build it again: {repair_command()}",
        )
    return Verdict(False, is_new=True)


def _child_command(model: Path, use_extra_bufts: bool) -> Sequence[str]:
    return [sys.executable, "-m", "specdec_cli.selfcheck", str(model), "--extra-bufts", str(int(use_extra_bufts))]


# --- what is remembered, and for what ------------------------------------------------------------------------------


def _cache_file() -> Path:
    return paths.cache_dir() / "selfcheck.json"


def _read() -> dict[str, bool]:
    """Verdicts by key, oldest first."""
    verdicts = read_object(_cache_file()).get("use_extra_bufts")
    items = verdicts.items() if isinstance(verdicts, dict) else ()
    return {key: value for key, value in items if isinstance(value, bool)}


def _remember(key: str, use_extra_bufts: bool) -> None:
    """Add a verdict; where nothing can be written, the next run checks again."""
    verdicts = [*_read().items(), (key, use_extra_bufts)][-_MAX_REMEMBERED:]
    replace_text(_cache_file(), json.dumps({"use_extra_bufts": dict(verdicts)}, indent=1))


def _key(files: Sequence[Path]) -> str | None:
    """Names library and CPU; None when there is no library to name."""
    if not files:
        return None
    digest = hashlib.sha256(f"{_TEST_VERSION}\n{_cpu()}\n".encode())
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            digest.update(f"{file.resolve()}\t{status.st_size}\t{status.st_mtime_ns}\n".encode("utf-8", "replace"))
    return digest.hexdigest()


def _library_files() -> list[Path]:
    """The shared libraries that importing llama_cpp would load, found without importing it."""
    folder = _library_folder()
    try:
        files = sorted(folder.iterdir()) if folder else []
    except OSError:
        return []
    return [file for file in files if _is_library(file)]


def _library_folder() -> Path | None:
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override is not None:
        return Path(override)
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def _is_library(file: Path) -> bool:
    name = file.name.removeprefix("lib")
    return name.startswith(("llama", "ggml")) and file.suffix in (".so", ".dylib", ".dll")


def _cpu() -> str:
    """Model and instruction sets of the first processor, as far as the platform tells."""
    if sys.platform == "darwin":
        return _sysctl(b"machdep.cpu.brand_string")
    wanted = ("model name", "flags", "features", "cpu implementer", "cpu part", "cpu variant")
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return "".join(line for line in _first_paragraph(file) if line.lower().startswith(wanted))
    except OSError:
        return platform.processor()


def _first_paragraph(lines: Iterable[str]) -> Iterable[str]:
    # The kernel composes the file while it is read: with many cores all of it takes longer than the rest of the check.
    for line in lines:
        if not line.strip():
            return
        yield line


def _sysctl(name: bytes) -> str:
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    ctypes.CDLL(None).sysctlbyname(name, buffer, ctypes.byref(size), None, 0)
    return buffer.value.decode("utf-8", "replace")


# --- the child -------------------------------------------------------------------------------------------------------


def _decode_some(model_path: Path, use_extra_bufts: bool) -> bool:
    """Decode a batch, then single tokens; whether all logits are finite."""
    import numpy as np

    from specdec_cli.llama import LlamaContext, Model
    from specdec_cli.types import ContextOptions

    with (
        Model(model_path, gpu_layers=0, use_extra_bufts=use_extra_bufts) as model,
        LlamaContext(model, ContextOptions(256)) as context,
    ):
        tokens = model.tokenize(_TEXT, add_special=True, parse_special=False)
        for _ in range(4):
            context.sync(tokens)
            row = context.score()[0]
            if not np.isfinite(row).all():
                return False
            tokens.append(int(row.argmax()))
    return True


def _child_main(arguments: Sequence[str]) -> int:
    """`MODEL --extra-bufts 0|1`: what `check` runs; exit code 0 when decoding works."""
    forbid_core_dump()
    model, _flag, use_extra_bufts = arguments
    return 0 if _decode_some(Path(model), use_extra_bufts == "1") else 1


if __name__ == "__main__":
    sys.exit(_child_main(sys.argv[1:]))
