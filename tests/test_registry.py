"""models.toml: what is shipped, and what is said about a broken one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec_cli import paths
from specdec_cli.choice import ModelChoice, choose_models
from specdec_cli.cli.app import invoke
from specdec_cli.cli.loaded import Loaded
from specdec_cli.config import load_settings
from specdec_cli.errors import ModelMissingError, UsageError
from specdec_cli.estimates import PAYING_RATIO, cost_ratio
from specdec_cli.registry import (
    HubSource,
    PathSource,
    PypiSource,
    known_names,
    load_registry,
    merge_layers,
    own_file,
    parse_source,
    read_layer,
)

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

SHARDS = """
[models."s"]
sources = ["hf:o/r/x-00001-of-00002.gguf"]
shards = [
    { file = "x-00001-of-00002.gguf", size = 10, sha256 = "%s" },
    { file = "x-00002-of-00002.gguf", size = 20 },
]
""" % ("ab" * 32)


def test_shipped_default_pair() -> None:
    pair = load_registry().pair(None)
    assert pair.name == "qwen2.5-coder-1.5b"
    assert (pair.target.size, pair.draft.size, pair.draft_tokens) == (1117320768, 491400064, None)
    assert [source.partition(":")[0] for source in pair.target.sources] == ["hf", "pypi"]


def test_every_shipped_entry_is_complete() -> None:
    registry = load_registry()
    assert len(registry.pairs) >= 25
    for model in registry.models.values():
        assert model.license, model.name
        assert model.params, model.name
        assert model.architecture, model.name
        assert model.sources[0].startswith("hf:") or model.name in {"smollm2-135m-instruct", "gemma-3-270m"}
        for shard in model.files:
            # what is verified is known by its checksum
            assert bool(shard.sha256) == model.verified, model.name
        for source in map(parse_source, model.sources):
            # main moves: only a checksum tells that it did
            assert isinstance(source, PypiSource) or len(source.revision) == 40 or model.sha256 or not model.verified


def test_small_to_large_dense_moe_and_hybrid() -> None:
    targets = [pair.target for pair in load_registry().pairs.values()]
    assert {target.architecture for target in targets} == {"dense", "moe", "hybrid"}
    sizes = [target.size for target in targets if target.size]
    assert min(sizes) < 1.2e9
    assert max(sizes) > 40e9


def test_the_default_is_verified() -> None:
    assert load_registry().pair().verified
    assert not all(pair.verified for pair in load_registry().pairs.values())


def test_no_pair_is_recommended_that_cannot_pay() -> None:
    for pair in load_registry().pairs.values():
        ratio = cost_ratio(pair.target, pair.draft)
        assert ratio is not None, pair.name
        assert ratio < PAYING_RATIO or not pair.recommended, (pair.name, ratio)
        assert pair.recommended != bool(pair.reason), pair.name


def test_every_shipped_name_can_be_typed() -> None:
    registry = load_registry()
    assert all(re.fullmatch(r"[\w.+-]+", name) for name in [*registry.pairs, *registry.models])
    assert not set(registry.pairs) & {name for name in registry.models if name not in registry.pairs}


def test_unknown_pair_names_the_closest_and_all() -> None:
    with pytest.raises(ModelMissingError) as caught:
        load_registry().pair("qwen2.5-coder-1.5")
    assert "did you mean `qwen2.5-coder-1.5b`" in caught.value.message
    assert "`specdec models`" in caught.value.hint


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
        ('file = "f.gguf"', 'file = "a\\u001b[2J.gguf"', "`file` must be a plain file name"),
        ("size = 3", 'params = "seven"', '`params` must be like "7.6B"'),
        ("size = 3", 'architecture = "mow"', "not `mow`; did you mean `moe`?"),
        ("size = 3", "gated = 1", "`gated` must be true or false, not `1`"),
        ("size = 3", 'verified = "no"', "`verified` must be true or false"),
        ('note = "n"', "recommended = false", "`reason` belongs to `recommended = false`"),
        ('note = "n"', 'reason = "r"', "`reason` belongs to `recommended = false`"),
        ("size = 3", "shards = [1]", "`file` and `shards` exclude each other"),
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
    assert parse_source("path:/m/a b.gguf") == PathSource(Path("/m/a b.gguf"))
    assert parse_source("pypi:a-b==1.2") == PypiSource(("a-b==1.2",))
    assert parse_source("pypi:p{9..11}x==0.1") == PypiSource(("p9x==0.1", "p10x==0.1", "p11x==0.1"))


@pytest.mark.parametrize(
    "text",
    ["hf:o/f.gguf", "hf:o/r/../x", "hf:o/r/f@", "pypi:a", "pypi:-r==1", "pypi:a{3..1}==1", "pypi:a{1..99999}==1",
     "pypi:a==1 b", "http://x/y", "", "path:relative.gguf", "path:/a\0b"],
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


# ------------------------------------------------------------------ split models


def test_shards_are_read() -> None:
    [model] = read_layer(SHARDS, "x.toml").models.values()
    assert (model.file, model.size, model.sha256) == ("x-00001-of-00002.gguf", 30, None)
    assert [(shard.file, shard.size) for shard in model.files] == [
        ("x-00001-of-00002.gguf", 10),
        ("x-00002-of-00002.gguf", 20),
    ]
    assert model.files[0].sha256 == "ab" * 32


def test_a_shard_of_unknown_size_leaves_the_total_unknown() -> None:
    [model] = read_layer(SHARDS.replace(", size = 10", ""), "x.toml").models.values()
    assert model.size is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x-00002-of-00002", "x-00003-of-00003", "`shards` must be all files"),
        ("x-00002-of-00002", "y-00002-of-00002", "`shards` must be all files"),
        ("x-00002-of-00002", "x", "`shards` must be all files"),
        ("size = 20", "size = 0", "`size` must be at least 1"),
        ("size = 20", "sze = 20", "`shards`: unknown key `sze`; did you mean `size`?"),
        ('file = "x-00002-of-00002.gguf", size = 20', "size = 20", "the key `file` is missing"),
        ('{ file = "x-00002-of-00002.gguf", size = 20 }', "7", "`shards` must be a table"),
        ("shards = [", "shards = [] # [", None),
    ],
)
def test_broken_shards_are_named(old: str, new: str, said: str | None) -> None:
    assert old in SHARDS
    with pytest.raises(UsageError) as caught:
        read_layer(SHARDS.replace(old, new), "x.toml")
    assert "x.toml" in caught.value.message
    assert said is None or said in caught.value.message


# ------------------------------------------------------------------ the user's own file


def write_own(text: str) -> Path:
    own_file().parent.mkdir(parents=True, exist_ok=True)
    own_file().write_text(text, encoding="utf-8")
    return own_file()


def test_the_own_file_adds_and_overrides() -> None:
    write_own(
        'default = "mine"\n[models."qwen3-0.6b"]\nsources = ["path:/m/other.gguf"]\nfile = "other.gguf"\n'
        '[pairs.mine]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\n'
        '[pairs."qwen3-4b+0.6b"]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\n'
    )
    registry = load_registry()
    assert registry.pair().name == "mine"
    assert registry.pair().origin == str(own_file())
    # also in pairs that are shipped
    assert registry.pair("qwen3-8b+0.6b").draft.file == "other.gguf"
    assert registry.pair("qwen3-4b+0.6b").target.name == "qwen3-8b"
    assert registry.pair("qwen2.5-coder-1.5b").origin == "models.toml"
    assert known_names("pairs").count("qwen3-4b+0.6b") == 1
    assert known_names("pairs")[-1] == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pairs", "is not valid TOML"),
        ('[pairs.mine]\ntarget = "qwen3-8"\ndraft = "qwen3-0.6b"', "`target` names no model: `qwen3-8`; did you mean"),
        ('[pairs.mine]\ntraget = "qwen3-8b"', '[pairs."mine"]: unknown key `traget`; did you mean `target`'),
        ("a = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_mistakes_in_the_own_file_name_it(text: str, said: str) -> None:
    path = write_own(text)
    with pytest.raises(UsageError) as caught:
        load_registry()
    assert caught.value.message.startswith(str(path))
    assert said in caught.value.message
    assert caught.value.hint
    # completion goes on with what can be read
    assert "qwen2.5-coder-1.5b" in known_names("pairs")


def test_an_own_file_that_cannot_be_read() -> None:
    own_file().parent.mkdir(parents=True, exist_ok=True)
    own_file().write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"cannot read .*models.toml.: it is not UTF-8 text"):
        load_registry()
    own_file().unlink()
    own_file().mkdir()
    with pytest.raises(UsageError, match="Is a directory"):
        load_registry()
    assert "qwen2.5-coder-1.5b" in known_names("pairs")


def test_names_that_are_neither_pair_nor_model() -> None:
    registry = load_registry()
    assert registry.find("qwen3-8b").name == "qwen3-8b"
    assert {pair.name for pair in registry.pairs_with("qwen3-1.7b")} == {"qwen3-14b+1.7b", "qwen3-32b+1.7b"}
    with pytest.raises(ModelMissingError, match=r"no pair or model is called `qwen3-8`; did you mean `qwen3-8b`"):
        registry.find("qwen3-8")


def test_a_target_may_be_a_known_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_registry().models["qwen3-8b"]
    assert choose_models(None, "qwen3-8b", None) == ModelChoice(None, known, None)
    with pytest.raises(ModelMissingError, match="did you mean `qwen3-8b`"):
        choose_models(None, "qwen3-9b", None)
    assert invoke(["config", "set", "target", "qwen3-8b"]) == 0
    assert load_settings(["target"])["target"].value == "qwen3-8b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").write_text("")
    assert choose_models(None, "qwen3-8b", None).target == Path("qwen3-8b")


def test_models_of_a_conversation_keep_the_names_they_were_called_by() -> None:
    registry, loaded = load_registry(), Loaded(quiet=True)
    pair = registry.pairs["qwen3-8b+0.6b"]
    for names in ((None, "qwen3-8b", None), (pair.name, None, None), (pair.name, "qwen3-4b", None)):
        loaded.choice = choose_models(names[0], names[1], None)
        assert loaded.names == names
