"""How much memory this process took."""

from __future__ import annotations

import sys


def peak_memory_bytes() -> int:
    """The most memory that this process had resident so far, in bytes, model files mapped into memory included."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
