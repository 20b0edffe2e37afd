"""End to end through llama.cpp on tiny random models: sampled answers follow the target's own distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from models import tiny
from scipy.stats import chi2

from specdec_cli.llama import Model
from specdec_cli.sampling import Sampler
from specdec_cli.session import Session, SessionOptions
from specdec_cli.types import Draft, Drafting, Round, SamplingParams, Token

ALPHA = 1e-4
NUM_ANSWERS = 800
SETTINGS = {
    "plain": SamplingParams(temperature=0.7, top_k=6, top_p=1, min_p=0),
    "truncated": SamplingParams(temperature=1.3, top_k=5, top_p=0.95, min_p=0.02, repeat_penalty=1.3, repeat_last_n=4),
    "mixture": SamplingParams(temperature=0.9, top_k=5, top_p=1, min_p=0, xtc_probability=0.5, xtc_threshold=0.2),
}


def exact(session: Session, prompt: list[int], params: SamplingParams) -> dict[tuple[int, int], float]:
    """Probabilities of the first two tokens, from the target's logits alone."""
    target, _ = session.prepare(len(prompt), 2)
    sampler = Sampler(params, session.target.num_vocab)

    def next_probs(tokens: list[int]) -> dict[int, float]:
        target.sync(tokens)
        found = sampler.distribution(target.score()[0], tokens)
        assert found.ids is not None
        return dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))

    first = next_probs(prompt)
    return {(a, b): p * q for a, p in first.items() for b, q in next_probs([*prompt, a]).items()}


def sampled(
    session: Session, prompt: list[int], params: SamplingParams, num_tokens: int
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """How often which two tokens came first, of answers of `num_tokens`; depth and width that some draft had."""
    found: Counter[tuple[int, ...]] = Counter()
    depth = width = 0
    for seed in range(NUM_ANSWERS):
        tokens: list[int] = []
        events = session.stream(prompt, sampling=replace(params, seed=seed), max_tokens=num_tokens)
        while len(tokens) < 2:
            event = next(events)
            if isinstance(event, Token):
                tokens.append(event.id)
            elif isinstance(event, Round) and event.parents:
                tree = Draft(tuple(range(event.num_drafted)), event.parents)
                depth, width = max(depth, *tree.depths), max(width, *map(len, tree.children().values()))
        # What comes later was drafted all the same.
        events.close()  # type: ignore[attr-defined]
        found[tuple(tokens)] += 1
    return found, depth, width


CHAINS, TREES = Drafting("model", 3, 0.0, 1), Drafting("tree", 32, 0.0, 16)
CASES = [(settings, seed, CHAINS) for settings in SETTINGS for seed in (3, 8)] + [("mixture", 8, TREES)]


@pytest.mark.parametrize(
    ("settings", "draft_seed", "drafting"), CASES, ids=lambda value: getattr(value, "drafter", value)
)
def test_two_tokens_follow_the_target(settings: str, draft_seed: int, drafting: Drafting, tmp_path: Path) -> None:
    params = SETTINGS[settings]
    target, draft = tiny(tmp_path, "target", seed=3), tiny(tmp_path, "draft", seed=draft_seed, num_layers=1)
    options = SessionOptions(drafting, threads=1)
    with Session(Model(target), Model(draft), options) as session:
        prompt = session.encode("hello there", raw=True)
        expected = exact(session, prompt, params)
        found, depth, width = sampled(session, prompt, params, 20 if drafting is TREES else 2)
    if drafting is TREES:
        assert min(depth, width) >= 4
    assert set(found) <= set(expected)
    likely = [pair for pair, prob in expected.items() if prob * NUM_ANSWERS >= 5]
    rest = 1 - sum(expected[pair] for pair in likely)
    shares = np.array([expected[pair] for pair in likely] + ([rest] if rest * NUM_ANSWERS >= 5 else []))
    counts = np.array([found[pair] for pair in likely] + ([0] if len(shares) > len(likely) else []))
    if len(shares) > len(likely):
        counts[-1] = NUM_ANSWERS - counts.sum()
    shares = shares / shares.sum()
    statistic = ((counts - shares * counts.sum()) ** 2 / (shares * counts.sum())).sum()
    assert chi2.sf(statistic, len(shares) - 1) > ALPHA, list(itertools.islice(zip(likely, counts, strict=False), 5))
    assert len(likely) >= 4
