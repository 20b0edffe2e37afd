"""N-gram statistics of the user's own text, kept across runs in one SQLite file a vocabulary.

They only make drafts, so nothing here may fail an answer: a file that cannot be used is described by `problem` and left
as it is, one that is locked for the moment is passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec_cli.paths import state_dir
from specdec_cli.types import LanguageModel

SCHEMA = 1
MAX_ENTRIES = 500_000
"""About 10 MB."""

WAIT_S = 2.0
"""How long a write waits for another process."""

_APPLICATION = 0x5370446E
_TOKEN_BITS = 21
_SIZES = (3, 2)
_KEPT_SHARE = 0.9
_SAMPLE = 16
_MAX_KNOWN = 1 << 14
_PADDING = re.compile(rb"\[PAD\d+\]")

_TABLES = f"""
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {SCHEMA};
CREATE TABLE meta (vocabulary TEXT NOT NULL, entries INTEGER NOT NULL, clock INTEGER NOT NULL);
CREATE TABLE ngrams (
    context INTEGER, next INTEGER, count INTEGER NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (context, next)
) WITHOUT ROWID;
"""
# With a single max() the other columns are those of its row: the largest count, the latest use among equals.
_BEST = "SELECT next, count, sum(count), max((count << 31) + used) FROM ngrams WHERE context = ?"
_INSERT = "INSERT OR IGNORE INTO ngrams VALUES (?, ?, 0, 0)"
_COUNT = "UPDATE ngrams SET count = count + ?, used = ? WHERE context = ? AND next = ?"
_EVICT = """
DELETE FROM ngrams WHERE (context, next) IN (SELECT context, next FROM ngrams ORDER BY count, used LIMIT ?)
"""


def vocabulary_fingerprint(model: LanguageModel) -> str:
    """16 hexadecimal digits that tell tokenizers apart, the same for models that differ in padding.

    Every 16th token is looked at: that takes up to a tenth of a second, and two vocabularies taken for one cost
    acceptance, never correctness.
    """
    digest = hashlib.blake2b(digest_size=8)
    for token in range(0, model.num_vocab, _SAMPLE):
        piece = model.piece(token, special=True)
        if piece and not _PADDING.fullmatch(piece):
            digest.update(b"%d:%d:%b" % (token, len(piece), piece))
    return digest.hexdigest()


def default_path(vocabulary: str) -> Path:
    """Where statistics are kept unless the user names a file."""
    return state_dir() / f"ngrams-{vocabulary}.sqlite"


def has_default() -> bool:
    """Whether there are such statistics for any vocabulary."""
    return any(state_dir().glob("ngrams-*.sqlite"))


class NgramStore:
    """Which token followed two or three others, and how often.

    Made by `open`. Methods never raise for what is wrong with the file; `problem` says it.

    Attributes:
        path: the file.
        problem: why the file is not used, or why the last `add` failed; empty when all is well.
    """

    def __init__(self, path: Path, vocabulary: str, max_entries: int, wait_s: float) -> None:
        self.path = path
        self.problem = ""
        self._vocabulary = vocabulary
        self._max_entries = max_entries
        self._wait_ms = int(wait_s * 1000)
        self._connection: sqlite3.Connection | None = None
        # What another process adds meanwhile can wait for the next run.
        self._known: dict[int, tuple[int, float] | None] = {}

    @classmethod
    def open(cls, path: Path, vocabulary: str, *, max_entries: int = MAX_ENTRIES, wait_s: float = WAIT_S) -> NgramStore:
        """Statistics from a file, or none yet when there is no file: the first `add` makes it.

        Args:
            path: the file, on read-only media too.
            vocabulary: fingerprint of the target's; a file made for another one is not used.
            max_entries: the most (context, next token) pairs kept.
            wait_s: how long a write waits for another process.
        """
        store = cls(path, vocabulary, max_entries, wait_s)
        try:
            if path.exists():
                store._connect()
        except (OSError, sqlite3.Error) as error:
            store._give_up(error)
        return store

    @property
    def warning(self) -> str:
        """One line for the user; empty when all is well."""
        return f"{self.problem}; going on without it" if self.problem else ""

    @property
    def num_entries(self) -> int:
        """(context, next token) pairs in the file; 0 without a usable one."""
        try:
            row = self._connection.execute("SELECT entries FROM meta").fetchone() if self._connection else None
        except sqlite3.Error as error:
            self._take_note(error)
            return 0
        return int(row[0]) if row else 0

    def best(self, last_tokens: Sequence[int]) -> tuple[int, float, int] | None:
        """The token that most often followed the last three tokens, else the last two.

        Returns:
            The token, its share of what followed in (0, 1], and the number of tokens looked at; None when nothing is
            known, or the file is being written at this moment.
        """
        try:
            for size in _SIZES:
                context = _key(last_tokens[-size:]) if len(last_tokens) >= size else None
                found = None if context is None else self._following(context)
                if found:
                    return *found, size
        except sqlite3.Error as error:
            if not _is_busy(error):
                self._take_note(error)
        return None

    def _following(self, context: int) -> tuple[int, float] | None:
        """The best token and its share. Asked once: a pair that half of all texts have takes 0.1 ms to add up."""
        if self._connection is None:
            return None
        if context not in self._known:
            token, count, total, _ = self._connection.execute(_BEST, (context,)).fetchone()
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[context] = None if token is None else (int(token), count / total)
        return self._known[context]

    def add(self, tokens: Sequence[int]) -> bool:
        """Count what followed what in a text, in one transaction.

        Returns:
            Whether it is in the file now; `problem` says why not.
        """
        counts = _counted(tokens)
        if not counts:
            return True
        try:
            self._make_file()
            if self._connection is None:
                return False
            with self._transaction(self._connection):
                self._write(self._connection, counts)
        except (OSError, sqlite3.Error) as error:
            self._take_note(error)
            return False
        self._known.clear()
        self.problem = ""
        return True

    def close(self) -> None:
        """Release the file; the store is empty afterwards."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._known.clear()

    def __enter__(self) -> NgramStore:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- the file ------------------------------------------------------------------------------------------------

    def _make_file(self) -> None:
        """Where `open` found no file; what was found unusable stays as it is."""
        if self._connection is not None or self.problem:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The user's own text can be read from it, so nobody else may.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        self._connect()

    def _connect(self) -> None:
        # A file that may only be read is opened for reading by SQLite itself.
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(
            uri, timeout=self._wait_ms / 1000, isolation_level=None, check_same_thread=False, uri=True
        )
        try:
            self._prepare(connection)
            self.problem = _difference(connection, self._vocabulary, self.path)
        except BaseException:
            connection.close()
            raise
        if self.problem:
            connection.close()
            return
        # A lookup that meets a writer does without: waiting costs more than a draft can gain.
        connection.execute("PRAGMA busy_timeout = 0")
        self._connection = connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables in an empty file."""
        if self.path.stat().st_size or not os.access(self.path, os.W_OK):
            return
        with self._transaction(connection):
            # Another process may have been faster.
            if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _TABLES.split(";")[:-1]:
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES (?, 0, 0)", (self._vocabulary,))

    @contextlib.contextmanager
    def _transaction(self, connection: sqlite3.Connection) -> Iterator[None]:
        """All or nothing, behind other writers."""
        connection.execute(f"PRAGMA busy_timeout = {self._wait_ms}")
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        finally:
            connection.execute("PRAGMA busy_timeout = 0")

    def _write(self, connection: sqlite3.Connection, counts: Counter[tuple[int, int]]) -> None:
        num_before, clock = connection.execute("SELECT entries, clock + 1 FROM meta").fetchone()
        num = num_before + connection.executemany(_INSERT, counts).rowcount
        connection.executemany(_COUNT, ((count, clock, *entry) for entry, count in counts.items()))
        if num > self._max_entries:
            # More than the excess, so that not every text ends in a search for the least used.
            surplus = num - int(self._max_entries * _KEPT_SHARE)
            num -= connection.execute(_EVICT, (surplus,)).rowcount
        connection.execute("UPDATE meta SET entries = ?, clock = ?", (num, clock))

    def _take_note(self, error: Exception) -> None:
        """A full disk or another process may be gone the next time; a damaged file is not touched again."""
        if _is_damage(error):
            self._give_up(error)
        else:
            self.problem = self._described(error)

    def _give_up(self, error: Exception) -> None:
        self.problem = self._described(error)
        self.close()

    def _described(self, error: Exception) -> str:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if _is_busy(error):
            return f"the n-gram file `{self.path}` is in use by another process"
        if _is_damage(error):
            return f"the n-gram file `{self.path}` is damaged or not such a file ({reason})"
        return f"the n-gram file `{self.path}` cannot be used: {reason}"


def _is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _is_damage(error: Exception) -> bool:
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)


def _difference(connection: sqlite3.Connection, vocabulary: str, path: Path) -> str:
    """Why a healthy database is not the one that is wanted."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != _APPLICATION:
        return f"`{path}` is not an n-gram file of specdec"
    if version != SCHEMA:
        return f"the n-gram file `{path}` has format {version}; this specdec reads {SCHEMA}"
    if connection.execute("SELECT vocabulary FROM meta").fetchone() != (vocabulary,):
        return f"the n-gram file `{path}` was made for another model's vocabulary"
    return ""


def _counted(tokens: Sequence[int]) -> Counter[tuple[int, int]]:
    """(context key, next token) -> how often."""
    counts: Counter[tuple[int, int]] = Counter()
    for size in _SIZES:
        for end in range(size, len(tokens)):
            context = _key(tokens[end - size : end])
            if context is not None and 0 <= tokens[end] < 1 << _TOKEN_BITS:
                counts[context, tokens[end]] += 1
    return counts


def _key(tokens: Sequence[int]) -> int | None:
    """Two or three tokens as one 64-bit integer, pairs below zero; None when an id is too large for that."""
    key = 0
    for token in tokens:
        if not 0 <= token < 1 << _TOKEN_BITS:
            return None
        key = key << _TOKEN_BITS | token
    return key if len(tokens) == max(_SIZES) else -1 - key
