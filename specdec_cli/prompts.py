"""Prompts to check and measure with: built in, or from a file in the form of Spec-Bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message and the kind of text that it asks for."""

    category: str
    text: str


_SUMMARY_A = """Summarize this in three sentences.

A lighthouse does not only shine. Until radio came, each one had its own pattern of light and darkness, printed
in a book that every ship carried, so that a captain who counted seconds knew which of a hundred towers he saw.
Keepers wound the clockwork that turned the lens every few hours, all night, all year. When electric motors took
over, the patterns stayed the same: sailors trusted the rhythm more than the map."""

_SUMMARY_B = """Give the main points of this note as a list.

The server room will be without power on Saturday from six to ten in the morning, because the switch board is
replaced. Mail and the wiki will not work then; telephones will. Please save open documents on Friday evening.
The build machines start again by themselves, but the printers on the second floor must be switched on by hand.
Questions go to the help desk."""

_SUMMARY_C = """What does this text say about cost? Answer in two sentences.

Decoding a token reads every weight of the model once, and does little arithmetic with it. Reading takes the
time, so a pass over five tokens costs hardly more than a pass over one. Whoever can guess the next tokens
cheaply, and check the guesses in one pass, gets several tokens for the price of one. The guesses need not be
good: a wrong one costs a little, a right one saves a whole pass."""

_SUMMARY_D = """Write a headline and one sentence for this report.

The town council decided on Tuesday to close Mill Street to cars between May and September. Shops may receive
goods before ten in the morning. Forty trees in large pots will be placed along the street, and the bus line
moves to Church Street. The plan was tried for two weeks last summer; two thirds of the residents who answered a
survey wanted it back."""

_CODE = """```python
def processData(inputList, maxValue):
    resultList = []
    for currentItem in inputList:
        if currentItem["value"] <= maxValue:
            newItem = {"name": currentItem["name"], "value": currentItem["value"] * 2}
            resultList.append(newItem)
    return resultList
```"""

BUILT_IN: tuple[Prompt, ...] = tuple(
    Prompt(category, text)
    for category, texts in {
        "code": (
            "Write a Python function that merges two sorted lists, with type hints and a docstring.",
            "Write a Python class for a bank account with deposit, withdraw and a list of transactions.",
            "Write a SQL query that finds the five customers with the highest total of orders in 2023.",
            "Write a JavaScript function that groups an array of objects by the value of a key.",
        ),
        "json": (
            "Return a JSON array with the seven days of the week; each item has the keys name, number and weekend.",
            "Return a JSON object that describes a book: title, author with name and born, tags, pages, available.",
            "Convert to JSON: name: Ada; age: 36; languages: English, French; address: 12 Hill Road, London.",
            "Write a JSON configuration for a web server with two hosts, ports, TLS settings and logging levels.",
        ),
        "summary": (_SUMMARY_A, _SUMMARY_B, _SUMMARY_C, _SUMMARY_D),
        "chat": (
            "What are good reasons to learn to cook at home? Answer in a friendly tone.",
            "How do I keep a houseplant alive when I travel for two weeks?",
            "Explain to a ten year old why the sky is blue.",
            "I have an hour before my train leaves. What could I do near a large railway station?",
        ),
        "edit": (
            f"Rewrite this function so that it uses snake_case names, and return the whole code:\n\n{_CODE}",
            f"Add type hints to this function and return the whole code:\n\n{_CODE}",
            f"Add a docstring and comments to this function and return the whole code:\n\n{_CODE}",
            "Correct the spelling and return the whole text: Their are many resons to viset the libary on rainey days. "
            "It is quite, it is warm, and nobody askes you too buy somthing. Bring a freind and a notbook.",
        ),
        "story": (
            "Write a short story about a clockmaker who repairs a watch that runs backwards.",
            "Write a short story about two children who find a door in an old oak.",
            "Write the first page of a novel set on a ship that never reaches a harbor.",
            "Write a short fable about a fox, a bridge and a secret.",
        ),
    }.items()
    for text in texts
)
"""Four prompts in each of six categories."""


def built_in(num_per_category: int) -> list[Prompt]:
    """The first prompts of each category."""
    categories = dict.fromkeys(prompt.category for prompt in BUILT_IN)
    return [
        prompt
        for category in categories
        for prompt in [p for p in BUILT_IN if p.category == category][:num_per_category]
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file with one JSON object a line: `category`, and `turns`, of which the first is used.

    Source of the form: Xia et al. 2024 (Spec-Bench).

    Raises:
        UsageError: the file cannot be read, or a line has another form.
    """
    try:
        # Not splitlines(): a line separator of Unicode may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read `{path}`: {reason}", "check the path given to `--prompts`") from None
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UsageError(f"`{path}` has no prompts", 'write lines like {"category": "code", "turns": ["..."]}')
    return prompts


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
        category, text = str(entry.get("category", "all")), entry["turns"][0]
    except (json.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        category, text = "", None
    if not isinstance(text, str) or not text:
        hint = 'each line is like {"category": "code", "turns": ["..."]}'
        raise UsageError(f"line {number} of `{path}` is not a prompt", hint)
    return Prompt(category, text)
