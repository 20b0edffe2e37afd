"""The registry file travels: in the wheel, in the sdist, and in a wheel made from the sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("build")
pytest.importorskip("hatchling")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `direct/*.whl`, and `sdist/*.tar.gz` with the wheel made from it."""
    folder = tmp_path_factory.mktemp("built")
    build = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    run(*build, "--wheel", "--outdir", folder / "direct", ROOT)
    run(*build, "--outdir", folder / "sdist", ROOT)
    return folder


def test_sdist_has_the_one_copy(built: Path) -> None:
    (archive,) = (built / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        (name,) = (name for name in tar.getnames() if name.endswith("models.toml"))
    assert name.count("/") == 1


@pytest.mark.parametrize("origin", ["direct", "sdist"])
def test_installed_wheel_loads_the_registry(built: Path, tmp_path: Path, origin: str) -> None:
    (wheel,) = (built / origin).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("specdec_cli/models.toml") == (ROOT / "models.toml").read_bytes()
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", site, wheel)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from specdec_cli import registry\n"
        f"assert registry.__file__.startswith({str(site)!r}), registry.__file__\n"
        "print(registry.load_registry().pair(None).target.file)"
    )
    assert run(sys.executable, "-I", "-c", code, cwd=elsewhere) == "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf\n"
