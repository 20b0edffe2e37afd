"""The memory estimate against what processes really take: one process for each model and context.

python benchmarks/memory.py MODEL.gguf... [--ctx 2048 8192] [--kv-type f16] [--draft SMALL.gguf]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def measure(target: Path, draft: Path | None, num_ctx: int, kv_type: str) -> int:
    """Peak resident bytes of a fresh process that loads and answers."""
    command = [
        sys.executable,
        __file__,
        "--child",
        str(num_ctx),
        kv_type,
        str(target),
        *([str(draft)] if draft else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(json.loads(done.stdout))


def answer(num_ctx: int, kv_type: str, target: Path, draft: Path | None) -> int:
    """Load a session, answer a short prompt; the peak in bytes."""
    from specdec_cli.render.memory import peak_memory_bytes
    from specdec_cli.session import Session, SessionOptions
    from specdec_cli.types import SamplingParams

    with Session.open(target, draft, SessionOptions(num_ctx=num_ctx, kv_type=kv_type)) as session:
        prompt = session.encode("def quicksort(values):\n" * 30, raw=True)
        session.generate(prompt, sampling=SamplingParams(temperature=0), max_tokens=16)
    return peak_memory_bytes()


def main() -> None:
    """Print one line for each measurement."""
    if sys.argv[1:2] == ["--child"]:
        num_ctx, kv_type, target, *rest = sys.argv[2:]
        sys.stdout.write(str(answer(int(num_ctx), kv_type, Path(target), Path(rest[0]) if rest else None)))
        return
    from specdec_cli.llama import repacked_types
    from specdec_cli.memory import Placement, estimate_files

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--ctx", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--kv-type", default="f16")
    flags = parser.parse_args()
    placement = Placement(flags.kv_type, repacks=repacked_types(), keeps_windows=flags.draft is None)
    sys.stdout.write(f"{'model':44} {'ctx':>6} {'estimate':>10} {'measured':>10} {'off by':>7}\n")
    for model in flags.models:
        for num_ctx in flags.ctx:
            expected = estimate_files(model, flags.draft, num_ctx, placement).peak
            measured = measure(model, flags.draft, num_ctx, flags.kv_type)
            sys.stdout.write(row(model.name, num_ctx, expected, measured))
            sys.stdout.flush()


def row(name: str, num_ctx: int, expected: int, measured: int) -> str:
    """One line of the table."""
    error = 100 * (expected / measured - 1)
    return f"{name:44} {num_ctx:6} {expected / 1e6:7.0f} MB {measured / 1e6:7.0f} MB {error:+6.1f}%\n"


if __name__ == "__main__":
    main()
