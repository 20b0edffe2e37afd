"""Chains against trees: `auto` with one branch and with eight, interleaved with plain decoding in one process.

python benchmarks/trees.py TARGET.gguf DRAFT.gguf --prompts PROMPTS.jsonl [-n 96] [--repeat 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specdec_cli.bench import Measurement, Plan, Setting, measure
from specdec_cli.prompts import read_prompts
from specdec_cli.render.bench import bench_document
from specdec_cli.session import Session, SessionOptions
from specdec_cli.types import Drafting, SamplingParams

CHAINS, TREES = (Setting.of(Drafting("auto", max_branches=branches)) for branches in (1, 8))


def row(name: str, measurement: Measurement, category: str | None) -> str:
    """One line: rates, trees over chains by the geometric mean of the answers' ratios, tokens a pass, trees."""
    rates = [[pair.answer.stats.tokens_per_s for pair in measurement.pairs(s.name, category)] for s in (CHAINS, TREES)]
    chains, trees = (measurement.part(setting.name, category) for setting in (CHAINS, TREES))
    speedups = [part.speedup.mean if part.speedup else float("nan") for part in (chains, trees)]
    cells = [
        name,
        f"{chains.baseline.tokens_per_s:.1f}",
        *(f"{speedup:.2f}x" for speedup in speedups),
        f"{geometric_mean(tree / chain for chain, tree in zip(*rates, strict=True)):.3f}x",
        *(f"{part.speculative.mean_acceptance_length:.2f}" for part in (chains, trees)),
        f"{trees.speculative.num_trees} of {trees.speculative.num_rounds}",
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Print a table; with `--json` write what `specdec bench --json` would."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-n", "--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    plan = Plan(
        read_prompts(flags.prompts), [CHAINS, TREES], SamplingParams(temperature=0), flags.max_tokens, flags.repeat
    )
    with Session.open(flags.target, flags.draft, SessionOptions()) as session:
        measurement = measure(session, plan)
    if flags.json:
        document: dict[str, Any] = bench_document(measurement, {}, [], swept=False)
        flags.json.write_text(json.dumps(document, indent=1))
    names = "category | baseline tok/s | chains | trees | trees over chains | length | with trees | trees of rounds"
    sys.stdout.write(f"| {names} |\n|---|{'---:|' * 7}\n")
    for name in (*measurement.categories, None):
        sys.stdout.write(row(name or "all", measurement, name))


if __name__ == "__main__":
    main()
