"""The sampling and structure flags through the command line: refused before a model is loaded, then at work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import CHATML, tiny

from specdec_cli.cli.app import invoke
from specdec_cli.session import Session
from specdec_cli.tiny import Vocabulary, byte_level_vocabulary

Run = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    plain = byte_level_vocabulary()
    metadata = dict(plain.metadata) | {"general.sampling.temp": 0.5, "general.sampling.top_k": 9}
    bad = dict(plain.metadata) | {"general.sampling.top_p": 1.5}
    tiny(folder, "set", vocabulary=Vocabulary(plain.tokens, plain.types, metadata, plain.favored), chat_template=CHATML)
    tiny(folder, "bad", vocabulary=Vocabulary(plain.tokens, plain.types, bad, plain.favored))
    tiny(folder, "target", chat_template=CHATML)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared-home")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, home: Path, tmp_path: Path
) -> Run:
    """`specdec run ARGUMENTS` on a terminal's side, in a folder of its own."""
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    monkeypatch.setenv("SPECDEC_THREADS", "1")
    monkeypatch.setattr("specdec_cli.cli.prompt._is_terminal", lambda: True)
    monkeypatch.setattr("specdec_cli.cli.prompt._read_stdin", lambda *, wanted: "")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, target: str = "target.gguf") -> SimpleNamespace:
        capsys.readouterr()
        code = invoke(["run", "--target", str(folder / target), "-n", "12", *arguments, "hello"])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(code), out=out, err=err)

    return call


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_arguments: object) -> Session:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Session, "open", opened)


BAD = [
    (("-t", "-1"), "temperature must be"),
    (("-t", "nan"), "temperature must be"),
    (("-t", "inf"), "temperature must be"),
    (("--top-p", "0"), "top-p must be"),
    (("--top-p", "1.5"), "top-p must be"),
    (("--top-p", "nan"), "top-p must be"),
    (("--top-k", "-1"), "top-k must be"),
    (("--min-p", "nan"), "min-p must be"),
    (("--typical-p", "0"), "typical-p must be"),
    (("--xtc-probability", "2"), "xtc-probability must be"),
    (("--dynatemp-range", "-1"), "dynatemp-range must be"),
    (("--mirostat", "3"), "mirostat must be"),
    (("--repeat-penalty", "1e9"), "repeat-penalty must be"),
    (("--presence-penalty", "inf"), "presence-penalty must be"),
    (("--frequency-penalty", "-1e9"), "frequency-penalty must be"),
    (("--dry-multiplier", "1e9"), "dry-multiplier must be"),
    (("--dry-allowed-length", "0"), "dry-allowed-length must be"),
    (("--dry-breaker", ""), "--dry-breaker must not be empty"),
    (("--stop", ""), "--stop must not be empty"),
    (("--stop", "a", "--stop", ""), "--stop must not be empty"),
    (("--logit-bias", "1=x"), "--logit-bias takes TOKEN=BIAS"),
    (("--json-schema", '{"not": {}}'), 'Unimplemented keys: ["not"]'),
    (("--json-schema", '{"type":'), "not JSON"),
    (("--json-schema", '{"type": "intger"}'), "Invalid type: intger"),
    (("--json-schema", "nowhere.json"), "cannot read `nowhere.json`"),
    (("--json-schema", ""), "cannot read"),
    (("--grammar", "nowhere.gbnf"), "cannot read `nowhere.gbnf`"),
    (("--grammar", "."), "Is a directory"),
    (("--json-object", "--json-schema", "{}"), "--json-schema and --json-object exclude each other"),
    (("--json-object", "--grammar", "x"), "--grammar and --json-object exclude each other"),
    (("--json-object", "--ignore-eos"), "--ignore-eos and --json-object exclude each other"),
    (("--sampler-defaults", "mine"), "'--sampler-defaults'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=str)
def test_refused_before_the_model_is_looked_for(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments, target="nowhere.gguf")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Error: ")
    assert message in done.err.splitlines()[0]
    assert "Hint: " in done.err


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("arguments", "target", "message"),
    [
        (("--logit-bias", "320=1"), "target.gguf", "there is no token 320; the model has 320"),
        (("--logit-bias", "99999999999999999999=1"), "target.gguf", "there is no token 99999999999999999999"),
        (("--logit-bias", " house=1"), "target.gguf", "' house' is no single token but"),
        (("--logit-bias", "1=nan"), "target.gguf", "logit-bias of token 1"),
        (("--logit-bias", "1=inf"), "target.gguf", "logit-bias of token 1"),
        (("--sampler-defaults", "model"), "bad.gguf", "top-p must be"),
    ],
)
def test_refused_with_the_vocabulary_alone(run: Run, arguments: tuple[str, ...], target: str, message: str) -> None:
    done = run(*arguments, target=target)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-3]


class TestSamplerDefaults:
    def test_shown_and_used(self, run: Run) -> None:
        done = run("--sampler-defaults", "model", "--seed", "1", target="set.gguf")
        assert done.code == 0
        assert "sampling settings of the model: temperature 0.5, top-k 9\n" in done.err
        assert done.out == run("-t", "0.5", "--top-k", "9", "--seed", "1", target="set.gguf").out
        assert done.out != run("--seed", "1", target="set.gguf").out

    def test_what_was_given_wins(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        done = run("--sampler-defaults", "model", "-t", "0", target="set.gguf")
        assert "of the model: top-k 9\n" in done.err
        assert done.out == run("-t", "0", target="set.gguf").out
        monkeypatch.setenv("SPECDEC_TEMPERATURE", "0.25")
        done = run("--sampler-defaults", "model", "--json", target="set.gguf")
        assert json.loads(done.out.splitlines()[0])["temperature"] == 0.25

    def test_none_in_the_file(self, run: Run) -> None:
        assert "sampling settings of the model: none\n" in run("--sampler-defaults", "model", "-t", "0").err

    def test_json_line_has_what_is_used(self, run: Run) -> None:
        start = json.loads(run("--sampler-defaults", "model", "--json", target="set.gguf").out.splitlines()[0])
        assert start["temperature"] == 0.5


class TestStructure:
    def test_schema(self, run: Run) -> None:
        schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
        done = run("--json-schema", schema, "-n", "3")
        assert done.code == 0
        assert isinstance(json.loads(done.out)["a"], int)
        assert "at the limit of 3 tokens, closed with" in done.err
        end = json.loads(run("--json-schema", schema, "-n", "3", "--json").out.splitlines()[-1])
        assert end["num_tokens"] == 3
        assert end["num_closing"] > 0
        assert isinstance(json.loads(end["text"])["a"], int)

    def test_files(self, run: Run) -> None:
        Path("schema.json").write_text('{"enum": ["yes", "no"]}')
        assert json.loads(run("--json-schema", "schema.json").out) in ("yes", "no")
        Path("grammar.gbnf").write_text('root ::= "yes" | "no"')
        assert run("--grammar", "grammar.gbnf").out in ("yes\n", "no\n")
        Path("grammar.lark").write_text('start: "yes" | "no"')
        assert run("--grammar", "grammar.lark").out in ("yes\n", "no\n")
        assert isinstance(json.loads(run("--json-object").out), dict)

    def test_stop(self, run: Run) -> None:
        whole = run("-t", "0").out
        done = run("-t", "0", "--stop", whole[4:6], "--stop", "nowhere")
        assert done.out == whole[: whole.index(whole[4:6])] + "\n"
        assert json.loads(run("-t", "0", "--stop", whole[4:6], "--json").out.splitlines()[-1])["reason"] == "stop"

    def test_grammar_of_another_kind(self, run: Run) -> None:
        Path("grammar.gbnf").write_bytes(bytes(range(256)))
        done = run("--grammar", "grammar.gbnf", target="nowhere.gguf")
        assert (done.code, "it is not UTF-8 text" in done.err) == (2, True)
        assert len(done.err.splitlines()) == 3


def test_every_setting_has_a_line_in_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text(encoding="utf-8")
    from specdec_cli.cli.flag_groups import SamplingFlags, StructureFlags

    for group in (SamplingFlags, StructureFlags):
        for field in group.__dataclass_fields__:
            assert f"`--{field.replace('_', '-')}" in page, field
