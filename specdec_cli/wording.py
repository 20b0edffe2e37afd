"""How sizes and sources are written for people, without what is secret in them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_COMMIT = re.compile(r"@([0-9a-f]{8})[0-9a-f]{32}$")


def format_size(num_bytes: int | None) -> str:
    """Return a size for people, in decimal units: `1.1 GB`."""
    if num_bytes is None:
        return "unknown size"
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes} bytes"


def describe(source: str) -> str:
    """A source for people: secrets left out, commits short."""
    return _COMMIT.sub(r"@\1", scrub(source))


def scrub(text: str) -> str:
    """Return the text without access tokens, passwords in URLs, and query strings, which can be signatures."""
    for secret in _secrets():
        text = text.replace(secret, "***")
    text = re.sub(r"\bhf_[A-Za-z0-9]{6,}", "***", text)
    text = re.sub(r"://[^\s/?#'\"`]+@", "://***@", text)
    return re.sub(r"(https?://[^\s?#'\"`]+)[?#][^\s'\"`]+", r"\1", text)


def _secrets() -> list[str]:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    found = [os.environ.get(name, "").strip() for name in names]
    path = os.environ.get("HF_TOKEN_PATH") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "token"
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        found.append(Path(path).expanduser().read_text(encoding="utf-8").strip())
    # Anything shorter would blank out words that are no secrets.
    return [secret for secret in found if len(secret) >= 6]
