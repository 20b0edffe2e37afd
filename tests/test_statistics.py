"""End to end through llama.cpp on tiny random models: sampled answers follow the target's own distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from models import tiny
from scipy.stats import chi2

from specdec_cli.llama import Model
from specdec_cli.sampling import Sampler
from specdec_cli.session import Session, SessionOptions
from specdec_cli.types import Drafting, SamplingParams, Token

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


def sampled(session: Session, prompt: list[int], params: SamplingParams) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(NUM_ANSWERS):
        seeded = SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed})
        events = session.stream(prompt, sampling=seeded, max_tokens=2)
        found[tuple(event.id for event in events if isinstance(event, Token))] += 1
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("draft_seed", [3, 8], ids=["like", "unlike"])
def test_two_tokens_follow_the_target(settings: str, draft_seed: int, tmp_path: Path) -> None:
    params = SETTINGS[settings]
    target, draft = tiny(tmp_path, "target", seed=3), tiny(tmp_path, "draft", seed=draft_seed, num_layers=1)
    options = SessionOptions(Drafting("model", 3, 0.0), threads=1)
    with Session(Model(target), Model(draft), options) as session:
        prompt = session.encode("hello there", raw=True)
        expected = exact(session, prompt, params)
        found = sampled(session, prompt, params)
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
