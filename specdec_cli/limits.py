"""Sizes that the backend works in and names of what drafts, for those who need them without loading either."""

from __future__ import annotations

from typing import Literal

DrafterName = Literal["auto", "model", "tree", "ngram", "none"]
"""What `--drafter` takes."""

CHUNK = 512
"""Tokens of one decode call while a prompt is read."""
