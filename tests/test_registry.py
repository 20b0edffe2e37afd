"""models.toml: what is shipped, and what is said about a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_cli import paths
from specdec_cli.errors import ModelMissingError, UsageError
from specdec_cli.registry import HubSource, PypiSource, load_registry, merge_layers, parse_source, read_layer

GOOD = """
default = "p"
[models."t"]
sources = ["hf:o/r/f.gguf"]
file = "f.gguf"
size = 3
[models."d"]
sources = ["pypi:part{1..3}==1.0"]
file = "d.gguf"
[pairs."p"]
target = "t"
draft = "d"
draft_tokens = 4
note = "n"
"""


def test_shipped_default_pair() -> None:
    pair = load_registry().pair(None)
    assert pair.name == "qwen2.5-coder-1.5b"
    assert (pair.target.size, pair.draft.size, pair.draft_tokens) == (1117320768, 491400064, None)
    assert [source.partition(":")[0] for source in pair.target.sources] == ["hf", "pypi"]


def test_every_shipped_entry_is_complete() -> None:
    registry = load_registry()
    assert len(registry.pairs) >= 4
    for model in registry.models.values():
        assert model.size, model.name
        assert model.sha256, model.name
        assert model.license, model.name
        for source in map(parse_source, model.sources):
            # main moves: a checked size and checksum need a pinned revision
            assert isinstance(source, PypiSource) or len(source.revision) == 40


def test_unknown_pair_names_the_closest_and_all() -> None:
    with pytest.raises(ModelMissingError) as caught:
        load_registry().pair("qwen2.5-coder-1.5")
    assert "did you mean `qwen2.5-coder-1.5b`" in caught.value.message
    assert "smollm2-1.7b+135m" in caught.value.hint


def test_layer_is_read_and_resolved() -> None:
    pair = merge_layers([read_layer(GOOD, "x.toml")]).pair("p")
    assert (pair.target.name, pair.draft.name, pair.draft_tokens, pair.note) == ("t", "d", 4, "n")
    assert (pair.draft.size, pair.draft.sha256) == (None, None)


def test_a_later_layer_wins_table_by_table() -> None:
    mine = read_layer('[models."t"]\nsources = ["hf:o/r/g.gguf@v1"]\nfile = "g.gguf"', "mine.toml")
    registry = merge_layers([read_layer(GOOD, "x.toml"), mine])
    assert registry.pair(None).target.file == "g.gguf"
    assert registry.pair(None).draft.file == "d.gguf"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("default =", "default", "not valid TOML"),
        ('sources = ["hf', 'soruces = ["hf', '[models."t"]: unknown key `soruces`; did you mean `sources`?'),
        ("size = 3", 'size = "3"', '[models."t"]: `size` must be a whole number, not `3`'),
        ("size = 3", "size = true", "`size` must be a whole number"),
        ("size = 3", "size = 0", "`size` must be at least 1"),
        ("size = 3", 'sha256 = "abc"', "`sha256` must be 64"),
        ('["hf:o/r/f.gguf"]', "[]", "`sources` must be"),
        ('["hf:o/r/f.gguf"]', "[1]", "`sources` must be"),
        ('["hf:o/r/f.gguf"]', '["ftp:x"]', "`ftp:x` is not a source"),
        ('file = "f.gguf"', 'file = "../f.gguf"', "`file` must be a plain file name"),
        ('file = "f.gguf"', 'file = "f-00001-of-00003.gguf"', "split model"),
        ('file = "f.gguf"', "", "the key `file` is missing"),
        ('target = "t"', 'target = "tt"', '[pairs."p"]: `target` names no model: `tt`; did you mean `t`?'),
        ("draft_tokens = 4", "draft_token = 4", "did you mean `draft_tokens`"),
        ("draft_tokens = 4", "draft_tokens = 0", "`draft_tokens` must be at least 1"),
        ('default = "p"', 'default = "q"', "`default` names no pair: `q`"),
        ('default = "p"', "", "`default` names no pair"),
        ('[pairs."p"]', "[pairs]", "must be a table"),
        ('[pairs."p"]', '[pear."p"]', "x.toml: unknown key `pear`; did you mean `pairs`?"),
    ],
)
def test_a_broken_file_is_named(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        merge_layers([read_layer(GOOD.replace(old, new, 1), "x.toml")])
    assert "x.toml" in caught.value.message or "models.toml" in caught.value.message
    assert said in caught.value.message


def test_sources_are_parsed() -> None:
    assert parse_source("hf:o/r/sub/f.gguf@v1.0") == HubSource("o/r", "sub/f.gguf", "v1.0")
    assert parse_source("hf:o/r/f.gguf") == HubSource("o/r", "f.gguf", "main")
    assert parse_source("pypi:a-b==1.2") == PypiSource(("a-b==1.2",))
    assert parse_source("pypi:p{9..11}x==0.1") == PypiSource(("p9x==0.1", "p10x==0.1", "p11x==0.1"))


@pytest.mark.parametrize(
    "text",
    ["hf:o/f.gguf", "hf:o/r/../x", "hf:o/r/f@", "pypi:a", "pypi:-r==1", "pypi:a{3..1}==1", "pypi:a{1..99999}==1",
     "pypi:a==1 b", "http://x/y", ""],
)  # fmt: skip
def test_what_is_not_a_source(text: str) -> None:
    with pytest.raises(UsageError):
        parse_source(text)


def test_home_variable_moves_all_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    found = [paths.cache_dir(), paths.config_dir(), paths.state_dir()]
    assert len(set(found)) == 3
    assert all(path.is_relative_to(tmp_path / "home") for path in found)
    assert not (tmp_path / "home").exists()
    monkeypatch.delenv("SPECDEC_HOME")
    assert not paths.cache_dir().is_relative_to(tmp_path)
