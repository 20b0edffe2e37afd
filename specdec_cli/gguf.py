"""A look at a GGUF file before llama.cpp sees it: what it holds, and whether that can be true.

The C code behind llama.cpp takes much of a header at its word. Here every count is compared with the size of the file
before anything is made of it, so that a damaged or hostile file costs neither memory nor time. Only the header is read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from specdec_cli.errors import ModelLoadError, ModelMissingError
from specdec_cli.files import known_of, remember_of
from specdec_cli.split import missing_file, shard_names

_VERSIONS = (2, 3)
_DOWNLOAD = "download the model again"
_LFS = b"version https://git-lfs"
_OTHERS = {
    b"PK\x03\x04": "a ZIP archive (or a PyTorch file)", b"\x1f\x8b": "a gzip archive", b"\x89HDF": "an HDF5 file",
    b"ggml": "a file of the old GGML format", b"lmgg": "a file of the old GGML format",
    b"tjgg": "a file of the old GGJT format", b"fmgg": "a file of the old GGMF format",
}  # fmt: skip
"""What else a file may be, by its first bytes."""

# Far above anything published (a few dozen keys, a few thousand tensors, 300,000 tokens), and read in a second.
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS = 1 << 16, 1 << 17, 1 << 22
_MAX_KEY_BYTES, _MAX_TEXT_BYTES = 1 << 16, 1 << 26
_KEPT_ITEMS, _KEPT_BYTES = 1024, 1 << 20
"""Longer arrays and texts are counted, not kept."""

# llama.cpp's own limits; beyond them it ends the process.
_MAX_NAME_BYTES, _MAX_DIMS, _MAX_LAYERS, _MAX_EXPERTS = 63, 4, 512, 1024

_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
"""ggml's number of a type -> name, weights in a block, bytes of a block."""

_ENDS, _LONG_ARRAY = "vocabularies", 10_000
"""What is remembered of headers: where arrays of more texts than that end."""

_VECTOR_TYPES = {"F32", "F16", "BF16", "F64", "I32", "I64"}
"""llama.cpp ends the process in the middle of a pass where it meets others."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A value too long to keep.

    Attributes:
        kind: GGUF's number of the type: of the elements, or 8 for a text.
        length: elements of the array, or bytes of the text.
        offset: where the first element, or the text, begins in the file.
    """

    kind: int
    length: int
    offset: int


Scalar = str | bool | int | float
Value = Scalar | tuple[Scalar, ...] | Skipped


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it.

    Attributes:
        name: llama.cpp's name.
        shape: sizes, slowest dimension first, as NumPy counts.
        type_id: number of the ggml type, a key of `TENSOR_TYPES`.
        offset: from the beginning of the data, in bytes.
        num_bytes: size of the data.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        """The ggml type in words."""
        return TENSOR_TYPES[self.type_id][0]


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the weights.

    Attributes:
        path: the file.
        version: of the format.
        metadata: by key.
        tensors: in file order.
        data_offset: where the weights begin, in bytes.
        alignment: of each tensor, in bytes.
        file_size: in bytes.
    """

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    alignment: int
    file_size: int

    @property
    def architecture(self) -> str:
        """The family of the model as llama.cpp names it; empty when the file does not tell."""
        return self.text("general.architecture")

    @property
    def split_no(self) -> int:
        """Number of this part of a split model, from 0."""
        return self.number("split.no", 0)

    @property
    def split_count(self) -> int:
        """Parts of the model; 1 when it is not split."""
        return max(1, self.number("split.count", 1))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights in this file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def text(self, key: str) -> str:
        """The text under a key; empty when there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """The whole number under a key."""
        value = self.metadata.get(key)
        return int(value) if isinstance(value, int) else default

    def parameter(self, name: str) -> Value | None:
        """A value of the architecture's own, such as `block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}")


def check_header(path: Path) -> tuple[Header, ...]:
    """Refuse what cannot be a model, with a reason.

    Args:
        path: of a split model the first part.

    Returns:
        The headers of all parts; the first one has the metadata.

    Raises:
        ModelMissingError: there is no such file, or a part is missing.
        ModelLoadError: not a GGUF file, a directory, one that may not be read, or one that llama.cpp cannot hold.
    """
    first = read_header(path)
    _check_parameters(first)
    return first, *_other_parts(first)


def read_header(path: Path) -> Header:
    """What one file says of itself, after checking that the file can hold it.

    Raises:
        ModelMissingError: there is no such file.
        ModelLoadError: not a GGUF file, a directory, one that may not be read, or a header that cannot be true.
    """
    try:
        if path.is_dir():
            raise ModelLoadError(f"`{path}` is a directory", "name the .gguf file in it")
        if path.exists() and not path.is_file():
            raise ModelLoadError(f"`{path}` is not a regular file", "name a .gguf file on a disk")
        with path.open("rb") as stream:
            _check_magic(path, stream.read(24))
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise ModelLoadError(f"cannot read `{path}`: {error.strerror}", "check its permissions") from None


def _read(path: Path, data: mmap.mmap) -> Header:
    """The header; where its vocabularies end is remembered, because walking through them takes 50 ms."""
    known = known_of(path, _ENDS)
    reader = _Reader(path, data, known if isinstance(known, dict) else {})
    header = reader.header()
    if reader.ends != known and reader.ends:
        remember_of(path, _ENDS, reader.ends)
    return header


def _check_magic(path: Path, head: bytes) -> None:
    if head[:4] != b"GGUF":
        raise ModelLoadError(f"`{path}` is not a GGUF file: {what_it_is(head)}", _how_to_get(head))
    if len(head) < 24:
        raise ModelLoadError(f"`{path}` is cut off: {len(head)} bytes", _DOWNLOAD)
    (version,) = struct.unpack("<I", head[4:8])
    (swapped,) = struct.unpack(">I", head[4:8])
    if swapped in _VERSIONS:
        raise ModelLoadError(
            f"`{path}` has GGUF version {version}: it is version {swapped} written for big-endian machines",
            "download the little-endian file, or convert it with `gguf-convert-endian` from the package gguf",
        )
    if version not in _VERSIONS:
        hint = _DOWNLOAD if version == 1 else "update specdec"
        raise ModelLoadError(f"`{path}` has GGUF version {version}; known are 2 and 3", hint)


def what_it_is(head: bytes) -> str:
    """What a file that is no GGUF file seems to be, by its first bytes."""
    if not head:
        return "it is empty"
    if head.lstrip()[:1] == b"<":
        return "it is an HTML or XML page"
    if head.startswith(_LFS):
        return "it is a Git LFS pointer, which stands for the file"
    if (name := next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)) is not None:
        return f"it is {name}"
    shown = head[:8].decode("ascii", "replace")
    return (
        f"it begins with `{shown}`"
        if shown.isascii() and shown.isprintable()
        else f"it begins with {head[:8].hex(' ')}"
    )


def _how_to_get(head: bytes) -> str:
    if head.startswith(_LFS):
        return "run `git lfs pull` in its repository, or download the file with `specdec pull hf:OWNER/REPO`"
    if head.lstrip()[:1] == b"<":
        return "download the file itself and not its page, e.g. with `specdec pull hf:OWNER/REPO`"
    if any(head.startswith(magic) for magic in _OTHERS):
        return "specdec loads GGUF files only; look for a repository of the model with `GGUF` in its name"
    return _DOWNLOAD


class _Reader:
    """Walks through a header, never beyond the end of the file.

    Args:
        path: for messages.
        data: the whole file, mapped.
        known: where each long array of texts ends, by where it begins.

    Attributes:
        ends: the same, of this file.
    """

    def __init__(self, path: Path, data: mmap.mmap, known: Mapping[str, object]) -> None:
        self._path = path
        self._known = known
        self.ends: dict[str, int] = {}
        self._data = data
        self._size = len(data)
        self._position = 4
        self._num_strings = 0

    def header(self) -> Header:
        """Everything up to the weights."""
        version, num_tensors, num_keys = self._unpack("<IQQ", "the counts")
        self._check_count("tensors", num_tensors, _MAX_TENSORS, 24)
        self._check_count("keys", num_keys, _MAX_KEYS, 13)
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            key = self._string(_MAX_KEY_BYTES, f"key {index}")
            if not key or key in metadata:
                self._refuse(f"key {index} is empty" if not key else f"the key {_shown(key)} appears twice")
            metadata[key] = self._value(key)
        alignment = self._alignment(metadata)
        infos = [self._tensor(index) for index in range(num_tensors)]
        data_offset = self._position + -self._position % alignment if infos else self._position
        tensors = tuple(self._placed(infos, alignment, data_offset))
        return Header(self._path, version, metadata, tensors, data_offset, alignment, self._size)

    def _check_count(self, what: str, count: int, most: int, bytes_each: int) -> None:
        """Before anything is read: that many do not fit into the file, or no model has them."""
        if count > min(most, self._size // bytes_each):
            reason = "more than any model has" if count > most else f"the file has {self._size} bytes"
            self._refuse(f"it claims {count} {what}; {reason}")

    # --- values -----------------------------------------------------------------------------------------------------

    def _value(self, key: str) -> Value:
        (kind,) = self._unpack("<I", f"the type of {_shown(key)}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self._text(key)
        if kind not in _SCALARS:
            self._refuse(f"{_shown(key)} has the unknown type {kind}")
        (value,) = self._unpack(f"<{_SCALARS[kind]}", f"the value of {_shown(key)}")
        return value

    def _text(self, key: str) -> str | Skipped:
        offset, length = self._skip_string(_MAX_TEXT_BYTES, f"the text of {_shown(key)}")
        if length > _KEPT_BYTES:
            return Skipped(_STRING, length, offset)
        return self._data[offset : offset + length].decode("utf-8", "replace")

    def _array(self, key: str) -> Value:
        what = f"the array {_shown(key)}"
        kind, count = self._unpack("<IQ", what)
        if kind == _STRING:
            return self._strings(what, count)
        if kind not in _SCALARS:
            nested = "is an array of arrays" if kind == _ARRAY else f"has elements of the unknown type {kind}"
            self._refuse(f"{what} {nested}")
        offset, size = self._position, struct.calcsize(f"<{_SCALARS[kind]}")
        if count > (self._size - offset) // size:
            self._refuse(f"{what} claims {count} elements; {self._size - offset} bytes are left")
        self._position = offset + count * size
        if count > _KEPT_ITEMS:
            return Skipped(kind, count, offset)
        return struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, offset)

    def _strings(self, what: str, count: int) -> Value:
        self._num_strings += count
        if count > (self._size - self._position) // 8 or self._num_strings > _MAX_STRINGS:
            self._refuse(f"{what} claims {count} texts; {self._size - self._position} bytes are left")
        first = self._position
        if count <= _KEPT_ITEMS:
            return tuple(self._string(_MAX_KEY_BYTES, what) for _ in range(count))
        end = self._known.get(str(first)) if count > _LONG_ARRAY else None
        if isinstance(end, int) and first + 8 * count <= end <= self._size:
            self._position = end
        else:
            self._skip_strings(count, what)
        if count > _LONG_ARRAY:
            self.ends[str(first)] = self._position
        return Skipped(_STRING, count, first)

    def _skip_strings(self, count: int, what: str) -> None:
        # A loop of its own: vocabularies have hundreds of thousands.
        unpack, data, position, end = struct.Struct("<Q").unpack_from, self._data, self._position, self._size - 8
        for _ in range(count):
            if position > end:
                break
            position += 8 + unpack(data, position)[0]
        else:
            if position <= self._size:
                self._position = position
                return
        self._refuse(f"{what} does not end within the file")

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            self._refuse(f"`general.alignment` must be a power of two, not {_shown_value(alignment)}")
        return alignment

    def _tensor(self, index: int) -> TensorInfo:
        name = self._string(_MAX_NAME_BYTES, f"the name of tensor {index}")
        what = f"tensor {_shown(name)}"
        (num_dims,) = self._unpack("<I", what)
        if not 1 <= num_dims <= _MAX_DIMS:
            self._refuse(f"{what} has {num_dims} dimensions; possible are 1 to {_MAX_DIMS}")
        sizes = self._unpack(f"<{num_dims}q", what)
        type_id, offset = self._unpack("<IQ", what)
        if min(sizes) < 1 or math.prod(sizes) >= 1 << 63:
            self._refuse(f"{what} has the impossible shape {list(sizes)}")
        if type_id not in TENSOR_TYPES:
            self._refuse(f"{what} has the unknown type {type_id}", "update llama-cpp-python, or download another file")
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        if num_dims == 1 and type_name not in _VECTOR_TYPES:
            self._refuse(f"{what} is a vector of the type {type_name}, with which llama.cpp cannot compute")
        if sizes[0] % block:
            self._refuse(f"{what} has rows of {sizes[0]} weights, which {type_name} cannot hold")
        return TensorInfo(name, sizes[::-1], type_id, offset, math.prod(sizes) // block * block_bytes)

    def _placed(self, infos: list[TensorInfo], alignment: int, data_offset: int) -> Iterator[TensorInfo]:
        """The tensors, which follow one another without gaps, inside the file."""
        expected, end = 0, 0
        names: set[str] = set()
        for tensor in infos:
            what = f"tensor {_shown(tensor.name)}"
            if tensor.name in names:
                self._refuse(f"{what} appears twice")
            if tensor.offset != expected:
                relation = "overlaps the one before it" if tensor.offset < expected else "leaves a gap"
                self._refuse(f"{what} {relation}: it begins at {tensor.offset} and not at {expected}")
            names.add(tensor.name)
            end = expected + tensor.num_bytes
            expected = end + -end % alignment
            yield tensor
        if (needed := data_offset + end) > self._size:
            raise ModelLoadError(f"`{self._path}` is cut off: {self._size} of {needed} bytes", _DOWNLOAD)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _unpack(self, form: str, what: str) -> tuple[int, ...]:
        size = struct.calcsize(form)
        if self._position + size > self._size:
            raise ModelLoadError(f"`{self._path}` is cut off: {self._size} bytes end within {what}", _DOWNLOAD)
        values = struct.unpack_from(form, self._data, self._position)
        self._position += size
        return values

    def _string(self, most: int, what: str) -> str:
        offset, length = self._skip_string(most, what)
        return self._data[offset : offset + length].decode("utf-8", "replace")

    def _skip_string(self, most: int, what: str) -> tuple[int, int]:
        """Where a text begins, and its length in bytes."""
        (length,) = self._unpack("<Q", what)
        offset = self._position
        if length > most:
            self._refuse(f"{what} claims {length} bytes; the most is {most}")
        if length > self._size - offset:
            raise ModelLoadError(f"`{self._path}` is cut off: {self._size} bytes end within {what}", _DOWNLOAD)
        self._position = offset + length
        return offset, length

    def _refuse(self, reason: str, hint: str = _DOWNLOAD) -> NoReturn:
        raise ModelLoadError(f"`{self._path}` is damaged: {reason}", hint)


# --- what the values mean --------------------------------------------------------------------------------------------

_RANGES = {
    "block_count": (1, _MAX_LAYERS),
    "context_length": (1, 2**31 - 1),
    "embedding_length": (1, 1 << 20),
    "feed_forward_length": (0, 1 << 24),
    "attention.head_count": (0, 1 << 14),
    "attention.head_count_kv": (0, 1 << 14),
    "attention.key_length": (1, 1 << 16),
    "attention.value_length": (1, 1 << 16),
    "attention.sliding_window": (0, 2**31 - 1),
    "rope.dimension_count": (0, 1 << 16),
    "expert_count": (0, _MAX_EXPERTS),
    "expert_used_count": (0, _MAX_EXPERTS),
    "nextn_predict_layers": (0, _MAX_LAYERS),
    "vocab_size": (1, 1 << 24),
}
"""Where llama.cpp would end the process, or ask for memory that no machine has."""

_NEEDED = ("block_count", "context_length", "embedding_length")
_PART_OF = {"expert_used_count": "expert_count", "nextn_predict_layers": "block_count"}
"""What cannot be more than something else."""


def _check_parameters(header: Header) -> None:
    path, architecture = header.path, header.architecture
    if not architecture:
        raise ModelLoadError(f"`{path}` does not say which architecture it has", "download another file of the model")
    kind = header.text("general.type")
    if architecture == "clip" or kind in {"adapter", "mmproj", "imatrix"}:
        what = "a vision or audio projector" if architecture == "clip" else f"of the kind `{kind}`"
        raise ModelLoadError(f"`{path}` is no language model but {what}", "name the language model's .gguf file")
    for name, (least, most) in _RANGES.items():
        if name in _PART_OF:
            most = header.number(f"{architecture}.{_PART_OF[name]}")
        value = header.parameter(name)
        for item in value if isinstance(value, tuple) else (value,):
            # Of another type: llama.cpp says so itself, or takes no notice.
            if type(item) is int and not least <= item <= most:
                raise ModelLoadError(
                    f"`{path}` is damaged: `{architecture}.{name}` is {item}; possible are {least} to {most}", _DOWNLOAD
                )
    for name in _NEEDED:
        if type(header.parameter(name)) is not int:
            raise ModelLoadError(f"`{path}` is damaged: `{architecture}.{name}` is missing", _DOWNLOAD)


def _other_parts(first: Header) -> Iterator[Header]:
    """The headers of a split model's further parts, which lie beside the first one."""
    if first.split_count == 1:
        return
    path, count = first.path, first.split_count
    names = shard_names(path.name)
    if len(names) != count:
        raise ModelLoadError(
            f"`{path}` is one of {count} parts, which llama.cpp finds by their names",
            f"give it its name back: ...-{first.split_no + 1:05d}-of-{count:05d}.gguf",
        )
    if first.split_no != 0:
        raise ModelLoadError(f"`{path}` is part {first.split_no + 1} of {count}", f"name the first part: `{names[0]}`")
    for number, name in enumerate(names[1:], 1):
        part = path.with_name(name)
        if not part.exists():
            raise ModelMissingError(
                f"part {number + 1} of {count} is missing: `{part}`", "download all parts into one folder"
            )
        header = read_header(part)
        if header.split_no != number:
            raise ModelLoadError(f"`{part}` says that it is part {header.split_no + 1}, not {number + 1}", _DOWNLOAD)
        yield header


def _shown(name: str) -> str:
    """A name from the file in a message: short, and harmless on a terminal."""
    return f"`{name[:60]}`" if name.isprintable() else ascii(name[:60])


def _shown_value(value: object) -> str:
    return str(value) if isinstance(value, bool | int | float) else type(value).__name__
