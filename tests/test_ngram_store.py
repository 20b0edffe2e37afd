"""Statistics across runs: what they say, how large they get, and every way in which the file can be unusable."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import sentencepiece_vocabulary, tiny

from specdec_cli.cli import ngram as ngram_module
from specdec_cli.cli.app import invoke
from specdec_cli.errors import ExitCode
from specdec_cli.llama import Model
from specdec_cli.ngram_store import NgramStore, default_path, vocabulary_fingerprint
from specdec_cli.testing import FakeModel

ROOT = Path(__file__).parents[1]
VOCABULARY = "0123456789abcdef"
TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 5]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "n #grams?.sqlite"


def filled(path: Path, text: list[int] = TEXT, **settings: float) -> NgramStore:
    store = NgramStore.open(path, VOCABULARY, **settings)  # type: ignore[arg-type]
    assert store.add(text)
    assert store.problem == store.warning == ""
    return store


# ------------------------------------------------------------------ what they say


def test_they_last(path: Path) -> None:
    filled(path).close()
    with NgramStore.open(path, VOCABULARY) as store:
        assert store.best([9, 1, 2, 3]) == (4, 2 / 3, 3)
        assert store.best([9, 2, 3]) == (4, 2 / 3, 2)
        assert store.best([2, 3, 9]) is None
        assert store.best([3]) is None
        assert store.best([]) is None


def test_the_latest_wins_among_equals(path: Path) -> None:
    with filled(path, [1, 2, 3]) as store:
        assert store.add([1, 2, 4])
        assert store.best([1, 2]) == (4, 0.5, 2)
        assert store.add([1, 2, 3, 1, 2, 3])
        assert store.best([1, 2]) == (3, 0.75, 2)


@given(st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4))
def test_counts_are_those_of_a_counter(texts: list[list[int]]) -> None:
    counts: dict[tuple[int, ...], Counter[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = NgramStore.open(Path(folder) / "n", VOCABULARY)
        for text in texts:
            assert store.add(text)
            for size in (2, 3):
                for end in range(size, len(text)):
                    counts.setdefault(tuple(text[end - size : end]), Counter())[text[end]] += 1
        assert store.num_entries == sum(map(len, counts.values()))
        for context, found in counts.items():
            token, share, size = store.best(context) or (0, 0.0, 0)
            assert size == len(context)
            assert found[token] == max(found.values())
            assert share == found[token] / found.total()
        store.close()


def test_no_file_is_made_before_there_is_something_to_keep(path: Path) -> None:
    with NgramStore.open(path, VOCABULARY) as store:
        assert store.best([1, 2]) is None
        assert store.add([1, 2])
        assert (store.num_entries, store.problem, path.parent.exists()) == (0, "", False)


def test_only_the_user_may_read_it(path: Path) -> None:
    filled(path).close()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("token", [-1, 1 << 21, 1 << 40])
def test_ids_that_do_not_fit_are_left_out(path: Path, token: int) -> None:
    with filled(path, [1, 2, 3, token, 1, 2, 3, token]) as store:
        assert store.num_entries == 1
        assert store.best([1, 2, token]) is None
        assert store.best([1, 2]) == (3, 1.0, 2)


def test_a_lookup_takes_microseconds(path: Path) -> None:
    """Promised are 50 us; the bound leaves room for a busy machine."""
    with filled(path, [1, 2, *range(3000), *range(3000)]) as store:
        times = []
        for _ in range(50):
            started = time.perf_counter()
            assert store.best([7, 8, 9])
            times.append(time.perf_counter() - started)
    assert min(times) < 500e-6


# ------------------------------------------------------------------ bounds


def test_the_least_used_go_first(path: Path) -> None:
    with filled(path, [7, 8, 9] * 5, max_entries=100) as store:
        for start in range(100, 600, 50):
            assert store.add(list(range(start, start + 30)))
            assert store.num_entries <= 100
        assert store.best([7, 8, 9]) == (7, 1.0, 3)
        assert store.best([550, 551]) == (552, 1.0, 2)
        assert store.best([100, 101]) is None
        rows = sqlite3.connect(path)
        assert rows.execute("SELECT count(*) FROM ngrams").fetchone() == (store.num_entries,)
        rows.close()


def test_one_text_larger_than_the_bound(path: Path) -> None:
    with filled(path, list(range(500)), max_entries=50) as store:
        assert store.num_entries == 45


# ------------------------------------------------------------------ files that cannot be used


def assert_ignored(path: Path, text: str) -> None:
    before = path.read_bytes()
    with NgramStore.open(path, VOCABULARY) as store:
        assert text in store.warning
        assert str(path) in store.warning
        assert store.warning.endswith("; going on without it")
        assert "\n" not in store.warning
        assert store.best([1, 2, 3]) is None
        assert not store.add(TEXT)
        assert store.num_entries == 0
        assert text in store.warning
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello", b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 3000])
def test_a_file_of_something_else(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert_ignored(path, "damaged or not such a file")


def test_another_programs_database(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    assert_ignored(path, "is not an n-gram file of specdec")


def test_another_vocabulary(path: Path) -> None:
    filled(path).close()
    before = path.read_bytes()
    with NgramStore.open(path, "another") as store:
        assert "another model's vocabulary" in store.warning
        assert not store.add(TEXT)
        assert store.best([1, 2, 3]) is None
    assert path.read_bytes() == before


def test_a_later_format(path: Path) -> None:
    filled(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    assert_ignored(path, "has format 9; this specdec reads 1")


def test_a_directory(path: Path) -> None:
    path.mkdir(parents=True)
    with NgramStore.open(path, VOCABULARY) as store:
        assert "cannot be used" in store.warning
        assert not store.add(TEXT)


def test_an_empty_file_is_a_new_one(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    filled(path).close()


def test_damage_that_shows_later(path: Path) -> None:
    """The first page is whole, so that opening finds nothing."""
    filled(path, list(range(3000))).close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    with NgramStore.open(path, VOCABULARY) as store:
        for _ in range(2):
            assert store.best([100, 101, 102]) is None
            assert "damaged" in store.warning
        assert not store.add(TEXT)
    assert path.read_bytes() == data


@pytest.mark.parametrize("size", [100, 4096, 10_000])
def test_a_file_that_was_cut_off(path: Path, size: int) -> None:
    filled(path, list(range(3000))).close()
    os.truncate(path, size)
    with NgramStore.open(path, VOCABULARY) as store:
        store.best([100, 101, 102])
        store.add(TEXT)
        assert store.warning


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with NgramStore.open(tmp_path / "file" / "n.sqlite", VOCABULARY) as store:
        assert not store.add(TEXT)
        assert "cannot be used" in store.warning


# ------------------------------------------------------------------ read-only media


def unprivileged(folder: Path, code: str) -> str:
    """What a program prints that may read, and not write, in a folder; root may write anywhere."""
    drop = "import os\nif os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    imports = "from pathlib import Path\nfrom specdec_cli.ngram_store import NgramStore\n"
    head = f"{imports}{drop}path = Path({str(folder)!r}) / 'n'\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", head + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that everybody can look into: the tests' own folders are closed to others."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_reading_works_where_nothing_can_be_written(readable: Path) -> None:
    filled(readable / "n").close()
    (readable / "n").chmod(0o444)
    readable.chmod(0o555)
    code = f"""
with NgramStore.open(path, {VOCABULARY!r}) as store:
    print(store.best([1, 2, 3]), store.warning)
    print(store.add([1, 2, 3]), store.warning)
    print(store.best([1, 2, 3]))
"""
    first, second, third = unprivileged(readable, code).splitlines()
    assert first == third + " " == f"(4, {2 / 3}, 3) "
    assert second.startswith("False the n-gram file")
    assert "readonly" in second


def test_a_folder_without_write_permission(readable: Path) -> None:
    readable.chmod(0o555)
    code = f"store = NgramStore.open(path, {VOCABULARY!r})\nprint(store.add([1, 2, 3]), store.warning)"
    assert unprivileged(readable, code).startswith("False the n-gram file")


# ------------------------------------------------------------------ two processes


def test_two_writers_lose_nothing(path: Path) -> None:
    """Both begin without a file."""
    code = f"""
import sys
from pathlib import Path
from specdec_cli.ngram_store import NgramStore
store = NgramStore.open(Path({str(path)!r}), {VOCABULARY!r}, wait_s=30)
sys.stdin.read(1)
for _ in range(20):
    assert store.add([1, 2, 3, int(sys.argv[1])]), store.problem
    assert store.best([1, 2]) in ((3, 1.0, 2), None)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    writers = [
        subprocess.Popen([sys.executable, "-c", code, token], env=environment, stdin=subprocess.PIPE)
        for token in ("4", "5")
    ]
    for writer in writers:
        assert writer.stdin
        writer.stdin.write(b"\n")
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0]
    with NgramStore.open(path, VOCABULARY) as store, sqlite3.connect(path) as connection:
        assert store.num_entries == 5
        assert connection.execute("SELECT sum(count) FROM ngrams").fetchone() == (120,)
    connection.close()


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_locked_file_fails_nothing(path: Path, begin: str) -> None:
    with filled(path, wait_s=0.1) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute(begin)
        started = time.monotonic()
        assert store.best([1, 2, 3]) == (None if "EXCLUSIVE" in begin else (4, 2 / 3, 3))
        assert store.warning == ""
        assert time.monotonic() - started < 0.05
        assert not store.add(TEXT)
        assert "in use by another process" in store.warning
        assert NgramStore.open(path, VOCABULARY, wait_s=0.1).best([9, 9, 9]) is None
        other.execute("ROLLBACK")
        other.close()
        assert store.add(TEXT)
        assert store.warning == ""
        assert store.best([1, 2, 3]) == (4, 2 / 3, 3)


# ------------------------------------------------------------------ the vocabulary


def test_fingerprints(tmp_path: Path) -> None:
    def fingerprint(name: str, **settings: object) -> str:
        with Model(tiny(tmp_path, name, **settings), vocab_only=True) as model:
            return vocabulary_fingerprint(model)

    bytes_level = fingerprint("a")
    assert bytes_level == fingerprint("b", seed=5, num_vocab=384)
    assert bytes_level != fingerprint("c", vocabulary=sentencepiece_vocabulary())
    assert len(bytes_level) == 16
    assert vocabulary_fingerprint(FakeModel(alphabet="abcd")) != vocabulary_fingerprint(FakeModel(alphabet="xyz"))


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("the end and the end and the end\n" * 3)
    return file


def build(*arguments: object) -> int:
    return int(invoke(["ngram", "build", *map(str, arguments)]))


def test_build_and_build_again(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(text, "--target", model) == 0
    out, err = capsys.readouterr()
    with Model(model, vocab_only=True) as loaded:
        tokens = loaded.tokenize(text.read_text(), add_special=False, parse_special=False)
        path = default_path(vocabulary_fingerprint(loaded))
        with NgramStore.open(path, vocabulary_fingerprint(loaded)) as store:
            num_entries = store.num_entries
            assert store.best(tokens[:3]) is not None
    assert out == f"{len(tokens)} tokens from 1 file · {num_entries} entries in {path}\n"
    assert err == ""
    assert build(text, text, "--target", model, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "schema": 1, "path": str(path), "files": 2, "skipped": [], "tokens": 2 * len(tokens), "entries": num_entries,
    }  # fmt: skip


def test_a_large_text_is_counted_in_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ngram_module, "CHUNK", 64)
    monkeypatch.setattr(ngram_module, "_HEAD", 21)
    text = "\ufeff" + "Zwölf Boxkämpfer jagen Viktor\r\n" * 30
    (tmp_path / "b.txt").write_bytes(text.encode())
    with (tmp_path / "b.txt").open("rb") as stream:
        parts = ngram_module.read_text(stream)
        assert parts is not None
        assert "".join(parts) == text[1:].replace("\r\n", "\n")
    assert build(tmp_path / "b.txt", "--target", model, "--ngram-cache", tmp_path / "n") == 0
    assert "tokens from 1 file" in capsys.readouterr().out


def test_what_is_not_text_is_left_out(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"zeros": b"a\0b", "latin": "Zwölf".encode("latin-1"), "wide": "abc".encode("utf-16")}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").touch()
    files = [*(tmp_path / name for name in others), tmp_path / "empty", text]
    assert build(*files, "--target", model) == 0
    out, err = capsys.readouterr()
    assert "tokens from 2 files" in out
    assert err.splitlines() == [f"skipped `{tmp_path / name}`: not a text in UTF-8" for name in others]
    assert build(*files, "--target", model, "-q") == 0
    assert capsys.readouterr().err == ""


def test_when_nothing_is_text_nothing_was_done(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zeros").write_bytes(b"a\0b")
    assert build(tmp_path / "zeros", "--target", model) == ExitCode.FAILURE
    assert "nothing was learned" in capsys.readouterr().err


def test_errors(model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failed(code: ExitCode, message: str, *arguments: object) -> None:
        assert build(*arguments) == code
        out, err = capsys.readouterr()
        assert (out, err.startswith("Error: "), err.count("\nHint: ")) == ("", True, 1)
        assert message in err

    bad, home = tmp_path / "bad.sqlite", Path(os.environ["SPECDEC_HOME"])
    bad.write_text("no database")
    failed(ExitCode.USAGE, "is a directory", text, tmp_path, "--target", model)
    failed(ExitCode.USAGE, "no file", text, tmp_path / "none", "--target", model)
    failed(ExitCode.MODEL_MISSING, "no model file", text, "--target", tmp_path / "none.gguf")
    failed(ExitCode.MODEL_MISSING, "no pair is called", text, "--pair", "none")
    failed(ExitCode.FAILURE, "damaged", text, "--target", model, "--ngram-cache", bad)
    failed(ExitCode.USAGE, "Missing argument")
    assert bad.read_text() == "no database"
    assert not (home / "state").exists()


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ngram"]) == ExitCode.USAGE
    assert "build" in "".join(capsys.readouterr())
