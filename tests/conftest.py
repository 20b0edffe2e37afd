"""Every test runs alone: its own SPECDEC_HOME, no color switches from outside, the same examples each time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from specdec_cli import selfcheck, trial

# Where the tests run as a background job SIGINT is ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

COLOR_VARIABLES = (
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "PY_COLORS",
    "COLORTERM",
    "COLUMNS",
    "LINES",
)

settings.register_profile(
    "specdec",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# For tests that are expected to fail, where nobody reads the smallest example.
settings.register_profile("mutants", settings.get_profile("specdec"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "specdec"))


@pytest.fixture(scope="session")
def _known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, _known: Path) -> None:
    # A directory of its own: tests look into their tmp_path, which must stay empty.
    home = tmp_path_factory.mktemp("specdec-home")
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    for name in COLOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # A child process tries this llama.cpp, and each model file: once for all tests that have no home of their own.
    for module, name in ((selfcheck, "_cache_file"), (trial, "_file")):
        monkeypatch.setattr(module, name, _shared(home, _known, getattr(module, name)))


def _shared(home: Path, known: Path, own: Callable[[], Path]) -> Callable[[], Path]:
    return lambda: known / own().name if os.environ.get("SPECDEC_HOME") == str(home) else own()
