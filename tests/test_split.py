"""A model in shards, really loaded: from the disk and from a hub; and which names mean what."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serve
from huggingface_hub import constants

from specdec_cli import tiny
from specdec_cli.cli.app import invoke
from specdec_cli.split import is_piece, shard_names, shard_number, stem_of

FIRST, SECOND = "tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"


class Typed(int):
    """A number of the type that llama.cpp demands in a key of a split model."""

    def __new__(cls, value: int, kind: str) -> Typed:
        number = super().__new__(cls, value)
        number.kind = kind
        return number

    kind = ""

    def packed(self) -> bytes:
        """Type and value."""
        return struct.pack("<I" + self.kind, {"H": 2, "i": 5}[self.kind], self)


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model in two files."""
    whole: list[Any] = []
    typed, write = tiny._typed, tiny.write_gguf

    def with_types(value: Any) -> bytes:
        return value.packed() if isinstance(value, Typed) else typed(value)

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "write_gguf", lambda *arguments: whole.extend(arguments))
        tiny.write_tiny_model(tmp_path / "x", seed=1, quant="q8_0")
    monkeypatch.setattr(tiny, "_typed", with_types)
    _, metadata, tensors = whole
    middle = len(tensors) // 2
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, (name, part) in enumerate(((FIRST, tensors[:middle]), (SECOND, tensors[middle:]))):
        keys = {"split.no": Typed(number, "H"), "split.count": Typed(2, "H")}
        keys["split.tensors.count"] = Typed(len(tensors), "i")
        write(folder / name, {**(metadata if number == 0 else {}), **keys}, part)
    return folder


@pytest.fixture
def hub(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serve({f"o/r/{name}": (shards / name).read_bytes() for name in (FIRST, SECOND)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def answer(target: str, capfd: pytest.CaptureFixture[str]) -> str:
    code = invoke(["run", "--target", target, "--raw", "-t", "0", "-n", "8", "--threads", "1", "-q", "hello"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return out


def test_shards_answer_as_one(
    shards: Path, hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    tiny.write_tiny_model(tmp_path / "whole.gguf", seed=1, quant="q8_0")
    whole = answer(str(tmp_path / "whole.gguf"), capfd)
    assert answer(str(shards / FIRST), capfd) == whole
    assert answer("hf:o/r:Q8_0", capfd) == whole
    assert answer("hf:o/r", capfd) == whole
    assert len(hub.gets()) == 2


def test_part_that_is_missing(shards: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    (shards / SECOND).unlink()
    assert invoke(["run", "--target", str(shards / FIRST), "hello"]) == 3
    assert f"no `{SECOND}`" in capfd.readouterr().err


def test_names() -> None:
    assert shard_number(SECOND) == (2, 2)
    assert shard_number("a-1-of-2.gguf") is None
    assert shard_names(SECOND) == [FIRST, SECOND]
    assert shard_names("a.gguf") == ["a.gguf"]
    assert shard_names("a-00001-of-99999.gguf") == ["a-00001-of-99999.gguf"]
    assert (stem_of(SECOND), stem_of("a.b.GGUF")) == ("tiny-Q8_0", "a.b")


@pytest.mark.parametrize(
    ("name", "piece"),
    [("a.gguf.part1of2", True), ("a.gguf-split-b", True), ("a.gguf.part-aa", True), ("a.ggufab", True),
     ("a.gguf.002", True), ("a.gguf", False), ("a.gguf.part", False), ("a.gguf.gz", False), ("a.gguf.lock", False),
     ("a.gguf.txt", False), (FIRST, False)],
)  # fmt: skip
def test_pieces(name: str, piece: bool) -> None:
    assert is_piece(name) is piece
