"""The whole loop on exact fakes: same distribution, same greedy answer, same ending as the target alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from lossless import (
    Alternating,
    Path,
    RandomPolicy,
    RandomTrees,
    ScriptedDrafter,
    collect,
    distance,
    draft_tree,
    outcomes,
    random_tree,
    reference_answers,
    reference_mirostat,
    reference_probs,
)
from scipy import stats

from specdec_cli.constraint import Grammar, GrammarConstraint, Vocabulary
from specdec_cli.distribution import Distribution
from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import ModelDrafter, NoDrafter
from specdec_cli.engine import speculate
from specdec_cli.errors import BackendError, ContextFullError
from specdec_cli.sampling import Sampler
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.types import Draft, Event, Finish, LengthPolicy, Prefill, Round, SamplingParams, Token

TOLERANCE = 1e-12
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = SamplingParams(temperature=0)
# Penalties see drafted tokens, top-k and top-p give sparse supports, a bias forbids a token.
SETTINGS = {
    "plain": PLAIN,
    "hot": SamplingParams(temperature=1.7, top_k=0, top_p=1, min_p=0),
    "cold": SamplingParams(temperature=0.3, top_k=0, top_p=1, min_p=0),
    "top-k": SamplingParams(temperature=0.8, top_k=2, top_p=1, min_p=0),
    "top-p": SamplingParams(temperature=0.8, top_k=0, top_p=0.8, min_p=0),
    "min-p": SamplingParams(temperature=1.2, top_k=0, top_p=1, min_p=0.3),
    "penalties": SamplingParams(
        temperature=1,
        top_k=0,
        top_p=1,
        min_p=0,
        repeat_last_n=2,
        repeat_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.9,
    ),
    "bias": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, logit_bias=((0, -np.inf), (1, 0.7))),
    "dry": replace(PLAIN, dry_multiplier=1.5, dry_allowed_length=1, dry_last_n=3),
    "dry of all": replace(PLAIN, dry_multiplier=0.9, dry_allowed_length=1, dry_last_n=-1),
    "typical": replace(PLAIN, typical_p=0.6),
    "top-n-sigma": replace(PLAIN, top_n_sigma=1.2, temperature=1.5),
    "xtc": replace(PLAIN, xtc_probability=0.4, xtc_threshold=0.15),
    "dynatemp": replace(PLAIN, dynatemp_range=0.8, dynatemp_exponent=0.7),
    "mirostat 1": replace(PLAIN, mirostat=1, mirostat_tau=0.9, mirostat_eta=0.6),
    "mirostat 2": replace(PLAIN, mirostat=2, mirostat_tau=0.9, mirostat_eta=0.6),
    "new": replace(
        PLAIN,
        dry_multiplier=0.5,
        dry_allowed_length=1,
        typical_p=0.95,
        xtc_probability=0.3,
        dynatemp_range=0.3,
        top_k=3,
    ),
    "everything": SamplingParams(
        top_k=3, top_p=0.9, min_p=0.05, repeat_last_n=3, repeat_penalty=1.2, frequency_penalty=0.8
    ),
}


# Token 1 followed by 0, as the prompt ends: DRY looks back to there.
BREAKERS = {1: [(0,)]}


@dataclass
class Bench:
    """A target, the settings, and one answer's conditions."""

    num_vocab: int = 3
    params: SamplingParams = PLAIN
    prompt: Sequence[int] = (1, 0)
    max_tokens: int = 3
    stop_tokens: Collection[int] = ()
    seed: int = 1
    policy: Callable[[], LengthPolicy] = field(default=lambda: Fixed(2))
    constrained: bool = False
    target_kwargs: dict[str, Any] = field(default_factory=dict)

    def target(self) -> FakeContext:
        return FakeContext.random(self.seed, num_vocab=self.num_vocab, **self.target_kwargs)

    def sampler(self) -> Sampler:
        return Sampler(self.params, self.num_vocab, self.constraint(), BREAKERS)

    def constraint(self) -> Alternating | None:
        return Alternating(self.num_vocab, len(self.prompt)) if self.constrained else None

    def next_probs(self, tokens: Sequence[int]) -> dict[int, float]:
        """What the target says after `tokens`, from the table alone."""
        logits_after, constraint = self.target().logits_after, self.constraint()

        def allowed(before: Sequence[int]) -> list[int] | None:
            return None if constraint is None else constraint.allowed(before).tolist()

        if self.params.mirostat:
            return reference_mirostat(logits_after, self.params, tokens, len(self.prompt), None, allowed)
        logits = logits_after(tokens)
        return reference_probs(logits, self.params, tokens, allowed=allowed(tokens), breakers=BREAKERS)

    def events(self, drafter: Any, rng: Any, target: FakeContext | None = None) -> Iterator[Event]:
        return speculate(
            target or self.target(),
            drafter,
            self.policy(),
            self.sampler(),
            rng,
            self.prompt,
            max_tokens=self.max_tokens,
            stop_tokens=self.stop_tokens,
        )

    def reference(self) -> dict[Path, float]:
        """Answer -> probability, from the table alone."""
        found: dict[Path, float] = {}
        answers = reference_answers(self.next_probs, self.prompt, self.max_tokens, tuple(self.stop_tokens))
        for (answer, _), prob in answers.items():
            found[answer] = found.get(answer, 0.0) + prob
        return found


# ------------------------------------------------------------------ drafters: (bench, rng) -> drafter


def other_model(bench: Bench, rng: Any) -> ModelDrafter:
    return ModelDrafter(FakeContext.random(77, num_vocab=bench.num_vocab), bench.sampler(), rng, bench.stop_tokens)


def same_model(bench: Bench, rng: Any) -> ModelDrafter:
    return ModelDrafter(bench.target(), bench.sampler(), rng, bench.stop_tokens)


def careless_model(bench: Bench, rng: Any) -> ModelDrafter:
    """Plain sampling whatever the settings say: still lossless, as its proposals are what it sampled from."""
    return ModelDrafter(FakeContext.random(78, num_vocab=bench.num_vocab), Sampler(PLAIN, bench.num_vocab), rng)


def tree_model(bench: Bench, rng: Any) -> ModelDrafter:
    """Trees: siblings without replacement, or the likeliest ones."""
    context = FakeContext.random(77, num_vocab=bench.num_vocab)
    return ModelDrafter(context, bench.sampler(), rng, bench.stop_tokens, max_leaves=4)


def greedy_trees(bench: Bench, rng: Any) -> ModelDrafter:
    """Point masses for a target that is sampled."""
    context = FakeContext.random(77, num_vocab=bench.num_vocab)
    return ModelDrafter(context, Sampler(GREEDY, bench.num_vocab), rng, max_leaves=16)


def padded_model(bench: Bench, rng: Any) -> ModelDrafter:
    """A draft model whose logits rows are longer than the target's, as padded vocabularies are."""
    return ModelDrafter(FakeContext.random(79, num_vocab=bench.num_vocab + 2), bench.sampler(), rng)


def fixed_tree(bench: Bench, rng: Any) -> ScriptedDrafter:
    return ScriptedDrafter(random_tree(5, bench.num_vocab), max_nodes=4)


def fixed_chain(bench: Bench, rng: Any) -> ScriptedDrafter:
    return ScriptedDrafter(lambda tokens, limit: Draft.chain([(tokens[-1] + 1) % bench.num_vocab, tokens[-2]]))


def sampled_tree(bench: Bench, rng: Any) -> ScriptedDrafter:
    """Siblings without replacement, in a shape that depends on the position, under the settings' own transform."""
    context, sampler = FakeContext.random(80, num_vocab=bench.num_vocab), bench.sampler()

    def script(tokens: Sequence[int], limit: int) -> Draft:
        def proposal(path: Path) -> Distribution:
            return sampler.distribution(context.logits_after([*tokens, *path]), tokens, path)

        return draft_tree(proposal, [(2,), (1, 2), (2, 1)][len(tokens) % 3][:limit], rng, replace=False)

    return ScriptedDrafter(script)


MODEL_DRAFTERS = [other_model, same_model, careless_model, padded_model, tree_model]
TREES = [tree_model, fixed_tree, sampled_tree]
DRAFTERS = [*MODEL_DRAFTERS, fixed_tree, fixed_chain, sampled_tree]


# ------------------------------------------------------------------ exact: every random choice of a whole answer


def assert_exact(bench: Bench, make: Callable[[Bench, Any], Any]) -> None:
    found = outcomes(lambda rng: collect(bench.events(make(bench, rng), rng))[0])
    assert sum(found.values()) == pytest.approx(1, abs=TOLERANCE)
    assert distance(found, bench.reference()) < TOLERANCE


@pytest.mark.parametrize("make", DRAFTERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_have_exactly_the_targets_distribution(name: str, make: Callable[[Bench, Any], Any]) -> None:
    assert_exact(Bench(params=SETTINGS[name], max_tokens=2), make)


@pytest.mark.parametrize("make", DRAFTERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["plain", "dry", "typical", "xtc", "mirostat 2", "everything"])
def test_a_constraint_keeps_the_distribution_it_defines(name: str, make: Callable[[Bench, Any], Any]) -> None:
    """Its state follows drafted tokens; also of drafters that do not know of it."""
    assert_exact(Bench(params=SETTINGS[name], constrained=True, max_tokens=2), make)


@pytest.mark.parametrize("make", [other_model, fixed_chain, sampled_tree], ids=lambda make: make.__name__)
def test_a_real_grammar_keeps_its_state_under_speculation(make: Callable[[Bench, Any], Any]) -> None:
    """One matcher for target and draft model, moved back and forth; the reference makes a new one for each question."""
    vocabulary = Vocabulary(FakeModel(alphabet="abcd"))
    grammar = Grammar("words", LLMatcher.grammar_from_lark('start: ("ab" | "cd" | "ad"+ | "bc" "d"*)+'))
    shared: list[GrammarConstraint] = []

    class GrammarBench(Bench):
        def constraint(self) -> Any:
            return shared[0] if shared else GrammarConstraint(grammar, vocabulary, len(self.prompt))

    bench = GrammarBench(num_vocab=5, stop_tokens={4}, max_tokens=3)

    def run(rng: Any) -> Path:
        shared[:] = [GrammarConstraint(grammar, vocabulary, len(bench.prompt))]
        return collect(bench.events(make(bench, rng), rng))[0]

    found = outcomes(run)
    shared.clear()
    assert distance(found, bench.reference()) < TOLERANCE


@pytest.mark.parametrize("make", [same_model, fixed_chain], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["dry of all", "mirostat 1", "mirostat 2", "new"])
def test_three_tokens_of_what_depends_on_the_ones_before(name: str, make: Callable[[Bench, Any], Any]) -> None:
    assert_exact(Bench(params=SETTINGS[name], prompt=(2, 1, 0, 2, 0), max_tokens=3), make)
    assert_exact(Bench(params=SETTINGS[name], max_tokens=3, num_vocab=3, constrained=True), make)


@pytest.mark.parametrize("make", [other_model, sampled_tree, fixed_chain], ids=lambda make: make.__name__)
def test_three_tokens_with_a_stop_token(make: Callable[[Bench, Any], Any]) -> None:
    assert_exact(Bench(params=SETTINGS["penalties"], max_tokens=3, stop_tokens={2}), make)


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Fixed(1),
        lambda: Fixed(3),
        lambda: Fixed(2, 0.45),
        lambda: Fixed(2, 0.6),
        lambda: RandomPolicy(3),
        lambda: RandomPolicy(4),
    ],
)
def test_no_policy_biases_the_answer(policy: Callable[[], LengthPolicy]) -> None:
    """A policy that looked at the sampled token, and dropped unlikely ones, would."""
    assert_exact(Bench(policy=policy, max_tokens=2, seed=4), other_model)
    assert_exact(Bench(policy=policy, max_tokens=3, num_vocab=2, seed=5), other_model)


@pytest.mark.parametrize("name", ["plain", "top-k", "penalties", "bias", "xtc", "mirostat 2", "everything"])
def test_a_tree_of_any_shape_keeps_the_distribution(name: str) -> None:
    """Up to four tokens, sampled in any order of branches; how it goes on depends on chance and on what was drawn."""
    bench = Bench(params=SETTINGS[name], max_tokens=2, seed=3, policy=lambda: RandomTrees(1, 4))
    assert_exact(bench, tree_model)
    assert_exact(replace(bench, constrained=True, stop_tokens={2}), tree_model)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_trees_of_depth_and_width_four_keep_the_distribution(name: str) -> None:
    """Of point masses, so that only verification is by chance; 24 tokens, of which many are tried and rejected."""
    shapes: list[tuple[int, int]] = []

    def drafter(bench: Bench, rng: Any) -> ModelDrafter:
        found = greedy_trees(bench, rng)
        propose = found.propose

        def observed(*args: Any) -> Draft:
            draft = propose(*args)
            shapes.append((max(draft.depths, default=0), max(map(len, draft.children().values()), default=0)))
            return draft

        found.propose = observed  # type: ignore[method-assign]
        return found

    bench = Bench(num_vocab=4, params=SETTINGS[name], max_tokens=4, policy=lambda: RandomTrees(2, 24, wide=True))
    assert_exact(bench, drafter)
    assert (4, 4) in shapes


@pytest.mark.parametrize(
    "kind",
    [{"can_forget": True}, {"can_forget": False}, {"can_forget": False, "num_snapshots": 1, "can_save": True}],
    ids=["drops a tail", "forgets all", "snapshots and checkpoints"],
)
def test_the_kind_of_cache_does_not_matter(kind: dict[str, Any]) -> None:
    kwargs = {**kind, "chunk": 2}

    def drafter(bench: Bench, rng: Any) -> ModelDrafter:
        return ModelDrafter(FakeContext.random(77, num_vocab=3, **kwargs), bench.sampler(), rng)

    assert_exact(
        Bench(target_kwargs=kwargs, max_tokens=3, prompt=(1, 0, 2, 2, 1), num_vocab=3, policy=lambda: Fixed(1)), drafter
    )


def test_padding_of_the_target_is_never_produced() -> None:
    """The sampler covers 3 tokens of the target's 5 and of the draft model's 4."""
    bench = Bench(max_tokens=2)

    def run(rng: Any) -> Path:
        target, draft_model = FakeContext.random(1, num_vocab=5), FakeContext.random(2, num_vocab=4)
        return collect(bench.events(ModelDrafter(draft_model, bench.sampler(), rng), rng, target))[0]

    target = FakeContext.random(1, num_vocab=5)
    answers = reference_answers(
        lambda tokens: reference_probs(target.logits_after(tokens), PLAIN, num_vocab=3), bench.prompt, 2
    )
    assert distance(outcomes(run), {answer: prob for (answer, _), prob in answers.items()}) < TOLERANCE


# ------------------------------------------------------------------ statistical: real generators, chi-squared

ALPHA = 1e-4
NUM_ANSWERS = 700


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("plain", other_model),
        ("everything", other_model),
        ("penalties", same_model),
        ("top-k", sampled_tree),
        ("penalties", fixed_tree),
        ("everything", fixed_chain),
        ("new", other_model),
        ("dry", fixed_tree),
        ("mirostat 2", other_model),
        ("xtc constrained", other_model),
        ("plain", tree_model),
        ("penalties", tree_model),
        ("top-k", tree_model),
        ("everything constrained", tree_model),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_sampled_answers_pass_chi_squared(name: str, make: Callable[[Bench, Any], Any]) -> None:
    """One generator an answer, seeded as a user's would be; a correct program fails one such test in 10 000."""
    constrained = name.endswith(" constrained")
    params = SETTINGS[name.removesuffix(" constrained")]
    policy = (lambda: RandomTrees(1, 24, wide=True)) if make is tree_model else (lambda: Fixed(3))
    bench = Bench(params=params, constrained=constrained, num_vocab=4, max_tokens=3, policy=policy)
    counts: Counter[Path] = Counter()
    target = bench.target()
    for seed in range(NUM_ANSWERS):
        rng = np.random.default_rng(seed)
        counts[collect(bench.events(make(bench, rng), rng, target))[0]] += 1
    assert chi_squared_p(counts, bench.reference()) > ALPHA


def chi_squared_p(counts: Counter[Path], expected: dict[Path, float]) -> float:
    """p-value; answers expected fewer than 5 times are pooled."""
    assert set(counts) <= set(expected)
    total = counts.total()
    common = [answer for answer, prob in expected.items() if prob * total >= 5]
    observed = [counts[answer] for answer in common]
    wanted = [expected[answer] * total for answer in common]
    rest = total - sum(wanted)
    if rest > 1e-6:
        observed.append(total - sum(observed))
        wanted.append(rest)
    return float(stats.chisquare(observed, wanted, sum_check=False).pvalue)


def test_chi_squared_finds_a_biased_sampler() -> None:
    """The test has the power to see argmax drafts with probabilities attached."""
    bench = Bench(num_vocab=4, max_tokens=3)
    context, sampler = FakeContext.random(77, num_vocab=4), bench.sampler()

    def script(tokens: Sequence[int], limit: int) -> Draft:
        proposal = sampler.distribution(context.logits_after(tokens))
        return Draft.chain([int(proposal.probs.argmax())], [proposal])

    counts: Counter[Path] = Counter()
    for seed in range(NUM_ANSWERS):
        counts[collect(bench.events(ScriptedDrafter(script), np.random.default_rng(seed)))[0]] += 1
    assert chi_squared_p(counts, bench.reference()) < ALPHA


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if "mirostat" not in name])
def test_a_draft_model_equal_to_the_target_is_always_accepted(name: str, constrained: bool) -> None:
    """Both go through the same transform with the same history, so target / draft is 1 at every token."""
    bench = Bench(params=SETTINGS[name], num_vocab=5, max_tokens=60, policy=lambda: Fixed(4), constrained=constrained)
    rng = np.random.default_rng(3)
    rounds = [event for event in bench.events(same_model(bench, rng), rng) if isinstance(event, Round)]
    assert all(event.num_accepted == event.num_drafted for event in rounds)
    assert len(rounds) == 12


@pytest.mark.parametrize("name", ["mirostat 1", "mirostat 2"])
def test_an_equal_draft_model_is_mostly_accepted_under_mirostat(name: str) -> None:
    """It does not see the bonus token's surprise, so that the budgets part a little; they do not begin anew."""
    params = replace(SETTINGS[name], mirostat_tau=1.5, mirostat_eta=0.1)
    bench = Bench(params=params, num_vocab=12, max_tokens=300, policy=lambda: Fixed(4))
    rng = np.random.default_rng(3)
    rounds = [event for event in bench.events(same_model(bench, rng), rng) if isinstance(event, Round)]
    assert sum(event.num_accepted for event in rounds) > 0.8 * sum(event.num_drafted for event in rounds)


def test_a_seed_gives_the_same_answer_again() -> None:
    bench = Bench(params=SETTINGS["everything"], num_vocab=6, max_tokens=30)
    answers = []
    for seed in (1, 1, 2):
        rng = np.random.default_rng(seed)
        answers.append(collect(bench.events(other_model(bench, rng), rng))[0])
    assert answers[0] == answers[1] != answers[2]


# ------------------------------------------------------------------ greedy: token for token


def greedy_answer(bench: Bench, num_ctx: int = 256) -> Path:
    """Argmax from the table, one token after the other."""
    tokens = list(bench.prompt)
    while len(tokens) < len(bench.prompt) + bench.max_tokens and len(tokens) <= num_ctx:
        token = next(iter(bench.next_probs(tokens)))
        if token in bench.stop_tokens:
            break
        tokens.append(token)
    return tuple(tokens[len(bench.prompt) :])


@st.composite
def greedy_cases(draw: st.DrawFn) -> tuple[Bench, Any]:
    """Everything that may change the way to an answer, and must not change the answer."""
    num_vocab = draw(st.integers(2, 5))
    prompt = draw(st.lists(st.integers(0, num_vocab - 1), min_size=1, max_size=7))
    kinds: dict[str, Any] = {"can_forget": draw(st.booleans()), "chunk": draw(st.integers(1, 5))}
    policies = [
        *[lambda k=k: Fixed(k) for k in range(9)],
        *[lambda c=c: Fixed(4, c) for c in (0.0, 0.5, 1.0)],
        lambda: RandomPolicy(5),
        lambda: RandomTrees(5, 30),
    ]
    bench = Bench(
        num_vocab=num_vocab,
        params=draw(
            st.sampled_from(
                [
                    GREEDY,
                    SamplingParams(temperature=0, repeat_penalty=1.4, frequency_penalty=0.5),
                    replace(GREEDY, dry_multiplier=2.0, dry_allowed_length=1, dry_last_n=-1),
                    replace(GREEDY, typical_p=0.4, top_k=0),
                ]
            )
        ),
        constrained=num_vocab > 2 and draw(st.booleans()),
        prompt=prompt,
        max_tokens=draw(st.integers(0, 12)),
        stop_tokens=draw(st.sampled_from([(), (0,), (1,), (0, 1)])),
        seed=draw(st.integers(0, 10**6)),
        policy=draw(st.sampled_from(policies)),
        target_kwargs={"num_ctx": len(prompt) + draw(st.integers(1, 14)), **kinds},
    )
    return bench, draw(drafters(bench))


@st.composite
def drafters(draw: st.DrawFn, bench: Bench) -> Any:
    """A draft model, equal, related or unrelated, perhaps with a small context; scripted chains and trees."""
    kind = draw(st.sampled_from(["model", "model", "tree", "none"]))
    rng = np.random.default_rng(0)
    if kind == "none":
        return NoDrafter()
    if kind == "tree":
        # Within the room for one token a round: a tree has more nodes than its depth.
        return RoomyTrees(draw(st.integers(0, 999)), bench)
    table = bench.target()._table + draw(st.sampled_from([0.0, 1.0, 9.0])) * np.random.default_rng(1).standard_normal(
        (bench.num_vocab,) * 3
    )
    kwargs = {"can_forget": draw(st.booleans()), "chunk": draw(st.integers(1, 5)), "num_ctx": draw(st.integers(4, 40))}
    stop_tokens, max_leaves = draw(st.sampled_from([(), bench.stop_tokens])), draw(st.sampled_from([1, 2, 4, 16]))
    max_leaves = max_leaves if bench.target_kwargs["can_forget"] else 1
    return ModelDrafter(FakeContext(table, **kwargs), bench.sampler(), rng, stop_tokens, max_leaves)


class RoomyTrees(ScriptedDrafter):
    """Random trees cut to the free part of the target's context; chains where it takes no trees."""

    def __init__(self, seed: int, bench: Bench) -> None:
        super().__init__(random_tree(seed, bench.num_vocab))
        self._num_ctx = bench.target_kwargs["num_ctx"]
        self._takes_trees = bench.target_kwargs["can_forget"]

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        self._max_nodes = self._num_ctx - len(tokens)
        draft = super().propose(tokens, policy, limit)
        return draft if self._takes_trees else Draft.chain(draft.tokens[:limit])


@settings(max_examples=250)
@given(greedy_cases())
def test_greedy_answer_is_the_targets_own(case: tuple[Bench, Any]) -> None:
    bench, drafter = case
    target = bench.target()
    answer, _ = collect(bench.events(drafter, np.random.default_rng(1), target))
    assert answer == greedy_answer(bench, target.num_ctx)


@settings(max_examples=100)
@given(greedy_cases())
def test_an_answer_ends_for_the_same_reason_as_without_drafting(case: tuple[Bench, Any]) -> None:
    bench, drafter = case
    rng = np.random.default_rng(1)
    assert collect(bench.events(drafter, rng)) == collect(bench.events(NoDrafter(), rng))


def test_a_stop_token_behind_the_budget_does_not_change_the_reason() -> None:
    """The target, when the budget is spent, has not looked further: neither may a bonus token."""
    chain = FakeContext(np.array([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]))
    results = []
    for k in (0, 1, 2):
        drafter = ModelDrafter(FakeContext(chain._table), Sampler(GREEDY, 3), np.random.default_rng(0))
        events = speculate(
            chain, drafter, Fixed(k), Sampler(GREEDY, 3), np.random.default_rng(0), [0], max_tokens=1, stop_tokens={2}
        )
        results.append(collect(events))
    assert results == [((1,), "length")] * 3


@pytest.mark.parametrize("can_forget", [True, False])
@pytest.mark.parametrize("k", range(6))
def test_greedy_budget_cut_at_every_position(k: int, can_forget: bool) -> None:
    for max_tokens in range(12):
        bench = Bench(
            num_vocab=5,
            params=GREEDY,
            max_tokens=max_tokens,
            policy=lambda: Fixed(k),
            seed=8,
            target_kwargs={"can_forget": can_forget},
        )
        rng = np.random.default_rng(0)
        for make in (same_model, other_model):
            answer, reason = collect(bench.events(make(bench, rng), rng))
            assert (len(answer), reason) == (max_tokens, "length")
            assert answer == greedy_answer(bench)


# ------------------------------------------------------------------ events


def test_pattern_of_sources() -> None:
    """Draft model = target, two drafted tokens a round, five tokens."""
    for params in (GREEDY, PLAIN):
        bench = Bench(params=params, max_tokens=5, num_vocab=5)
        rng = np.random.default_rng(0)
        events = list(bench.events(same_model(bench, rng), rng))
        sources = [event.source for event in events if isinstance(event, Token)]
        assert sources == ["draft", "draft", "bonus", "draft", "draft"]


def test_order_and_content_of_events() -> None:
    bench = Bench(num_vocab=5, max_tokens=20, policy=lambda: Fixed(3), prompt=(0, 1, 2, 3))
    rng = np.random.default_rng(2)
    events = list(bench.events(other_model(bench, rng), rng))
    assert isinstance(events[0], Prefill)
    assert events[0].num_tokens == 4
    assert events[-1] == Finish("length")
    new: list[Token] = []
    index = 0
    for event in events[1:-1]:
        if isinstance(event, Token):
            new.append(event)
            continue
        assert isinstance(event, Round)
        assert (event.index, event.num_tokens) == (index, len(new))
        drafted = [token for token in new if token.source == "draft"]
        assert len(drafted) == min(event.num_accepted, len(new))
        assert all(token.source == "draft" for token in new[:-1])
        if event.num_accepted < event.num_drafted:
            assert new[-1].source == "recovered"
        assert 0 <= event.num_accepted <= event.num_drafted <= 3
        assert event.total_s >= event.verify_s > 0
        assert event.total_s >= event.draft_s > 0
        index, new = index + 1, []
    assert not new


def test_baseline_is_one_target_token_a_round() -> None:
    bench = Bench(num_vocab=5, max_tokens=4)
    events = list(bench.events(NoDrafter(), np.random.default_rng(0)))
    assert [event.source for event in events if isinstance(event, Token)] == ["target"] * 4
    assert [event.num_drafted for event in events if isinstance(event, Round)] == [0] * 4


def test_the_policy_learns_from_every_round_in_order() -> None:
    class Learning(RandomPolicy):
        def __init__(self) -> None:
            super().__init__(1)
            self.seen: list[Round] = []

        def learn(self, record: Round) -> None:
            self.seen.append(record)

    policy = Learning()
    bench = Bench(num_vocab=5, max_tokens=15, policy=lambda: policy)
    rng = np.random.default_rng(0)
    events = list(bench.events(other_model(bench, rng), rng))
    assert policy.seen == [event for event in events if isinstance(event, Round)]


@pytest.mark.parametrize(
    ("make", "can_forget"),
    # What cannot drop a tail takes no trees.
    [(make, can_forget) for make in DRAFTERS for can_forget in (True, False) if can_forget or make not in TREES],
)
def test_after_every_round_the_cache_holds_what_was_accepted(
    make: Callable[[Bench, Any], Any], can_forget: bool
) -> None:
    """Everything but the token that the target added; a cache that cannot drop the rest may be empty instead."""
    bench = Bench(num_vocab=4, max_tokens=25, target_kwargs={"can_forget": can_forget})
    target, rng, tokens = bench.target(), np.random.default_rng(0), list(bench.prompt)
    for event in bench.events(make(bench, rng), rng, target):
        if isinstance(event, Token):
            tokens.append(event.id)
        elif isinstance(event, Round):
            accepted = tokens[: len(tokens) - (event.num_tokens - event.num_accepted)]
            assert list(target.tokens) in ([accepted] if can_forget else [accepted, []])
            assert target._cells == list(target.tokens)


# ------------------------------------------------------------------ work: nothing is decoded twice


class LoggingContext(FakeContext):
    """Remembers every prefix that was decoded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes: list[Path] = []

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Any:
        held = list(self._cells[: len(self._cells) - num_old])
        result = super()._decode(tokens, draft, rows=rows, num_old=num_old)
        self.prefixes += [(*held, *tokens[: index + 1]) for index in range(len(tokens))]
        paths: list[list[int]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else [*held, *tokens]), token])
        self.prefixes += [tuple(path) for path in paths[num_old:]]
        return result


@pytest.mark.parametrize("max_leaves", [1, 8])
@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize(
    "policy",
    [lambda: Fixed(1), lambda: Fixed(4), lambda: Fixed(4, 0.5), lambda: RandomPolicy(1), lambda: RandomTrees(1, 12)],
)
def test_no_token_is_decoded_twice(policy: Callable[[], LengthPolicy], name: str, max_leaves: int) -> None:
    for seed in range(3):
        bench = Bench(num_vocab=4, max_tokens=40, prompt=(1, 2, 3, 0, 1), params=SETTINGS[name], policy=policy)
        target = LoggingContext(bench.target()._table, chunk=3)
        draft_model = LoggingContext(FakeContext.random(77, num_vocab=4)._table, chunk=3)
        rng = np.random.default_rng(seed)
        drafter = ModelDrafter(draft_model, bench.sampler(), rng, max_leaves=max_leaves)
        events = list(bench.events(drafter, rng, target))
        for context in (target, draft_model):
            assert len(context.prefixes) == len(set(context.prefixes)) == context.num_decoded
        rounds = [event for event in events if isinstance(event, Round)]
        rejected = sum(event.num_drafted - event.num_accepted for event in rounds)
        # The token committed last is decoded only if it was drafted.
        last = next(event for event in reversed(events) if isinstance(event, Token))
        assert target.num_decoded == 5 + 40 - (last.source != "draft") + rejected
        assert target.num_calls == 1 + len(rounds)


def test_a_whole_round_is_one_target_pass_also_when_nothing_can_be_dropped() -> None:
    """Accepted whole, a recurrent model never starts anew."""
    bench = Bench(params=GREEDY, num_vocab=5, max_tokens=30, target_kwargs={"can_forget": False})
    target, rng = bench.target(), np.random.default_rng(0)
    rounds = [event for event in bench.events(same_model(bench, rng), rng, target) if isinstance(event, Round)]
    assert target.num_calls == len(rounds) == 10
    assert target.num_decoded == len(bench.prompt) + 30 - 1


# ------------------------------------------------------------------ endings


def test_no_tokens_wanted() -> None:
    bench = Bench(max_tokens=0)
    events = list(bench.events(other_model(bench, None), np.random.default_rng(0)))
    assert [type(event) for event in events] == [Prefill, Finish]
    assert events[-1] == Finish("length")


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("num_prompt", [1, 5, 6, 7])
def test_context_is_used_to_its_last_cell(k: int, num_prompt: int) -> None:
    """Eight cells: the last token needs none of its own."""
    prompt = [1, 0, 2, 1, 1, 0, 2][:num_prompt]
    bench = Bench(params=GREEDY, prompt=prompt, max_tokens=99, policy=lambda: Fixed(k), target_kwargs={"num_ctx": 8})
    rng = np.random.default_rng(0)
    for make in (other_model, same_model):
        answer, reason = collect(bench.events(make(bench, rng), rng))
        assert (len(answer), reason) == (9 - num_prompt, "context")
        assert answer == greedy_answer(bench, 8)


@pytest.mark.parametrize("num_prompt", [8, 9, 600])
def test_a_prompt_that_does_not_fit(num_prompt: int) -> None:
    bench = Bench(prompt=[1] * num_prompt, max_tokens=100, target_kwargs={"num_ctx": 8})
    target = bench.target()
    with pytest.raises(ContextFullError) as caught:
        list(bench.events(NoDrafter(), np.random.default_rng(0), target))
    assert str(num_prompt) in caught.value.message
    assert "8" in caught.value.message
    wanted = {8: 256, 9: 256, 600: 768}[num_prompt]
    assert f"--ctx {wanted}" in caught.value.hint
    assert target.num_calls == 0


@pytest.mark.parametrize("k", range(4))
def test_a_stop_token_first_gives_an_empty_answer(k: int) -> None:
    bench = Bench(params=GREEDY, policy=lambda: Fixed(k))
    first = greedy_answer(bench)[0]
    bench.stop_tokens = {first}
    rng = np.random.default_rng(0)
    for make in (same_model, other_model):
        events = list(bench.events(make(bench, rng), rng))
        assert collect(iter(events)) == ((), "eog")
        assert [event.num_tokens for event in events if isinstance(event, Round)] == [0]


def test_nothing_is_emitted_past_a_stop_token_in_an_accepted_draft() -> None:
    """A chain 0 1 2 3 4 5 drafted whole, ended by 3; the drafter does not know about stop tokens."""
    table = np.full((6, 6), -9.0)
    table[np.arange(6), (np.arange(6) + 1) % 6] = 9.0
    for depth, tree in itertools.product(range(1, 7), (False, True)):
        drafts = Draft.chain([(1 + index) % 6 for index in range(depth)])
        if tree:
            drafts = Draft((*drafts.tokens, 5), (*drafts.parents, -1), (None,) * (depth + 1), (1.0,) * (depth + 1))
        target = FakeContext(table)
        events = list(
            speculate(
                target,
                ScriptedDrafter(lambda tokens, limit, drafts=drafts: drafts if len(tokens) == 1 else Draft()),
                Fixed(9),
                Sampler(GREEDY, 6),
                np.random.default_rng(0),
                [0],
                max_tokens=50,
                stop_tokens={3},
            )
        )
        assert collect(iter(events)) == ((1, 2), "eog")
        assert list(target.tokens) == target._cells


def test_stop_token_sampled_as_recovered_token() -> None:
    bench = Bench(params=GREEDY, num_vocab=4)
    first = greedy_answer(bench)[0]
    bench.stop_tokens = {first}
    wrong = ScriptedDrafter(lambda tokens, limit: Draft.chain([(first + 1) % 4]))
    assert collect(bench.events(wrong, np.random.default_rng(0))) == ((), "eog")


# ------------------------------------------------------------------ interruptions: the next answer is right

INTERRUPTED = Bench(params=GREEDY, num_vocab=5, max_tokens=12, prompt=(1, 2, 3, 4, 0, 1, 2), policy=lambda: Fixed(3))


def contexts(can_forget: bool) -> tuple[FakeContext, FakeContext]:
    kwargs = {"num_vocab": 5, "chunk": 3, "can_forget": can_forget}
    return FakeContext.random(1, **kwargs), FakeContext.random(77, **kwargs)  # type: ignore[arg-type]


def answer_on(target: FakeContext, draft_model: FakeContext, prompt: Sequence[int]) -> Path:
    bench = Bench(params=GREEDY, num_vocab=5, max_tokens=12, prompt=prompt)
    drafter = ModelDrafter(draft_model, bench.sampler(), np.random.default_rng(0))
    return collect(bench.events(drafter, np.random.default_rng(0), target))[0]


@pytest.mark.parametrize("can_forget", [True, False])
def test_closed_at_any_event_and_asked_again(can_forget: bool) -> None:
    expected = greedy_answer(INTERRUPTED)
    for num_events in range(20):
        target, draft_model = contexts(can_forget)
        drafter = ModelDrafter(draft_model, INTERRUPTED.sampler(), np.random.default_rng(0))
        events = INTERRUPTED.events(drafter, np.random.default_rng(0), target)
        taken = list(itertools.islice(events, num_events))
        events.close()  # type: ignore[attr-defined]
        seen = tuple(event.id for event in taken if isinstance(event, Token))
        assert seen == expected[: len(seen)]
        assert answer_on(target, draft_model, INTERRUPTED.prompt) == expected
        # Another turn on what was seen so far.
        follow = [*INTERRUPTED.prompt, *seen]
        bench = Bench(params=GREEDY, num_vocab=5, max_tokens=12, prompt=follow)
        assert answer_on(target, draft_model, follow) == greedy_answer(bench)


@pytest.mark.parametrize("can_forget", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BackendError])
@pytest.mark.parametrize("which", [0, 1], ids=["target", "draft model"])
def test_failing_at_any_decode_call_and_asked_again(which: int, error: type[BaseException], can_forget: bool) -> None:
    expected = greedy_answer(INTERRUPTED)
    for call in range(1, 8):
        pair = contexts(can_forget)
        fail_at(pair[which], call, error)
        drafter = ModelDrafter(pair[1], INTERRUPTED.sampler(), np.random.default_rng(0))
        seen: list[int] = []
        with pytest.raises(error):
            seen.extend(ids_of(INTERRUPTED.events(drafter, np.random.default_rng(0), pair[0])))
        assert tuple(seen) == expected[: len(seen)]
        for prompt in ([*INTERRUPTED.prompt, *seen], INTERRUPTED.prompt):
            bench = Bench(params=GREEDY, num_vocab=5, max_tokens=12, prompt=prompt)
            assert answer_on(*pair, prompt) == greedy_answer(bench)


def ids_of(events: Iterator[Event]) -> Iterator[int]:
    return (event.id for event in events if isinstance(event, Token))


def fail_at(context: FakeContext, call: int, error: type[BaseException]) -> None:
    """Let the `call`-th decode call from now raise, a part of it done."""
    original, calls = context._decode, itertools.count(1)

    def decode(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            context.fail_next = error("stopped")
        return original(*args, **kwargs)

    context._decode = decode  # type: ignore[method-assign]


def test_a_cache_filled_by_others_does_not_matter() -> None:
    bench = Bench(params=GREEDY, num_vocab=5, max_tokens=10)
    for leftover in ([1, 0], [1, 0, 3, 3], [4] * 30, [1]):
        target = bench.target()
        target.sync(leftover)
        target.score(Draft.chain([2]))
        assert collect(bench.events(NoDrafter(), np.random.default_rng(0), target))[0] == greedy_answer(bench)
