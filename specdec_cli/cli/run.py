"""`specdec run`: one answer."""

from __future__ import annotations

import sys

from specdec_cli.cli import options as opt
from specdec_cli.cli.prompt import read_prompt
from specdec_cli.cli.status import status
from specdec_cli.errors import UsageError


def run(
    prompt: opt.PromptArgument = None,
    file: opt.FileOption = None,
    system: opt.SystemOption = None,
    raw: opt.RawOption = False,
    max_tokens: opt.MaxTokensOption = 2048,
    pair: opt.PairOption = None,
    target: opt.TargetOption = None,
    draft: opt.DraftOption = None,
    offline: opt.OfflineOption = False,
    ctx: opt.CtxOption = None,
    gpu_layers: opt.GpuLayersOption = None,
    draft_gpu_layers: opt.DraftGpuLayersOption = None,
    threads: opt.ThreadsOption = None,
    kv_type: opt.KvTypeOption = "f16",
    drafter: opt.DrafterOption = "model",
    no_draft: opt.NoDraftOption = False,
    draft_tokens: opt.DraftTokensOption = None,
    draft_confidence: opt.DraftConfidenceOption = 0.5,
    temperature: opt.TemperatureOption = 0.8,
    top_k: opt.TopKOption = 40,
    top_p: opt.TopPOption = 0.95,
    min_p: opt.MinPOption = 0.05,
    repeat_last_n: opt.RepeatLastNOption = 64,
    repeat_penalty: opt.RepeatPenaltyOption = 1.0,
    presence_penalty: opt.PresencePenaltyOption = 0.0,
    frequency_penalty: opt.FrequencyPenaltyOption = 0.0,
    logit_bias: opt.LogitBiasOption = None,
    seed: opt.SeedOption = None,
    compare: opt.CompareOption = False,
    as_json: opt.JsonOption = False,
    no_stream: opt.NoStreamOption = False,
    quiet: opt.QuietOption = False,
    color: opt.ColorOption = "auto",
) -> int:
    """Answer one prompt, live, with acceptance statistics."""
    text = read_prompt(prompt, file or ())
    # Inside, because `specdec --help` must not load llama.cpp.
    with status(sys.stderr, "Starting", quiet=quiet or as_json):
        from specdec_cli.choice import choose_models
        from specdec_cli.cli.job import Job, View, open_session
        from specdec_cli.session import SessionOptions, with_seed
        from specdec_cli.types import SamplingParams

    if max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {max_tokens}", "see `specdec run --help`")
    params = SamplingParams(
        temperature, top_k, top_p, min_p, repeat_last_n, repeat_penalty, presence_penalty, frequency_penalty,
        opt.parse_logit_bias(logit_bias), seed,
    )  # fmt: skip
    plain = no_draft or drafter == "none" or draft_tokens == 0
    if plain and compare:
        raise UsageError("--compare has nothing to compare with `--no-draft` or `-k 0`", "leave one of them out")
    choice = choose_models(pair, target, draft, no_draft=plain)
    num_draft_tokens = choice.num_draft_tokens if draft_tokens is None else draft_tokens
    options = SessionOptions(num_draft_tokens, draft_confidence, ctx, gpu_layers, draft_gpu_layers, threads, kv_type)
    view = View(as_json, quiet, color, stream=not no_stream)
    with open_session(choice, options, offline=offline, quiet=quiet or as_json) as session:
        tokens = session.encode(text, system=system, raw=raw)
        job = Job(session, choice.pair, tokens, with_seed(params), max_tokens, seed_drawn=seed is None)
        return job.run(view, compare=compare)
