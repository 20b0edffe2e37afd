"""Which models can draft for a target: files on this machine are compared, known ones that are not here are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path

from specdec_cli.compatibility import Compatibility, Verdict, compare
from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError
from specdec_cli.estimates import active_share, expert_share, objection, ratio_of
from specdec_cli.gguf import check_header
from specdec_cli.llama import Model, require_tokenizer
from specdec_cli.local_files import LocalModel, scan, size_of
from specdec_cli.registry import ModelSpec, Registry
from specdec_cli.stored import locate
from specdec_cli.translation import Efficiency, Tokenizer, efficiency

_SIMILAR = 0.99
"""Paddings of one tokenizer change its size by less than a hundredth."""

OnStep = Callable[[str, float], None]
_Here = list[tuple[Path, ModelSpec]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a file without loading its weights.

    Attributes:
        path: the file.
        size: bytes of it, with the other shards of a split model.
        active_share: the share of these that one token reads.
        model: its vocabulary and metadata, open.
    """

    path: Path
    size: int
    active_share: float
    model: Model


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that might draft.

    Attributes:
        name: in the registry, else in the program that has it.
        place: that program; empty for a model that is not on this machine.
        path: the file; None for a model that is not on this machine.
        size: in bytes; None when it is not known.
        cost_ratio: a draft step in target steps; None when a size is not known.
        fits: whether it can draft for the target; None when only having it can tell.
        verdict: how the vocabularies compare; None when they were not compared.
        reason: why not, or what else to know.
        pair: the pair of the registry that joins the two; empty without one.
        is_foreign: whether the tokenizers are known to differ, so that drafts have to be translated.
        translation: how well drafts can be translated where the vocabularies differ; None where they need not or
            cannot be.
    """

    name: str
    place: str
    path: Path | None
    size: int | None
    cost_ratio: float | None
    fits: bool | None
    verdict: Verdict | None
    reason: str
    pair: str = ""
    is_foreign: bool = False
    translation: Efficiency | None = None


def open_vocabulary(path: Path) -> Measured:
    """Load what can be compared of a file; the model has to be closed.

    Raises:
        ModelMissingError: there is no such file.
        ModelLoadError: it is not a model that this llama.cpp can load, or one without a tokenizer.
    """
    check_header(path)
    model = Model(path, vocab_only=True)
    try:
        require_tokenizer(model)
    except ModelLoadError:
        model.close()
        raise
    return Measured(path, size_of(path), expert_share(model.metadata), model)


def ratio(target: Measured, draft: Measured) -> float:
    """A draft step in target steps."""
    return ratio_of((target.size, target.active_share), (draft.size, draft.active_share))


def translation(target: Model, draft: Model, found: Compatibility) -> Efficiency | None:
    """How well drafts can be translated from one tokenizer to the other; None where they need not or cannot be."""
    return None if found.fits else efficiency(Tokenizer(target), Tokenizer(draft))


def find_drafts(registry: Registry, target: Path, on_step: OnStep) -> list[Candidate]:
    """Every model that might draft for a target, the best first, then those that cannot, with the reason.

    Args:
        registry: what is known by name.
        target: the target's file.
        on_step: told what is being compared, and the share that is done.

    Raises:
        ModelLoadError: the target cannot be read.
    """
    measured = open_vocabulary(target)
    with measured.model:
        here = [(path, spec) for spec in registry.models.values() if (path := locate(spec)) is not None]
        names = {spec.name for spec in registry.models.values() if _is_file_of(spec, target, here)}
        files = [file for file in _files(here) if not _is_same(file.path, target)]
        found = []
        for number, file in enumerate(files):
            on_step(f"comparing with {file.name}", number / len(files))
            found.append(_judge_file(measured, file))
        for spec in {pair.draft.name: pair.draft for pair in registry.pairs.values()}.values():
            # Larger ones are no drafts, and what is here was compared, whatever it is called.
            is_smaller = spec.size is None or spec.size < measured.size
            if is_smaller and not any(_is_file_of(spec, file.path, here) for file in files):
                found.append(_judge_known(registry, measured, names, spec))
    return sorted(found, key=_order)


def _order(candidate: Candidate) -> tuple[int, float, str]:
    rank = 2 if candidate.is_foreign else {True: 0, None: 1, False: 3}[candidate.fits]
    return rank, candidate.cost_ratio or 0.0, candidate.name


def _files(here: _Here) -> Iterator[LocalModel]:
    """What lies on this machine, by the registry's names where it has one."""
    left = list(here)
    for file in scan():
        known, left = _taken(left, file.path)
        name = known[0].name if known else file.name
        yield LocalModel(file.place, name, file.path, file.size, file.is_complete)
    while left:
        path = left[0][0]
        known, left = _taken(left, path)
        yield LocalModel("models.toml", known[0].name, path, size_of(path))


def _taken(left: _Here, path: Path) -> tuple[list[ModelSpec], _Here]:
    """Every model that a file is, and what is left without them."""
    known = [spec for place, spec in left if place == path or _is_same(place, path)]
    return known, [(place, spec) for place, spec in left if spec not in known]


def _is_file_of(spec: ModelSpec, path: Path, here: _Here) -> bool:
    """Whether a file is this model, wherever it lies."""
    if any(known == spec and _is_same(place, path) for place, known in here):
        return True
    try:
        return path.name == spec.file and spec.size == size_of(path)
    except OSError:
        return False


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _judge_file(target: Measured, file: LocalModel) -> Candidate:
    def judged(fits: bool, reason: str, cost: float | None = None, verdict: Verdict | None = None) -> Candidate:
        return Candidate(file.name, file.place, file.path, file.size, cost, fits, verdict, reason)

    if not file.is_complete:
        return judged(False, "some of its shards are missing")
    if file.size >= target.size:
        return judged(False, "not smaller than the target")
    try:
        draft = open_vocabulary(file.path)
    except ModelMissingError:
        return judged(False, "it is gone")
    except SpecdecError as error:
        return judged(False, error.message)
    with draft.model:
        found, cost = compare(target.model, draft.model), ratio(target, draft)
        translated = translation(target.model, draft.model, found)
    judgment = judged(found.fits, found.reason or note_on(found, cost), cost, found.verdict)
    return replace(judgment, is_foreign=translated is not None, translation=translated)


def note_on(found: Compatibility, cost: float) -> str:
    """What else to know of two models that fit together; may be empty."""
    return "; ".join(filter(None, (objection(cost), found.verdict if found.verdict != "same tokenizer" else "")))


def _judge_known(registry: Registry, target: Measured, names: Set[str], draft: ModelSpec) -> Candidate:
    """A model of the registry that is not here, by what the registry says of it; `names` are those of the target."""
    pairs = [pair for pair in registry.pairs_with(draft.name) if pair.draft == draft and pair.target.name in names]
    size, num_target, num_vocab = draft.size, target.model.num_vocab, _num_vocab(registry, draft)
    cost = None if size is None else ratio_of((target.size, target.active_share), (size, active_share(draft)))
    if pairs:
        remark = pairs[0].reason or pairs[0].note
        return Candidate(draft.name, "", None, size, cost, True, None, remark, pairs[0].name)
    is_foreign, reason = False, "its vocabulary is not known before it is here"
    if num_vocab is not None:
        is_foreign = min(num_vocab, num_target) / max(num_vocab, num_target) < _SIMILAR
        reason = f"has about as many tokens, {num_vocab}; only comparing them can tell"
    if is_foreign:
        reason = f"another tokenizer, {num_vocab} tokens where the target has {num_target}: drafts are translated"
    return Candidate(draft.name, "", None, size, cost, None, None, reason, is_foreign=is_foreign)


def _num_vocab(registry: Registry, draft: ModelSpec) -> int | None:
    """The size of a draft model's vocabulary, up to padding: its own, or that of a target it is paired with."""
    targets = [pair.target for pair in registry.pairs_with(draft.name) if pair.draft == draft and pair.recommended]
    return next((spec.num_vocab for spec in (draft, *targets) if spec.num_vocab is not None), None)
