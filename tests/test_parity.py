"""Our transforms against llama.cpp's own sampler chain: same tokens, same probabilities.

llama.cpp adds probabilities up in single precision, one after the other. Where a cut falls within that error, which
token is the last is chance; such a case is left out when ours changes, too, if the setting moves by 2e-4 of itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from models import tiny

from specdec_cli.llama import Model
from specdec_cli.repetition import find_breakers
from specdec_cli.sampling import Sampler
from specdec_cli.types import SamplingParams

OFF = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
SIZES = (100, 32_000, 152_000)
TOLERANCE = 1e-5
ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
SLACK = 2e-4
Answer = tuple[np.ndarray, np.ndarray]


class Chain:
    """llama.cpp's samplers in the order of its `llama-cli`, for one row after another.

    Args:
        params: the settings.
        num_vocab: length of a row.
        vocab: llama_vocab pointer, for DRY.
    """

    def __init__(self, params: SamplingParams, num_vocab: int, vocab: Any = None) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in self._samplers(params, num_vocab, vocab):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    @staticmethod
    def _samplers(params: SamplingParams, num_vocab: int, vocab: Any) -> Iterator[Any]:
        if params.logit_bias:
            pairs = (llama_cpp.llama_logit_bias * len(params.logit_bias))(*params.logit_bias)
            yield llama_cpp.llama_sampler_init_logit_bias(num_vocab, len(params.logit_bias), pairs)
        if params.mirostat:
            yield llama_cpp.llama_sampler_init_temp(params.temperature)
            budget = (1, params.mirostat_tau, params.mirostat_eta)
            if params.mirostat == 1:
                yield llama_cpp.llama_sampler_init_mirostat(num_vocab, *budget, 100)
            else:
                yield llama_cpp.llama_sampler_init_mirostat_v2(*budget)
            return
        yield llama_cpp.llama_sampler_init_penalties(
            num_vocab,
            params.repeat_last_n if params.repeat_last_n >= 0 else 100_000,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        if vocab is not None:
            texts = (ctypes.c_char_p * len(params.dry_breakers))(*map(str.encode, params.dry_breakers))
            yield llama_cpp.llama_sampler_init_dry(
                vocab,
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                params.dry_last_n if params.dry_last_n >= 0 else 100_000,
                texts,
                len(params.dry_breakers),
            )
        yield llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma)
        yield llama_cpp.llama_sampler_init_top_k(params.top_k)
        yield llama_cpp.llama_sampler_init_typical(params.typical_p, 0)
        yield llama_cpp.llama_sampler_init_top_p(params.top_p, 0)
        yield llama_cpp.llama_sampler_init_min_p(params.min_p, 0)
        yield llama_cpp.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1)
        yield llama_cpp.llama_sampler_init_temp_ext(params.temperature, params.dynatemp_range, params.dynatemp_exponent)

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._chain, token)

    def apply(self, row: np.ndarray) -> tuple[Answer, int]:
        """Ascending ids and probabilities of the tokens that are possible, and the token that was selected, if any."""
        data = np.zeros(row.size, dtype=ENTRY)
        data["id"], data["logit"] = np.arange(row.size), row
        kind = ctypes.POINTER(llama_cpp.llama_token_data)
        array = llama_cpp.llama_token_data_array(data.ctypes.data_as(kind), row.size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        # The samplers may move the pointer within the array.
        left = np.ctypeslib.as_array(array.data, shape=(array.size,)).view(ENTRY).reshape(-1).copy()
        chosen = int(left["id"][array.selected]) if array.selected >= 0 else -1
        left = left[np.argsort(left["id"])]
        logits = left["logit"].astype(np.float64)
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        return (left["id"][probs > 0], probs[probs > 0]), chosen

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


def theirs(params: SamplingParams, row: np.ndarray, history: Sequence[int] = (), vocab: Any = None) -> Answer:
    chain = Chain(params, row.size, vocab)
    for token in history:
        chain.accept(token)
    answer, _ = chain.apply(row)
    chain.close()
    return answer


def ours(params: SamplingParams, row: np.ndarray, history: Sequence[int] = (), breakers: Any = None) -> Answer:
    found = Sampler(params, row.size, breakers=breakers).distribution(row, history)
    ids = np.arange(row.size) if found.ids is None else found.ids
    return ids[found.probs > 0], found.probs[found.probs > 0].astype(np.float64)


def assert_same(found: Answer, expected: Answer) -> None:
    """The same support, but for tokens that are possible in name only, and close probabilities."""
    seen, wanted = (answer[0][answer[1] > 1e-30] for answer in (found, expected))
    assert np.array_equal(seen, wanted), f"{np.setxor1d(seen, wanted)} in one of them only"
    shared = np.isin(found[0], expected[0])
    known = dict(zip(expected[0].tolist(), expected[1].tolist(), strict=True))
    assert np.abs(found[1][shared] - np.array([known[token] for token in found[0][shared].tolist()])).max() < TOLERANCE


def is_close_call(params: SamplingParams, row: np.ndarray, history: Sequence[int] = ()) -> bool:
    """Whether a cut of ours changes when its setting, or for the entropy the row, moves within the rounding error."""
    kept = ours(params, row, history)[0]
    names = ("typical_p", "top_p", "min_p", "top_n_sigma", "xtc_threshold")
    for name, factor in itertools.product(names, (1 - SLACK, 1 + SLACK)):
        value = getattr(params, name)
        if value in {0.0, 1.0} or (name == "xtc_threshold" and params.xtc_probability == 0):
            continue
        moved = dataclasses.replace(
            params, **{name: min(value * factor, 1.0) if name != "top_n_sigma" else value * factor}
        )
        if not np.array_equal(ours(moved, row, history)[0], kept):
            return True
    if params.typical_p < 1:
        moves = [ours(params, (row * np.float32(factor)), history)[0] for factor in (1 - SLACK, 1 + SLACK)]
        return not all(np.array_equal(moved, kept) for moved in moves)
    return False


def random_row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Peaked like a language model's: a few tokens stand out of the many."""
    row = rng.standard_normal(size) * rng.uniform(1.0, 2.5)
    places = rng.permutation(size)[: int(rng.integers(5, 60))]
    row[places] += rng.gamma(2.0, 4.0, places.size) + math.log(size) - 4
    return row.astype(np.float32)


def random_history(rng: np.random.Generator, row: np.ndarray) -> list[int]:
    """Repetitive, and about the tokens that matter."""
    alphabet = np.argsort(-row)[: int(rng.integers(2, 12))]
    return [int(token) for token in rng.choice(alphabet, int(rng.integers(0, 90)))]


SINGLE: dict[str, Any] = {
    "softmax": lambda rng: {},
    "logit-bias": lambda rng: {
        "logit_bias": tuple((int(token), float(rng.normal() * 5)) for token in rng.permutation(100)[:8])
    },
    "forbidden": lambda rng: {"logit_bias": tuple((int(token), -math.inf) for token in rng.permutation(100)[:50])},
    "repeat": lambda rng: {"repeat_penalty": rng.uniform(0.5, 2), "repeat_last_n": int(rng.choice([1, 8, 64, -1]))},
    "presence": lambda rng: {"presence_penalty": rng.uniform(-2, 2)},
    "frequency": lambda rng: {"frequency_penalty": rng.uniform(-1, 1), "repeat_last_n": int(rng.choice([8, 64, -1]))},
    "top-n-sigma": lambda rng: {"top_n_sigma": rng.uniform(0.3, 4)},
    "top-k": lambda rng: {"top_k": int(rng.integers(1, 120))},
    "typical": lambda rng: {"typical_p": rng.uniform(0.1, 0.99)},
    "top-p": lambda rng: {"top_p": rng.uniform(0.05, 0.99)},
    "min-p": lambda rng: {"min_p": 10 ** rng.uniform(-4, 0)},
    # At probability 1 the coin is always heads; at 0 the transform is off.
    "xtc": lambda rng: {"xtc_probability": 1.0, "xtc_threshold": rng.uniform(0.01, 0.5)},
    "temperature": lambda rng: {"temperature": rng.uniform(0.1, 3)},
    "greedy": lambda rng: {"temperature": 0.0},
    "dynatemp": lambda rng: {
        "temperature": rng.uniform(0.3, 2), "dynatemp_range": rng.uniform(0.1, 2),
        "dynatemp_exponent": rng.uniform(0.3, 3),
    },
}  # fmt: skip


def some(rng: np.random.Generator, names: Sequence[str], chance: float = 0.5) -> SamplingParams:
    """A combination of transforms, each with its random setting."""
    fields: dict[str, Any] = {}
    for name in names:
        if rng.random() < chance:
            fields |= SINGLE[name](rng)
    return dataclasses.replace(OFF, **fields)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SINGLE)
def test_one_transform(name: str, size: int) -> None:
    rng = np.random.default_rng([len(name), size])
    num_close = 0
    num_cases = {100: 30, 32_000: 8, 152_000: 3}[size]
    for _ in range(num_cases):
        row = random_row(rng, size)
        params = dataclasses.replace(OFF, **SINGLE[name](rng))
        history = random_history(rng, row)
        if is_close_call(params, row, history):
            num_close += 1
            continue
        assert_same(ours(params, row, history), theirs(params, row, history))
    assert num_close <= num_cases // 10


# After -inf, llama.cpp's typical computes 0 * log(0), which is not a number: it is not combined with what makes them.
COMBINATIONS = {
    "cuts": ("temperature", "top-n-sigma", "top-k", "top-p", "min-p"),
    "typical": ("temperature", "top-k", "typical", "top-p", "min-p"),
    "all": (
        "logit-bias",
        "repeat",
        "presence",
        "frequency",
        "top-n-sigma",
        "top-k",
        "top-p",
        "min-p",
        "xtc",
        "dynatemp",
    ),
    "forbidden": ("forbidden", "repeat", "frequency", "top-n-sigma", "top-k", "top-p", "min-p", "temperature"),
    "typical after penalties": ("logit-bias", "repeat", "presence", "typical", "top-p", "xtc", "dynatemp"),
    "greedy": ("logit-bias", "repeat", "frequency", "top-k", "typical", "xtc", "greedy"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations(name: str, size: int) -> None:
    rng = np.random.default_rng([len(name), size, 7])
    num_close = 0
    num_cases = {100: 60, 32_000: 12, 152_000: 4}[size]
    for _ in range(num_cases):
        row = random_row(rng, size)
        params = some(rng, COMBINATIONS[name])
        history = random_history(rng, row)
        if is_close_call(params, row, history):
            num_close += 1
            continue
        assert_same(ours(params, row, history), theirs(params, row, history))
    assert num_close <= num_cases // 10


@pytest.mark.parametrize("size", SIZES)
def test_the_defaults(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(10):
        row = random_row(rng, size)
        if not is_close_call(SamplingParams(), row):
            assert_same(ours(SamplingParams(), row), theirs(SamplingParams(), row))


# ------------------------------------------------------------------ DRY, whose breakers need a vocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp("models")
    with Model(tiny(folder, num_layers=1), vocab_only=True) as loaded:
        yield loaded


BREAKERS = [
    (),
    ("\n", ":", '"', "*"),
    ("\n",),
    ("the",),
    (" the", "he"),
    ("and then", "nd"),
    ("ing\n", "in", "ü"),
    ("a" * 60, "ab" * 30),
    ("é" * 25,),
    ("aab", "ab"),
]


def text_history(rng: np.random.Generator, model: Model) -> list[int]:
    """Tokens of a text that repeats itself, with breakers here and there."""
    words = [
        "the",
        " the",
        " and",
        " then",
        "ing",
        "in",
        "\n",
        ":",
        "a",
        "aab",
        "é",
        "ü",
        '"',
        "*",
        "x",
        " and then",
        "nd",
    ]
    pool = [words[index] for index in rng.permutation(len(words))[: int(rng.integers(2, 6))]]
    text = "".join(rng.choice(pool, int(rng.integers(1, 50))))
    return model.tokenize(text, add_special=False, parse_special=False)


@pytest.mark.parametrize("texts", BREAKERS, ids=lambda texts: "-".join(texts)[:20].replace("\n", "newline") or "none")
def test_dry(texts: tuple[str, ...], model: Model) -> None:
    rng = np.random.default_rng(len(texts))
    breakers = find_breakers(texts, model)
    num_penalized = 0
    for _ in range(60):
        row = rng.standard_normal(model.num_vocab).astype(np.float32)
        history = text_history(rng, model)
        params = dataclasses.replace(
            OFF,
            dry_multiplier=rng.uniform(0.1, 3),
            dry_base=float(rng.choice([1.0, 1.05, 1.75, 3.0])),
            dry_allowed_length=int(rng.integers(1, 5)),
            dry_last_n=int(rng.choice([1, 5, 20, 64, -1])),
            dry_breakers=texts,
            repeat_penalty=float(rng.choice([1.0, 1.2])),
        )
        found = ours(params, row, history, breakers)
        assert_same(found, theirs(params, row, history, model.vocab))
        plain = ours(dataclasses.replace(params, dry_multiplier=0.0), row, history)
        num_penalized += not np.array_equal(found[1], plain[1])
    assert num_penalized > 5


def test_dry_of_random_tokens(model: Model) -> None:
    """Short alphabets, among them pieces of breakers; long repetitions."""
    rng = np.random.default_rng(3)
    texts = ("\n", ":", '"', "*", "ing")
    breakers = find_breakers(texts, model)
    for _ in range(200):
        alphabet = rng.permutation(model.num_vocab - 64)[: int(rng.integers(1, 6))]
        alphabet[0] = int(rng.choice([10, 58, alphabet[0], alphabet[0]]))
        history = [int(token) for token in rng.choice(alphabet, int(rng.integers(0, 120)))]
        params = dataclasses.replace(
            OFF,
            dry_multiplier=float(rng.choice([0.2, 0.8, 100.0])),
            dry_allowed_length=int(rng.integers(1, 7)),
            dry_last_n=int(rng.choice([0, 2, 30, 64, -1])),
            dry_breakers=texts,
        )
        row = rng.standard_normal(model.num_vocab).astype(np.float32)
        assert_same(ours(params, row, history, breakers), theirs(params, row, history, model.vocab))


# ------------------------------------------------------------------ Mirostat, whose budget follows what it samples


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat(version: int, size: int) -> None:
    """Step after step with the token that llama.cpp selected, so that an error of the budget would add up."""
    rng = np.random.default_rng([version, size])
    num_compared = 0
    for _ in range({100: 12, 32_000: 3, 152_000: 1}[size]):
        params = dataclasses.replace(
            OFF,
            temperature=rng.uniform(0.5, 1.5),
            mirostat=version,
            mirostat_tau=rng.uniform(1.0, 6.0),
            mirostat_eta=float(rng.choice([0.1, 0.3])),
        )
        chain, sampler = Chain(params, size), Sampler(params, size)
        tokens = [0]
        for _ in range(6):
            row = random_row(rng, size)
            expected, chosen = chain.apply(row)
            found = sampler.distribution(row, tokens)
            assert found.ids is not None
            if np.array_equal(found.ids, expected[0]):
                assert_same((found.ids, found.probs), expected)
                num_compared += 1
            else:
                # At the budget's edge single precision may decide about one token; and then the budgets part.
                different = np.setxor1d(found.ids, expected[0])
                assert different.size <= 1 + size // 10_000, (version, size, different.size, found.ids.size)
                break
            tokens.append(chosen)
        chain.close()
    assert num_compared >= {100: 60, 32_000: 9, 152_000: 2}[size]
