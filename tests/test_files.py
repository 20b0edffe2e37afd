"""Files written as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_cli.files import write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    for text in ("first", "second"):
        write_whole(path, text)
        assert path.read_text() == text
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no such devices")
def test_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("/dev/null")
    write_whole(tmp_path / "nowhere", "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="space"):
        write_whole(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"[Dd]irectory"):
        write_whole(tmp_path, "text")
    assert tmp_path.is_dir()
