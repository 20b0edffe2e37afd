"""Where a measurement comes from: versions, machine, model files. Numbers without it cannot be compared.

The library is imported where it is asked, so that the rest can be told where it does not work.
"""

from __future__ import annotations

import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import specdec_cli
from specdec_cli.files import file_digest

_LOAD_INTERVAL_S = 0.5


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of specdec, the bindings and llama.cpp, and of Python."""
    from specdec_cli import llama

    build = llama.versions()
    return {
        "specdec": specdec_cli.__version__,
        "llama_cpp_python": build["llama-cpp-python"],
        "llama_cpp": build["llama.cpp"],
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """CPU, cores, memory in bytes, operating system, and the features that llama.cpp was built for."""
    from specdec_cli import llama

    return {
        "cpu": cpu_name(),
        "num_cores": psutil.cpu_count(logical=False),
        "num_threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "build": llama.versions()["system"],
    }


def cpu_name() -> str:
    """The CPU's marketing name, or the next best thing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets by the kernel's names; empty where it does not tell."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":")[2] for line in file if line.lower().startswith(("flags", "features"))][:1]
    except OSError:
        return set()
    return set(" ".join(lines).split())


def load() -> float:
    """Share of all CPUs that other processes use, from 0 to 1; takes half a second."""
    before_s = time.process_time()
    share = psutil.cpu_percent(_LOAD_INTERVAL_S) / 100
    own = (time.process_time() - before_s) / _LOAD_INTERVAL_S / (psutil.cpu_count() or 1)
    return max(0.0, share - own)


def model_file(path: Path) -> dict[str, Any]:
    """Name, size in bytes and SHA-256 of a file; the last two None where it cannot be read.

    The digest is remembered for path, size and time of change.
    """
    try:
        size = path.stat().st_size
        return {"file": path.name, "size_bytes": size, "sha256": file_digest(path)}
    except OSError:
        return {"file": path.name, "size_bytes": None, "sha256": None}
