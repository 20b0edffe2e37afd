"""The suite has teeth: faults of the kind that make speculation lossy are each caught by a test."""

from __future__ import annotations

import time

import pytest
from mutants import MUTANTS, Mutant, is_in_place, quick_failures

QUICK = [mutant for mutant in MUTANTS if mutant.quick]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_to_replace_occurs_once(mutant: Mutant) -> None:
    assert is_in_place(mutant)


def test_every_mutant_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    unharmed = (None, sorted({mutant.quick for mutant in QUICK}))
    (known, _), *results = quick_failures([unharmed, *((mutant, [mutant.quick]) for mutant in QUICK)])
    with capsys.disabled():
        print("\n")
        for mutant, (found, seconds) in zip(QUICK, results, strict=True):
            print(f"  {mutant.name:50} {seconds:5.1f} s   {found[0] if found else 'SURVIVED'}")
        print(f"  {len(QUICK)} mutants in {time.perf_counter() - started:.1f} s")
    assert not known, "fails without any mutant"
    # Anything but a failing test, an error when it is collected for example, has not caught it.
    assert all(found and found[0].startswith("tests/") for found, _ in results)
