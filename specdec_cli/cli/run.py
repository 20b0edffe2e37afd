"""`specdec run`: one answer."""

from __future__ import annotations

import dataclasses
import sys

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.prompt import read_prompt
from specdec_cli.cli.status import status
from specdec_cli.errors import UsageError


@groups.with_flag_groups
def run(
    context: typer.Context,
    model: groups.ModelFlags,
    drafting: groups.DraftingFlags,
    sampling: groups.SamplingFlags,
    structure: groups.StructureFlags,
    output: groups.OutputFlags,
    prompt: opt.PromptArgument = None,
    file: opt.FileOption = None,
    system: opt.SystemOption = None,
    raw: opt.RawOption = False,
    max_tokens: opt.MaxTokensOption = 2048,
    compare: opt.CompareOption = False,
) -> int:
    """Answer one prompt, live, with acceptance statistics."""
    text = read_prompt(prompt, file or ())
    # Inside, because `specdec --help` must not load llama.cpp.
    with status(sys.stderr, "Starting", quiet=output.is_silent):
        from specdec_cli.choice import choose_models, fetch_files
        from specdec_cli.cli.job import Job, open_session
        from specdec_cli.render.progress import make_progress
        from specdec_cli.template import prepare

    opt.require_positive(("--max-tokens", max_tokens), command="run")
    form = structure.structure()
    sampling.params()
    choice = choose_models(model.pair, model.target, model.draft)
    options = drafting.session_options(choice, model, groups.given(context, drafting))
    if options.drafting.is_off and compare:
        if not opt.is_configured(context, "compare"):
            raise UsageError("--compare has nothing to compare without drafts", "leave it out, or add `-k auto`")
        # A default for every answer is no request for this one.
        compare = False
    if not options.drafting.uses_model:
        choice = dataclasses.replace(choice, draft=None)
    files = fetch_files(choice, offline=model.offline, progress=make_progress(output.is_silent))
    params = sampling.params_for(files[0], groups.given(context, sampling))
    if not raw:
        # Its process starts while the models load.
        prepare()
    with open_session(choice.name, files, options, quiet=output.is_silent) as session:
        tokens = session.encode(text, system=system, raw=raw)
        view = output.view(explain=drafting.explain)
        return Job(session, choice.pair, tokens, params, max_tokens, form).run(view, compare=compare)
