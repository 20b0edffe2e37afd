"""Where specdec keeps its files: the platform's directories, or everything below `SPECDEC_HOME`.

Nothing here makes a directory; who writes into one makes it.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

HOME_VARIABLE = "SPECDEC_HOME"


def _home() -> Path | None:
    value = os.environ.get(HOME_VARIABLE)
    return Path(value).expanduser().absolute() if value else None


def cache_dir() -> Path:
    """Return the directory for what can be fetched again: model files and their parts."""
    home = _home()
    return home / "cache" if home else platformdirs.user_cache_path("specdec", appauthor=False)


def config_dir() -> Path:
    """Return the directory for what the user writes: `config.toml` and their own `models.toml`."""
    home = _home()
    return home / "config" if home else platformdirs.user_config_path("specdec", appauthor=False)


def state_dir() -> Path:
    """Return the directory for what specdec learns: histories and measurements."""
    home = _home()
    return home / "state" if home else platformdirs.user_state_path("specdec", appauthor=False)
