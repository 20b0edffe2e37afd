"""Time of one row's way from logits to a distribution: `python benchmarks/sampling.py [NUM_VOCAB]`."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time

import numpy as np

from specdec_cli.distribution import Ids
from specdec_cli.sampling import Sampler
from specdec_cli.types import SamplingParams

NUM_VOCAB = 152_064
NUM_RUNS = 200
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}

CASES: dict[str, dict[str, object]] = {
    "defaults: top-k 40, top-p 0.95, min-p 0.05, temperature 0.8": {},
    "top-k 40, temperature 1": {**OFF, "top_k": 40},
    "everything off, temperature 1": OFF,
    "temperature 0.8": {**OFF, "temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "top-p 0.95": {**OFF, "top_p": 0.95},
    "min-p 0.05": {**OFF, "min_p": 0.05},
    "typical 0.9": {**OFF, "typical_p": 0.9},
    "top-n-sigma 1": {**OFF, "top_n_sigma": 1.0},
    "XTC": {**OFF, "xtc_probability": 0.5},
    "dynamic temperature": {**OFF, "dynatemp_range": 0.5},
    "defaults, XTC, dynamic temperature, typical": {
        "xtc_probability": 0.5, "dynatemp_range": 0.5, "typical_p": 0.9,
    },
    "defaults, repeat and frequency penalties": {"repeat_penalty": 1.1, "frequency_penalty": 0.1},
    "defaults, DRY over 64 tokens": {"dry_multiplier": 0.8},
    "defaults, DRY over 4096 tokens": {"dry_multiplier": 0.8, "dry_last_n": -1},
    "Mirostat 1": {"mirostat": 1},
    "Mirostat 2": {"mirostat": 2},
}  # fmt: skip


class Every:
    """A constraint that allows each n-th token; a grammar's own masks come on top of this."""

    def __init__(self, num_vocab: int, step: int) -> None:
        self._ids = np.arange(0, num_vocab, step)

    def allowed(self, tokens: object, path: object) -> Ids:  # noqa: ARG002
        """The same tokens everywhere."""
        return self._ids


def language_like(rng: np.random.Generator, num_vocab: int) -> np.ndarray:
    """Logits with a few tokens far above the many, in single precision as a context returns them."""
    row = 2.5 * rng.standard_normal(num_vocab)
    row[rng.permutation(num_vocab)[:200]] += rng.gamma(2.0, 3.0, 200) + 6
    return row.astype(np.float32)


def milliseconds(sampler: Sampler, rows: list[np.ndarray], history: list[int], *, sample: bool) -> tuple[float, float]:
    """Median and fastest time of a row."""
    rng = np.random.default_rng(0)
    taken = []
    for index in range(NUM_RUNS):
        row = rows[index % len(rows)]
        started = time.perf_counter()
        found = sampler.distribution(row, history)
        if sample:
            found.sample(rng)
        taken.append(1000 * (time.perf_counter() - started))
    return float(np.median(taken)), min(taken)


def main(num_vocab: int) -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    rows = [language_like(rng, num_vocab) for _ in range(8)]
    history = rng.integers(0, 50, 4096).tolist()
    print(f"{num_vocab} tokens, {NUM_RUNS} rows, milliseconds a row: median, fastest, median with one draw")
    for name, settings in CASES.items():
        report(name, Sampler(SamplingParams(**settings), num_vocab), rows, history)  # type: ignore[arg-type]
    for step in (1, 100):
        constraint = Every(num_vocab, step)
        name = f"defaults, a constraint that allows 1 in {step}"
        report(name, Sampler(SamplingParams(), num_vocab, constraint), rows, history)


def report(name: str, sampler: Sampler, rows: list[np.ndarray], history: list[int]) -> None:
    """Print a line."""
    median, fastest = milliseconds(sampler, rows, history, sample=False)
    drawn, _ = milliseconds(sampler, rows, history, sample=True)
    print(f"{name:62} {median:7.3f} {fastest:7.3f} {drawn:7.3f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_VOCAB)
