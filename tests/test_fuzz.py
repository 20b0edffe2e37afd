"""Damaged and hostile model files: refused quickly with little memory, and what is let through kills nobody.

SPECDEC_FUZZ_CORPUS=DIR keeps the files of note; those that lie there are tried again in the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import hostile
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import tiny

from specdec_cli import tiny as tiny_module
from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError
from specdec_cli.gguf import check_header

NUM_BYTE_CASES = int(os.environ.get("SPECDEC_FUZZ_CASES", 400))
NUM_LOADED = int(os.environ.get("SPECDEC_FUZZ_LOADED", 60))
MOST_BYTES = 24 << 20
"""Of Python's memory, for a file of 0.3 MB: texts and short arrays are copied, nothing else."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("SPECDEC_FUZZ_CORPUS") or tmp_path_factory.mktemp("corpus"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("original"), num_layers=1, num_vocab=275)


def examined(path: Path) -> str:
    """What the check says: the reason without names and numbers, or nothing where the file is let through."""
    tracemalloc.start()
    began = time.perf_counter()
    refused: SpecdecError | None = None
    try:
        check_header(path)
    except (ModelLoadError, ModelMissingError) as error:
        refused = error
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES
    # Far above what it takes, a few milliseconds, and far below what a claimed count would.
    assert time.perf_counter() - began < 10
    if refused is None:
        return ""
    assert refused.hint
    assert refused.message.isprintable()
    return re.sub(r"`.*?`|[0-9]+|\[.*\]|'.*?'|b'.*'", "", refused.message)


def test_any_change_of_bytes_is_refused_or_harmless_to_python(original: Path, corpus: Path, tmp_path: Path) -> None:
    data, (header,) = original.read_bytes(), check_header(original)
    seen: dict[str, int] = {}

    @settings(max_examples=NUM_BYTE_CASES, suppress_health_check=list(HealthCheck))
    @given(changed=hostile.mutated(data, header.data_offset))
    def run(changed: bytes) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(changed)
        reason = examined(path)
        seen[reason] = seen.get(reason, 0) + 1
        if seen[reason] == 1:
            (corpus / f"bytes-{len(seen):02d}.gguf").write_bytes(changed)

    run()
    # Not one reason for all: the cases reach every part of the header.
    assert len(seen) >= 12
    assert seen.get("", 0) >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="cases are run in copies of one process")
def test_what_passes_the_check_kills_no_process_that_the_trial_admits(
    original: Path, corpus: Path, tmp_path: Path
) -> None:
    """Each file is loaded as the trial does; where that lives, a session answers from the file, and must live too."""
    known = sorted(corpus.glob("*.gguf")) if "SPECDEC_FUZZ_CORPUS" in os.environ else []
    # One is known to be deadly, whatever the others are.
    deadly = tiny(tmp_path, "deadly", num_layers=1, metadata={"llama.rope.scaling.type": "of another world"})
    let_through = [path for path in (deadly, *known) if passes(path)]

    @settings(max_examples=3 * NUM_LOADED, suppress_health_check=list(HealthCheck))
    @given(case=cases(original))
    def collect(case: tuple[dict[str, tiny_module.MetadataValue], list[tiny_module.Tensor]]) -> None:
        path = tmp_path / f"case-{len(let_through):03d}.gguf"
        with contextlib.suppress(OverflowError, ValueError):
            tiny_module.write_gguf(path, *case)
        if len(let_through) < NUM_LOADED and path.exists() and not examined(path):
            let_through.append(path)

    collect()
    outcomes = load_all(let_through, tmp_path)
    assert len(outcomes) == len(let_through) >= NUM_LOADED // 2
    for number, outcome in enumerate(outcomes):
        if outcome["trial"] != 0:
            (corpus / f"deadly-{number:03d}.gguf").write_bytes(Path(outcome["path"]).read_bytes())
    answered = [outcome for outcome in outcomes if outcome["trial"] == 0]
    assert answered
    assert not [outcome for outcome in answered if outcome["answer"] != 0]
    # The trial is there for a reason.
    assert len(answered) < len(outcomes)


def passes(path: Path) -> bool:
    return not examined(path)


@st.composite
def cases(draw: st.DrawFn, original: Path) -> tuple[dict[str, tiny_module.MetadataValue], list[tiny_module.Tensor]]:
    """Metadata and tensors of a tiny model with one to three lies."""
    metadata, tensors = contents()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("value", "value", "value", "architecture", "tensor", "gone")))
        if kind == "value":
            metadata[draw(st.sampled_from(hostile.KEYS))] = draw(hostile.VALUES)
        elif kind == "gone":
            metadata.pop(draw(st.sampled_from(hostile.KEYS)), None)
        elif kind == "tensor":
            tensors = draw(hostile.tensor_changes())(tensors)
        else:
            metadata = renamed(metadata, draw(st.sampled_from(hostile.ARCHITECTURES)))
    return metadata, tensors


def contents() -> tuple[dict[str, tiny_module.MetadataValue], list[tiny_module.Tensor]]:
    """What a tiny model's file is written from."""
    written: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_module, "write_gguf", lambda _path, *parts: written.extend(parts))
        tiny_module.write_tiny_model(Path("unused"), num_vocab=275, num_layers=1, context_length=512, quant="q4_0")
    metadata, tensors = written
    return dict(metadata), list(tensors)


def renamed(metadata: dict[str, tiny_module.MetadataValue], name: str) -> dict[str, tiny_module.MetadataValue]:
    """The same model under another architecture."""
    old = f"{metadata.get('general.architecture')}."
    moved = {
        (f"{name}." + key.removeprefix(old) if key.startswith(old) else key): value for key, value in metadata.items()
    }
    return {**moved, "general.architecture": name}


def load_all(files: list[Path], folder: Path) -> list[dict[str, object]]:
    script = Path(__file__).with_name("hostile.py")
    lines = "".join(json.dumps(str(path)) + "\n" for path in files)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=lines,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=60 + 10 * len(files),
    )
    (folder / "stderr").write_text(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]
