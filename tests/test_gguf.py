"""What is refused before llama.cpp sees it, and with which words."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import tiny

from specdec_cli import gguf, paths
from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError
from specdec_cli.gguf import TENSOR_TYPES, Skipped, check_header, read_header
from specdec_cli.tiny import write_gguf

Raw = tuple[str, int, bytes]
"""Key, GGUF's number of the type, and the encoded value."""


def header(version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 1, 1)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def info(name: str, sizes: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}qIQ", len(sizes), *sizes, type_id, offset)


PLAIN: tuple[Raw, ...] = (
    ("general.architecture", 8, text("llama")),
    ("llama.block_count", 4, struct.pack("<I", 2)),
    ("llama.context_length", 4, struct.pack("<I", 64)),
    ("llama.embedding_length", 4, struct.pack("<I", 32)),
)


def write_raw(
    path: Path, keys: tuple[Raw, ...] = PLAIN, tensors: tuple[bytes, ...] = (), data: bytes = bytes(512)
) -> Path:
    """A file written byte by byte, true or not."""
    body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    body += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    body += b"".join(tensors)
    path.write_bytes(body + bytes(-len(body) % 32) + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_header(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message.replace(f"`{path}`", "FILE")


def test_a_model_passes(tmp_path: Path) -> None:
    (found,) = check_header(tiny(tmp_path, num_layers=1))
    assert (found.version, found.architecture, found.alignment, found.split_count) == (3, "llama", 32, 1)
    assert found.parameter("block_count") == 1
    assert found.metadata["tokenizer.ggml.add_bos_token"] is False
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    first = found.tensors[0]
    assert (first.name, first.shape, first.type_name, first.offset) == ("token_embd.weight", (320, 256), "Q8_0", 0)
    assert found.num_bytes == sum(tensor.num_bytes for tensor in found.tensors)
    assert found.data_offset + found.num_bytes == found.file_size == found.path.stat().st_size


def test_long_arrays_and_texts_are_counted_not_kept(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        {"a": ["x"] * 2000, "b": list(range(2000)), "c": "y" * (2 << 20), "d": [1, 2], "e": ["z"]},
        [],
    )
    metadata = read_header(tmp_path / "m.gguf").metadata
    assert (metadata["d"], metadata["e"]) == ((1, 2), ("z",))
    kept = [metadata[key] for key in "abc"]
    assert [(item.kind, item.length) for item in kept if isinstance(item, Skipped)] == [
        (8, 2000),
        (5, 2000),
        (8, 2 << 20),
    ]


def with_vocabulary(path: Path, word: str, num: int = 20_000) -> Path:
    words = array(8, num, text(word) * num)
    after = ("general.name", 8, text("behind it"))
    return write_raw(path, (*PLAIN, ("tokenizer.ggml.tokens", 9, words), after))


def test_where_a_vocabulary_ends_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_vocabulary(tmp_path / "m.gguf", "word")
    walked: list[str] = []
    walk = gguf._Reader._skip_strings
    monkeypatch.setattr(
        gguf._Reader, "_skip_strings", lambda self, count, what: (walked.append(what), walk(self, count, what))
    )
    first = read_header(path)
    assert (first, len(walked)) == (read_header(path), 1)
    assert first.metadata["general.name"] == "behind it"
    # Another file of that name, and of that size.
    with_vocabulary(path, "wine")
    os.utime(path, ns=(1, 1))
    assert (read_header(path), len(walked)) == (first, 2)


@pytest.mark.parametrize("known", [-5, 10**9, "x", None, True, [1], {"a": 1}])
def test_nonsense_that_was_remembered_is_not_believed(tmp_path: Path, known: object) -> None:
    path = with_vocabulary(tmp_path / "m.gguf", "word")
    first = read_header(path)
    store = paths.state_dir() / "vocabularies.json"
    ((identity, ends),) = json.loads(store.read_text()).items()
    for value in (known, dict.fromkeys(ends, known)):
        store.write_text(json.dumps({identity: value}))
        assert read_header(path) == first
    assert json.loads(store.read_text()) == {identity: ends}


def test_the_types_are_those_of_ggml() -> None:
    """By the library itself, where its functions can be reached."""
    ggml = importlib.import_module("llama_cpp.llama_cpp")._lib
    if not hasattr(ggml, "ggml_type_size"):
        pytest.skip("ggml's own functions are out of reach here")
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    found = {}
    for number in range(43):
        if block := ggml.ggml_blck_size(number):
            found[number] = (ggml.ggml_type_name(number).decode().upper(), block, ggml.ggml_type_size(number))
    assert found == {number: (name.upper(), *rest) for number, (name, *rest) in TENSOR_TYPES.items()}


@pytest.mark.parametrize("version", [2, 3])
def test_known_versions(tmp_path: Path, version: int) -> None:
    path = tiny(tmp_path, num_layers=1)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", version))
    assert check_header(path)[0].version == version


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a GGUF file: it is empty"),
        (b"<!DOCTYPE html><html>", "it is an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
        (b"ggml" + bytes(40), "it is a file of the old GGML format"),
        (b"PK\x03\x04" + bytes(40), "it is a ZIP archive"),
        (b"no model at all", "it begins with `no model`"),
        (b"\xff\x00\x01", "it begins with ff 00 01"),
        (b"GGU", "is not a GGUF file"),
        (b"GGUF", "is cut off: 4 bytes"),
        (header()[:23], "is cut off: 23 bytes"),
        (header(1), "has GGUF version 1; known are 2 and 3"),
        (header(4), "has GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "has GGUF version 50331648: it is version 3 written for big-endian"),
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
    assert f"no directory `{tmp_path / 'nowhere'}`" in caught.value.hint
    tiny(tmp_path, num_layers=1).rename(tmp_path / "model-Q4_K_M.gguf")
    with pytest.raises(ModelMissingError) as caught:
        check_header(tmp_path / "model-Q4_KM.gguf")
    assert caught.value.hint == f"did you mean `{tmp_path / 'model-Q4_K_M.gguf'}`?"
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


@pytest.mark.parametrize(
    ("num_tensors", "num_keys", "message"),
    [
        (0, 2**63, "it claims 9223372036854775808 keys; more than any model has"),
        (2**64 - 1, 0, "it claims 18446744073709551615 tensors; more than any model has"),
        (0, 1000, "it claims 1000 keys; the file has 24 bytes"),
        (40, 0, "it claims 40 tensors; the file has 24 bytes"),
    ],
)
def test_hostile_counts(tmp_path: Path, num_tensors: int, num_keys: int, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys))
    assert message in refusal(path)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((("a", 12, bytes(8)), ("a", 12, bytes(8))), "the key `a` appears twice"),
        ((("", 12, bytes(8)),), "key 0 is empty"),
        ((("a", 77, bytes(8)),), "`a` has the unknown type 77"),
        ((("a", 8, struct.pack("<Q", 2**40)),), "the text of `a` claims 1099511627776 bytes; the most is 67108864"),
        ((("a", 8, struct.pack("<Q", 60_000)),), "bytes end within the text of `a`"),
        ((("a", 9, array(9, 1, array(9, 1))),), "the array `a` is an array of arrays"),
        ((("a", 9, array(99, 1)),), "the array `a` has elements of the unknown type 99"),
        ((("a", 9, array(4, 2**62)),), "the array `a` claims 4611686018427387904 elements"),
        ((("a", 9, array(8, 2**62)),), "the array `a` claims 4611686018427387904 texts"),
        ((("a", 9, array(8, 4, struct.pack("<Q", 2**63))),), "the array `a` claims 9223372036854775808 bytes"),
        ((("general.alignment", 4, struct.pack("<I", 24)),), "`general.alignment` must be a power of two, not 24"),
        ((("general.alignment", 4, struct.pack("<I", 0)),), "`general.alignment` must be a power of two, not 0"),
        ((("general.alignment", 8, text("32")),), "`general.alignment` must be a power of two, not str"),
        ((("\x1b[31mred", 77, b""),), "'\\x1b[31mred' has the unknown type 77"),
    ],
)  # fmt: skip
def test_hostile_metadata(tmp_path: Path, keys: tuple[Raw, ...], message: str) -> None:
    assert message in refusal(write_raw(tmp_path / "m.gguf", keys))


def test_a_long_array_of_texts_that_leaves_the_file(tmp_path: Path) -> None:
    entries = text("x") * 1999 + struct.pack("<Q", 2**63)
    path = write_raw(tmp_path / "m.gguf", (("a", 9, array(8, 2000, entries)),))
    assert refusal(path) == "FILE is damaged: the array `a` does not end within the file"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((info("a"), info("a", offset=128)), "tensor `a` appears twice"),
        ((info("a"), info("b", offset=96)), "tensor `b` overlaps the one before it: it begins at 96 and not at 128"),
        ((info("a"), info("b", offset=256)), "tensor `b` leaves a gap: it begins at 256 and not at 128"),
        ((info("a", ()),), "tensor `a` has 0 dimensions; possible are 1 to 4"),
        ((info("a", (1,) * 5),), "tensor `a` has 5 dimensions"),
        ((info("a", (32, -1)),), "tensor `a` has the impossible shape [32, -1]"),
        ((info("a", (32, 0)),), "tensor `a` has the impossible shape [32, 0]"),
        ((info("a", (2**40, 2**40)),), "tensor `a` has the impossible shape"),
        ((info("a", (32,), 4),), "tensor `a` has the unknown type 4"),
        ((info("a", (32,), 31),), "tensor `a` has the unknown type 31"),
        ((info("a", (33, 1), 8),), "tensor `a` has rows of 33 weights, which Q8_0 cannot hold"),
        ((info("a", (32,), 8),), "tensor `a` is a vector of the type Q8_0"),
        ((info("a" * 64),), "the name of tensor 0 claims 64 bytes; the most is 63"),
        ((info("a", (2**50,)),), "is cut off"),
    ],
)
def test_hostile_tensors(tmp_path: Path, tensors: tuple[bytes, ...], message: str) -> None:
    assert message in refusal(write_raw(tmp_path / "m.gguf", tensors=tensors))


def test_cut_off_files_name_both_sizes(tmp_path: Path) -> None:
    path = tiny(tmp_path, num_layers=1)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert refusal(path) == f"FILE is cut off: {size - 1} of {size} bytes"


def with_parameter(name: str, value: int) -> tuple[Raw, ...]:
    key = f"llama.{name}"
    return (*(item for item in PLAIN if item[0] != key), (key, 4, struct.pack("<I", value)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (PLAIN[1:], "does not say which architecture it has"),
        (PLAIN[:1] + PLAIN[2:], "`llama.block_count` is missing"),
        (with_parameter("block_count", 0), "`llama.block_count` is 0; possible are 1 to 512"),
        (with_parameter("block_count", 513), "`llama.block_count` is 513"),
        (with_parameter("embedding_length", 2**31), "`llama.embedding_length` is 2147483648"),
        (with_parameter("attention.head_count", 2**30), "`llama.attention.head_count` is 1073741824"),
        (with_parameter("expert_used_count", 2), "`llama.expert_used_count` is 2; possible are 0 to 0"),
        (with_parameter("nextn_predict_layers", 3), "`llama.nextn_predict_layers` is 3; possible are 0 to 2"),
        (with_parameter("expert_count", 5000), "`llama.expert_count` is 5000; possible are 0 to 1024"),
        ((*PLAIN, ("llama.attention.head_count_kv", 9, array(5, 2, struct.pack("<ii", 1, -1)))),
         "`llama.attention.head_count_kv` is -1"),
        ((("general.architecture", 8, text("clip")),), "is no language model but a vision or audio projector"),
        ((*PLAIN, ("general.type", 8, text("adapter"))), "is no language model but of the kind `adapter`"),
    ],
)  # fmt: skip
def test_parameters_that_llama_cpp_would_die_of(tmp_path: Path, keys: tuple[Raw, ...], message: str) -> None:
    assert message in refusal(write_raw(tmp_path / "m.gguf", keys))


class TestParts:
    @staticmethod
    def write(folder: Path, number: int, count: int = 2, name: str = "m-{:05d}-of-{:05d}.gguf") -> Path:
        path = folder / name.format(number + 1, count)
        keys = (*PLAIN, ("split.no", 2, struct.pack("<H", number)), ("split.count", 2, struct.pack("<H", count)))
        return write_raw(path, keys, (info(f"part{number}"),))

    def test_all_are_read(self, tmp_path: Path) -> None:
        first, second = self.write(tmp_path, 0), self.write(tmp_path, 1)
        assert [found.path for found in check_header(first)] == [first, second]

    def test_a_missing_one_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelMissingError, match=r"part 2 of 2 is missing: .*m-00002-of-00002\.gguf"):
            check_header(self.write(tmp_path, 0))

    def test_another_than_the_first(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0)
        second = self.write(tmp_path, 1)
        with pytest.raises(ModelLoadError, match="is part 2 of 2") as caught:
            check_header(second)
        assert caught.value.hint == "name the first part: `m-00001-of-00002.gguf`"

    def test_a_name_that_does_not_tell_the_others(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"is one of 2 parts, which llama\.cpp finds by their names"):
            check_header(self.write(tmp_path, 0, name="model.gguf"))

    def test_parts_in_the_wrong_order(self, tmp_path: Path) -> None:
        first = self.write(tmp_path, 0)
        self.write(tmp_path, 0, name="m-00002-of-{1:05d}.gguf")
        with pytest.raises(ModelLoadError, match="says that it is part 1, not 2"):
            check_header(first)


@given(data=st.binary(max_size=40))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError):
        check_header(path)
