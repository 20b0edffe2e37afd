"""Sizes that the backend works in, for those who reckon with them without loading it."""

from __future__ import annotations

CHUNK = 512
"""Tokens of one decode call while a prompt is read."""
