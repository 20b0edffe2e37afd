"""What `--help`, completion and every other start cost, and the table by which commands are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from specdec_cli.cli.app import COMMANDS, app, invoke
from specdec_cli.cli.command import first_line

ROOT = Path(__file__).parents[1]
HEAVY = {"llama_cpp", "numpy", "huggingface_hub", "jinja2", "psutil", "rich", "pydantic", "tomlkit", "platformdirs"}


def loaded_by(arguments: list[str], environment: dict[str, str] | None = None) -> set[str]:
    """Modules in a process that ran one command line."""
    script = (
        "import sys\nfrom specdec_cli.__main__ import main\ncode = None\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "sys.stderr.write(f'{code} ' + ' '.join(sys.modules))"
    )
    command = [sys.executable, "-c", script, *arguments]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    code, *names = done.stderr.split()
    assert code == "0", done.stderr
    return set(names)


def completion(line: str, shell: str = "bash") -> dict[str, str]:
    words = line.split(" ")
    return {
        "_SPECDEC_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
    }


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "-h"], ["ngram", "build", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_by(arguments)
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_the_list_of_pairs_loads_nothing_for_downloads_or_answers(tmp_path: Path) -> None:
    loaded = loaded_by(["models", "--json"], {"SPECDEC_HOME": str(tmp_path)})
    assert {"specdec_cli.stored", "specdec_cli.memory"} <= loaded
    assert not loaded & (HEAVY - {"psutil", "platformdirs", "huggingface_hub"})
    unneeded = {"download", "hub", "hub_files", "sources", "config", "cli.flag_groups"}
    assert not loaded & {f"specdec_cli.{name}" for name in unneeded}


@pytest.mark.parametrize(
    "line", ["specdec ru", "specdec run --dr", "specdec run --drafter ", "specdec run -t 1 --drafter n"]
)
def test_completion_loads_nothing_heavy(line: str) -> None:
    assert not loaded_by([], completion(line)) & HEAVY


def test_help_takes_little_more_than_typer() -> None:
    """Relative, and the best of some: the machine may be slow, and busy."""

    def best_s(*arguments: str) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=-3, check=True
            )
            times.append(time.perf_counter() - began)
        return min(times)

    bare_s = best_s("-c", "import typer")
    assert best_s("-m", "specdec_cli", "--help") < 2 * bare_s + 0.1
    assert best_s("-m", "specdec_cli", "run", "--help") < 3 * bare_s + 0.1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_commands_say(name: str) -> None:
    assert COMMANDS[name].line == first_line(COMMANDS[name].load(name))


def test_completion_proposes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed(line: str) -> list[str]:
        for name, value in completion(line).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            invoke([])
        return capsys.readouterr().out.split()

    assert proposed("specdec r") == ["run"]
    assert set(proposed("specdec ")) == set(COMMANDS)
    assert proposed("specdec run --draft-c") == ["--draft-confidence"]
    assert proposed("specdec run --drafter n") == ["ngram", "none"]
    assert proposed("specdec run -t x --drafter m") == ["model"]
    assert proposed("specdec ngram b") == ["build"]
    assert proposed("specdec config set temp") == ["temperature"]
    assert proposed("specdec config show draft-c") == ["draft-confidence"]


def test_help_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +run +Answer one prompt", out, flags=re.MULTILINE)
    assert "Exit codes: 0 done" in out
    assert "\x1b" not in out


def test_help_keeps_the_panels(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--help"]) == 0
    out = capsys.readouterr().out
    headings = re.findall(r"^(\w+):$", out, flags=re.MULTILINE)
    assert headings == ["Arguments", "Options", "Model", "Drafting", "Sampling", "Structure", "Output"]
    assert out.index("Drafting:") < out.index("--drafter") < out.index("Sampling:") < out.index("--top-k")


def test_values_are_still_converted_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    command = typer.main.get_command(app).commands["run"]
    parameters = command.make_context("run", ["--ctx", "64", "-f", "a", "-t", "1", "hello"]).params
    assert (parameters["ctx"], parameters["file"], parameters["temperature"]) == (64, [Path("a")], 1.0)
    assert (parameters["prompt"], parameters["top_k"], parameters["target"]) == ("hello", 40, None)
    for arguments in (["--ctx", "x"], ["--drafter", "y"], ["-t", ""]):
        assert invoke(["run", *arguments, "hello"]) == 2
        assert arguments[0] in capsys.readouterr().err
    assert invoke(["ngram", "build"]) == 2
    assert "Missing argument" in capsys.readouterr().err
