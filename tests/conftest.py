"""Every test runs alone: its own SPECDEC_HOME, no color switches from outside, the same examples each time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

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


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    # A directory of its own: tests look into their tmp_path, which must stay empty.
    monkeypatch.setenv("SPECDEC_HOME", str(_home(tmp_path_factory)))
    for name in COLOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _home(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("specdec-home")
