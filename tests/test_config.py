"""Defaults in the user's config: what may stand there, what they do, what they yield to, how they are shown and set."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from specdec_cli import config, paths
from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.app import COMMANDS, app, invoke
from specdec_cli.cli.defaults import known_options
from specdec_cli.config import load_pair_settings, save_pair_settings
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.render.config import Value, print_config
from specdec_cli.types import Drafting

ROOT = Path(__file__).parents[1]
DEFAULT_PAIR = "qwen2.5-coder-1.5b"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECDEC_") and name != "SPECDEC_HOME"]:
        monkeypatch.delenv(name)


def file() -> Path:
    return paths.config_dir() / "config.toml"


def write(text: str) -> Path:
    file().parent.mkdir(parents=True, exist_ok=True)
    file().write_text(text, encoding="utf-8")
    return file()


def context(*arguments: str, command: str = "run") -> Any:
    """A command line, parsed."""
    return typer.main.get_command(app).commands[command].make_context(command, list(arguments))


def parameters(*arguments: str, command: str = "run") -> dict[str, Any]:
    return dict(context(*arguments, command=command).params)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr("specdec_cli.cli.prompt._read_stdin", lambda *, wanted: "")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke(list(arguments))
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


def drafting(*arguments: str) -> Drafting:
    """What `specdec run` drafts with."""
    made = context(*arguments)
    flags = groups.DraftingFlags(**{name: made.params[name] for name in groups.DraftingFlags.__dataclass_fields__})
    return flags.drafting(made.params["pair"] or DEFAULT_PAIR, None, groups.given(made, flags))


# --- what may stand there --------------------------------------------------------------------------------------------

EVERY_KIND = """
temperature = 0            # a whole number where a float is wanted
top_k = 5                  # as in [pairs]
"min-p" = 0.25
ctx = 4096
draft-tokens = 7
kv-type = "q8_0"
tuned = false
quiet = true
stop = ["a", "b"]
logit-bias = "15043=-2.5"  # one of several
target = "~/big.gguf"
color = "never"
json = true

[pairs."qwen2.5-coder-14b+0.5b"]
draft_tokens = 3
"""


def test_every_kind_of_value() -> None:
    write(EVERY_KIND)
    found = parameters("hello")
    assert {name: found[name] for name in ("temperature", "top_k", "min_p", "ctx", "kv_type", "max_tokens")} == {
        "temperature": 0.0, "top_k": 5, "min_p": 0.25, "ctx": 4096, "kv_type": "q8_0", "max_tokens": 2048,
    }  # fmt: skip
    assert (found["draft_tokens"], found["tuned"], found["quiet"], found["as_json"]) == ("7", False, True, True)
    assert (found["stop"], found["logit_bias"]) == (["a", "b"], ["15043=-2.5"])
    assert (found["target"], found["color"]) == (str(Path.home() / "big.gguf"), "never")


def test_every_option_of_run_can_have_a_default() -> None:
    options = {name for group in (groups.ModelFlags, groups.DraftingFlags, groups.SamplingFlags, groups.StructureFlags,
                                  groups.OutputFlags) for name in group.__dataclass_fields__}  # fmt: skip
    assert {option.name for option in known_options().values()} == options | {"system", "raw", "max_tokens", "compare"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ntemprature = 1", "config.toml:1: unknown key `x`"),
        ("\n\ntemprature = 1", "config.toml:3: unknown key `temprature`; did you mean `temperature`?"),
        ("top-k = 1\ntop_k = 2", "config.toml:2: `top-k` is set twice"),
        ("ctx = 1\ntemperature = 'hot'", "config.toml:2: `temperature` cannot be `hot`: "),
        ("top-k = 1.5", "config.toml:1: `top-k` cannot be `1.5`: "),
        ("top-k = true", "config.toml:1: `top-k` cannot be `true`: it takes a value, not true or false"),
        ("quiet = 1", "config.toml:1: `quiet` cannot be `1`: it must be true or false"),
        ("ctx = [1, 2]", "config.toml:1: `ctx` cannot be `[1, 2]`: it takes one value"),
        ("drafter = 'modle'", "config.toml:1: `drafter` cannot be `modle`: 'modle' is not one of 'auto'"),
        ("ctx = 1\nctx = 2", "is not valid TOML"),
        ("ctx 1", "is not valid TOML: Expected"),
        ("[run]\nctx = 1", "config.toml:1: unknown key `run`"),
        ("[pairs.x]\ndrafter = 'none'\ndraft_tokens = 99", 'config.toml:3: [pairs."x"]: `draft_tokens` must be from 0'),
        ("[pairs.x]\ndraft_token = 9", 'config.toml:2: [pairs."x"]: unknown key `draft_token`; did you mean'),
        ("ctx = 9\npairs = 1", "config.toml:2: `pairs` must be tables"),
        ("temp = 1\ntemperature = 1", "config.toml:2: `temperature` is set twice"),
        ("stop = [\n 'a',\n", "is not valid TOML"),
        (f"stop = {'[' * 5000}", "is nested too deeply"),
    ],
)
def test_mistakes_are_named_with_their_line(call: Call, text: str, said: str) -> None:
    write(text)
    for arguments in (["run", "hello"], ["config", "show"], ["bench", "--report", "x"]):
        code, out, err = call(*arguments)
        assert (code, out) == (2, "")
        assert said in err.splitlines()[0]
        assert "Hint: " in err
    assert call("config", "path") == (0, f"{file()}\n", "")
    assert call("run", "--help")[0] == 0


def test_a_mark_in_front_of_the_text() -> None:
    write("").write_bytes(b"\xef\xbb\xbfctx = 9\n")
    assert parameters("hello")["ctx"] == 9


def test_other_names_of_options(call: Call) -> None:
    write("temp = 0.5\n")
    assert parameters("hello")["temperature"] == 0.5
    assert call("config", "set", "temperature", "0.25")[0] == 0
    assert file().read_text() == "temp = 0.25\n"
    assert call("config", "set", "temp", "--unset")[0] == 0
    assert file().read_text() == ""


def test_a_file_that_is_no_text(call: Call) -> None:
    write("").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in call("run", "hello")[2]
    file().unlink()
    file().mkdir()
    assert call("run", "hello")[0] == 2
    assert call("config", "set", "ctx", "5")[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ntemperature = -1", "temperature must be"),
        ("\nmax-tokens = 0", "--max-tokens must be 1 or more"),
        ("\ndraft-tokens = 65", "draft-tokens must be"),
        ("\ndraft-tokens = 'many'", "--draft-tokens must be a number or auto"),
        ("\ngrammar = 'nowhere.gbnf'", "cannot read `nowhere.gbnf`"),
    ],
)
def test_a_refused_value_is_traced(call: Call, text: str, message: str) -> None:
    write(text)
    code, _, err = call("run", "--target", "nowhere.gguf", "hello")
    assert code == 2
    assert message in err.splitlines()[0]
    assert f"{file()}:2" in err or "grammar" in text
    code, _, err = call("run", "--target", "nowhere.gguf", "-t", "-2", "hello")
    assert "config.toml" not in err or "temperature" not in text


def test_a_refused_variable_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TOP_P", "2")
    assert "Hint: it is set by SPECDEC_TOP_P\n" in call("run", "--target", "nowhere.gguf", "hello")[2]


# --- who wins --------------------------------------------------------------------------------------------------------


def test_flag_then_environment_then_config(monkeypatch: pytest.MonkeyPatch) -> None:
    write("temperature = 0.25\n")
    assert parameters("hello")["temperature"] == 0.25
    monkeypatch.setenv("SPECDEC_TEMPERATURE", "0.5")
    assert parameters("hello")["temperature"] == 0.5
    assert parameters("-t", "0.75", "hello")["temperature"] == 0.75
    file().unlink()
    assert parameters("hello")["temperature"] == 0.5


@pytest.mark.parametrize("command", ["run", "bench", "check"])
def test_every_command_with_these_flags_takes_them(command: str) -> None:
    write("temperature = 0.25\nctx = 99\ncolor = 'never'\npair = 'x'\ndraft-tokens = 'auto'\ncompare = true\n")
    found = parameters(command=command)
    assert (found["temperature"], found["ctx"], found["color"]) == (0.25, 99, "never")
    # An option of the same name that is another one.
    assert found.get("draft_tokens") == (5 if command == "check" else "auto")
    assert found.get("compare") in ((True,) if command == "run" else (None,))


def test_other_commands_take_what_they_share() -> None:
    write("pair = 'x'\noffline = true\nngram-cache = '/n'\njson = true\n")
    assert (parameters(command="pull")["pair"], parameters(command="pull")["offline"]) == ("x", True)
    assert parameters(command="pull")["as_json"] is False
    assert parameters(command="tune")["name"] == "x"
    build = typer.main.get_command(app).commands["ngram"].commands["build"]
    assert build.make_context("build", ["a"]).params["ngram_cache"] == Path("/n")


class TestModels:
    """A pair, a target and its draft are one choice."""

    def chosen(self, *arguments: str, command: str = "run") -> tuple[object, ...]:
        found = parameters(*arguments, command=command)
        return tuple(str(found[name]) if found[name] else None for name in ("pair", "target", "draft"))

    def test_a_named_pair_replaces_files(self) -> None:
        write("target = '/t'\ndraft = '/d'\n")
        assert self.chosen() == (None, "/t", "/d")
        assert self.chosen("-m", "x") == ("x", None, None)
        assert self.chosen("y", command="bench") == (None, None, None)
        assert self.chosen("-d", "/e") == (None, "/t", "/e")

    def test_a_named_target_replaces_the_pair(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write("pair = 'x'\n")
        assert self.chosen("--target", "/t") == (None, "/t", None)
        assert self.chosen("-d", "/e") == ("x", None, "/e")
        monkeypatch.setenv("SPECDEC_TARGET", "/v")
        assert self.chosen() == (None, "/v", None)
        assert self.chosen("-m", "y") == ("y", None, None)

    def test_the_argument_wins_over_a_pair_from_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_PAIR", "x")
        found = parameters("y", command="bench")
        assert (found["name"], found["pair"]) == ("y", None)
        found = parameters(command="bench")
        assert opt.one_pair(found["name"], found["pair"]) == "x"


@pytest.mark.parametrize(
    ("text", "arguments", "gone"),
    [
        ("json-object = true", ("--json-schema", "{}"), "json_object"),
        ("ignore-eos = true", ("--json-object",), "ignore_eos"),
        ("grammar = 'g'", ("--ignore-eos",), "grammar"),
        ("system = 's'", ("--raw",), "system"),
        ("raw = true", ("--system", "s"), "raw"),
        ("no-draft = true", ("-k", "3"), "no_draft"),
    ],
)
def test_what_excludes_a_flag_yields_to_it(text: str, arguments: tuple[str, ...], gone: str) -> None:
    write(text)
    assert parameters("hello")[gone]
    assert not parameters(*arguments, "hello")[gone]


class TestDrafting:
    def test_config_then_pair(self) -> None:
        write("drafter = 'ngram'\ndraft-tokens = 9\ndraft-confidence = 0.75\n")
        assert drafting() == Drafting("ngram", 9, 0.75)
        save_pair_settings(DEFAULT_PAIR, Drafting("model", 2, 0.25))
        assert drafting() == Drafting("model", 2, 0.25)
        assert drafting("-m", "y") == Drafting("ngram", 9, 0.75)
        assert drafting("-k", "auto") == Drafting("model", None, 0.25)
        assert drafting("--drafter", "auto") == Drafting("auto", 2, 0.25)

    def test_environment_wins_over_what_was_saved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        save_pair_settings(DEFAULT_PAIR, Drafting("model", 2, 0.25))
        monkeypatch.setenv("SPECDEC_DRAFT_TOKENS", "4")
        assert drafting() == Drafting("model", 4, 0.25)

    @pytest.mark.parametrize("text", ["drafter = 'none'", "draft-tokens = 0", "no-draft = true"])
    def test_off_by_default_and_on_by_request(self, text: str) -> None:
        write(text)
        assert drafting().is_off
        assert not drafting("-k", "auto", "--drafter", "auto").is_off
        assert not drafting(*(["--drafter", "model"] if text.startswith("draft-tokens") else ["-k", "3"])).is_off
        assert drafting("--no-draft", "-k", "3").is_off
        assert drafting("-k", "0").is_off

    def test_saved_for_the_pair_is_more_particular_than_off(self) -> None:
        write("drafter = 'none'\n")
        save_pair_settings(DEFAULT_PAIR, Drafting("model", 2, 0.25))
        assert drafting() == Drafting("model", 2, 0.25)


def test_sampling_settings_of_the_config_are_chosen_ones() -> None:
    write("top-k = 7\n")
    made = context("hello")
    assert groups.given(made, groups.SamplingFlags()) == {"top_k"}


# --- show ------------------------------------------------------------------------------------------------------------


def shown(call: Call, *names: str) -> dict[str, tuple[Any, str, str]]:
    code, out, err = call("config", "show", *names, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["schema"], document["path"]) == (1, str(file()))
    return {value["name"]: (value["value"], value["origin"], value["where"]) for value in document["values"]}


class TestShow:
    def test_origins(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_CTX", "77")
        write("# mine\ntemperature = 0.25\nctx = 5\nstop = [\n 'a',\n]\n")
        save_pair_settings(DEFAULT_PAIR, Drafting("ngram", 3, 0.25))
        values = shown(call)
        assert values["ctx"] == (77, "environment", "SPECDEC_CTX")
        assert values["temperature"] == (0.25, "config", f"{file()}:2")
        assert values["stop"] == (["a"], "config", f"{file()}:6")
        assert values["drafter"][:2] == ("ngram", "config")
        assert re.fullmatch(rf"{file()}:\d+, for {DEFAULT_PAIR}", values["drafter"][2])
        assert values["top-k"] == (40, "default", "")
        assert values["threads"] == (None, "default", "")
        assert set(values) == set(known_options())

    def test_pair_entry(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        from specdec_cli import registry

        text = registry._shipped_text().replace(
            f'[pairs."{DEFAULT_PAIR}"]', f'[pairs."{DEFAULT_PAIR}"]\ndraft_tokens = 6'
        )
        shipped = registry.read_layer(text, registry.SHIPPED_FILE)
        monkeypatch.setattr(registry, "_shipped_layer", lambda: shipped)
        assert shown(call, "draft-tokens") == {"draft-tokens": (6, "pair", f"{DEFAULT_PAIR} in models.toml")}
        write("draft-tokens = 4\n")
        assert shown(call, "draft-tokens")["draft-tokens"][:2] == (4, "config")

    def test_table(self, call: Call) -> None:
        write("temperature = 0.25\n")
        code, out, err = call("config", "show")
        assert (code, err) == (0, "")
        assert re.search(r"^temperature +0\.25 +config\.toml:1 *$", out, flags=re.MULTILINE)
        assert re.search(r"^threads +\(physical cores\) +default *$", out, flags=re.MULTILINE)
        assert "\x1b" not in out
        assert "\x1b" in call("config", "show", "--color", "always")[1]

    def test_a_pipe_has_no_width(self, call: Call) -> None:
        write(f"system = '{'word ' * 60}end'\n")
        out = call("config", "show")[1]
        assert len(out.splitlines()) == len(known_options()) + 2
        assert all(line == line.rstrip() for line in out.splitlines())
        assert f"{'word ' * 60}end" in out

    def test_a_terminal_folds(self) -> None:
        stream = Terminal()
        print_config([Value("system", "word " * 60, "default")], file(), stream)
        assert len(stream.getvalue().splitlines()) > 5

    def test_no_secrets(self, call: Call) -> None:
        address = "url:http://user:password@host.example/x.gguf?token=signature"
        texts = [call("config", "set", "target", address), call("config", "show", "target"), call("config", "show")]
        texts += [call("config", "show", "--json"), call("config", "set", "target", f"{address}#sha256=1")]
        for _, out, err in texts:
            assert "host.example" in out + err
            assert "password" not in out + err
            assert "signature" not in out + err
        assert address in file().read_text()

    def test_what_run_refuses_is_refused(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_DRAFT_TOKENS", "abc")
        code, out, err = call("config", "show")
        assert (code, out) == (2, "")
        assert "draft-tokens must be a number or auto" in err
        assert "Hint: it is set by SPECDEC_DRAFT_TOKENS\n" in err

    def test_settings_of_an_unknown_pair(self, call: Call) -> None:
        write("ctx = 9\n\n[pairs.nosuch]\ndraft_tokens = 3\n")
        code, _, err = call("config", "show")
        assert (code, err) == (0, f"Warning: {file()}:3: no pair is called `nosuch`\n")

    @pytest.mark.parametrize("name", ["temperature", "temp"])
    def test_one(self, call: Call, name: str) -> None:
        assert list(shown(call, name)) == ["temperature"]

    def test_unknown(self, call: Call) -> None:
        code, out, err = call("config", "show", "temprature")
        assert (code, out) == (2, "")
        assert "there is no option `temprature`; did you mean `temperature`?" in err

    def test_fields_are_documented(self, call: Call) -> None:
        page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
        section = page.split("## specdec config show --json\n")[1].split("\n## ")[0]
        document = json.loads(call("config", "show", "ctx", "--json")[1])
        assert set(document) | set(document["values"][0]) == set(
            re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
        )

    def test_values_are_those_of_run(self, call: Call) -> None:
        write(EVERY_KIND)
        values, found = shown(call), parameters("hello")
        for name, option in known_options().items():
            value = values[name][0]
            assert value == (found[option.name] or None) or str(value) == str(found[option.name]), name


# --- set -------------------------------------------------------------------------------------------------------------


class TestSet:
    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (("temperature", "0.2"), "temperature = 0.2"),
            (("--temp", "1"), "temperature = 1.0"),
            (("top_k", "7"), "top-k = 7"),
            (("repeat-last-n", "-1"), "repeat-last-n = -1"),
            (("draft-tokens", "5"), "draft-tokens = 5"),
            (("draft-tokens", "auto"), 'draft-tokens = "auto"'),
            (("quiet", "yes"), "quiet = true"),
            (("tuned", "false"), "tuned = false"),
            (("stop", "a", "\n"), 'stop = ["a", "\\n"]'),
            (("system", 'Say "ü"'), 'system = "Say \\"ü\\""'),
            (("pair", DEFAULT_PAIR), f'pair = "{DEFAULT_PAIR}"'),
            (("drafter", "ngram"), 'drafter = "ngram"'),
            (("json-schema", '{"type": "object"}'), 'json-schema = "{\\"type\\": \\"object\\"}"'),
        ],
    )
    def test_writes_one_line_that_counts(self, call: Call, arguments: tuple[str, ...], line: str) -> None:
        code, out, err = call("config", "set", *arguments)
        assert (code, out) == (0, ""), err
        assert "Warning" not in err
        assert file().read_text(encoding="utf-8") == f"{line}\n"
        name = line.partition(" ")[0]
        assert shown(call, name)[name][1] == "config"

    def test_paths_become_absolute(self, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        assert call("config", "set", "target", "t.gguf")[0] == 0
        assert parameters("hello")["target"] == str(tmp_path / "t.gguf")

    @pytest.mark.parametrize(
        ("arguments", "code", "said"),
        [
            (("temperature", "-1"), 2, "temperature must be"),
            (("temperature", "hot"), 2, "`temperature` cannot be `hot`"),
            (("ctx", "0"), 2, "--ctx must be"),
            (("threads", "1000"), 2, "--threads must be"),
            (("kv-type", "q9"), 2, "--kv-type must be"),
            (("draft-tokens", "65"), 2, "draft-tokens must be"),
            (("max-tokens", "0"), 2, "--max-tokens must be"),
            (("drafter", "modle"), 2, "'modle' is not one of"),
            (("logit-bias", "x"), 2, "--logit-bias takes TOKEN=BIAS"),
            (("json-schema", "{"), 2, "not JSON"),
            (("stop", ""), 2, "--stop must not be empty"),
            (("pair", "qwen"), 3, "no pair is called `qwen`"),
            (("temprature", "1"), 2, "did you mean `temperature`?"),
            (("file", "x"), 2, "there is no option `file`"),
            (("ctx", "1", "2"), 2, "`ctx` takes one value"),
            (("ctx",), 2, "there is no value for `ctx`"),
            (("ctx", "--unset"), 2, "`ctx` is not set"),
            (("ctx", "5", "--unset"), 2, "--unset takes no value"),
            ((), 2, "NAME"),
        ],
    )
    def test_refuses_what_the_flag_refuses(self, call: Call, arguments: tuple[str, ...], code: int, said: str) -> None:
        assert call("config", "set", *arguments)[0] == code
        assert said in call("config", "set", *arguments)[2]
        assert not file().exists()

    def test_keeps_everything_else(self, call: Call) -> None:
        text = '# mine\ntop_k = 7  # few\n\n# saved\n[pairs."x"]\ndrafter = "model"  # good\n'
        write(text)
        call("config", "set", "temperature", "0.5")
        call("config", "set", "top-k", "8")
        changed = text.replace("top_k = 7  # few\n", "top_k = 8  # few\ntemperature = 0.5\n")
        assert file().read_text() == changed
        call("config", "set", "temperature", "--unset")
        assert file().read_text() == changed.replace("temperature = 0.5\n", "")
        assert load_pair_settings("x").drafter == "model"

    @pytest.mark.parametrize("text", ["", "# only words", "ctx = 1", "[pairs.x]\ndraft_tokens = 1", "\n\n"])
    def test_into_any_file(self, call: Call, text: str) -> None:
        write(text)
        assert call("config", "set", "seed", "5")[0] == 0
        assert parameters("hello")["seed"] == 5
        assert set(text.split()) <= set(file().read_text().split())

    def test_repairs(self, call: Call) -> None:
        write("temprature = 1\ntemperature = 'hot'\n")
        code, _, err = call("config", "set", "temperature", "0.5")
        assert code == 0
        assert "Warning: " in err
        assert "unknown key `temprature`" in err
        assert call("config", "set", "temprature", "--unset")[0] == 0
        assert file().read_text() == "temperature = 0.5\n"

    def test_says_when_something_else_wins(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPECDEC_SEED", "1")
        assert "Warning: SPECDEC_SEED is set, and wins over it" in call("config", "set", "seed", "5")[2]

    def test_a_broken_file_stays(self, call: Call) -> None:
        write("ctx 1")
        code, _, err = call("config", "set", "seed", "5")
        assert code == 2
        assert f"{file()} is not valid TOML" in err
        assert file().read_text() == "ctx 1"

    def test_a_link_stays_one(self, call: Call, tmp_path: Path) -> None:
        real = tmp_path / "dotfiles.toml"
        real.write_text("ctx = 5\n")
        file().parent.mkdir(parents=True)
        file().symlink_to(real)
        assert call("config", "set", "seed", "5")[0] == 0
        assert file().is_symlink()
        assert real.read_text() == "ctx = 5\nseed = 5\n"

    def test_the_reason_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SpecdecError, match=r"^cannot write `.*/file/config\.toml`: (File exists|Not a directory)$"):
            config._replace(tmp_path / "file" / "config.toml", "ctx = 9")

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="this user may write everywhere")
    def test_not_writable(self, call: Call) -> None:
        write("")
        file().parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            assert call("config", "set", "seed", "5")[0] == 1
        finally:
            file().parent.chmod(stat.S_IRWXU)


def test_a_configured_comparison_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    write("compare = true\n")
    assert opt.is_configured(context("hello"), "compare")
    assert not opt.is_configured(context("--compare", "hello"), "compare")


def test_neither_help_nor_completion_reads_the_file() -> None:
    write("ctx 1")
    variables = os.environ | {"PYTHONPATH": str(ROOT), "COMP_WORDS": "specdec run --dr", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "specdec_cli"]
    for arguments, environment in ((["run", "-h"], {}), ([], {"_SPECDEC_COMPLETE": "complete_bash"})):
        done = subprocess.run([*command, *arguments], env=variables | environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert "--drafter" in done.stdout


def test_names_of_commands_are_no_options() -> None:
    assert "pairs" not in known_options()
    assert COMMANDS["config"].module == "config"


def test_python_raises_what_the_command_line_shows() -> None:
    write("ctx 1")
    with pytest.raises(UsageError):
        load_pair_settings("x")
    with pytest.raises(SpecdecError):
        save_pair_settings("x", Drafting())
