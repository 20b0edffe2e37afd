"""What tuning measures: a text by the target, how the draft model agrees with it, and what passes and steps cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec_cli import conversation
from specdec_cli.context import common_prefix
from specdec_cli.errors import ModelLoadError
from specdec_cli.sampling import top_probability
from specdec_cli.translation import SAMPLE, Translator
from specdec_cli.types import Context, Draft, LanguageModel

PROMPTS = (
    "Write a Python function that counts the words of a text, without imports.",
    "List the four seasons as JSON, with a name and the first month of each.",
    "Why do leaves change their color in autumn? Answer in a few sentences.",
)
"""Short, and of three kinds: draft models agree with code much more often than with talk."""

MAX_ANSWER, MIN_ANSWER = 48, 12
"""Tokens of one answer; with its first row it must fit into one call of `Context.score`."""

PASS_SIZES = (1, 2, 3, 4, 5, 9)
NUM_BASE = 160
"""Tokens in the cache while passes and steps are timed."""

NUM_CTX = 512
"""Holds the longest text, and the base with a few steps behind it."""

OnStep = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def greedy_answers(model: LanguageModel, context: Context, budget_s: float, on_step: OnStep) -> list[Text]:
    """The target's answers to `PROMPTS`, shorter ones where it is slow.

    Args:
        model: the target.
        context: a cache of it, of `NUM_CTX` tokens.
        budget_s: seconds that all answers may take; each has `MIN_ANSWER` tokens or ends by itself, and where even that
            takes too long there is only one.
        on_step: told after each token.

    Raises:
        ModelLoadError: the model takes too few tokens.
    """
    texts: list[Text] = []
    first_began = time.perf_counter()
    for number, prompt in enumerate(_encode(model, prompt) for prompt in PROMPTS):
        answer: list[int] = []
        if len(prompt) + MAX_ANSWER > context.num_ctx:
            raise ModelLoadError(f"`{model.path.name}` takes {context.num_ctx} tokens, too few to be measured with")
        began = time.perf_counter()
        while len(answer) < MAX_ANSWER:
            context.sync([*prompt, *answer])
            answer.append(int(context.score()[0].argmax()))
            on_step((number + len(answer) / MAX_ANSWER) / len(PROMPTS))
            late = time.perf_counter() - began > budget_s / len(PROMPTS)
            if answer[-1] in model.stop_tokens or (late and len(answer) >= MIN_ANSWER):
                break
        texts.append(Text(tuple(prompt), tuple(answer)))
        if time.perf_counter() - first_began > budget_s:
            break
    return texts


def translated(text: Text, translator: Translator) -> Text:
    """A text as a draft model with another tokenizer reads it; agreement is then measured in its own tokens."""
    translation = translator.translation()
    prompt = translation.ids(text.prompt)
    whole = translation.ids([*text.prompt, *text.answer])
    if len(whole) < 2:
        # Nothing but special tokens.
        whole = [*whole, *translator.draft.encode(SAMPLE.encode())][:MIN_ANSWER]
    # What merges across the border belongs to the answer.
    num_before = max(1, min(common_prefix(prompt, whole), len(whole) - 1))
    return Text(tuple(whole[:num_before]), tuple(whole[num_before:][:MAX_ANSWER]))


def _encode(model: LanguageModel, prompt: str) -> list[int]:
    if model.chat_template is None:
        return conversation.encode_raw(model, prompt)
    return conversation.encode_chat(model, [{"role": "user", "content": prompt}])


def time_passes(context: Context, texts: Sequence[Text], budget_s: float, num_repeats: int = 5) -> dict[int, float]:
    """Number of tokens -> median seconds of a pass over as many, for `PASS_SIZES`; at least one repeat counts."""
    base, following = _base(texts, max(PASS_SIZES) - 1)
    times = np.zeros((num_repeats + 1, len(PASS_SIZES)))
    first_began = time.perf_counter()
    for repeat in range(num_repeats + 1):
        for column, size in enumerate(PASS_SIZES):
            context.sync(base)
            began = time.perf_counter()
            context.score(Draft.chain(following[: size - 1]))
            times[repeat, column] = time.perf_counter() - began
            context.keep(())
        if repeat and time.perf_counter() - first_began > budget_s:
            times = times[: repeat + 1]
            break
    # The first repeat read the base, and touched pages and kernels for the first time.
    return dict(zip(PASS_SIZES, map(float, np.median(times[1:], axis=0)), strict=True))


def time_steps(
    contexts: Sequence[Context],
    texts: Sequence[Text],
    budget_s: float,
    *,
    num_rounds: int,
    num_steps: int,
    on_step: OnStep,
) -> Times:
    """Median seconds of one draft step in each round, shape (contexts, rounds); fewer rounds when time is up.

    The contexts take turns, so that whatever else the machine does meets all of them. A step is what drafting does: a
    token decoded, the likeliest one looked up, and its probability.
    """
    base, following = _base(texts, num_steps)
    times = np.zeros((len(contexts), num_rounds, num_steps))
    first_began = time.perf_counter()
    for round_ in range(num_rounds):
        for index, context in enumerate(contexts):
            context.sync(base)
            context.score()
            for step in range(num_steps):
                context.sync([*base, *following[: step + 1]])
                began = time.perf_counter()
                row = context.score()[0]
                row.argmax()
                top_probability(row)
                times[index, round_, step] = time.perf_counter() - began
            on_step((round_ + (index + 1) / len(contexts)) / num_rounds)
        if time.perf_counter() - first_began > budget_s:
            times = times[:, : round_ + 1]
            break
    return np.median(times, axis=2)


def follow(context: Context, texts: Sequence[Text], num_shared: int) -> tuple[list[float], list[bool]]:
    """Confidence of the draft model at each position of the answers, and whether its likeliest token is theirs.

    Args:
        context: of the draft model.
        texts: the target's.
        num_shared: token ids that both models have.
    """
    confidences: list[float] = []
    matches: list[bool] = []
    for text in texts:
        context.sync(text.prompt)
        rows = context.score(Draft.chain(text.answer[:-1]))[:, :num_shared]
        confidences += map(top_probability, rows)
        matches += (rows.argmax(axis=1) == np.asarray(text.answer)).tolist()
        context.keep(range(len(text.answer) - 1))
    return confidences, matches


def _base(texts: Sequence[Text], num_following: int) -> tuple[list[int], list[int]]:
    """All texts in a row: about `NUM_BASE` tokens to stand in the cache, and those that follow them.

    The last text comes first: it is in the cache already.
    """
    tokens = [token for text in reversed(texts) for token in (*text.prompt, *text.answer)]
    num_base = max(1, min(NUM_BASE, len(tokens) - num_following))
    return tokens[:num_base], tokens[num_base : num_base + num_following]
