"""Options in groups, one object each: what a command is given becomes what the layers below are told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from specdec_cli.cli.options import (
    ColorOption,
    DraftOption,
    MaxTokensOption,
    OfflineOption,
    QuietOption,
    TargetOption,
    chat_option,
    complete_pair,
    drafting_option,
    model_option,
    output_option,
    sampling_option,
    structure_option,
)
from specdec_cli.errors import UsageError
from specdec_cli.limits import DrafterName

if TYPE_CHECKING:
    from specdec_cli.choice import ModelChoice
    from specdec_cli.cli.job import View
    from specdec_cli.config import PairSettings
    from specdec_cli.constraint import Grammar
    from specdec_cli.session import SessionOptions, Structure
    from specdec_cli.types import Drafting, SamplingParams


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which models, and how they are loaded."""

    pair: Annotated[
        str | None,
        model_option(
            "--pair", "-m", metavar="NAME", help="pair from `models.toml`, or a target as in `--target`",
            autocompletion=complete_pair,
        ),
    ] = None  # fmt: skip
    target: TargetOption = None
    draft: DraftOption = None
    offline: OfflineOption = False
    ctx: Annotated[
        int | None,
        model_option(
            "--ctx", metavar="TOKENS", help="context size", show_default="what prompt and answer need; 8192 in chat"
        ),
    ] = None
    gpu_layers: Annotated[
        int | None,
        model_option("--gpu-layers", metavar="N", help="target layers on the GPU", show_default="all, if supported"),
    ] = None
    draft_gpu_layers: Annotated[
        int | None,
        model_option(
            "--draft-gpu-layers", metavar="N", help="draft layers on the GPU", show_default="all, if supported"
        ),
    ] = None
    threads: Annotated[
        int | None, model_option("--threads", metavar="N", help="CPU threads", show_default="physical cores")
    ] = None
    kv_type: Annotated[
        str,
        model_option("--kv-type", metavar="TYPE", help="type of both caches: f32, f16, q8_0, q5_1, q5_0, q4_1, q4_0"),
    ] = "f16"

    tuned: Annotated[
        bool, model_option("--tuned/--no-tuned", help="draft with the file that `specdec tune` made, where it did")
    ] = True
    force: Annotated[bool, model_option("--force", envvar=None, help="load also where the memory seems too small")] = (
        False
    )


@dataclass(frozen=True, slots=True)
class DraftingFlags:
    """What proposes tokens, and how many."""

    drafter: Annotated[
        DrafterName,
        drafting_option(
            "--drafter",
            help="what proposes tokens: the draft model, in chains or trees, repeated text, whichever pays, or nothing",
        ),
    ] = "auto"
    no_draft: Annotated[
        bool, drafting_option("--no-draft", envvar=None, help="plain decoding by the target, as `-k 0`")
    ] = False
    draft_tokens: Annotated[
        str | None,
        drafting_option(
            "--draft-tokens", "-k", metavar="K|auto",
            help="most draft tokens a round, 0 for none; auto drafts what pays by the measured costs",
            show_default="the pair's, else auto",
        ),
    ] = None  # fmt: skip
    draft_confidence: Annotated[
        float,
        drafting_option("--draft-confidence", metavar="P", help="with `-k K`, end a draft at a less probable token"),
    ] = 0.5
    draft_branches: Annotated[
        int,
        drafting_option("--draft-branches", metavar="N", help="most branches of a draft tree, 1 drafts chains only"),
    ] = 8
    ngram_cache: Annotated[
        Path | None,
        drafting_option(
            "--ngram-cache", metavar="FILE", help="draft from n-grams of your own text, and add the answer to them",
            show_default="what `specdec ngram build` made, only read",
        ),
    ] = None  # fmt: skip
    explain: Annotated[
        bool,
        drafting_option("--explain", envvar=None, help="after the answer, for each round why its draft got its length"),
    ] = False

    @property
    def is_off(self) -> bool:
        """Whether this is plain decoding."""
        return self.no_draft or self.drafter == "none" or self.num_draft_tokens == 0

    @property
    def num_draft_tokens(self) -> int | None:
        """The number given; None for auto, or nothing.

        Raises:
            UsageError: neither a number nor auto.
        """
        if self.draft_tokens is None or self.draft_tokens == "auto":
            return None
        try:
            return int(self.draft_tokens)
        except ValueError:
            raise UsageError(
                f"--draft-tokens must be a number or auto, not `{self.draft_tokens}`", "see `specdec run --help`"
            ) from None

    def drafting(self, pair: str | None, default_tokens: int | None, given: Set[str] = frozenset()) -> Drafting:
        """What proposes tokens, and how many: by the flags, then what was saved for the pair, the config, the pair.

        Args:
            pair: its name, for the config.
            default_tokens: the pair's own draft tokens; None is auto.
            given: fields that the user chose.

        Raises:
            UsageError: a value outside its range, or a config file with a mistake.
        """
        from specdec_cli.config import load_pair_settings
        from specdec_cli.types import Drafting

        saved = load_pair_settings(pair)
        drafter = self._drafter(saved, given)
        num = self._draft_tokens(saved, default_tokens, given)
        confidence = self.draft_confidence
        if saved.draft_confidence is not None and "draft_confidence" not in given:
            confidence = saved.draft_confidence
        # Checked also when it is not used.
        drafting = Drafting(drafter, num, confidence, self.draft_branches)
        return replace(drafting, drafter="none") if self.no_draft or drafting.is_off else drafting

    def _drafter(self, saved: PairSettings, given: Set[str]) -> DrafterName:
        if "drafter" in given:
            return self.drafter
        wanted = saved.drafter or self.drafter
        # Whoever says how to draft wants to: a saved "none" is no answer to that.
        if wanted == "none" and given & {"draft_tokens", "draft_confidence"}:
            return "auto" if self.drafter == "none" else self.drafter
        return wanted

    def _draft_tokens(self, saved: PairSettings, default_tokens: int | None, given: Set[str]) -> int | None:
        if "draft_tokens" in given:
            return self.num_draft_tokens
        if saved.draft_tokens is not None:
            return None if saved.draft_tokens == "auto" else saved.draft_tokens
        wants = "drafter" in given and self.drafter != "none"
        if self.draft_tokens is None or (wants and self.num_draft_tokens == 0):
            return default_tokens
        return self.num_draft_tokens

    def session_options(self, choice: ModelChoice, model: ModelFlags, given: Set[str] = frozenset()) -> SessionOptions:
        """How to load and draft.

        Raises:
            UsageError: a value outside its range, or a draft model is wanted and there is none.
        """
        from specdec_cli.session import SessionOptions

        drafting = self.drafting(choice.pair, choice.num_draft_tokens, given)
        if drafting.drafter in {"model", "tree"} and choice.draft is None and not drafting.is_off:
            hint = "name one with `--draft MODEL`, or a pair"
            raise UsageError(f"`--drafter {drafting.drafter}` needs a draft model", hint)
        return SessionOptions(
            drafting, model.ctx, model.gpu_layers, model.draft_gpu_layers, model.threads, model.kv_type, model.tuned,
            self.ngram_cache, model.force,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How the next token is chosen; llama.cpp's names, order and defaults."""

    temperature: Annotated[float, sampling_option("--temperature", "-t", metavar="T", help="0 is greedy")] = 0.8
    top_k: Annotated[int, sampling_option("--top-k", metavar="N", help="keep the N likeliest tokens, 0 is off")] = 40
    top_p: Annotated[
        float, sampling_option("--top-p", metavar="P", help="keep the likeliest tokens up to this mass, 1 is off")
    ] = 0.95
    min_p: Annotated[
        float, sampling_option("--min-p", metavar="P", help="keep tokens above this share of the likeliest, 0 is off")
    ] = 0.05
    typical_p: Annotated[
        float, sampling_option("--typical-p", metavar="P", help="keep locally typical tokens up to this mass, 1 is off")
    ] = 1.0
    top_n_sigma: Annotated[
        float, sampling_option("--top-n-sigma", metavar="N", help="keep tokens within N standard deviations, 0 is off")
    ] = 0.0
    xtc_probability: Annotated[
        float, sampling_option("--xtc-probability", metavar="P", help="chance to exclude top choices, 0 is off")
    ] = 0.0
    xtc_threshold: Annotated[
        float, sampling_option("--xtc-threshold", metavar="P", help="probability that makes a top choice")
    ] = 0.1
    dynatemp_range: Annotated[
        float, sampling_option("--dynatemp-range", metavar="T", help="vary the temperature with the entropy, 0 is off")
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, sampling_option("--dynatemp-exponent", metavar="X", help="how entropy becomes temperature")
    ] = 1.0
    repeat_last_n: Annotated[
        int, sampling_option("--repeat-last-n", metavar="N", help="tokens that penalties look at, 0 is off, -1 is all")
    ] = 64
    repeat_penalty: Annotated[
        float, sampling_option("--repeat-penalty", metavar="X", help="divide logits of seen tokens, 1 is off")
    ] = 1.0
    presence_penalty: Annotated[
        float, sampling_option("--presence-penalty", metavar="X", help="subtract from logits of seen tokens, 0 is off")
    ] = 0.0
    frequency_penalty: Annotated[
        float, sampling_option("--frequency-penalty", metavar="X", help="subtract for each occurrence, 0 is off")
    ] = 0.0
    dry_multiplier: Annotated[
        float, sampling_option("--dry-multiplier", metavar="X", help="strength of the DRY penalty, 0 is off")
    ] = 0.0
    dry_base: Annotated[float, sampling_option("--dry-base", metavar="X", help="growth of the DRY penalty a token")] = (
        1.75
    )
    dry_allowed_length: Annotated[
        int, sampling_option("--dry-allowed-length", metavar="N", help="longest repetition without a DRY penalty")
    ] = 2
    dry_last_n: Annotated[
        int, sampling_option("--dry-last-n", metavar="N", help="tokens that DRY looks at, 0 is off, -1 is all")
    ] = 64
    dry_breaker: Annotated[
        list[str] | None,
        sampling_option(
            "--dry-breaker", metavar="TEXT", envvar=None, help="DRY does not look across this, `none` for no breakers;"
            " repeatable", show_default="newline, colon, quote, asterisk",
        ),
    ] = None  # fmt: skip
    mirostat: Annotated[
        int, sampling_option("--mirostat", metavar="N", help="Mirostat 1 or 2 in place of the others")
    ] = 0
    mirostat_tau: Annotated[
        float, sampling_option("--mirostat-tau", metavar="X", help="surprise aimed at, in bits")
    ] = 5.0
    mirostat_eta: Annotated[float, sampling_option("--mirostat-eta", metavar="X", help="learning rate")] = 0.1
    logit_bias: Annotated[
        list[str] | None,
        sampling_option(
            "--logit-bias", metavar="TOKEN=BIAS", envvar=None,
            help="add to a token's logit, by id or text, e.g. 15043=-2.5 or ' the'=-inf; repeatable",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None,
        sampling_option("--seed", metavar="N", help="of the random generator", show_default="drawn, and shown"),
    ] = None
    sampler_defaults: Annotated[
        Literal["llama.cpp", "model"],
        sampling_option("--sampler-defaults", help="where settings you do not give come from"),
    ] = "llama.cpp"

    def params(self) -> SamplingParams:
        """The settings, without what only the model's file can tell.

        Raises:
            UsageError: a value outside its range.
        """
        from specdec_cli.settings import split_bias
        from specdec_cli.types import SamplingParams

        for text in self.logit_bias or ():
            split_bias(text)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        breakers = values.pop("dry_breaker")
        if breakers:
            values["dry_breakers"] = () if list(breakers) == ["none"] else tuple(breakers)
        values["logit_bias"] = ()
        del values["sampler_defaults"]
        return SamplingParams(**values)

    def params_for(self, target: Path, given: Collection[str], *, tells: bool = True) -> SamplingParams:
        """The settings for one model, read from its file without loading the weights; says what the file decided.

        Args:
            target: the target's file.
            given: fields that the user chose.
            tells: say it.

        Raises:
            UsageError: a value outside its range, or a bias on an unknown token.
            ModelLoadError: the file is not a model.
        """
        params = self.params()
        if not self.logit_bias and self.sampler_defaults == "llama.cpp":
            return params
        from specdec_cli.llama import Model
        from specdec_cli.settings import resolve_biases, with_model_defaults
        from specdec_cli.trial import admit

        admit(target)
        with Model(target, vocab_only=True) as model:
            params = replace(params, logit_bias=resolve_biases(self.logit_bias or (), model))
            if self.sampler_defaults == "model":
                params, found = with_model_defaults(params, model, given)
                listed = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in found.items())
                if tells:
                    typer.echo(f"sampling settings of the model: {listed or 'none'}", err=True)
        return params


@dataclass(frozen=True, slots=True)
class StructureFlags:
    """Where an answer ends and what form it has."""

    stop: Annotated[
        list[str] | None,
        structure_option("--stop", metavar="TEXT", envvar=None, help="end before this text; repeatable"),
    ] = None
    ignore_eos: Annotated[bool, structure_option("--ignore-eos", help="never end by the model's own choice")] = False
    grammar: Annotated[
        Path | None,
        structure_option("--grammar", metavar="FILE", help="keep to a grammar, .gbnf (llama.cpp's) or .lark"),
    ] = None
    json_schema: Annotated[
        str | None, structure_option("--json-schema", metavar="FILE|JSON", help="keep to a JSON schema")
    ] = None
    json_object: Annotated[bool, structure_option("--json-object", help="keep to any JSON object")] = False

    def structure(self) -> Structure:
        """Parsed and checked.

        Raises:
            UsageError: flags that exclude each other, or a grammar that does not parse.
        """
        from specdec_cli.session import Structure

        given = [
            name
            for name, value in (
                ("--grammar", self.grammar), ("--json-schema", self.json_schema), ("--json-object", self.json_object)
            )
            if value not in (None, False)
        ]  # fmt: skip
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other", "leave all but one out")
        return Structure(tuple(self.stop or ()), self.ignore_eos, self._grammar() if given else None)

    def _grammar(self) -> Grammar:
        from specdec_cli.constraint import Grammar

        if self.grammar is not None:
            return Grammar.from_file(self.grammar)
        return Grammar.json_object() if self.json_schema is None else Grammar.from_schema(self.json_schema)


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """How the answer is shown."""

    as_json: Annotated[bool, output_option("--json", envvar=None, help="JSON Lines on stdout, see docs/json.md")] = (
        False
    )
    no_stream: Annotated[
        bool, output_option("--no-stream", envvar=None, help="print the answer when it is complete")
    ] = False
    quiet: QuietOption = False
    color: ColorOption = "auto"

    @property
    def is_silent(self) -> bool:
        """Whether stderr shows no progress."""
        return self.quiet or self.as_json

    def view(self, *, explain: bool = False) -> View:
        """What a job needs to know of it."""
        from specdec_cli.cli.job import View

        return View(self.as_json, self.quiet, self.color, stream=not self.no_stream, explain=explain)


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """What a conversation has beside its answers."""

    max_tokens: MaxTokensOption = 2048
    on_full: Annotated[
        Literal["drop", "stop", "error"],
        chat_option(
            "--on-full", help="when the context is full: drop the oldest turns, stop the answer, or end with an error"
        ),
    ] = "drop"
    hide_thinking: Annotated[
        bool | None,
        chat_option(
            "--hide-thinking/--show-thinking",
            help="leave out or show what a reasoning model thinks",
            show_default="shown on a terminal, left out elsewhere",
        ),
    ] = None


def with_flag_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command in which each parameter that is a flag group becomes the options of that group.

    Where the parameter has a default, that has the command's own defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            own = parameter.default
            parameters += _group_parameters(groups[name], None if own is inspect.Parameter.empty else own)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def expanded(**values: Any) -> Any:
        built = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        return command(**values, **built)

    # Typer reads the options from here.
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def given(context: typer.Context, group: Any) -> set[str]:
    """Fields of a flag group that the user chose, on the command line, in the environment or in the config.

    For drafting the config does not count: what was saved for the pair is more particular than a default for all.
    """
    names = (field.name for field in fields(group))
    sources = {name: context.get_parameter_source(name) for name in names}
    others = {"DEFAULT", "DEFAULT_MAP"} if isinstance(group, DraftingFlags) else {"DEFAULT"}
    return {name for name, source in sources.items() if source is not None and source.name not in others}


def _group_parameters(group: Any, own: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: field.default if own is None else getattr(own, field.name) for field in fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]
