"""`specdec check`: evidence that speculation changes nothing, on the user's own models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.status import status
from specdec_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from specdec_cli.check import OnStep

PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="FILE", help="JSON Lines with `category` and `turns`", show_default="six built in"
    ),
]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", help="only the first N prompts")]


@groups.with_flag_groups
def check(
    context: typer.Context,
    model: groups.ModelFlags,
    sampling: groups.SamplingFlags,
    output: groups.OutputFlags,
    name: opt.PairArgument = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_tokens: opt.MaxTokensOption = 64,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", "-k", metavar="K", help="draft tokens a round")] = 5,
    num_first: Annotated[
        int, typer.Option("--first", metavar="N", help="answers begun for the first-token test")
    ] = 200,
) -> int:
    """Check that speculation changes nothing: greedy agreement, acceptance against theory, first tokens."""
    with status(sys.stderr, "Starting", quiet=output.is_silent):
        from specdec_cli.check import check as run_check
        from specdec_cli.choice import choose_models, fetch_files
        from specdec_cli.cli.job import open_session, say_method
        from specdec_cli.prompts import built_in, read_prompts
        from specdec_cli.render.check import check_document, print_check
        from specdec_cli.render.progress import make_progress
        from specdec_cli.session import SessionOptions, with_seed
        from specdec_cli.types import Drafting

    counts = (("--max-tokens", max_tokens), ("--draft-tokens", draft_tokens), ("--first", num_first))
    opt.require_positive(*counts, command="check")
    params = sampling.params()
    if params.temperature == 0:
        hint = "try `-t 0.8`; greedy agreement is always checked"
        raise UsageError("--temperature must be above 0 for the acceptance check", hint)
    chosen = (built_in(1) if prompts is None else read_prompts(prompts))[:limit]
    choice = choose_models(opt.one_pair(name, model.pair), model.target, model.draft)
    if choice.draft is None:
        raise UsageError("there is no draft model to check", "name one with `--draft MODEL`")
    options = SessionOptions(
        Drafting("model", draft_tokens, 0.0),
        model.ctx,
        model.gpu_layers,
        model.draft_gpu_layers,
        model.threads,
        model.kv_type,
        model.tuned,
        force=model.force,
    )
    files = fetch_files(choice, offline=model.offline, progress=make_progress(output.is_silent))
    params = with_seed(sampling.params_for(files[0], groups.given(context, sampling)))
    with open_session(choice.name, files, options, quiet=output.is_silent) as session:
        say_method(session, params, quiet=output.is_silent)
        report = run_check(
            session, chosen, params, max_tokens=max_tokens, num_first=num_first, on_step=_progress(output.is_silent)
        )
    if output.as_json:
        info: dict[str, object] = {"pair": choice.pair, "seed": params.seed, "num_draft_tokens": draft_tokens}
        sys.stdout.write(json.dumps(check_document(report, info), indent=2) + "\n")
    else:
        print_check(report, sys.stdout, output.color)
    return ExitCode.OK if report.passed else ExitCode.CHECK_FAILED


def _progress(quiet: bool) -> OnStep:
    """One changing line on a terminal."""

    def on_step(part: str, done: int, total: int) -> None:
        if not quiet and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[2K{part}: {done + 1} of {total}" if done + 1 < total else "\r\x1b[2K")
            sys.stderr.flush()

    return on_step
