"""Files written as a whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec_cli.config import load_settings, save_setting
from specdec_cli.errors import SpecdecError
from specdec_cli.files import locked, write_whole
from specdec_cli.own_registry import add_pair, own_layer, remove_pair


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


def test_no_change_is_lost_when_several_are_made_at_once(tmp_path: Path) -> None:
    """Locks are between open files: threads are as good as processes."""
    names = [f"key{number}" for number in range(8)]
    for name in ("old1", "old2"):
        add_pair(name, "qwen3-8b", "qwen3-0.6b")
    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(save_setting, name, 1) for name in names]
        tasks += [pool.submit(add_pair, name, "qwen3-8b", "qwen3-0.6b") for name in names]
        tasks += [pool.submit(remove_pair, name) for name in ("old1", "old2")]
    for task in tasks:
        task.result()
    assert set(load_settings(names)) == set(names)
    assert set(own_layer().pairs) == set(names)


def test_a_lock_that_is_never_let_go_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.files._PATIENCE_S", 0.05)
    with locked(tmp_path / "a"):
        with locked(tmp_path / "b"):
            pass
        with pytest.raises(SpecdecError, match="another process"), locked(tmp_path / "a"):
            pass
    with locked(tmp_path / "a"):
        pass


def test_without_a_place_for_locks_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("specdec_cli.files.state_dir", lambda: tmp_path / "file" / "state")
    with locked(tmp_path / "a"):
        pass
