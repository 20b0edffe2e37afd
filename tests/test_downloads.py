"""Every way a download fails, injected into a server on the loopback device: said, bounded, nothing half left."""

from __future__ import annotations

import email.utils
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Fault, Hub, serve
from huggingface_hub import constants
from models import tiny

from specdec_cli import download
from specdec_cli.choice import choose_models, fetch_files, named_model
from specdec_cli.cli.app import invoke
from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError, UsageError
from specdec_cli.registry import ModelSpec, Shard
from specdec_cli.sources import fetch, resolve, spec_of
from specdec_cli.stored import locate, verify
from specdec_cli.wording import scrub

ROOT = Path(__file__).parents[1]
CONTENT = b"GGUF" + bytes(range(256)) * 40
REPO = {
    "o/r/README.md": b"# r",
    "o/r/model-Q4_K_M.gguf": CONTENT,
    "o/r/model-Q8_0.gguf": CONTENT + b"8",
    "o/r/mmproj-F16.gguf": b"GGUF image encoder",
    "o/r/big/model-F16-00001-of-00002.gguf": CONTENT + b"1",
    "o/r/big/model-F16-00002-of-00002.gguf": CONTENT + b"2",
}
DEFAULT = "hf:o/r/model-Q4_K_M.gguf"
TOKEN = "hf_PlantedToken123"


class Recorder:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.num_new = self.num_kept = 0
        self.on_advance: Callable[[], None] = lambda: None

    def start(self, name: str, size: int | None, source: str) -> None:
        pass

    def expect(self, size: int) -> None:
        self.size = size

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        if kept:
            self.num_kept += num_bytes
        else:
            self.num_new += num_bytes
        self.on_advance()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self) -> None:
        pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_ETAG_TIMEOUT", "HF_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPECDEC_NO_PROGRESS", "")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr(download, "_CHUNK", 500)
    monkeypatch.setattr(download, "_RETRY_WAITS_S", (0.01, 0.01, 0.01))
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(dict(REPO)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def web() -> Iterator[Hub]:
    """A server that is no hub."""
    with serve(
        {"files/tiny.gguf": CONTENT, "s/t-00001-of-00002.gguf": CONTENT, "s/t-00002-of-00002.gguf": CONTENT}
    ) as it:
        yield it


def get(text: str, progress: Recorder | None = None, *, offline: bool = False) -> Path:
    return fetch(spec_of(text), offline=offline, progress=progress or Recorder())


def failure(text: str | ModelSpec, progress: Recorder | None = None, *, offline: bool = False) -> SpecdecError:
    spec = spec_of(text) if isinstance(text, str) else text
    with pytest.raises(SpecdecError) as caught:
        fetch(spec, offline=offline, progress=progress or Recorder())
    return caught.value


def finals(folder: Path) -> list[str]:
    """Names of everything that looks like a whole model."""
    found = [path for path in folder.rglob("*") if path.name.endswith(".gguf") or path.parent.name == "blobs"]
    return sorted(path.name for path in found if not path.name.endswith(".part"))


# --- which file of a repository ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:o/r", "model-Q4_K_M.gguf"),
        ("hf:o/r:q4_k_m", "model-Q4_K_M.gguf"),
        ("hf:o/r:Q8_0", "model-Q8_0.gguf"),
        ("hf:o/r:Q8", "model-Q8_0.gguf"),
        ("hf:o/r:MODEL-q8_0.gguf", "model-Q8_0.gguf"),
        ("hf:o/r:model-Q8_0", "model-Q8_0.gguf"),
        ("hf:o/r:f16", "model-F16-00001-of-00002.gguf"),
        ("hf:o/r:fp16", "model-F16-00001-of-00002.gguf"),
        ("hf:o/r:big/model-F16-00002-of-00002.gguf", "model-F16-00001-of-00002.gguf"),
        (f"hf:o/r:Q8_0@{COMMIT}", "model-Q8_0.gguf"),
        ("hf:o/r/model-Q8_0.gguf", "model-Q8_0.gguf"),
        ("hf:o/r/big/model-F16-00001-of-00002.gguf", "model-F16-00001-of-00002.gguf"),
        ("url:https://huggingface.co/o/r/resolve/main/model-Q8_0.gguf?download=true", "model-Q8_0.gguf"),
    ],
)
def test_file_is_chosen(hub: Hub, text: str, name: str) -> None:
    path = get(text)
    assert path.name == name
    assert path.read_bytes().startswith(CONTENT)
    num_requests = len(hub.requests)
    assert get(text, offline=True) == path
    assert len(hub.requests) == num_requests


@pytest.mark.parametrize("text", ["hf:o/r", "hf:o/r:Q8_0", "hf:o/r:F16"])
def test_what_is_here_needs_no_hub(hub: Hub, text: str) -> None:
    path = get(text)
    hub.status, hub.faults = 500, [Fault("ANY", status=500)]
    assert get(text) == path


def test_all_shards_are_fetched_and_lie_side_by_side(hub: Hub) -> None:
    progress = Recorder()
    path = get("hf:o/r:F16", progress)
    second = path.with_name("model-F16-00002-of-00002.gguf")
    assert (path.read_bytes(), second.read_bytes()) == (CONTENT + b"1", CONTENT + b"2")
    assert progress.num_new == 2 * len(CONTENT) + 2
    second.resolve().unlink()
    assert locate(spec_of("hf:o/r/big/model-F16-00001-of-00002.gguf")) is None
    hub.requests.clear()
    assert get("hf:o/r:F16") == path
    assert [request for request in hub.asked() if request.startswith("GET /o/")] == [
        f"GET /o/r/resolve/{COMMIT}/big/model-F16-00002-of-00002.gguf"
    ]


def test_shards_of_a_registry_entry(hub: Hub) -> None:
    contents = [REPO[f"o/r/big/model-F16-0000{number}-of-00002.gguf"] for number in (1, 2)]
    shards = tuple(
        Shard(f"model-F16-0000{number}-of-00002.gguf", len(content), hashlib.sha256(content).hexdigest())
        for number, content in enumerate(contents, 1)
    )
    source = "hf:o/r/big/model-F16-00001-of-00002.gguf"
    spec = ModelSpec("m", shards[0].file, (source,), sum(map(len, contents)), shards=shards)
    path = fetch(spec, offline=False, progress=Recorder())
    assert locate(spec) == verify(spec) == path
    wrong = ModelSpec("m", shards[0].file, (source,), shards=(shards[0], Shard(shards[1].file, 5, None)))
    assert "offers" in failure(wrong).message


@pytest.mark.parametrize(
    ("files", "wanted", "kind", "said", "hint"),
    [
        (REPO, ":Q5_K_M", ModelMissingError,
         "has no model `Q5_K_M`; it has\n  big/model-F16-00001-of-00002.gguf  20.5 kB, 2 parts\n"
         "  model-Q4_K_M.gguf  10.2 kB\n  model-Q8_0.gguf  10.2 kB", "hf:o/r:F16"),
        ({"o/r/a-Q3_K_S.gguf": CONTENT, "o/r/a-Q3_K_L.gguf": CONTENT}, "", UsageError,
         "has more than one model:\n  a-Q3_K_L.gguf  10.2 kB\n  a-Q3_K_S.gguf", "hf:o/r:Q3_K_L"),
        ({"o/r/a-Q3_K_S.gguf": CONTENT, "o/r/a-Q3_K_L.gguf": CONTENT}, ":q3_k", UsageError,
         "more than one model for `q3_k`", "hf:o/r:Q3_K_L"),
        ({"o/r/model.safetensors": b"x", "o/r/mmproj-F16.gguf": CONTENT}, "", ModelMissingError,
         "has no GGUF model; it has mmproj-F16.gguf, model.safetensors", "r-GGUF"),
        ({"o/r/a-Q4_K_M.gguf.part1of2": b"x", "o/r/a-Q4_K_M.gguf.part2of2": b"x"}, "", ModelLoadError, "only pieces",
         "cat a-Q4_K_M.gguf.part1of2 a-Q4_K_M.gguf.part2of2 > model.gguf"),
        ({"o/r/a-Q8_0.gguf-split-a": b"x", "o/r/a-Q2_K.gguf": CONTENT}, ":Q8_0", ModelLoadError,
         "only in pieces", "cat"),
        ({"o/r/a-Q4_K_M-00001-of-00002.gguf": CONTENT}, "", ModelMissingError, "`a-Q4_K_M-00002-of-00002.gguf`", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_listed(
    hub: Hub, files: dict[str, bytes], wanted: str, kind: type[SpecdecError], said: str, hint: str
) -> None:
    hub.files = dict(files)
    error = failure(f"hf:o/r{wanted}")
    assert isinstance(error, kind)
    assert said in error.message
    assert hint in error.hint
    assert not hub.gets()


def test_only_model_is_the_default(hub: Hub) -> None:
    hub.files = {"o/r/thing.gguf": CONTENT, "o/r/imatrix.gguf": CONTENT}
    assert get("hf:o/r").name == "thing.gguf"
    assert get("hf:o/r", offline=True).name == "thing.gguf"


def test_plain_quantization_before_one_with_a_prefix(hub: Hub) -> None:
    hub.files = {"o/r/m-UD-Q4_K_M.gguf": CONTENT, "o/r/m-Q4_K_M.gguf": CONTENT}
    assert get("hf:o/r").name == "m-Q4_K_M.gguf"
    assert get("hf:o/r:UD-Q4_K_M").name == "m-UD-Q4_K_M.gguf"


@pytest.mark.parametrize(
    "text",
    ["hf:o", "hf:o/r:", "hf:o/../r", "hf:o/r@", "hf:o/r/../../x", "url:ftp://x/y", "url:x", "pypi:x", "hf:o/r@a/../b"],
)
def test_malformed(text: str) -> None:
    with pytest.raises(UsageError, match="is not a source"):
        named_model(text)


def test_later_part_is_explained(hub: Hub) -> None:
    with pytest.raises(UsageError, match="part 2 of 3") as caught:
        spec_of("hf:o/r/a-00002-of-00003.gguf")
    assert "a-00001-of-00003.gguf" in caught.value.hint


def test_pull_takes_a_newer_file_and_run_does_not(hub: Hub) -> None:
    path = get("hf:o/r")
    hub.files["o/r/model-Q4_K_M.gguf"] = CONTENT + b"new"
    assert get("hf:o/r") == path
    newer = resolve(spec_of("hf:o/r"), offline=False, progress=Recorder(), refresh=True)
    assert newer.size == len(CONTENT) + 3
    assert verify(newer) is None


def test_pull_without_a_hub_uses_what_is_here(hub: Hub) -> None:
    get("hf:o/r")
    hub.faults = [Fault("API", status=503)]
    progress = Recorder()
    here = resolve(spec_of("hf:o/r"), offline=False, progress=progress, refresh=True)
    assert locate(here) is not None
    assert "the hub answered HTTP 503; what is here is used" in progress.notes[-1]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said", "hint"),
    [
        (Fault("HEAD", status=401, headers={"X-Error-Code": "GatedRepo"}), "`o/r` is gated", "accept the license at"),
        (Fault("HEAD", status=403, headers={"X-Error-Code": "GatedRepo"}), "(HTTP 403): `o/r` is gated", "`HF_TOKEN`"),
        (Fault("ANY", status=401, headers={"X-Error-Code": "RepoNotFound"}), "no repository `o/r`", "spelling"),
        (Fault("ANY", status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}),
         "does not know the access token", "unset it"),
        (Fault("ANY", status=404, headers={"X-Error-Code": "RepoNotFound"}), "or it is private", "`HF_TOKEN`"),
        (Fault("ANY", status=403, headers={"X-Error-Message": "Access to this resource is disabled."}), "disabled",
         "/o/r"),
        (Fault("ANY", status=403), "access refused (HTTP 403)", "`HF_TOKEN`"),
        (Fault("ANY", status=404, headers={"X-Error-Code": "RevisionNotFound"}), "no revision `main`", "leave out"),
        (Fault("HEAD", status=404, headers={"X-Error-Code": "EntryNotFound"}), "no model-Q4_K_M.gguf", "/tree/"),
        (Fault("ANY", status=429, headers={"Retry-After": "7000"}), "allows no more requests", "in 7000 s"),
        (Fault("ANY", status=429, headers={"RateLimit": '"api";r=0;t=200'}), "allows no more requests", "in 200 s"),
        (Fault("ANY", status=429), "allows no more requests", "later"),
        (Fault("ANY", status=500), "the hub answered HTTP 500", "run the same command again"),
        (Fault("GET", status=502), "the hub answered HTTP 502", "run the same command again"),
        (Fault("ANY", status=418), "the hub answered HTTP 418", "run the same command again"),
        (Fault("API", body=b"<html>log in"), "does not come from a hub", "in a browser"),
        (Fault("HEAD", body=b"<html>log in"), "does not come from a hub", "in a browser"),
        (Fault("GET", body=b"<html>log in"), "an HTML page came", "in a browser"),
        (Fault("GET", body=b"<html>log in", headers={"Content-Type": "x/y"}), "an HTML page came", ""),
        (Fault("GET", body=b""), "broke off", "continues"),
        (Fault("GET", body=b"no model"), "is not a GGUF file: it begins with `no model`", "check the name"),
        (Fault("GET", cut_after=0), "the download broke off", "continues where this one stopped"),
        (Fault("GET", stall_after=0), "does not answer", ""),
        (Fault("GET", length=50), "the download broke off", "continues"),
        (Fault("GET", headers={"Content-Range": "bytes 7-9/10"}), "", ""),
        (Fault("ANY", status=302), "does not come from a hub", ""),
    ],
    ids=lambda value: str(value)[:70] if isinstance(value, Fault) else "",
)  # fmt: skip
def test_refusal_says_why_and_what_to_do(hub: Hub, home: Path, fault: Fault, said: str, hint: str) -> None:
    hub.faults = [fault]
    if not said:
        assert get("hf:o/r").read_bytes() == CONTENT
        return
    error = failure("hf:o/r")
    assert said in error.message
    assert hint in error.hint
    assert error.hint
    assert not finals(home)
    assert len(hub.requests) <= 12


@pytest.mark.parametrize("on", ["HEAD", "GET", "API"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_trouble_passes(hub: Hub, on: str, status: int) -> None:
    hub.faults = [Fault(on, times=2, status=status)]
    progress = Recorder()
    assert get("hf:o/r", progress).read_bytes() == CONTENT
    assert len([note for note in progress.notes if f"HTTP {status}" in note and "trying again" in note]) == 2


@pytest.mark.parametrize("form", ["seconds", "date", "nonsense"])
def test_asked_pause_is_kept(hub: Hub, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    asked = {"seconds": "12", "date": email.utils.formatdate(time.time() + 40, usegmt=True), "nonsense": "soon"}[form]
    hub.faults = [Fault("HEAD", times=1, status=429, headers={"Retry-After": asked})]
    get("hf:o/r")
    least, most = {"seconds": (12, 12), "date": (5, 40), "nonsense": (0, 1)}[form]
    assert least <= max(waits) <= most


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET", times=3, cut_after=700),
        Fault("GET", times=1, stall_after=700),
        Fault("GET", times=1, length=900),
        Fault("GET", times=1, length=len(CONTENT) + 50),
        Fault("GET", times=2, status=500),
        Fault("GET", times=1, skip=1, status=416),
    ],
    ids=str,
)
def test_broken_transfer_is_continued(hub: Hub, fault: Fault) -> None:
    hub.faults = [fault, Fault("GET", times=1, cut_after=300)]
    progress = Recorder()
    assert get(DEFAULT, progress).read_bytes() == CONTENT
    assert progress.size == len(CONTENT)
    assert progress.num_new + progress.num_kept == len(CONTENT)


def test_part_that_comes_from_elsewhere_is_refused(hub: Hub, home: Path) -> None:
    hub.faults = [
        Fault("GET", times=1, cut_after=1000),
        Fault("GET", headers={"Content-Range": f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}"}),
    ]
    assert "from byte 7 on, not from 1000" in failure(DEFAULT).message
    assert not finals(home)
    hub.faults = []
    progress = Recorder()
    assert get(DEFAULT, progress).read_bytes() == CONTENT
    assert progress.num_kept == 1000


def test_login_page_in_the_middle_keeps_what_is_there(hub: Hub) -> None:
    hub.faults = [Fault("GET", times=1, cut_after=1000), Fault("GET", times=1, body=b"<html>log in")]
    assert "HTML page" in failure(DEFAULT).message
    progress = Recorder()
    assert get(DEFAULT, progress).read_bytes() == CONTENT
    assert progress.num_kept == 1000


def test_endless_file_is_cut_off(hub: Hub, home: Path) -> None:
    hub.faults = [Fault("GET", body=b"GGUF" + b"x" * len(CONTENT), headers={"Content-Type": "x/y"})]
    assert "more than the 10244 bytes" in failure(DEFAULT).message
    assert not list(home.rglob("*.part"))


def test_damaged_part_is_fetched_anew(hub: Hub, home: Path) -> None:
    hub.faults = [Fault("GET", cut_after=600, skip=0, times=4), Fault("GET", times=4, status=500)]
    failure(DEFAULT)
    [part] = home.rglob("*.specdec.part")
    part.write_bytes(b"GGUF" + b"\0" * (part.stat().st_size - 4))
    hub.faults = []
    progress = Recorder()
    assert get(DEFAULT, progress).read_bytes() == CONTENT
    assert progress.notes == ["what an earlier download left was damaged; starting over"]


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EFBIG, "takes no file of this size")]
)
def test_disk_that_fills_up(hub: Hub, home: Path, number: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = download.PartFile.write

    def failing(self: download.PartFile, block: bytes) -> int:
        if self.size >= 1000:
            raise OSError(number, os.strerror(number))
        return write(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(download.PartFile, "write", failing)
        error = failure(DEFAULT)
    assert said in error.message
    assert error.hint
    assert not finals(home)
    progress = Recorder()
    assert get(DEFAULT, progress).read_bytes() == CONTENT
    assert progress.num_kept == 1000


def test_no_space_is_seen_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=15_000)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    error = failure("hf:o/r:F16")
    assert "needs 20.5 kB, but only 15.0 kB are free" in error.message
    assert not hub.gets()
    assert get("hf:o/r:Q8_0").name == "model-Q8_0.gguf"


def test_offline_is_exit_code_3(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert invoke(["pull", "--target", "hf:o/r:Q8_0"]) == 3
    assert "specdec pull --target hf:o/r:Q8_0" in capsys.readouterr().err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert invoke(["pull", "hf:o/r:Q8_0", "--offline"]) == 3
    assert not hub.requests


# --- wrong bytes on the disk ---------------------------------------------------------------------------------------


def test_wrong_bytes_of_the_right_size_are_found_by_a_pull(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pull", DEFAULT]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert invoke(["pull", "hf:o/r:Q4_K_M"]) == 0
    assert "already there" in capsys.readouterr().err
    path.write_bytes(CONTENT[:-1] + b"?")
    assert invoke(["pull", "hf:o/r:Q4_K_M"]) == 0
    assert "already there" not in capsys.readouterr().err
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("text", [DEFAULT, "hf:o/r:Q4_K_M"])
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("size", [0, 2000])
def test_file_that_ends_early_is_fetched_again(
    hub: Hub, capsys: pytest.CaptureFixture[str], text: str, is_copy: bool, size: int
) -> None:
    assert invoke(["pull", text]) == 0
    path = Path(capsys.readouterr().out.strip())
    if is_copy:
        path.resolve().unlink()
        path.unlink()
    path.write_bytes(CONTENT[:size])
    assert invoke(["pull", text]) == 0
    assert "already there" not in capsys.readouterr().err
    assert path.read_bytes() == CONTENT


def test_wrong_bytes_of_a_named_file_are_found_by_a_pull(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pull", DEFAULT]) == 0
    path = Path(capsys.readouterr().out.strip())
    path.write_bytes(CONTENT[:-1] + b"?")
    assert invoke(["pull", DEFAULT]) == 0
    assert path.read_bytes() == CONTENT
    hub.faults = [Fault("ANY", status=500)]
    assert invoke(["pull", DEFAULT]) == 0
    assert "what is here is used" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["model-Q4_K_M.gguf", "big/model-F16-00001-of-00002.gguf"])
def test_pull_of_a_named_file_takes_a_newer_one(hub: Hub, capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert invoke(["pull", f"hf:o/r/{model}"]) == 0
    hub.files[f"o/r/{model}"] = b"GGUF" + CONTENT[:3:-1]
    assert invoke(["pull", f"hf:o/r/{model}"]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]).read_bytes() == hub.files[f"o/r/{model}"]


def test_digest_is_remembered(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    get(DEFAULT)
    spec = resolve(spec_of("hf:o/r:Q4_K_M"), offline=False, progress=Recorder(), refresh=True)
    with monkeypatch.context() as patch:
        patch.setattr("specdec_cli.files._BLOCK", 0)
        assert verify(spec) is not None
    path = locate(spec)
    assert path is not None
    os.utime(path, ns=(1, 1))
    assert verify(spec) == path


def test_other_version_in_the_cache_is_left_alone(hub: Hub) -> None:
    path = get(DEFAULT)
    spec = ModelSpec("m", path.name, (DEFAULT,), len(CONTENT), "0" * 64)
    assert verify(spec) is None
    assert path.read_bytes() == CONTENT
    assert "offers other content" in failure(spec).message


# --- any web server ------------------------------------------------------------------------------------------------


def test_url(web: Hub, home: Path) -> None:
    text = f"{web.url}/files/tiny.gguf"
    progress = Recorder()
    path = fetch_files(choose_models(text, None, None), offline=False, progress=progress)[0]
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(home / "home" / "cache" / "models")
    assert get(f"url:{text}", offline=True) == path
    assert all("authorization" not in headers for _, _, headers in web.requests)


def test_url_of_shards(web: Hub) -> None:
    path = get(f"url:{web.url}/s/t-00001-of-00002.gguf")
    assert path.with_name("t-00002-of-00002.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("ANY", status=401), "access refused (HTTP 401)"),
        (Fault("ANY", status=404), "no such file (HTTP 404)"),
        (Fault("ANY", status=500), "HTTP 500"),
        (Fault("ANY", body=b"<html>log in"), "an HTML page came"),
        (Fault("GET", cut_after=0), "broke off"),
        (Fault("GET", body=b"no model", headers={"Content-Type": "x/y"}), "is not a GGUF file"),
    ],
)
def test_url_refusals(web: Hub, home: Path, fault: Fault, said: str) -> None:
    web.faults = [fault]
    error = failure(f"url:{web.url}/files/tiny.gguf")
    assert said in error.message
    assert error.hint
    assert not finals(home)


@pytest.mark.parametrize("file", ["files/tiny.gguf", "s/t-00001-of-00002.gguf"])
def test_pull_of_an_address_takes_a_newer_file(web: Hub, capsys: pytest.CaptureFixture[str], file: str) -> None:
    url = f"{web.url}/{file}"
    assert invoke(["pull", url]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert invoke(["pull", url]) == 0
    assert "already there" in capsys.readouterr().err
    web.files[file] = b"GGUF" + CONTENT[:3:-1]
    assert invoke(["pull", url]) == 0
    assert "already there" not in capsys.readouterr().err
    assert path.read_bytes() == web.files[file]
    path.write_bytes(CONTENT)
    assert invoke(["pull", url]) == 0
    assert path.read_bytes() == web.files[file]
    web.faults = [Fault("ANY", status=404)]
    assert invoke(["pull", url]) == 0
    assert "what is here is used" in capsys.readouterr().err


def test_old_parts_of_an_address_are_removed(web: Hub) -> None:
    text = f"url:{web.url}/files/tiny.gguf"
    web.faults = [Fault("GET", times=1, cut_after=1000), Fault("GET", times=4, status=500)]
    failure(text)
    web.files["files/tiny.gguf"] = b"GGUF" + CONTENT[:3:-1]
    assert not list(get(text).parent.glob("*part"))


def test_old_parts_of_a_hub_file_are_removed_and_no_locks_stay(hub: Hub, home: Path) -> None:
    other = "hf:o/r/model-Q8_0.gguf"
    for text in (DEFAULT, other):
        hub.faults = [Fault("GET", times=1, cut_after=1000), Fault("GET", times=4, status=500)]
        failure(text)
    hub.files["o/r/model-Q4_K_M.gguf"] = b"GGUF" + CONTENT[:3:-1]
    get(DEFAULT)
    assert len(list(home.rglob("*.part"))) == 1
    progress = Recorder()
    get(other, progress)
    assert progress.num_kept == 1000
    assert not list(home.rglob("*.part"))
    failure("hf:o/r/nope.gguf")
    assert not list((home / "home").rglob("*.lock"))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "it is empty"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"), (b"# r\n", "it begins with")],
)
def test_what_is_no_model_is_told_by_what_it_is(web: Hub, hub: Hub, content: bytes, said: str) -> None:
    web.files["files/tiny.gguf"] = hub.files["o/r/README.md"] = content
    for text in (f"url:{web.url}/files/tiny.gguf", "hf:o/r/README.md"):
        error = failure(text)
        assert said in error.message
        assert "network" not in error.hint


def test_server_that_answers_gets_only(web: Hub) -> None:
    web.faults = [Fault("HEAD", status=405), Fault("GET", times=1, cut_after=900)]
    assert get(f"url:{web.url}/files/tiny.gguf").read_bytes() == CONTENT
    assert [headers.get("range") for method, _, headers in web.requests if method == "GET"] == [None, None]


def test_interrupted_url_is_continued_unless_the_file_changed(web: Hub) -> None:
    text = f"url:{web.url}/files/tiny.gguf"
    for changed in (False, True):
        web.faults = [Fault("GET", times=1, cut_after=1000), Fault("GET", times=4, status=500)]
        failure(text)
        if changed:
            web.files["files/tiny.gguf"] = b"GGUF" + CONTENT[:3:-1]
        progress = Recorder()
        path = get(text, progress)
        assert path.read_bytes() == web.files["files/tiny.gguf"]
        assert progress.num_kept == (0 if changed else 1000)
        path.unlink()


def test_file_that_changes_within_a_download_starts_over(web: Hub) -> None:
    other = b"GGUF" + CONTENT[:3:-1]
    web.faults = [Fault("GET", times=1, cut_after=1000)]
    progress = Recorder()

    def change() -> None:
        web.files["files/tiny.gguf"] = other

    progress.on_advance = change
    assert get(f"url:{web.url}/files/tiny.gguf", progress).read_bytes() == other


def test_same_name_on_two_servers(web: Hub) -> None:
    with serve({"files/tiny.gguf": CONTENT + b"x"}) as second:
        first = get(f"url:{web.url}/files/tiny.gguf")
        other = get(f"url:{second.url}/files/tiny.gguf")
    assert (first.read_bytes(), other.read_bytes()) == (CONTENT, CONTENT + b"x")


def test_endless_redirects(web: Hub) -> None:
    web.faults = [Fault("ANY", location=web.url)]
    assert "redirects without end" in failure(f"url:{web.url}/files/tiny.gguf").message


# --- paths ---------------------------------------------------------------------------------------------------------


def test_shards_on_the_disk(tmp_path: Path) -> None:
    def check(name: str) -> SpecdecError:
        with pytest.raises(SpecdecError) as caught:
            fetch_files(choose_models(None, tmp_path / name, None), offline=True, progress=Recorder())
        return caught.value

    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(CONTENT)
    error = check("m-00002-of-00003.gguf")
    assert ("part 2 of 3" in error.message, "m-00001-of-00003.gguf" in error.hint) == (True, True)
    error = check("m-00001-of-00003.gguf")
    assert isinstance(error, ModelMissingError)
    assert "no `m-00003-of-00003.gguf`" in error.message
    (tmp_path / "m-00003-of-00003.gguf").write_bytes(CONTENT)
    choice = choose_models(None, tmp_path / "m-00001-of-00003.gguf", None)
    assert fetch_files(choice, offline=True, progress=Recorder())[0].name == "m-00001-of-00003.gguf"


@pytest.mark.parametrize(
    "names",
    [
        tuple(f"m.gguf.part{number}of10" for number in range(1, 11)),
        ("m.gguf-split-a", "m.gguf-split-b"),
        ("m.gguf.aa", "m.gguf.ab"),
        ("m.gguf.part-aa", "m.gguf.part-ab"),
        ("m.gguf.001", "m.gguf.002"),
    ],
)
def test_pieces_are_explained(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(CONTENT)
    for name in (*names, "m.gguf"):
        with pytest.raises(SpecdecError) as caught:
            fetch_files(choose_models(None, tmp_path / name, None), offline=True, progress=Recorder())
        assert f"cat {' '.join(names)} > m.gguf" in caught.value.hint
        assert "piece" in caught.value.message


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("m.gguf.part1of2",), "`m.gguf.part2of2`"),
        (("m.gguf.part2of3",), "`m.gguf.part1of3` and `m.gguf.part3of3`"),
        (("m.gguf.001", "m.gguf.003"), "`m.gguf.002`"),
    ],
)
def test_missing_pieces_are_named(tmp_path: Path, names: tuple[str, ...], missing: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(CONTENT)
    with pytest.raises(SpecdecError) as caught:
        fetch_files(choose_models(None, tmp_path / names[0], None), offline=True, progress=Recorder())
    assert f"get {missing} too" in caught.value.hint
    assert "cat " not in caught.value.hint


def test_pull_refuses_paths_as_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tiny(tmp_path, num_layers=1)
    half = tmp_path / "half.gguf"
    half.write_bytes(whole.read_bytes()[:-100])
    for arguments, code, said in (
        ([str(tmp_path / "nope.gguf")], 3, "no model file"),
        (["--target", str(whole), "--draft", str(tmp_path / "nope.gguf")], 3, "no model file"),
        ([f"path:{tmp_path / 'nope.gguf'}"], 3, "no model file"),
        ([str(half)], 1, "is cut off"),
        ([f"path:{whole}"], 0, "already there"),
        (["o/one"], 3, "write `hf:o/one`"),
    ):
        assert invoke(["pull", "--no-tune", *arguments]) == code
        assert said in capsys.readouterr().err or code == 0


@pytest.mark.parametrize("text", [DEFAULT, "hf:o/r"])
def test_hub_is_asked_for_files_only(hub: Hub, home: Path, text: str) -> None:
    hub.faults = [Fault("API", body=b"[]")] if text == DEFAULT else []
    process = start_pull(hub, home, text)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert not [asked for asked in hub.asked() if "/api/" in asked and "/api/models/" not in asked]


@pytest.mark.parametrize("text", ["hf:o/nope", "hf:o/r/nope.gguf", "hf:o/r@nope", "hf:o/r:Q2_K", f"{DEFAULT}@nope"])
def test_what_the_hub_does_not_have_is_exit_code_3(hub: Hub, text: str) -> None:
    assert invoke(["pull", text]) == 3


def test_what_an_address_does_not_have_is_exit_code_3(web: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pull", f"{web.url}/nope.gguf"]) == 3
    web.faults = [Fault("ANY", status=500)]
    assert invoke(["pull", f"{web.url}/files/tiny.gguf"]) == 1
    capsys.readouterr()
    assert invoke(["pull", "http://127.0.0.1:9/tiny.gguf"]) == 1
    shown = capsys.readouterr().err
    assert "check the address" in shown
    assert "HF_ENDPOINT" not in shown


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B-GGUF", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M"])
def test_repository_without_prefix_gets_a_hint(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(["pull", "--target", path]) == 3
    assert f"write `hf:{path.removeprefix('hf.co/')}`" in capsys.readouterr().err


# --- processes -----------------------------------------------------------------------------------------------------


def start_pull(hub: Hub, home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        **environment,
    }
    variables.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "specdec_cli", "pull", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_pull_goes_on(hub: Hub, home: Path, number: signal.Signals) -> None:
    # More than one block, so that something is on the disk.
    content = b"GGUF" + bytes(3 << 20)
    hub.files["o/r/large.gguf"] = content
    hub.faults = [Fault("GET", times=1, stall_after=2 << 20)]
    first = start_pull(hub, home, "hf:o/r/large.gguf", "--no-tune")
    wait_for(lambda: any(path.stat().st_size > 1 << 20 for path in home.rglob("*.specdec.part")))
    first.send_signal(number)
    _, errors = first.communicate(timeout=30)
    assert first.returncode == (130 if number == signal.SIGINT else -9)
    if number == signal.SIGINT:
        assert "the same command goes on from here" in errors
        assert "Traceback" not in errors
    assert not finals(home)
    second = start_pull(hub, home, "hf:o/r/large.gguf", "--no-tune")
    out, errors = second.communicate(timeout=30)
    assert second.returncode == 0, errors
    assert Path(out.strip()).read_bytes() == content
    assert int(hub.gets()[-1]["range"].removeprefix("bytes=").removesuffix("-")) >= 1 << 20


def test_second_process_waits_and_says_so(hub: Hub, home: Path) -> None:
    hub.faults = [Fault("GET", times=1, stall_after=5000)]
    first = start_pull(hub, home, DEFAULT)
    wait_for(hub.gets)
    second = start_pull(hub, home, DEFAULT)
    lines: list[str] = []
    assert second.stderr is not None
    lines.append(second.stderr.readline())
    assert "another process is downloading model-Q4_K_M.gguf; waiting for it" in lines[0]
    hub.ended.set()
    outputs = [process.communicate(timeout=30)[0].strip() for process in (first, second)]
    assert outputs[0] == outputs[1]
    assert Path(outputs[0]).read_bytes() == CONTENT
    assert len([request for request in hub.asked() if request.startswith("GET /o/")]) == 2


# --- secrets -------------------------------------------------------------------------------------------------------


def looked_through(folder: Path, *secrets: str) -> None:
    """No file below the folder has one of these in its name or content."""
    for path in folder.rglob("*"):
        assert not [secret for secret in secrets if secret in str(path)]
        if path.is_file():
            assert not [secret for secret in secrets if secret.encode() in path.read_bytes()], path


def test_token_goes_to_the_hub_only_and_is_shown_nowhere(hub: Hub, home: Path) -> None:
    # As on the real hub, the bytes come from another host.
    with serve(dict(REPO)) as outside:
        hub.faults = [Fault("GET", location=outside.url)]
        process = start_pull(hub, home, "hf:o/r", "--debug", HF_TOKEN=TOKEN)
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert TOKEN not in out + errors
        asked = [headers for _, path, headers in hub.requests if "o/r" in path]
        assert {headers.get("authorization") for headers in asked} == {f"Bearer {TOKEN}"}
        assert outside.gets()
        assert TOKEN not in str(outside.requests)
    looked_through(home, TOKEN)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("HEAD", status=401, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": f"token {TOKEN} may not"}),
        Fault("API", status=418, headers={"X-Error-Message": TOKEN}),
        Fault("GET", status=500, headers={"X-Error-Message": TOKEN}),
        Fault("GET", cut_after=0),
        Fault("GET", body=TOKEN.encode()),
        Fault("API", body=TOKEN.encode()),
        Fault("ANY", location=f"http://{TOKEN}:{TOKEN}@127.0.0.1:9/{TOKEN}"),
    ],
    ids=str,
)
def test_token_in_no_error(
    hub: Hub, home: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    hub.faults = [fault]
    assert invoke(["pull", "hf:o/r", "--debug"]) == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err
    assert TOKEN not in out + err
    assert f"Bearer {TOKEN}" in str(hub.requests)
    looked_through(home, TOKEN)


@pytest.mark.parametrize(
    "fault", [None, Fault("ANY", status=401), Fault("GET", cut_after=0), Fault("ANY", status=500)], ids=str
)
def test_password_in_an_address_is_shown_nowhere(
    web: Hub, home: Path, fault: Fault | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    web.faults = [fault] if fault else []
    address = web.url.replace("://", "://me:secretword@") + "/files/tiny.gguf?signature=secretsign"
    assert invoke(["pull", "--target", f"url:{address}", "--debug"]) == (0 if fault is None else 1)
    out, err = capfd.readouterr()
    assert "secretword" not in out + err
    assert "secretsign" not in out + err
    assert "authorization" in web.requests[0][2]
    looked_through(home, "secretword", "secretsign")


def test_scrubbed() -> None:
    text = scrub("https://a:b@c@host/x?sig=1#y and 'http://u@h/p' git@host a@b")
    assert text == "https://***@host/x and 'http://***@h/p' git@host a@b"


# --- pull ----------------------------------------------------------------------------------------------------------


def test_pull_of_a_target_and_a_draft(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pull", "--target", "hf:o/r:F16", "--draft", "hf:o/r:Q8_0", "--no-tune"]) == 0
    target, draft = map(Path, capsys.readouterr().out.split())
    assert (target.name, draft.name) == ("model-F16-00001-of-00002.gguf", "model-Q8_0.gguf")


def test_json_of_a_split_model(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert invoke(["pull", "hf:o/r:F16", "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["pair"], document["draft"]) == (None, None)
    assert document["target"]["size"] == 2 * len(CONTENT) + 2
    assert [Path(file).name[-14:-5] for file in document["target"]["files"]] == ["-of-00002"] * 2


def test_wrong_path_is_seen_before_a_download(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(CONTENT)
    choice = choose_models(None, "hf:o/r", tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(ModelLoadError):
        fetch_files(choice, offline=False, progress=Recorder())
    assert not hub.requests


def test_speed_of_a_continued_download_counts_new_bytes_only(
    hub: Hub, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.progress import Progress as RichProgress

    from specdec_cli.render.progress import BarProgress, LineProgress

    speeds: list[float | None] = []
    update = RichProgress.update

    def spy(self: RichProgress, task: int, **values: object) -> None:
        update(self, task, **values)  # type: ignore[arg-type]
        speeds.append(self.tasks[0].speed)

    monkeypatch.setattr(RichProgress, "update", spy)
    bar, lines = BarProgress(), LineProgress()
    for display in (bar, lines):
        display.start("m", 2_000_000_000, "hf:o/r")
        display.advance(1_000_000_000, kept=True)
    time.sleep(0.05)
    for _ in range(5):
        time.sleep(0.01)
        bar.advance(1000)
    bar.finish()
    assert speeds[-1] is None or speeds[-1] < 1_000_000
    assert "MB/s" not in capsys.readouterr().err
