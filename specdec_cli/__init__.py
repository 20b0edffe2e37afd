"""specdec: lossless speculative decoding for GGUF models on llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_cli.session import Result, Session, SessionOptions, load
    from specdec_cli.types import SamplingParams

if TYPE_CHECKING:
    __version__: str

__all__ = ["Result", "SamplingParams", "Session", "SessionOptions", "load"]

_HOMES = {
    "load": "session",
    "Result": "session",
    "Session": "session",
    "SessionOptions": "session",
    "SamplingParams": "types",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `specdec --help` must not load llama.cpp, nor read package metadata."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("specdec-cli")
    except PackageNotFoundError:  # a source tree on sys.path
        return "0+unknown"
