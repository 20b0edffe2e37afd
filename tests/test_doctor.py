"""`specdec doctor`: on a good machine, on a broken one, and what it says of speed; nothing private in its document."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_server import Fault, serve
from models import CHATML, no_vocabulary, sentencepiece_vocabulary, tiny

from specdec_cli import doctor as look
from specdec_cli import llama, memory, paths, provenance, selfcheck
from specdec_cli.cli.app import invoke
from specdec_cli.cost import CostModel, Timing
from specdec_cli.doctor import KINDS, Expectation, Finding, Measurement
from specdec_cli.errors import UsageError
from specdec_cli.prediction import expected_speedup
from specdec_cli.render.doctor import anonymous, print_finding, print_measurement, reason, sentence

ROOT = Path(__file__).parents[1]
NAMES = ["specdec", "llama.cpp", "build", "devices", "cpu", "memory", "terminal", "config", "files", "hub", "pair"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny(folder, "target", chat_template=CHATML)
    tiny(folder, "draft", seed=1)
    tiny(folder, "other", vocabulary=sentencepiece_vocabulary())
    tiny(folder, "none", vocabulary=no_vocabulary())
    (folder / "broken.gguf").write_bytes(b"GGUF" + b"x" * 50)
    return folder


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the self-check remembers, so that it runs once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(tmp_path_factory.mktemp("verdict")))
        selfcheck.check()
        return (paths.cache_dir() / "selfcheck.json").read_bytes()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, verdict: bytes) -> None:
    paths.cache_dir().mkdir(parents=True)
    (paths.cache_dir() / "selfcheck.json").write_bytes(verdict)
    for name in [name for name in os.environ if name.startswith(("SPECDEC_", "HF_")) and name != "SPECDEC_HOME"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECDEC_THREADS", "1")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke(["doctor", "--offline", *arguments])
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


def models(folder: Path, target: str = "target", draft: str | None = "draft") -> list[str]:
    arguments = ["--target", str(folder / f"{target}.gguf")]
    return arguments if draft is None else [*arguments, "--draft", str(folder / f"{draft}.gguf")]


def document(call: Call, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = call("--json", *arguments)
    assert (done[0], done[2]) == (code, "")
    return json.loads(done[1])


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in found["checks"] if item["name"] == name)


# --- the command -----------------------------------------------------------------------------------------------------


def test_lines(call: Call, folder: Path) -> None:
    code, out, err = call(*models(folder))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines if re.match(r"(ok|warning|problem) ", line)] == NAMES
    assert re.search(r"target\.gguf with draft\.gguf: [\d.]+ tokens/s without drafts; a pass over 1: ", " ".join(lines))
    assert "Expect " in out
    assert "\x1b" not in out


def test_document(call: Call, folder: Path) -> None:
    found = document(call, *models(folder))
    assert (found["schema"], found["usable"]) == (1, True)
    assert [item["name"] for item in found["checks"]] == NAMES
    measurement = found["measurement"]
    assert (measurement["target"], measurement["draft"], measurement["pair"]) == ("target.gguf", "draft.gguf", None)
    assert list(measurement["pass_s"]) == ["1", "2", "3", "4", "5", "8", "16"]
    assert all(seconds > 0 for seconds in measurement["pass_s"].values())
    assert measurement["step_s"] > 0
    assert [item["text"] for item in measurement["expectations"]] == [kind.name for kind in KINDS]
    assert all(item["speedup"] >= 1 for item in measurement["expectations"])
    assert check(found, "cpu")["facts"]["threads_used"] == 1
    assert check(found, "devices")["facts"]["devices"][0]["kind"] == "cpu"
    assert check(found, "hub")["facts"]["reachable"] is None


def test_without_a_draft_model(call: Call, folder: Path) -> None:
    measurement = document(call, *models(folder, draft=None))["measurement"]
    assert (measurement["draft"], measurement["step_s"]) == (None, None)
    assert [item["text"] for item in measurement["expectations"]] == ["repeated"]
    assert any("--draft" in line for line in measurement["advice"])


def test_nothing_is_loaded_or_written_without_measuring(call: Call, folder: Path) -> None:
    # A remembered verdict of the self-check is all there may be.
    found = document(call, "--no-measure", *models(folder))
    assert found["measurement"] is None
    files = [path.name for path in paths.cache_dir().parent.rglob("*") if path.is_file()]
    assert files == ["selfcheck.json"]


def test_no_models(call: Call) -> None:
    code, out, _ = call()
    assert code == 0
    assert re.search(r"^warning +pair +\S+ is not installed", out, flags=re.MULTILINE)
    assert "→ `specdec pull " in out
    assert "Expect" not in out


def test_an_installed_pair_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"smollm2-1.7b-instruct": folder / "target.gguf", "smollm2-135m-instruct": folder / "draft.gguf"}
    monkeypatch.setattr("specdec_cli.stored.locate", lambda spec: found.get(spec.name, folder / "x") if found else None)
    finding, files = look.look_at_pair("smollm2-1.7b+135m", None, None)
    names = {path.name for path in (files.target, files.draft) if path} if files else set()
    assert (finding.status, names) in (("ok", {"target.gguf", "draft.gguf"}), ("warning", set()))
    monkeypatch.setattr("specdec_cli.stored.locate", lambda spec: folder / "target.gguf")
    finding, files = look.look_at_pair(None, None, None)
    assert files is not None
    assert finding.facts == {"pair": files.pair, "installed": True}


@pytest.mark.parametrize(
    ("target", "draft", "said", "code"),
    [
        ("none", "target", "no tokenizer", 1),
        ("broken", None, "broken.gguf", 1),
        ("target", "none", "no tokenizer", 4),
    ],
)
def test_models_that_do_not_work(
    call: Call, folder: Path, target: str, draft: str | None, said: str, code: int
) -> None:
    found = document(call, *models(folder, target, draft), code=code)
    assert found["measurement"] is None
    name = "pair" if target == "broken" else "measure"
    assert check(found, name)["status"] == "problem"
    assert said in check(found, name)["text"]
    assert said in " ".join(call(*models(folder, target, draft))[1].split())


def test_a_draft_of_another_family(call: Call, folder: Path) -> None:
    measurement = document(call, *models(folder, "target", "other"))["measurement"]
    assert measurement["step_s"] > 0
    assert "another tokenizer" in measurement["advice"][0]


def test_missing_file(call: Call, folder: Path) -> None:
    found = check(document(call, *models(folder, "nowhere", None), code=3), "pair")
    assert (found["status"], found["text"]) == ("problem", "no model file `.../nowhere.gguf`")


def test_a_model_that_is_not_here_yet(call: Call) -> None:
    found = check(document(call, "--target", "hf:owner/repo:Q8_0"), "pair")
    assert (found["status"], found["hint"]) == ("warning", "`specdec pull --target hf:owner/repo:Q8_0`")


def test_a_broken_file_without_measuring(call: Call, folder: Path) -> None:
    code, out, _ = call("--no-measure", *models(folder, "target", "broken"))
    assert code == 1
    assert re.search(r"^problem +pair ", out, flags=re.MULTILINE)


def test_a_broken_registry(call: Call) -> None:
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "models.toml").write_text("[pairs")
    found = document(call, "--no-measure", code=2)
    assert check(found, "pair")["status"] == "problem"
    assert "models.toml" in check(found, "pair")["text"]


def test_a_home_that_takes_no_files(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: bytes
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(selfcheck, "check", lambda: selfcheck.Verdict(True))
    found = check(document(call, "--no-measure", *models(folder), code=1), "files")
    assert found["status"] == "problem"
    assert "no files can be written to cache $SPECDEC_HOME/cache" in found["text"]
    assert "SPECDEC_HOME" in found["hint"]


def test_the_limit_of_memory_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_MEMORY_LIMIT", "50MB")
    found = check(document(call, "--no-measure"), "memory")
    assert (found["status"], found["facts"]["free_bytes"]) == ("warning", 50_000_000)
    assert "`SPECDEC_MEMORY_LIMIT` allows no more" in found["text"]
    monkeypatch.setenv("SPECDEC_MEMORY_LIMIT", "lots")
    assert check(document(call, "--no-measure", code=2), "memory")["status"] == "problem"


def test_unknown_pair(call: Call) -> None:
    for more in ((), ("--no-measure",)):
        assert check(document(call, "qwen", *more, code=3), "pair")["text"].startswith("no pair is called `qwen`")


def test_a_broken_config_is_a_finding(call: Call, folder: Path) -> None:
    paths.config_dir().mkdir(parents=True)
    (paths.config_dir() / "config.toml").write_text("ctx = 99\ntemperature = 'hot'\n")
    found = document(call, *models(folder), code=2)
    assert check(found, "config")["status"] == "problem"
    assert check(found, "config")["text"].endswith("config.toml:2: `temperature` has a value that it cannot have")
    assert "config.toml:2: `temperature` cannot be `hot`" in call("--no-measure")[1]
    assert found["measurement"] is not None
    (paths.config_dir() / "config.toml").write_text("[pairs.x]\ndrafter = 'rosebud'")
    assert "rosebud" not in json.dumps(document(call, "--no-measure", code=2))
    (paths.config_dir() / "config.toml").write_text("ctx 99")
    assert call("--no-measure")[0] == 2


def test_a_broken_library(tmp_path: Path) -> None:
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "LLAMA_CPP_LIB_PATH": str(tmp_path),
    }
    command = [sys.executable, "-m", "specdec_cli", "doctor", "--offline"]
    done = subprocess.run([*command, "--json"], env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["usable"] is False
    assert [item["name"] for item in found["checks"]] == [name for name in NAMES if name not in ("build", "devices")]
    assert [item["name"] for item in found["checks"] if item["status"] == "problem"] == ["llama.cpp"]
    assert "pip install" in check(found, "llama.cpp")["hint"]
    assert str(tmp_path) not in done.stdout


def test_a_library_that_needs_the_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "check", lambda: selfcheck.Verdict(False))
    finding = look.look_at_library()
    assert finding.status == "warning"
    assert selfcheck.repair_command() in finding.hint
    assert finding.facts["repacks"] is False


def test_looking_never_fails() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("x")

    def refused() -> Finding:
        raise UsageError("what", "next")

    assert look.looked_at("a", broken) == Finding("a", "warning", "could not be looked at: ZeroDivisionError: x")
    assert look.looked_at("a", refused) == Finding("a", "warning", "what", "next")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_a_terminal_folds_at_words(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    command = "`specdec config set threads 4 --a-long-one`"
    finding = Finding("cpu", "warning", "many words " * 20, f"{'more words ' * 10}{command} {'and more ' * 5}")
    print_finding(finding, stream := Terminal(), "never")
    print_measurement(expecting(1.0, 1.0, 1.0, 1.0), stream, "never")
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines if command not in line)
    assert sum(command in line for line in lines) == 1


def test_a_pipe_has_no_width(call: Call) -> None:
    out = call("--no-measure")[1]
    assert all(line == line.rstrip() for line in out.splitlines())
    heads = [line for line in out.splitlines() if re.match(r"(ok|warning|problem) ", line)]
    assert len(heads) + out.count("\n" + 20 * " " + "→ ") == len(out.splitlines())


@pytest.mark.parametrize("width", ["10", "30", "60", "200"])
def test_any_width(call: Call, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    code, out, _ = call("--no-measure")
    assert code == 0
    assert "testdecodeworks" in "".join(out.split())
    # A hint is never cut: it may be a command.
    assert re.search(r"→ `specdec pull \S+`$", out, flags=re.MULTILINE)


def test_an_encoding_without_the_characters() -> None:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "specdec_cli", "doctor", "--offline", "--no-measure"]
    done = subprocess.run(command, env=variables, capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


# --- privacy ---------------------------------------------------------------------------------------------------------


def test_nothing_private(tmp_path: Path, folder: Path) -> None:
    home, token = tmp_path / "home" / "ermintrude", "hf_abcdefghijklmnop"
    home.mkdir(parents=True)
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("temprature = 1")
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HOME": str(home), "HF_TOKEN": token,
        "USER": "ermintrude", "LOGNAME": "ermintrude", "SPECDEC_HOME": str(home),
        "HF_HOME": str(tmp_path / "shelf" / "ermintrude"),
        "HF_ENDPOINT": "http://ermintrude:secret@127.0.0.1:9/?key=rosebud", "SECRET_OF_MINE": "rosebud",
    }  # fmt: skip
    command = [sys.executable, "-m", "specdec_cli", "doctor", "--json", "--no-measure", *models(folder, "nowhere")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (2, "")
    for private in ("ermintrude", token, "secret", "rosebud", str(tmp_path), str(folder), "127.0.0", sys.executable):
        assert private not in done.stdout
    if len(platform.node()) > 4:
        assert platform.node() not in done.stdout
    found = json.loads(done.stdout)
    assert check(found, "hub")["facts"] == {"custom_endpoint": True, "has_token": True, "reachable": False}
    assert check(found, "files")["facts"]["state"]["path"] in ("~/state", "$SPECDEC_HOME/state")


def test_names_are_left_out_of_paths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "model")
    monkeypatch.setattr(platform, "node", lambda: "box")
    assert (
        anonymous("a model at /data/model/models/x of box, model@box")
        == "a model at /data/USER/models/x of box, USER@HOST"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@hub:80/")
    assert anonymous(f"hub hub:80 {Path.home()}-2/x") == f"hub $HF_ENDPOINT {Path.home()}-2/x"
    assert anonymous(f"{Path.home()}/x and {sys.executable} -m pip") == "~/x and python3 -m pip"


def test_every_field_is_documented(call: Call, folder: Path) -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.split("## specdec doctor --json\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    found = document(call, *models(folder))
    names: set[str] = set()

    def collect(value: object) -> None:
        if isinstance(value, dict):
            names.update(key for key in value if not key.isdigit())
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(found)
    assert names <= documented, names - documented


# --- the machine -----------------------------------------------------------------------------------------------------


def test_devices() -> None:
    cpus = [device for device in llama.devices() if device.kind == "cpu"]
    assert cpus
    assert all(device.backend == "CPU" and device.total_bytes > 0 for device in cpus)


def test_a_build_that_leaves_instructions_out(monkeypatch: pytest.MonkeyPatch) -> None:
    system = {"system": "CPU : AVX2 = 1 | FMA = 1 | "}
    monkeypatch.setattr(llama, "versions", lambda: system)
    monkeypatch.setattr(provenance, "cpu_flags", lambda: {"avx2", "fma", "avx512f", "sse"})
    finding = look.look_at_build()
    assert (finding.status, finding.facts["unused"]) == ("warning", ["AVX512"])
    assert "pip install" in finding.hint
    monkeypatch.setattr(provenance, "cpu_flags", lambda: {"avx2"})
    assert look.look_at_build() == Finding("build", "ok", "CPU : AVX2 = 1 | FMA = 1", facts={
        "build": "CPU : AVX2 = 1 | FMA = 1", "unused": []})  # fmt: skip


def cgroup(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/b/memory.max": "1000000\n",
        "sys/fs/cgroup/a/b/memory.current": "900000\n",
    })  # fmt: skip
    assert (look.container_cpus(tmp_path), memory.container_limit(tmp_path)) == (1.5, 1000000)
    monkeypatch.setattr(look, "container_cpus", lambda: 1.5)
    finding = look.look_at_cpu(4)
    assert finding.status == "warning"
    assert "threads 1" in finding.hint


def test_limits_of_an_older_container(tmp_path: Path) -> None:
    cgroup(tmp_path, {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    })  # fmt: skip
    assert (look.container_cpus(tmp_path), memory.container_limit(tmp_path)) == (2.0, None)


@pytest.mark.parametrize("text", ["", "nonsense", "0::", ":::"])
def test_no_container(tmp_path: Path, text: str) -> None:
    cgroup(tmp_path, {"proc/self/cgroup": text})
    assert (look.container_cpus(tmp_path), memory.container_limit(tmp_path)) == (None, None)


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        finding = look.look_at_hub(offline=False)
        assert (finding.status, finding.facts["reachable"]) == ("ok", True)
        hub.faults.append(Fault("ANY", status=503))
        finding = look.look_at_hub(offline=False)
        assert (finding.status, finding.facts["reachable"]) == ("warning", False)
        assert "answers HTTP 503" in finding.text
        assert "HF_ENDPOINT" in finding.hint
        hub.faults[:] = [Fault("ANY", body=b"<html>please log in</html>")]
        finding = look.look_at_hub(offline=False)
        assert (finding.status, finding.facts["reachable"]) == ("warning", False)
        assert "answers with a web page" in finding.text
        hub.faults.clear()
        hub.hang = threading.Event()
        monkeypatch.setattr(look, "HUB_LIMIT_S", 0.3)
        assert look.look_at_hub(offline=False).facts["reachable"] is False
        hub.hang.set()
        num_requests = len(hub.requests)
        assert look.look_at_hub(offline=True).facts["reachable"] is None
        assert len(hub.requests) == num_requests


# --- what it is worth ------------------------------------------------------------------------------------------------


def costs(step: float, *passes: float) -> CostModel:
    return CostModel(Timing(dict(enumerate(passes, 1))), {"model": Timing({1: step})})


def test_expected_speedup_by_hand() -> None:
    # Three tokens in one pass cost 1.2; each accepted surely, one of two drafts a step of 0.1.
    found = expected_speedup(costs(0.1, 1.0, 1.1, 1.2, 50.0), "model", 1.0)
    assert found == pytest.approx(3 / (0.2 + 1.2))
    found = expected_speedup(costs(0.1, 1.0, 1.1, 1.2, 50.0), "model", 0.5)
    assert found == pytest.approx(max(1.5 / 1.2, 1.75 / 1.4))
    assert expected_speedup(costs(2.0, 1.0, 1.1, 1.2), "model", 0.9) == 1.0
    assert expected_speedup(costs(2.0, 1.0, 1.1, 1.2, 50.0), "ngram", 1.0) == pytest.approx(3 / 1.2)


def test_expected_speedup_grows_with_acceptance() -> None:
    found = [expected_speedup(costs(0.1, 1.0, 1.3, 1.5, 1.7), "model", share / 10) for share in range(11)]
    assert found == sorted(found)
    assert found[0] == 1.0
    assert found[-1] > 2


MEASURED = Measurement(
    "x", "t.gguf", "d.gguf", None, dict.fromkeys(look.PASS_SIZES, 0.1) | {5: 0.33}, 0.052, 0.0, (), ()
)  # fmt: skip


def expecting(*speedups: float) -> Measurement:
    return replace(MEASURED, expectations=tuple(map(Expectation, KINDS, speedups)))


def test_sentence() -> None:
    assert sentence(expecting(1.93, 1.2, 1.0, 2.5)) == (
        "Expect on this machine: code and JSON up to 1.9x, chat 1.2x, text copied from the prompt up to 2.5x; "
        "stories: none, there drafting switches itself off."
    )
    assert sentence(expecting(2.0, 1.5, 1.2, 3.0)).endswith("stories 1.2x, text copied from the prompt up to 3.0x.")
    assert sentence(expecting(1.0, 1.0, 1.0, 1.01)).startswith("Expect no gain")


def test_reason() -> None:
    assert reason(expecting(2.0, 1.5, 1.2, 3.0)) == ""
    assert reason(expecting(1.0, 1.0, 1.0, 1.0)) == (
        "Why no more: a pass over 5 tokens takes as long as 3.3 single ones, and a draft step 0.52 of one."
    )


def test_advice() -> None:
    files = look.LocalPair("x", Path("t"), Path("d"))
    all_of_it = look._advice(files, False, costs(0.5, 1.0, 2.0, 3.0, 4.0, 5.0), on_cpu=True)
    assert [bool(re.search(word, line)) for word, line in zip(("tune x", "larger", "GPU"), all_of_it, strict=True)] == [
        True
    ] * 3
    assert look._advice(files, True, costs(0.1, 1.0, 1.1, 1.2, 1.3, 1.4), on_cpu=True) == []
    assert look._advice(replace(files, draft=None), True, costs(0.1, 1.0), on_cpu=True)[0].count("--draft") == 1


def test_busy_cores_are_told(monkeypatch: pytest.MonkeyPatch, call: Call, folder: Path) -> None:
    monkeypatch.setattr(provenance, "load", lambda: 0.5)
    assert "Other programs took 50 % of the cores meanwhile" in " ".join(call(*models(folder))[1].split())
