"""How much a pair takes, how much there is, and what is said when it does not suffice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny

from specdec_cli import memory, selfcheck
from specdec_cli.cli.app import invoke
from specdec_cli.errors import BackendError, OutOfMemoryError, UsageError
from specdec_cli.gguf import Header, TensorInfo, Value, check_header
from specdec_cli.llama import devices, repacked_types
from specdec_cli.memory import (
    LIMIT_VARIABLE,
    Available,
    Fit,
    Placement,
    available,
    estimate,
    estimate_files,
    parse_size,
)
from specdec_cli.session import Session, SessionOptions
from specdec_cli.testing import FakeModel
from specdec_cli.tuning import tune
from specdec_cli.types import Drafting, SamplingParams

MIB = 1 << 20


def header(architecture: str, tensors: dict[str, tuple[int, ...]], **parameters: Value) -> tuple[Header]:
    """A header with these tensors in F16, as (slowest, ..., fastest) sizes."""
    metadata: dict[str, Value] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{name.replace('__', '.')}": value for name, value in parameters.items()}
    infos, offset = [], 0
    for name, shape in tensors.items():
        size = 2
        for number in shape:
            size *= number
        infos.append(TensorInfo(name, shape, 1, offset, size))
        offset += size
    return (Header(Path("m.gguf"), 3, metadata, tuple(infos), 0, 32, offset),)


def attention(layer: int, heads: int, size: int = 64) -> dict[str, tuple[int, ...]]:
    return {f"blk.{layer}.attn_{part}.weight": (heads * size, 512) for part in ("k", "v")}


BASICS: dict[str, Value] = {"embedding_length": 512, "context_length": 4096, "attention__head_count": 8}


def left(root: Path) -> list[int]:
    """Bytes that control groups leave."""
    return [group.left for group in memory._group_limits(root)]


class TestCache:
    """Bytes of the caches, against what each kind of model keeps."""

    @staticmethod
    def bytes_of(headers: tuple[Header], num_ctx: int = 1024, kv_type: str = "f16") -> int:
        return estimate(headers, None, num_ctx, Placement(kv_type)).target.cache

    def test_grouped_heads(self) -> None:
        tensors = attention(0, 2) | attention(1, 2)
        found = header("llama", tensors, block_count=2, attention__head_count_kv=2, **BASICS)
        assert self.bytes_of(found) == 2 * 1024 * 2 * (2 * 64) * 2
        assert self.bytes_of(found, kv_type="f32") == 2 * self.bytes_of(found)
        assert self.bytes_of(found, kv_type="q8_0") == self.bytes_of(found) * 34 // 64

    def test_contexts_are_rounded_up(self) -> None:
        found = header("llama", attention(0, 2), block_count=1, **BASICS)
        assert self.bytes_of(found, 1) == self.bytes_of(found, 256)
        assert self.bytes_of(found, 257) == self.bytes_of(found, 512)

    def test_another_number_of_heads_in_each_layer(self) -> None:
        tensors = {f"blk.{layer}.attn_qkv.weight": (1024, 512) for layer in range(3)}
        found = header("openelm", tensors, block_count=3, attention__head_count_kv=(1, 2, 4), **BASICS)
        assert self.bytes_of(found) == (1 + 2 + 4) * 1024 * 2 * 64 * 2

    def test_a_head_size_of_its_own(self) -> None:
        tensors = {"blk.0.attn_qkv.weight": (1024, 512)}
        found = header(
            "gemma3", tensors, block_count=1, attention__head_count_kv=1, attention__key_length=256,
            attention__value_length=128, **BASICS,
        )  # fmt: skip
        assert self.bytes_of(found) == 1024 * (256 + 128) * 2

    @pytest.mark.parametrize(("pattern", "num_cut"), [
        ({}, 5), ({"attention__sliding_window_pattern": 2}, 3), ({"attention__sliding_window_pattern": 0}, 6),
        ({"attention__sliding_window_pattern": (True, False, False, True, False)}, 2),
        ({"attention__sliding_window_pattern": -3}, 0), ({"attention__sliding_window": 0}, 0),
    ])  # fmt: skip
    def test_layers_with_a_window_keep_the_window_where_only_chains_are_drafted(
        self, pattern: dict[str, Value], num_cut: int
    ) -> None:
        tensors = {name: shape for layer in range(6) for name, shape in attention(layer, 2).items()}
        sizes: dict[str, Value] = {"attention__sliding_window": 300, "block_count": 6, **BASICS, **pattern}
        found = header("gemma3", tensors, **sizes)
        a_token = 2 * (2 * 64) * 2
        assert self.bytes_of(found, 8192) == 6 * 8192 * a_token
        cut = estimate(found, None, 8192, Placement(keeps_windows=True)).target.cache
        # The window and a pass over 512 tokens, rounded up.
        assert cut == (num_cut * 1024 + (6 - num_cut) * 8192) * a_token
        assert estimate(found, None, 256, Placement(keeps_windows=True)).target.cache == 6 * 256 * a_token

    def test_the_cache_of_a_hybrid_with_windows_is_not_cut(self) -> None:
        tensors = {"blk.0.shortconv.conv.weight": (512, 3), **attention(1, 2)}
        found = header("lfm2", tensors, block_count=2, shortconv__l_cache=3, attention__head_count_kv=(0, 2),
                       attention__sliding_window=300, attention__sliding_window_pattern=0, **BASICS)  # fmt: skip
        cut = estimate(found, None, 8192, Placement(keeps_windows=True))
        assert cut == estimate(found, None, 8192)

    def test_recurrent_layers_do_not_grow_with_the_context(self) -> None:
        tensors = {"blk.0.ssm_conv1d.weight": (1024, 4), "blk.0.ssm_in.weight": (2048, 512)}
        sizes: dict[str, Value] = {"ssm__inner_size": 1024, "ssm__state_size": 16, "ssm__conv_kernel": 4}
        found = header("mamba", tensors, block_count=1, **BASICS, **sizes)
        assert self.bytes_of(found) == 4 * (3 * 1024 + 1024 * 16)
        assert self.bytes_of(found, 4096) == self.bytes_of(found)

    def test_hybrids_have_both(self) -> None:
        tensors = {"blk.0.shortconv.conv.weight": (512, 3), **attention(1, 2)}
        found = header("lfm2", tensors, block_count=2, shortconv__l_cache=3, attention__head_count_kv=(0, 2), **BASICS)
        assert self.bytes_of(found) == 4 * 512 * 2 + 1024 * 2 * 128 * 2

    def test_latent_attention_keeps_one_vector(self) -> None:
        tensors = {"blk.0.attn_kv_a_mqa.weight": (576, 512), "blk.0.attn_k_b.weight": (8, 512, 64)}
        found = header(
            "deepseek2", tensors, block_count=1, attention__head_count_kv=1, attention__key_length=576, **BASICS
        )
        assert self.bytes_of(found) == 1024 * 576 * 2

    def test_layers_that_share_or_are_left_out(self) -> None:
        tensors = attention(0, 2) | attention(1, 2) | attention(2, 2)
        one_layer = 1024 * 2 * 128 * 2
        shared = header("gemma4", tensors, block_count=3, attention__shared_kv_layers=1, **BASICS)
        assert self.bytes_of(shared) == 2 * one_layer
        nextn = header("glm4moe", tensors, block_count=3, nextn_predict_layers=1, **BASICS)
        assert self.bytes_of(nextn) == 2 * one_layer


class TestParts:
    def test_weights_are_all_parts_of_a_split_model(self) -> None:
        (first,), (second,) = header("llama", attention(0, 2), block_count=2, **BASICS), header("", attention(1, 2))
        found = estimate((first, second), None, 256).target
        assert found.weights == 4 * 128 * 512 * 2
        assert found.cache == 2 * 256 * 256 * 2

    def test_repacked_weights_are_resident_twice_and_needed_once(self, tmp_path: Path) -> None:
        path = tiny(tmp_path, quant="q4_0")
        plain = estimate_files(path, None, 256)
        found = estimate_files(path, None, 256, Placement(repacks=frozenset({"Q4_0"})))
        (file,) = check_header(path)
        kept = sum(
            tensor.num_bytes
            for tensor in file.tensors
            if tensor.type_name == "Q4_0" and "token_embd" not in tensor.name
        )
        assert found.target.repacked == kept
        assert found.peak - plain.peak == kept
        assert found.needed == plain.needed == plain.peak

    def test_layers_on_a_gpu_leave_the_main_memory(self, tmp_path: Path) -> None:
        path = tiny(tmp_path, num_layers=4)
        found = [estimate_files(path, None, 1024, Placement(gpu_layers=layers)) for layers in (0, 1, 2, 5, 1000)]
        assert found[0].on_gpu == 0
        assert [item.on_gpu for item in found] == sorted(item.on_gpu for item in found)
        assert len({item.on_gpu for item in found}) == 4
        assert found[3] == found[4]
        embeddings = next(item.num_bytes for item in check_header(path)[0].tensors if item.name == "token_embd.weight")
        assert found[3].on_gpu > found[3].target.weights - embeddings + found[3].target.cache
        assert found[3].peak < found[0].peak

    def test_the_draft_model_gets_no_more_than_it_was_trained_for(self, tmp_path: Path) -> None:
        target, draft = tiny(tmp_path, "t", context_length=4096), tiny(tmp_path, "d", context_length=512)
        found, alone = estimate_files(target, draft, 4096), estimate_files(target, None, 4096)
        assert found.draft is not None
        assert found.draft.cache * 8 == found.target.cache
        assert found.peak == alone.peak + found.draft.in_ram

    def test_a_draft_of_another_tokenizer_has_a_larger_context(self) -> None:
        twice = fit(gigabytes(12)).with_draft_ctx(2.0).check(8192)
        usual = fit(gigabytes(12)).check(8192)
        assert twice.draft is not None
        assert usual.draft is not None
        assert (twice.target.cache, twice.draft.cache) == (usual.target.cache, 2 * usual.draft.cache)


def gigabytes(number: float) -> Available:
    return Available(int(number * 1e9))


def fit(free: Available, *, draft: bool = True, placement: Placement = memory.ON_CPU) -> Fit:
    """8 GB of weights and 64 KiB of cache a token, with a draft of an eighth."""
    tensors = {f"blk.{layer}.attn_{part}.weight": (512, 4096) for layer in range(16) for part in "kv"}
    big = header(
        "llama", {**tensors, "output.weight": (1000_000, 4000)}, block_count=16, **{**BASICS, "context_length": 65536}
    )
    small = header(
        "llama", {f"blk.{layer}.attn_{part}.weight": (512, 512) for layer in range(2) for part in "kv"}
        | {"output.weight": (125_000, 4000)}, block_count=2, **{**BASICS, "context_length": 65536},
    )  # fmt: skip
    return Fit(big, small if draft else None, placement, free)


class TestRefusal:
    def test_what_fits_passes(self) -> None:
        assert fit(gigabytes(12)).check(8192).needed < 12e9

    def test_the_numbers_are_told(self) -> None:
        with pytest.raises(OutOfMemoryError) as caught:
            fit(gigabytes(10)).check(32768)
        found = caught.value
        assert found.exit_code == 1
        assert found.message.startswith("`m.gguf` with `m.gguf` needs 1")
        assert "of memory at `--ctx 32768` (weights 9.14 GB, caches " in found.message
        assert found.message.endswith("; 10.0 GB are free")

    @pytest.mark.parametrize(
        ("free", "num_ctx", "expected"),
        [
            (10.2, 32768, ["--kv-type q8_0", "--ctx"]),
            (9.6, 32768, ["--ctx"]),
            (9.0, 4096, ["--no-draft"]),
            (8.3, 32768, ["--no-draft --ctx"]),
            (4.0, 4096, ["a smaller quantization"]),
        ],
    )
    def test_the_flags_that_would_make_it_fit(self, free: float, num_ctx: int, expected: list[str]) -> None:
        checked = fit(gigabytes(free))
        with pytest.raises(OutOfMemoryError) as caught:
            checked.check(num_ctx)
        for flag in expected:
            assert flag in caught.value.hint
        assert caught.value.hint.endswith("; `--force` loads all the same")

    def test_the_context_in_the_hint_fits_and_no_larger_one(self) -> None:
        checked = fit(gigabytes(10))
        largest = checked.largest_ctx(32768)
        assert 0 < largest < 32768
        assert largest % 256 == 0
        assert checked.check(largest).needed <= 10e9
        with pytest.raises(OutOfMemoryError) as caught:
            checked.check(largest + 256)
        assert f"`--ctx {largest}`" in caught.value.hint

    def test_a_context_that_does_not_hold_the_prompt_is_not_advised(self) -> None:
        checked = fit(gigabytes(10))
        with pytest.raises(OutOfMemoryError) as caught:
            checked.check(32768, checked.largest_ctx(32768) + 1)
        assert "--ctx" not in caught.value.hint

    def test_on_a_gpu(self) -> None:
        everything = Placement(gpu_layers=1000, draft_gpu_layers=1000)
        with pytest.raises(OutOfMemoryError) as caught:
            fit(Available(int(64e9), int(10.2e9)), placement=everything).check(32768)
        assert "on the GPU at `--ctx 32768`; 10.2 GB are free" in caught.value.message
        assert "`--draft-gpu-layers 0`" in caught.value.hint
        with pytest.raises(OutOfMemoryError, match="on the GPU") as caught:
            fit(Available(int(64e9), int(4e9)), placement=everything).check(32768)
        assert "`--gpu-layers 0`" in caught.value.hint or "`--gpu-layers 1" in caught.value.hint


class TestAvailable:
    def test_no_more_than_the_variable_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        free = available().ram
        assert free > 0
        monkeypatch.setenv(LIMIT_VARIABLE, "100MB")
        assert available(5) == Available(100_000_000, 5, is_set=True)
        monkeypatch.setenv(LIMIT_VARIABLE, "9999TB")
        assert available().ram < 10**15

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("123", 123),
            ("8GB", 8 * 10**9),
            ("8 g", 8 * 10**9),
            ("1.5GiB", 3 * 2**29),
            ("2ki", 2048),
            ("7B", 7),
        ],
    )
    def test_sizes(self, text: str, expected: int) -> None:
        assert parse_size(text) == expected

    @pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "GB", "1 2", "1i", "nan", "9" * 30])
    def test_no_sizes(self, text: str) -> None:
        with pytest.raises(UsageError, match="is not a size"):
            parse_size(text)

    @staticmethod
    def group(root: Path, name: str, files: dict[str, object]) -> None:
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(f"{content}\n")

    def test_control_groups(self, tmp_path: Path) -> None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("0::/user/job\n")
        self.group(tmp_path, "user/job", {"memory.max": "max", "memory.current": 5})
        self.group(
            tmp_path, "user",
            {"memory.max": 1000, "memory.current": 700, "memory.stat": "anon 100\nactive_file 50\ninactive_file 150"},
        )  # fmt: skip
        assert left(tmp_path) == [500]
        # In a container, whose own name for the group leads nowhere.
        self.group(tmp_path, "", {"memory.max": 90, "memory.current": 100})
        (tmp_path / "proc/self/cgroup").write_text("0::/../../elsewhere\n")
        assert left(tmp_path) == [0]

    def test_control_groups_of_the_first_version(self, tmp_path: Path) -> None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("9:cpu:/\n4:hugetlb,memory:/docker/abc\n")
        self.group(tmp_path, "memory", {"memory.limit_in_bytes": 800, "memory.usage_in_bytes": 300})
        assert left(tmp_path) == [500]

    def test_no_control_groups(self, tmp_path: Path) -> None:
        assert left(tmp_path) == []


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the tests that load: what was tried once need not be tried again."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def small(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    path = home / "tiny.gguf"
    return path if path.exists() else tiny(home, num_layers=16, context_length=1 << 20)


class TestSession:
    def test_refused_before_loading(self, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(LIMIT_VARIABLE, "10MB")
        monkeypatch.setattr("specdec_cli.session.Model", lambda *args, **kwargs: pytest.fail("loaded"))
        with pytest.raises(OutOfMemoryError, match=r"`tiny\.gguf` needs .* 10 MB are free, by `SPECDEC_MEMORY_LIMIT`"):
            Session.open(small)

    def test_force(self, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(LIMIT_VARIABLE, "10MB")
        options = SessionOptions(Drafting("none"), threads=1, force=True)
        with Session.open(small, options=options) as session:
            assert session.generate([65, 66], max_tokens=2).tokens

    def test_a_context_that_grows_too_large_leaves_the_session_usable(
        self, small: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(LIMIT_VARIABLE, str(estimate_files(small, None, 4096).needed))
        greedy = SamplingParams(temperature=0)
        with Session.open(small, options=SessionOptions(Drafting("none"), threads=1)) as session:
            before = session.generate([65, 66], sampling=greedy, max_tokens=2).tokens
            with pytest.raises(OutOfMemoryError, match=r"at `--ctx 500002`.*free") as caught:
                session.prepare(2, 500_000)
            assert "`--ctx 4096`" in caught.value.hint
            assert session.generate([65, 66], sampling=greedy, max_tokens=2).tokens == before

    def test_a_draft_without_memory_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = FakeModel(1), FakeModel(2)

        def refuse(options: object) -> None:
            raise BackendError("no context of 512 tokens for `small.gguf`: failed to allocate buffer")

        monkeypatch.setattr(draft, "open_context", refuse)
        with Session(target, draft, SessionOptions(Drafting("model", 3, 0.0))) as session:
            with pytest.raises(
                BackendError, match="the target took the memory, and none was left for the draft"
            ) as caught:
                session.generate("abc", max_tokens=5)
            assert "`--no-draft`" in caught.value.hint
            assert session.num_ctx is None

    def test_on_the_command_line(
        self, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(LIMIT_VARIABLE, "10MB")
        monkeypatch.setattr("sys.stdin", None)
        command = ["run", "--target", str(small), "--raw", "-n", "3", "--threads", "1", "hello"]
        assert invoke(command) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "Error: `tiny.gguf` needs" in shown.err
        assert "Hint: try a smaller quantization; `--force` loads all the same" in shown.err
        assert invoke([*command, "--force"]) == 0
        monkeypatch.setenv(LIMIT_VARIABLE, "much")
        assert invoke(command) == 2
        assert "`much` is not a size" in capsys.readouterr().err


def test_tuning_needs_both_in_memory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "10MB")
    with pytest.raises(OutOfMemoryError, match=r"needs .* 10 MB are free") as caught:
        tune(small, small)
    assert caught.value.hint == "tuning needs both models in memory; draft with the published file"


def test_the_devices_of_this_build() -> None:
    found = devices()
    if not found:
        pytest.skip("the library does not let itself be asked")
    assert any(not device.is_gpu for device in found)
    assert all(0 <= device.free_bytes <= device.total_bytes for device in found)


def peak_of(path: Path, num_ctx: int) -> int:
    script = Path(__file__).parents[1] / "benchmarks" / "memory.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), "--child", str(num_ctx), "f16", str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=300).stdout)


def compare(path: Path, num_ctx: int) -> None:
    expected = estimate_files(path, None, num_ctx, Placement(repacks=repacked_types(), keeps_windows=True)).peak
    assert expected == pytest.approx(peak_of(path, num_ctx), rel=0.15)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what counts as resident differs")


@on_linux
def test_against_the_peak_of_a_process(small: Path) -> None:
    """Most of it is the cache; the self-check, which makes a model of its own, is not in that process."""
    selfcheck.check()
    compare(small, 16384)


@on_linux
@pytest.mark.real
@pytest.mark.parametrize("num_ctx", [2048, 8192])
def test_against_the_peak_with_real_models(home: Path, num_ctx: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models up to 300 MB in the folder that SPECDEC_TEST_MODELS names."""
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    folder = Path(os.environ.get("SPECDEC_TEST_MODELS", "nowhere"))
    files = [path for path in folder.glob("*.gguf") if path.stat().st_size < 300_000_000]
    if not files:
        pytest.skip("SPECDEC_TEST_MODELS names no folder with small models")
    selfcheck.check()
    for path in files:
        compare(path, num_ctx)
