"""The user's own models.toml: what is added can be used, what is removed is gone, and everything else stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_cli import own_registry
from specdec_cli.errors import ModelMissingError, SpecdecError, UsageError
from specdec_cli.own_registry import add_pair, own_layer, remove_pair
from specdec_cli.registry import load_registry, own_file

HAND_MADE = """# my models
default = "mine"    # the fast one

# from a friend
[models.big]
sources = ["path:/m/big.gguf"]   # on the large disk
file = "big.gguf"

# the pair
[pairs.mine]
target = "big"
draft = "qwen3-0.6b"
# a remark inside

# another pair
[pairs."qwen3-8b+0.6b"]
target = "qwen3-8b"
draft = "qwen3-1.7b"
# the end
"""


def write(text: str) -> None:
    own_file().parent.mkdir(parents=True, exist_ok=True)
    own_file().write_text(text, encoding="utf-8")


def comments(text: str) -> list[str]:
    return [line[line.index("#") :] for line in text.splitlines() if "#" in line]


def test_the_first_pair_makes_the_file(tmp_path: Path) -> None:
    model = tmp_path / "t.gguf"
    model.write_bytes(b"GGUF")
    added = add_pair("mine", str(model), "hf:o/r/sub/d.gguf@v1", "to try")
    assert (added.path, added.models, added.replaced) == (own_file(), ("mine-target", "mine-draft"), False)
    pair = load_registry().pair("mine")
    assert (pair.note, pair.origin, pair.recommended) == ("to try", str(own_file()), True)
    assert (pair.target.file, pair.target.sources) == ("t.gguf", (f"path:{model}",))
    assert (pair.draft.file, pair.draft.sources) == ("d.gguf", ("hf:o/r/sub/d.gguf@v1",))


@pytest.mark.parametrize(
    ("text", "sources", "file"),
    [
        ("hf:o/r:f.gguf@v1", ["hf:o/r/f.gguf@v1"], "f.gguf"),
        ("pypi:part{1..3}==1.0", ["pypi:part{1..3}==1.0"], "part-1..3-1.0.gguf"),
    ],
)
def test_sources(text: str, sources: list[str], file: str) -> None:
    add_pair("p", "qwen3-8b", text)
    draft = load_registry().pair("p").draft
    assert (list(draft.sources), draft.file) == (sources, file)


def test_a_split_model_gets_its_shards() -> None:
    add_pair("p", "hf:o/r/big-00001-of-00003.gguf", "qwen3-0.6b")
    target = load_registry().pair("p").target
    assert [shard.file for shard in target.shards] == [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "target", "draft", "kind", "said"),
    [
        ("", "qwen3-8b", "qwen3-0.6b", UsageError, "cannot be the name"),
        ("a b", "qwen3-8b", "qwen3-0.6b", UsageError, "cannot be the name"),
        ("-x", "qwen3-8b", "qwen3-0.6b", UsageError, "cannot be the name"),
        ("x.gguf", "qwen3-8b", "qwen3-0.6b", UsageError, "cannot be the name"),
        ("a\x1b[2J", "qwen3-8b", "qwen3-0.6b", UsageError, "cannot be the name"),
        ("p", "nowhere.gguf", "qwen3-0.6b", ModelMissingError, "there is no file `nowhere.gguf`"),
        ("p", "qwen3-8b", "path:/nowhere.gguf", ModelMissingError, "there is no file"),
        ("p", "hf:o", "qwen3-0.6b", UsageError, "is not a source"),
        ("p", "hf:o/r/x-00002-of-00003.gguf", "qwen3-0.6b", UsageError, "is part 2 of 3"),
        ("p", "hf:o/r/x-00001-of-99999.gguf", "qwen3-0.6b", UsageError, "in 99999 parts"),
        ("p", ".", "qwen3-0.6b", ModelMissingError, "there is no file `.`"),
        ("p", "~nobody-of-that-name/x.gguf", "qwen3-0.6b", ModelMissingError, "there is no file"),
    ],
)
def test_what_cannot_be_added(name: str, target: str, draft: str, kind: type[SpecdecError], said: str) -> None:
    with pytest.raises(kind) as caught:
        add_pair(name, target, draft)
    assert said in caught.value.message
    assert caught.value.hint
    assert not own_file().exists()


def test_a_shipped_pair_can_be_replaced_and_an_own_one_not() -> None:
    assert add_pair("qwen3-8b+0.6b", "qwen3-8b", "qwen3-1.7b").replaced
    assert load_registry().pair("qwen3-8b+0.6b").draft.name == "qwen3-1.7b"
    with pytest.raises(UsageError, match=r"there is a pair `qwen3-8b\+0\.6b` in .* already"):
        add_pair("qwen3-8b+0.6b", "qwen3-8b", "qwen3-0.6b")
    assert remove_pair("qwen3-8b+0.6b")
    assert load_registry().pair("qwen3-8b+0.6b").draft.name == "qwen3-0.6b"


def test_comments_stay() -> None:
    write(HAND_MADE)
    add_pair("new", "qwen3-8b", "hf:o/r/d.gguf")
    assert set(comments(own_file().read_text())) == set(comments(HAND_MADE))
    assert set(own_layer().pairs) == {"mine", "qwen3-8b+0.6b", "new"}
    assert remove_pair("new")
    assert comments(own_file().read_text()) == comments(HAND_MADE)
    assert remove_pair("qwen3-8b+0.6b")
    text = own_file().read_text()
    assert comments(text) == comments(HAND_MADE)
    assert text.index("# a remark inside") < text.index("# another pair") < text.index("# the end")
    assert (set(own_layer().pairs), set(own_layer().models)) == ({"mine"}, {"big"})


def test_models_go_when_nothing_needs_them() -> None:
    write(HAND_MADE.replace('default = "mine"', 'default = "qwen3-8b+0.6b"'))
    add_pair("second", "big", "hf:o/r/d.gguf")
    assert remove_pair("mine")
    assert set(own_layer().models) == {"big", "second-draft"}
    assert remove_pair("second")
    assert set(own_layer().models) == set()
    assert "# from a friend" in own_file().read_text()
    assert not remove_pair("second")
    # a shipped pair is none of this file
    assert not remove_pair("qwen3-4b+0.6b")


def test_a_pair_that_is_the_default_stays() -> None:
    write(HAND_MADE)
    with pytest.raises(UsageError, match="`default` names no pair: `mine`"):
        remove_pair("mine")
    assert own_file().read_text() == HAND_MADE


@pytest.mark.parametrize(
    "text",
    [
        'pairs = { old = { target = "qwen3-8b", draft = "qwen3-0.6b" } }\n',
        '[pairs]\nold = { target = "qwen3-8b", draft = "qwen3-0.6b" }\n',
        '[pairs.old]\ntarget = "qwen3-8b"\ndraft = "qwen3-0.6b"\n[models.x]\nsources = ["hf:o/r/f.gguf"]\n'
        'file = "f.gguf"\n[pairs.older]\ntarget = "x"\ndraft = "qwen3-0.6b"',
    ],
)
def test_other_spellings_of_the_file(text: str) -> None:
    write(text)
    before = set(own_layer().pairs)
    add_pair("new", "qwen3-8b", "hf:o/r/d.gguf")
    assert set(own_layer().pairs) == before | {"new"}
    assert remove_pair("new")
    assert set(own_layer().pairs) == before
    assert remove_pair("old")
    assert set(own_layer().pairs) == before - {"old"}


def test_a_spelling_that_cannot_be_changed_is_left_alone() -> None:
    text = 'pairs.old.target = "qwen3-8b"\npairs.old.draft = "qwen3-0.6b"\n'
    write(text)
    with pytest.raises(SpecdecError, match="without losing something"):
        add_pair("new", "qwen3-8b", "hf:o/r/d.gguf")
    assert own_file().read_text() == text


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["qwen3-0.6b", "hf:o/r/d.gguf"]))))
def test_any_order_of_changes(changes: list[tuple[str, bool, str]]) -> None:
    write(HAND_MADE)
    expected = {"mine", "qwen3-8b+0.6b"}
    for name, adds, draft in changes:
        if adds and name not in expected:
            add_pair(name, "qwen3-8b", draft)
            expected.add(name)
        elif not adds:
            assert remove_pair(name) == (name in expected)
            expected.discard(name)
        assert set(own_layer().pairs) == expected
        assert set(comments(own_file().read_text())) == set(comments(HAND_MADE))


def test_a_file_with_mistakes_is_left_alone() -> None:
    write("[pairs")
    with pytest.raises(UsageError, match="not valid TOML"):
        add_pair("p", "qwen3-8b", "qwen3-0.6b")
    assert own_file().read_text() == "[pairs"


def test_a_link_stays_one_and_nothing_is_left_behind(tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles.toml"
    dotfiles.write_text("")
    own_file().parent.mkdir(parents=True)
    own_file().symlink_to(dotfiles)
    add_pair("p", "qwen3-8b", "qwen3-0.6b")
    assert own_file().is_symlink()
    assert "pairs" in dotfiles.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["dotfiles.toml"]


def test_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(blocked))
    monkeypatch.setattr(own_registry, "read_own_text", lambda _: "")
    monkeypatch.setattr("specdec_cli.registry.read_own_text", lambda _: "")
    with pytest.raises(SpecdecError, match="cannot write"):
        add_pair("p", "qwen3-8b", "qwen3-0.6b")
