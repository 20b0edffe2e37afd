"""`specdec pull` and the automatic pull: what is printed where, and the progress displays."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hub_server import Hub, serve
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from specdec_cli.choice import choose_models
from specdec_cli.cli import pull as pull_module
from specdec_cli.cli.pull import pull, pull_models
from specdec_cli.errors import DownloadError, ModelMissingError
from specdec_cli.registry import Registry, merge_layers, read_layer
from specdec_cli.render import progress as progress_module
from specdec_cli.render.progress import BarProgress, LineProgress, SilentProgress, make_progress

TARGET, DRAFT = b"GGUF target" * 100, b"GGUF draft" * 100


def registry_text() -> str:
    models = "".join(
        f"""
        [models.{name}]
        sources = ["hf:o/r/{name}.gguf"]
        file = "{name}.gguf"
        size = {len(content)}
        sha256 = "{hashlib.sha256(content).hexdigest()}"
        """
        for name, content in (("t", TARGET), ("d", DRAFT))
    )
    return f'default = "p"\n[pairs.p]\ntarget = "t"\ndraft = "d"\n{textwrap.dedent(models)}'


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    for variable in ("HF_HUB_OFFLINE", "SPECDEC_NO_PROGRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    made = merge_layers([read_layer(registry_text(), "test.toml")])
    monkeypatch.setattr("specdec_cli.choice.load_registry", lambda: made)
    return made


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve({"o/r/t.gguf": TARGET, "o/r/d.gguf": DRAFT}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(pull)
    return CliRunner().invoke(app, list(arguments))


def test_paths_on_stdout_and_the_rest_on_stderr(hub: Hub) -> None:
    result = run("p")
    assert result.exit_code == 0
    target, draft = map(Path, result.stdout.splitlines())
    assert (target.read_bytes(), draft.read_bytes()) == (TARGET, DRAFT)
    assert result.stderr.splitlines() == ["t: 1.1 kB from hf:o/r/t.gguf", "d: 1.0 kB from hf:o/r/d.gguf"]


def test_second_pull_says_already_there_at_once(hub: Hub) -> None:
    first = run()
    num_requests = len(hub.requests)
    began = time.monotonic()
    second = run("p")
    assert time.monotonic() - began < 0.5
    assert (second.exit_code, second.stdout, second.stderr) == (0, first.stdout, "p: already there\n")
    assert len(hub.requests) == num_requests


def test_json_is_one_document(hub: Hub) -> None:
    document = json.loads(run("--json", "-q").stdout)
    assert (document["schema"], document["pair"]) == (1, "p")
    assert document["target"]["size"] == len(TARGET)
    assert document["draft"]["sha256"] == hashlib.sha256(DRAFT).hexdigest()
    assert Path(document["draft"]["path"]).read_bytes() == DRAFT


def test_quiet_leaves_stderr_empty(hub: Hub) -> None:
    assert run("-q").stderr == ""
    assert run("-q").stderr == ""


def test_only_the_missing_file_is_fetched(hub: Hub, registry: Registry) -> None:
    choice = choose_models("p", None, None)
    first = pull_models(choice, quiet=True)
    first[1][0].unlink()
    hub.requests.clear()
    assert pull_models(choice, quiet=True) == first
    assert {path for _, path, _ in hub.requests if "t.gguf" in path} == set()


def test_offline_and_unknown_pair() -> None:
    with pytest.raises(ModelMissingError) as caught:
        pull_models(choose_models("p", None, None), offline=True)
    assert "specdec pull p" in caught.value.hint
    assert isinstance(run("--offline").exception, ModelMissingError)
    with pytest.raises(ModelMissingError, match="no pair is called `pp`; did you mean `p`"):
        choose_models("pp", None, None)


def test_failure_is_a_download_error(hub: Hub) -> None:
    hub.status = 500
    assert isinstance(run().exception, DownloadError)


# --- progress displays ---


class FakeStderr:
    def __init__(self, is_terminal: bool) -> None:
        self.text, self.is_terminal = "", is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.is_terminal


def test_display_fits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", FakeStderr(True))
    assert isinstance(make_progress(), BarProgress)
    assert isinstance(make_progress(quiet=True), SilentProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(), LineProgress)
    monkeypatch.setattr(sys, "stderr", FakeStderr(False))
    assert isinstance(make_progress(), LineProgress)
    monkeypatch.setenv("SPECDEC_NO_PROGRESS", "1")
    assert isinstance(make_progress(), SilentProgress)


def test_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, now_s = FakeStderr(False), 0.0
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now_s)
    progress = LineProgress()
    progress.start("m", 1_000_000_000, "hf:o/r/f")
    for _ in range(1000):
        now_s += 0.06
        progress.advance(1_000_000)
    lines = stderr.text.splitlines()
    assert lines[0] == "m: 1.0 GB from hf:o/r/f"
    assert lines[1] == "m: 100.0 MB (10 %), 16.7 MB/s"
    assert len(lines) == 11


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    script = tmp_path / "bar.py"
    script.write_text(
        "from specdec_cli.render.progress import make_progress\n"
        "bar = make_progress()\n"
        "bar.start('m', 1000, 'hf:o/r/f')\n"
        "bar.advance(500)\n"
        "bar.note('a [bold]note[/bold]')\n"
        "bar.finish()\n"
    )
    root = str(Path(pull_module.__file__).parents[2])
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": root}
    shown = pexpect.run(f"{sys.executable} {script}", env=environment, encoding="utf-8")
    assert shown.startswith("m: 1.0 kB from hf:o/r/f\r\n")
    assert "0.5/1.0 kB" in shown
    assert "a [bold]note[/bold]\r\n" in shown


def test_start_is_light() -> None:
    heavy = ("huggingface_hub", "numpy", "llama_cpp", "rich.progress")
    code = f"import sys, specdec_cli.cli.pull; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
