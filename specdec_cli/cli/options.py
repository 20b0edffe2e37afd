"""Every option, declared once: commands share names, help and environment variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

ColorChoice = Literal["auto", "always", "never"]
DrafterChoice = Literal["model", "none"]

_MODEL, _DRAFTING, _SAMPLING, _OUTPUT = "Model", "Drafting", "Sampling", "Output"

PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        "-m",
        metavar="NAME",
        envvar="SPECDEC_PAIR",
        rich_help_panel=_MODEL,
        help="pair from `models.toml`, or a target's .gguf file",
    ),
]
TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--target", metavar="FILE", envvar="SPECDEC_TARGET", rich_help_panel=_MODEL, help="target model, a .gguf file"
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="FILE",
        envvar="SPECDEC_DRAFT",
        rich_help_panel=_MODEL,
        help="draft model, a .gguf file",
    ),
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", envvar="SPECDEC_OFFLINE", rich_help_panel=_MODEL, help="do not download anything")
]
CtxOption = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        metavar="TOKENS",
        envvar="SPECDEC_CTX",
        rich_help_panel=_MODEL,
        help="context size",
        show_default="what prompt and answer need",
    ),
]
GpuLayersOption = Annotated[
    int | None,
    typer.Option(
        "--gpu-layers",
        metavar="N",
        envvar="SPECDEC_GPU_LAYERS",
        rich_help_panel=_MODEL,
        help="target layers on the GPU",
        show_default="all, if supported",
    ),
]
DraftGpuLayersOption = Annotated[
    int | None,
    typer.Option(
        "--draft-gpu-layers",
        metavar="N",
        envvar="SPECDEC_DRAFT_GPU_LAYERS",
        rich_help_panel=_MODEL,
        help="draft model layers on the GPU",
        show_default="all, if supported",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        envvar="SPECDEC_THREADS",
        rich_help_panel=_MODEL,
        help="CPU threads",
        show_default="physical cores",
    ),
]
KvTypeOption = Annotated[
    str,
    typer.Option(
        "--kv-type",
        metavar="TYPE",
        envvar="SPECDEC_KV_TYPE",
        rich_help_panel=_MODEL,
        help="type of both caches: f32, f16, q8_0, q5_1, q5_0, q4_1, q4_0",
    ),
]
DrafterOption = Annotated[
    DrafterChoice,
    typer.Option("--drafter", envvar="SPECDEC_DRAFTER", rich_help_panel=_DRAFTING, help="what proposes tokens"),
]
NoDraftOption = Annotated[
    bool, typer.Option("--no-draft", rich_help_panel=_DRAFTING, help="plain decoding by the target, as `-k 0`")
]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        "-k",
        metavar="K",
        envvar="SPECDEC_DRAFT_TOKENS",
        rich_help_panel=_DRAFTING,
        help="most draft tokens a round, 0 for none",
        show_default="the pair's, else 5",
    ),
]
DraftConfidenceOption = Annotated[
    float,
    typer.Option(
        "--draft-confidence",
        metavar="P",
        envvar="SPECDEC_DRAFT_CONFIDENCE",
        rich_help_panel=_DRAFTING,
        help="end a draft at a token with a lower probability",
    ),
]
TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature", "-t", metavar="T", envvar="SPECDEC_TEMPERATURE", rich_help_panel=_SAMPLING, help="0 is greedy"
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="N",
        envvar="SPECDEC_TOP_K",
        rich_help_panel=_SAMPLING,
        help="keep the N likeliest tokens, 0 is off",
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        envvar="SPECDEC_TOP_P",
        rich_help_panel=_SAMPLING,
        help="keep the likeliest tokens up to this mass, 1 is off",
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        envvar="SPECDEC_MIN_P",
        rich_help_panel=_SAMPLING,
        help="keep tokens above this share of the likeliest, 0 is off",
    ),
]
RepeatLastNOption = Annotated[
    int,
    typer.Option(
        "--repeat-last-n",
        metavar="N",
        envvar="SPECDEC_REPEAT_LAST_N",
        rich_help_panel=_SAMPLING,
        help="tokens that penalties look at, 0 is off, -1 is all",
    ),
]
RepeatPenaltyOption = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        metavar="X",
        envvar="SPECDEC_REPEAT_PENALTY",
        rich_help_panel=_SAMPLING,
        help="divide logits of seen tokens, 1 is off",
    ),
]
PresencePenaltyOption = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        metavar="X",
        envvar="SPECDEC_PRESENCE_PENALTY",
        rich_help_panel=_SAMPLING,
        help="subtract from logits of seen tokens, 0 is off",
    ),
]
FrequencyPenaltyOption = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        envvar="SPECDEC_FREQUENCY_PENALTY",
        rich_help_panel=_SAMPLING,
        help="subtract for each occurrence, 0 is off",
    ),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        rich_help_panel=_SAMPLING,
        help="add to a token's logit, e.g. 15043=-2.5 or 15043=-inf; repeatable",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        envvar="SPECDEC_SEED",
        rich_help_panel=_SAMPLING,
        help="of the random generator",
        show_default="drawn, and shown",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", envvar="SPECDEC_SYSTEM", help="system message")
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", metavar="N", envvar="SPECDEC_MAX_TOKENS", help="most tokens of the answer")
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="the question; `-` reads standard input only", show_default=False)
]
FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", metavar="FILE", help="read the prompt from a file, `-` is standard input; repeatable"),
]
RawOption = Annotated[bool, typer.Option("--raw", help="complete the bare text, without the chat template")]
CompareOption = Annotated[
    bool, typer.Option("--compare", rich_help_panel=_OUTPUT, help="run the baseline too and print both speeds")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", envvar="SPECDEC_QUIET", rich_help_panel=_OUTPUT, help="no summary, no progress")
]
JsonOption = Annotated[
    bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="JSON Lines on stdout, see docs/json.md")
]
ColorOption = Annotated[
    ColorChoice,
    typer.Option("--color", envvar="SPECDEC_COLOR", rich_help_panel=_OUTPUT, help="when to color the output"),
]
NoStreamOption = Annotated[
    bool, typer.Option("--no-stream", rich_help_panel=_OUTPUT, help="print the answer when it is complete")
]

# Spellings of llama.cpp's own tools that people type from habit; accepted, not shown.
ALIASES = {
    "--model-draft": "--draft",
    "-md": "--draft",
    "--model": "--pair",
    "--temp": "--temperature",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "-c": "--ctx",
    "--ctx-size": "--ctx",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "-ngld": "--draft-gpu-layers",
    "--gpu-layers-draft": "--draft-gpu-layers",
    "--n-gpu-layers-draft": "--draft-gpu-layers",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--draft-max": "--draft-tokens",
    "--spec-draft-n-max": "--draft-tokens",
    "--draft-p-min": "--draft-confidence",
    "--spec-draft-p-min": "--draft-confidence",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
}


class AliasCommand(TyperCommand):
    """A command that also takes the spellings of `ALIASES`, without showing them in its help."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser with further names for the options that it has."""
        parser = super().make_parser(ctx)
        for alias, name in ALIASES.items():
            if name in parser._long_opt:
                short = len(alias) == 2
                (parser._short_opt if short else parser._long_opt)[alias] = parser._long_opt[name]
        return parser


def parse_logit_bias(texts: Sequence[str] | None) -> tuple[tuple[int, float], ...]:
    """`ID=BIAS` texts as pairs.

    Raises:
        UsageError: a text of another form.
    """
    from specdec_cli.errors import UsageError

    pairs = []
    for text in texts or ():
        match = re.fullmatch(r"(\d+)=(\S+)", text)
        try:
            pairs.append((int(match[1]), float(match[2])))  # type: ignore[index]
        except (TypeError, ValueError):
            raise UsageError(f"--logit-bias takes ID=BIAS, not `{text}`", "e.g. `--logit-bias 15043=-2.5`") from None
    return tuple(pairs)
