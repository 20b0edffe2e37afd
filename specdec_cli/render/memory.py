"""How much memory this process took."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """The most memory that this process had resident so far, in bytes, model files mapped into memory included."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    if sys.platform == "linux":
        # What getrusage tells may be the parent's: the kernel keeps it over fork and exec.
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
