"""The documents say what the program does."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec_cli
from specdec_cli.cli.app import RUN_EXAMPLES, invoke
from specdec_cli.errors import ExitCode
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def examples(text: str) -> Iterator[list[str]]:
    """Arguments of every `specdec …` in some lines of shell."""
    for line in text.splitlines():
        for part in re.split(r"\s\|\s", line):
            words = shlex.split(part, comments=True)
            if words and words[0] == "specdec":
                yield words[1:]


EXAMPLES = [
    *examples(RUN_EXAMPLES),
    *(words for block in blocks(README, "sh") + blocks(COMMAND_PAGE, "sh") for words in examples(block)),
]


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def opened(_cls: type[Session], *arguments: object) -> Session:
        options = arguments[-1] if isinstance(arguments[-1], SessionOptions) else SessionOptions()
        return Session(FakeModel(0, string.printable), FakeModel(1, string.printable), options)

    monkeypatch.setattr(Session, "open", classmethod(opened))
    monkeypatch.setattr("specdec_cli.choice.fetch", lambda spec, **_kwargs: Path(spec.file))
    monkeypatch.setattr("specdec_cli.cli.prompt._is_terminal", lambda: True)
    monkeypatch.setattr("specdec_cli.cli.prompt._read_stdin", lambda *, wanted: "")
    monkeypatch.setenv("SPECDEC_MAX_TOKENS", "20")
    monkeypatch.chdir(tmp_path)
    models = [f"{name}.gguf" for name in ("big", "small", "qwen", "smollm2")]
    for name in ("notes.txt", "prompt.txt", *models):
        Path(name).write_text("abc")


def test_command_page_is_up_to_date() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "docs" / "make_cli.py", "--check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), f"run `python docs/make_cli.py`\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", [(), ("run",), ("chat",), ("pull",)])
def test_command_page_has_what_help_shows(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert invoke([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    section = COMMAND_PAGE.split(f"## {' '.join(['specdec', *command])}\n")[1].split("\n## ")[0]
    names = {name for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", shown) if "completion" not in name}
    assert names <= set(re.findall(r"--[a-z][\w-]+", section))
    assert set(re.findall(r"SPECDEC_\w+", shown)) == set(re.findall(r"SPECDEC_\w+", section))


def test_examples_were_found() -> None:
    assert len(EXAMPLES) >= 10


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("arguments", [words for words in EXAMPLES if words[0] == "run"], ids=" ".join)
def test_examples_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.usefixtures("_fakes")
def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [source] = blocks(README, "python")
    exec(compile(source, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 1
    used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert {"load", "SamplingParams"} <= used & set(specdec_cli.__all__)


def test_exit_codes() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert table == {int(code) for code in ExitCode}
    [line] = [line for line in COMMAND_PAGE.splitlines() if line.startswith("Exit codes:")]
    assert {int(code) for code in re.findall(r"(\d+) [a-z]", line)} == table


def test_options_in_readme_exist() -> None:
    known = set(re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", COMMAND_PAGE)) | {"-c"}
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    used = {word.split()[0] for word in re.findall(r"`(-{1,2}[a-zA-Z][^`]*)`", prose)}
    assert used <= known, used - known


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_nothing_is_left_to_fill_in() -> None:
    assert "PLACEHOLDER" not in README


@pytest.mark.usefixtures("_fakes")
def test_json_page_documents_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "-t", "0", "--compare", "--json", "-n", "20", "abc"]) == 0
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    fields = {
        section.split("\n")[0]: set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
        for section in page.split("\n## ")[1:]
    }
    for line in capsys.readouterr().out.splitlines():
        record = json.loads(line)
        known = fields[record["type"]] | (fields["Statistics"] if record["type"] == "end" else set())
        assert set(record) == known, record["type"]
