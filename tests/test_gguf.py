"""What is refused before llama.cpp sees it, and with which words."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError
from specdec_cli.gguf import check_header


def header(version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 1, 1)


def test_a_model_passes(tmp_path: Path) -> None:
    check_header(tiny(tmp_path))


@pytest.mark.parametrize("version", [2, 3])
def test_known_versions(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(version))
    check_header(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file: it begins with b''"),
        (b"<!DOCTYPE html><html>", "it begins with b'<!DOCTYP'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it begins with b'version '"),
        (b"ggml" + bytes(40), "it begins with b'ggml"),
        (b"GGU", "is not a GGUF file"),
        (b"GGUF", "is cut off: 4 bytes"),
        (header()[:23], "is cut off: 23 bytes"),
        (header(1), "has GGUF version 1; known are 2 and 3"),
        (header(4), "has GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "has GGUF version 50331648"),
    ],
)
def test_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        check_header(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelMissingError, match="no model file") as caught:
        check_header(tmp_path / "nowhere" / "m.gguf")
    assert "specdec pull" in caught.value.hint
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(ModelMissingError):
        check_header(tmp_path / "link.gguf")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is a directory"):
        check_header(tmp_path)


def test_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SpecdecError):
        check_header(tmp_path / "file" / "m.gguf")


def test_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError):
        check_header(tmp_path / ("a" * 400 + ".gguf"))


def test_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header())
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ModelLoadError, match="cannot read"):
        check_header(path)


@given(data=st.binary(max_size=40))
def test_any_bytes_pass_or_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(data)
    try:
        check_header(path)
    except ModelLoadError:
        return
    assert data[:4] == b"GGUF"
    assert len(data) >= 24
