"""Files are loaded by a child first: what dies there does not die here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny

from specdec_cli import paths
from specdec_cli.errors import BackendError, ModelLoadError
from specdec_cli.session import Session
from specdec_cli.trial import admit

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake children use POSIX signals")

ABORT = "import os, sys; print('/build/src/llama-model.cpp:12: GGML_ASSERT(n > 0) failed', file=sys.stderr); os.abort()"


class FakeChild:
    """A command whose process does what it is told, and a count of how often it was started."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.num_calls = 0

    def __call__(self, model: Path) -> list[str]:
        self.num_calls += 1
        return [sys.executable, "-I", "-S", "-c", self.script]


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is known there of files that other tests have tried."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def deadly(tmp_path: Path) -> Path:
    """A file with a sound header that llama.cpp aborts on."""
    return tiny(tmp_path, "deadly", num_layers=1, metadata={"llama.rope.scaling.type": "of another world"})


def test_harmless_files_are_tried_once(tmp_path: Path) -> None:
    child, path = FakeChild(""), tiny(tmp_path, num_layers=1)
    for _ in range(2):
        assert admit(path, command=child)[0].path == path
    assert child.num_calls == 1
    assert len(json.loads((paths.cache_dir() / "trials.json").read_text())["harmless"]) == 1
    # Changed, if only in time.
    os.utime(path, ns=(1, 1))
    admit(path, command=child)
    assert child.num_calls == 2


def test_what_kills_the_child_is_refused_each_time_with_its_last_words(tmp_path: Path) -> None:
    child, path = FakeChild(ABORT), tiny(tmp_path, num_layers=1)
    for _ in range(2):
        with pytest.raises(ModelLoadError) as caught:
            admit(path, command=child)
    assert caught.value.message == (
        f"`{path}` would crash llama.cpp: a test process died of SIGABRT: llama-model.cpp:12: GGML_ASSERT(n > 0) failed"
    )
    assert "download it again" in caught.value.hint
    assert child.num_calls == 2


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"did not answer within 0\.3 s"):
        admit(tiny(tmp_path, num_layers=1), command=FakeChild("import time; time.sleep(60)"), time_limit_s=0.3)


def test_a_broken_library_is_not_the_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise BackendError("llama.cpp does not work on this machine")

    monkeypatch.setattr("specdec_cli.selfcheck.check", broken)
    with pytest.raises(BackendError, match="does not work on this machine"):
        admit(tiny(tmp_path, num_layers=1), command=FakeChild(ABORT))


def test_a_bad_header_starts_no_child(tmp_path: Path) -> None:
    child, path = FakeChild(""), tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(ModelLoadError, match="has GGUF version 0"):
        admit(path, command=child)
    assert child.num_calls == 0


@pytest.mark.parametrize("content", [b"", b"[]", b'{"harmless": 3}', b'{"harmless": [1, null]}', b"\xff"])
def test_what_is_remembered_may_be_damaged(tmp_path: Path, content: bytes) -> None:
    (paths.cache_dir()).mkdir(parents=True)
    (paths.cache_dir() / "trials.json").write_bytes(content)
    child, path = FakeChild(""), tiny(tmp_path, num_layers=1)
    for _ in range(2):
        admit(path, command=child)
    assert child.num_calls == 1


def test_the_real_child_admits_a_tiny_model(tmp_path: Path) -> None:
    assert admit(tiny(tmp_path, num_layers=1))[0].architecture == "llama"


def test_a_deadly_file_leaves_the_process_alive(deadly: Path) -> None:
    """First what it does without a child, so that this tests something."""
    load = f"from pathlib import Path; from specdec_cli.llama import Model; Model(Path({str(deadly)!r}))"
    assert subprocess.run([sys.executable, "-c", load], capture_output=True).returncode < 0
    with pytest.raises(ModelLoadError, match=r"would crash llama\.cpp: a test process died of SIGABRT: .*GGML_ASSERT"):
        Session.open(deadly)


def test_a_file_that_cannot_be_used_is_harmless(tmp_path: Path) -> None:
    path = tiny(tmp_path, num_layers=1, metadata={"llama.attention.head_count": 7})
    admit(path)
    with pytest.raises(ModelLoadError, match="cannot load"):
        Session.open(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    values = {f"nonsense.{name}": 64 for name in ("block_count", "context_length", "embedding_length")}
    path = tiny(tmp_path, num_layers=1, metadata={"general.architecture": "nonsense", **values})
    with pytest.raises(ModelLoadError, match="unknown model architecture: 'nonsense'") as caught:
        Session.open(path)
    assert "update llama-cpp-python, or take another model" in caught.value.hint
