"""Models that other programs have put on the machine: found in each usual place, whatever else lies there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from specdec_cli import local_files, paths
from specdec_cli.local_files import LocalModel, scan, size_of

GGUF = b"GGUF" + bytes(60)
DIGEST = "ab" * 32


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # so that a service on the machine that runs the tests is left alone
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "home" / ".ollama" / "models"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def write(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def manifest(home: Path, *names: str, layers: object = None) -> Path:
    default = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}]
    text = json.dumps({"layers": default if layers is None else layers})
    return write(home.joinpath(".ollama", "models", "manifests", *names), text.encode())


def names() -> list[tuple[str, str]]:
    return [(model.place, model.name) for model in scan()]


def test_nothing_anywhere() -> None:
    assert scan() == []


def test_every_usual_place(home: Path, tmp_path: Path) -> None:
    write(paths.cache_dir() / "models" / "own.gguf")
    blob = write(tmp_path / "hub" / "models--o--r--x" / "blobs" / "abc")
    for revision in ("one", "two"):
        snapshot = tmp_path / "hub" / "models--o--r--x" / "snapshots" / revision / "Q4" / "f.gguf"
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(blob)
    write(home / ".lmstudio" / "models" / "p" / "m" / "b.GGUF")
    write(home / ".cache" / "lm-studio" / "models" / "p" / "m" / "c.gguf")
    write(home / ".cache" / "llama.cpp" / "d.gguf")
    manifest(home, "registry.ollama.ai", "library", "llama3", "8b")
    manifest(home, "registry.ollama.ai", "library", "llama3", "latest")
    manifest(home, "hf.co", "o", "r", "Q4_K_M")
    write(home / ".ollama" / "models" / "blobs" / f"sha256-{DIGEST}")
    found = scan()
    assert [(model.place, model.name) for model in found] == [
        ("specdec", "own.gguf"),
        ("Hugging Face", "o/r--x/Q4/f.gguf"),
        ("LM Studio", "p/m/b.GGUF"),
        ("LM Studio", "p/m/c.gguf"),
        ("llama.cpp", "d.gguf"),
        ("Ollama", "hf.co/o/r:Q4_K_M"),
    ]
    assert all(model.size == len(GGUF) and model.is_complete and model.path.is_file() for model in found)


def test_ollama_names(home: Path) -> None:
    manifest(home, "registry.ollama.ai", "library", "llama3", "8b")
    write(home / ".ollama" / "models" / "blobs" / f"sha256-{DIGEST}")
    assert names() == [("Ollama", "llama3:8b")]
    manifest(home, "registry.ollama.ai", "else", "llama3", "8b")
    assert local_files._ollama_name(("registry.ollama.ai", "else", "llama3", "8b")) == "else/llama3:8b"


def test_places_follow_their_variables(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / ".cache" / "llama.cpp" / "old.gguf")
    write(tmp_path / "cache" / "new.gguf")
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache"))
    assert names() == [("llama.cpp", "new.gguf")]
    monkeypatch.delenv("LLAMA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write(tmp_path / "xdg" / "llama.cpp" / "xdg.gguf")
    assert names() == [("llama.cpp", "xdg.gguf")]
    write(home / ".lmstudio-home-pointer", f"{tmp_path / 'studio'}\n".encode())
    write(tmp_path / "studio" / "models" / "a" / "b" / "s.gguf")
    assert ("LM Studio", "a/b/s.gguf") in names()


def test_the_service_of_ollama_is_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    folders = list(local_files._ollama_folders())
    assert folders[0] == home / ".ollama" / "models"


def test_split_models_are_one(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    for number in (1, 2, 3):
        write(folder / f"big-{number:05}-of-00003.gguf", GGUF + bytes(number))
    write(folder / "torn-00001-of-00002.gguf")
    write(folder / "tail-00002-of-00002.gguf")
    whole, torn = scan()
    assert whole == LocalModel("LM Studio", "big-00001-of-00003.gguf", whole.path, 3 * len(GGUF) + 6)
    assert (torn.name, torn.is_complete, torn.size) == ("torn-00001-of-00002.gguf", False, len(GGUF))
    assert size_of(whole.path) == whole.size
    write(folder / "joke-00001-of-99999.gguf")
    assert len(scan()) == 3


def test_what_is_no_model(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    write(folder / "page.gguf", b"<html>")
    write(folder / "empty.gguf", b"")
    write(folder / "mmproj-x.gguf")
    write(folder / "x.gguf.part")
    (folder / "folder.gguf").mkdir()
    (folder / "broken.gguf").symlink_to(folder / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe.gguf")
    assert scan() == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"7", b'{"layers": 7}', b'{"layers": [7, null, {}]}', b"[" * 100_000,
     b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]}',
     b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": 5}]}',
     b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:' + b"0" * 64 + b'"}]}'],
)  # fmt: skip
def test_junk_manifests(home: Path, content: bytes) -> None:
    write(home / ".ollama" / "models" / "manifests" / "a" / "b" / "c" / "d", content)
    write(home / ".ollama" / "models" / "manifests" / "loose", content)
    assert scan() == []


def test_a_blob_that_is_no_model(home: Path) -> None:
    manifest(home, "registry.ollama.ai", "library", "x", "y")
    write(home / ".ollama" / "models" / "blobs" / f"sha256-{DIGEST}", b"something else")
    assert scan() == []


def test_loops_of_links(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    write(folder / "a" / "m.gguf")
    (folder / "a" / "again").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "elsewhere").symlink_to(home / "disk")
    write(home / "disk" / "n.gguf")
    assert sorted(name for _, name in names()) == ["a/m.gguf", "elsewhere/n.gguf"]


def test_a_directory_that_may_not_be_read(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    write(folder / "open" / "m.gguf")
    closed = folder / "closed"
    write(closed / "n.gguf")
    closed.chmod(0)
    try:
        if os.access(closed, os.R_OK):
            pytest.skip("this user may read everything")
        assert names() == [("LM Studio", "open/m.gguf")]
    finally:
        closed.chmod(0o700)


def test_a_file_where_a_directory_should_be(home: Path) -> None:
    write(home / ".lmstudio", b"")
    write(home / ".ollama", b"")
    assert scan() == []


def test_large_and_deep_trees(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "_MAX_ENTRIES", 50)
    folder = home / ".lmstudio" / "models"
    write(folder / "near.gguf")
    for number in range(200):
        write(folder / "many" / f"{number}.txt", b"")
    write(folder / Path(*"abcdefghijklmnop") / "deep.gguf")
    assert names() == [("LM Studio", "near.gguf")]
