"""The drafter of docs/drafters.md, run as it stands there."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import GREEDY, SETTINGS, Bench, assert_exact, collect, greedy_answer

from specdec_cli.draft_length import Fixed
from specdec_cli.testing import FakeContext
from specdec_cli.types import Drafter, Round

PAGE = (Path(__file__).parents[1] / "docs" / "drafters.md").read_text(encoding="utf-8")
MOST_LINES = 40


def block(name: str) -> str:
    """The code after `<!-- name -->`."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Both blocks as one module."""
    path = tmp_path_factory.mktemp("example") / "document_drafter.py"
    path.write_text(block("example drafter") + block("example run"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("document_drafter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["document_drafter"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["document_drafter"]


def test_it_is_short() -> None:
    assert len(block("example drafter").splitlines()) <= MOST_LINES


def copying(document: list[int], num_vocab: int) -> FakeContext:
    """A target that goes on as the document does."""
    table = np.random.default_rng(0).standard_normal((num_vocab, num_vocab)).astype(np.float32)
    for token, following in itertools.pairwise(document):
        table[token, following] += 20
    return FakeContext(table)


def test_a_document_is_copied_in_fewer_passes(example: ModuleType) -> None:
    document = np.random.default_rng(1).permutation(60).tolist()
    events = list(example.answer(copying(document, 60), document, document[:3], 50))
    answer, reason = collect(iter(events))
    assert (list(answer), reason) == (document[3:53], "length")
    rounds = [event for event in events if isinstance(event, Round)]
    assert len(rounds) < 15
    assert {name for record in rounds for name in record.drafters} == {example.NAME}


def test_where_nothing_is_copied_it_proposes_nothing(example: ModuleType) -> None:
    document = np.random.default_rng(1).permutation(60).tolist()
    other = np.random.default_rng(2).permutation(60).tolist()
    events = list(example.answer(copying(other, 60), document, other[:3], 40))
    assert collect(iter(events))[0] == tuple(other[3:43])
    assert not any(event.num_drafted for event in events if isinstance(event, Round))


def test_it_is_a_drafter(example: ModuleType) -> None:
    drafter: Drafter = example.DocumentDrafter([1, 2, 3, 4, 5])
    assert drafter.propose([9, 1, 2, 3], Fixed(8), 8).tokens == (4, 5)
    assert drafter.propose([9, 1, 2, 3], Fixed(8), 1).tokens == (4,)
    assert not drafter.propose([1, 2], Fixed(8), 8).tokens
    assert not example.DocumentDrafter([]).propose([1, 2, 3], Fixed(8), 8).tokens


DOCUMENT = (1, 0, 2, 1, 0, 1, 1, 0, 0, 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_have_exactly_the_targets_distribution(name: str, example: ModuleType) -> None:
    bench = Bench(params=SETTINGS[name], prompt=(1, 0, 2, 1, 0), max_tokens=2)
    assert_exact(bench, lambda bench, rng: example.DocumentDrafter(DOCUMENT, 2))


@given(data=st.data())
def test_greedy_answers_are_the_targets_own(example: ModuleType, data: Any) -> None:
    num_vocab, k = data.draw(st.integers(2, 5)), data.draw(st.integers(0, 8))
    document = data.draw(st.lists(st.integers(0, num_vocab - 1), max_size=40))
    bench = Bench(num_vocab, GREEDY, (1, 0, 1), 40, (), data.draw(st.integers(0, 10**6)), lambda: Fixed(k))
    drafter = example.DocumentDrafter(document, data.draw(st.integers(1, 4)))
    assert collect(bench.events(drafter, np.random.default_rng(0)))[0] == greedy_answer(bench)
