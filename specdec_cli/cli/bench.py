"""`specdec bench`: what speculation gains on the user's machine, measured against plain decoding."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.status import status
from specdec_cli.errors import CheckFailedError, ExitCode, SpecdecError, UsageError

if TYPE_CHECKING:
    from specdec_cli.bench import Measurement, Plan, Setting
    from specdec_cli.choice import ModelChoice
    from specdec_cli.prompts import Prompt
    from specdec_cli.session import Session
    from specdec_cli.types import SamplingParams

_MEASURE, _REPORT = "Measurement", "Report"
_HELP = "see `specdec bench --help`"


@dataclass(frozen=True, slots=True)
class MeasureFlags:
    """What is measured."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="JSON Lines with `category` and `turns`", rich_help_panel=_MEASURE,
            show_default="24 built in",
        ),
    ] = None  # fmt: skip
    categories: Annotated[
        str | None,
        typer.Option(
            "--categories", metavar="NAMES", help="only these, e.g. code,json", rich_help_panel=_MEASURE,
            show_default="all",
        ),
    ] = None  # fmt: skip
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", help="only the first N prompts of a category", rich_help_panel=_MEASURE),
    ] = None
    repeat: Annotated[
        int, typer.Option("--repeat", metavar="N", help="answers to each prompt", rich_help_panel=_MEASURE)
    ] = 3
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="try drafters, draft lengths and confidences", rich_help_panel=_MEASURE),
    ] = False

    def chosen(self) -> list[Prompt]:
        """The prompts.

        Raises:
            UsageError: a value outside its range, a file that cannot be read, or an unknown category.
        """
        from specdec_cli.bench import select
        from specdec_cli.prompts import BUILT_IN, read_prompts

        opt.require_positive(("--repeat", self.repeat), ("--limit", self.limit), command="bench")
        names = [name.strip() for name in (self.categories or "").split(",") if name.strip()]
        return select(BUILT_IN if self.prompts is None else read_prompts(self.prompts), names, self.limit)


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """What becomes of the result."""

    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="results as CSV, `-` is stdout", rich_help_panel=_REPORT),
    ] = None
    markdown: Annotated[
        bool, typer.Option("--markdown", help="results as Markdown on stdout", rich_help_panel=_REPORT)
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="charts, a .png or .svg file", rich_help_panel=_REPORT),
    ] = None
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OLD.json", help="say what changed since", rich_help_panel=_REPORT),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="NEW.json", help="show this, measure nothing", rich_help_panel=_REPORT),
    ] = None
    save: Annotated[
        bool,
        typer.Option("--save", help="with `--sweep`: use the best setting for this pair from now on",
                     rich_help_panel=_REPORT),
    ] = False  # fmt: skip
    min_speedup: Annotated[
        float | None,
        typer.Option("--min-speedup", metavar="X", help="exit with 5 when it is less", rich_help_panel=_REPORT),
    ] = None
    check_lossless: Annotated[
        bool,
        typer.Option("--check-lossless", help="exit with 5 when greedy answers differ by more than near-ties",
                     rich_help_panel=_REPORT),
    ] = False  # fmt: skip

    def check(self, *, as_json: bool) -> None:
        """See that everything can be written at the end, before anything is measured.

        Raises:
            UsageError: a file that cannot be written, or several outputs for one stdout.
        """
        wanted = (("--json", as_json), ("--csv -", self.csv == Path("-")), ("--markdown", self.markdown))
        on_stdout = [name for name, given in wanted if given]
        if len(on_stdout) > 1:
            raise UsageError(f"{' and '.join(on_stdout)} both write to stdout", "leave out all but one")
        for flag, given in (("--save", self.save), ("--check-lossless", self.check_lossless)):
            if given and self.report is not None:
                raise UsageError(f"{flag} needs a measurement, and `--report` makes none", "leave one of them out")
        if self.min_speedup is not None and not 0 < self.min_speedup < math.inf:
            raise UsageError(f"--min-speedup must be above 0, not {self.min_speedup}", _HELP)
        if self.plot is not None:
            from specdec_cli.render.plot import check_plot

            check_plot(self.plot)
        for path in (self.csv, self.plot):
            if path is None or path == Path("-"):
                continue
            _check_writable(path)
            for flag, read in (("--compare", self.compare), ("--report", self.report)):
                if read is not None and path.resolve() == read.resolve():
                    raise UsageError(f"`{path}` is the report that {flag} reads", "write to another file")


_GREEDY = groups.SamplingFlags(temperature=0.0)


@groups.with_flag_groups
def bench(
    context: typer.Context,
    model: groups.ModelFlags,
    drafting: groups.DraftingFlags,
    *,
    sampling: groups.SamplingFlags = _GREEDY,
    what: MeasureFlags,
    report: ReportFlags,
    output: groups.OutputFlags,
    name: opt.PairArgument = None,
    max_tokens: opt.MaxTokensOption = 96,
) -> int:
    """Measure the gain over plain decoding, interleaved and repeated; greedy unless a temperature is given."""
    with status(sys.stderr, "Starting", quiet=output.quiet):
        from specdec_cli.render.bench import read_document
        from specdec_cli.render.compare import compare_documents

        report.check(as_json=output.as_json)
        old = None if report.compare is None else read_document(report.compare, "--compare")
    if report.report is not None:
        document = read_document(report.report, "--report")
    else:
        document = _Job(context, model, drafting, sampling, what, report, output.quiet, name, max_tokens).run()
    if old is not None:
        document["comparison"] = compare_documents(old, document)
    return _deliver(document, report, output)


@dataclass(frozen=True, slots=True)
class _Job:
    """The measurement that the flags ask for."""

    context: typer.Context
    model: groups.ModelFlags
    drafting: groups.DraftingFlags
    sampling: groups.SamplingFlags
    what: MeasureFlags
    report: ReportFlags
    quiet: bool
    name: str | None
    max_tokens: int

    def run(self) -> dict[str, Any]:
        """Measure; the document.

        Raises:
            SpecdecError: flags that cannot work, or whatever keeps the models from answering.
        """
        with status(sys.stderr, "Starting", quiet=self.quiet):
            from specdec_cli.choice import fetch_files
            from specdec_cli.cli.job import open_session, say_method
            from specdec_cli.render.progress import make_progress
            from specdec_cli.session import with_seed
            from specdec_cli.types import AUTO_DRAFTING

        prompts, choice = self._checked()
        # What was saved is the answer to another measurement.
        flags = dataclasses.replace(self.drafting, ngram_cache=None)
        options = flags.session_options(dataclasses.replace(choice, pair=None), self.model)
        if self.what.sweep:
            options = dataclasses.replace(options, drafting=AUTO_DRAFTING)
        files = fetch_files(choice, offline=self.model.offline, progress=make_progress(self.quiet))
        params = self.sampling.params_for(files[0], groups.given(self.context, self.sampling))
        if self.report.check_lossless and not params.is_greedy:
            hint = "leave out `-t`; for sampled answers use `specdec check`"
            raise UsageError("--check-lossless compares greedy answers only", hint)
        params = params if params.is_greedy else with_seed(params)
        with open_session(choice.name, files, options, quiet=self.quiet) as session:
            say_method(session, params, quiet=self.quiet)
            return self._measure(session, choice, prompts, params)

    def _checked(self) -> tuple[list[Prompt], ModelChoice]:
        """Prompts and models, after everything that can be refused without loading them."""
        from specdec_cli.choice import choose_models

        flags = self.drafting
        opt.require_positive(("--max-tokens", self.max_tokens), command="bench")
        prompts = self.what.chosen()
        self.sampling.params()
        flags.drafting(None, None)
        if flags.explain:
            raise UsageError("--explain belongs to `specdec run`", "leave it out")
        source = self.context.get_parameter_source("ngram_cache")
        if flags.ngram_cache and source is not None and source.name == "COMMANDLINE":
            hint = "what `specdec ngram build` made is read all the same"
            raise UsageError("--ngram-cache would learn from the very answers that are measured", hint)
        if self.what.sweep and groups.given(self.context, flags) - {"explain"}:
            hint = "leave out `--drafter`, `-k` and `--draft-confidence`, and their environment variables"
            raise UsageError("--sweep chooses drafters, lengths and confidences itself", hint)
        if flags.is_off:
            raise UsageError("there is nothing to compare with the baseline", "leave out what turns drafting off")
        no_model = flags.drafter == "ngram"
        pair = opt.one_pair(self.name, self.model.pair)
        choice = choose_models(pair, self.model.target, self.model.draft, no_draft=no_model)
        if self.report.save:
            self._check_save(choice)
        return prompts, choice

    def _check_save(self, choice: ModelChoice) -> None:
        from specdec_cli.config import config_file, load_pair_settings

        if not self.what.sweep:
            raise UsageError("--save keeps the best of several settings", "add `--sweep`")
        if choice.pair is None or self.model.target or self.model.draft:
            hint = "name a pair of `models.toml`, without `--target` and `--draft`"
            raise UsageError("--save keeps settings by the name of a pair, and the models are given as files", hint)
        load_pair_settings(choice.pair)
        _check_folder(config_file().resolve().parent)

    def _measure(
        self, session: Session, choice: ModelChoice, prompts: list[Prompt], params: SamplingParams
    ) -> dict[str, Any]:
        from specdec_cli import provenance
        from specdec_cli.bench import Plan, measure
        from specdec_cli.render.countdown import Countdown

        plan = Plan(prompts, self._settings(session), params, self.max_tokens, self.what.repeat)
        with status(sys.stderr, "Reading the model files", quiet=self.quiet):
            info = self._info(session, choice, plan)
            load = provenance.load()
        with Countdown(sys.stderr, "Measuring", quiet=self.quiet) as countdown:
            measurement = measure(session, plan, countdown)
        document = self._document(session, measurement, info, load)
        if document["interrupted"]:
            # Everything is said and done on the first Ctrl-C; a second one must not have to wait for it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif self.report.save:
            try:
                self._save(choice, measurement)
            except SpecdecError as error:
                # The measurement must not be lost for it.
                typer.echo(f"Warning: {error.message}", err=True)
        return document

    def _document(
        self, session: Session, measurement: Measurement, info: dict[str, Any], load: float
    ) -> dict[str, Any]:
        from specdec_cli.bench import doubts
        from specdec_cli.render.bench import bench_document

        info["settings"]["num_ctx"] = session.num_ctx
        document = bench_document(measurement, info, doubts(measurement, load), swept=self.what.sweep)
        if self.report.check_lossless and not measurement.interrupted:
            try:
                document["checks"] = {"lossless": self._lossless(session, measurement)}
            except KeyboardInterrupt:
                document["interrupted"] = True
        return document

    def _settings(self, session: Session) -> list[Setting]:
        from specdec_cli.bench import Setting, sweep_settings

        if self.what.sweep:
            return sweep_settings(session.draft_model is not None)
        drafting = session.options.drafting
        if session.draft_model is None and drafting.drafter == "auto":
            drafting = dataclasses.replace(drafting, drafter="ngram")
        return [Setting.of(drafting)]

    def _lossless(self, session: Session, measurement: Measurement) -> dict[str, Any]:
        from specdec_cli import interrupt
        from specdec_cli.bench import disagreements
        from specdec_cli.render.bench import disagreement_fields

        with interrupt.stop_on_sigint(), status(sys.stderr, "Looking at answers that differ", quiet=self.quiet):
            found = [disagreement_fields(item) for item in disagreements(session, measurement)]
        return {"passed": all(item["explained"] for item in found), "disagreements": found}

    def _save(self, choice: ModelChoice, measurement: Measurement) -> None:
        from specdec_cli.bench import OFF
        from specdec_cli.config import save_pair_settings
        from specdec_cli.types import PLAIN_DECODING

        assert choice.pair is not None
        best = measurement.best
        if best is None and not measurement.is_off:
            typer.echo(
                "nothing saved: no setting is faster beyond chance; more prompts or repeats would tell", err=True
            )
            return
        path = save_pair_settings(choice.pair, best.drafting if best else PLAIN_DECODING)
        if not self.quiet:
            typer.echo(f"saved for {choice.pair}: {best.name if best else OFF}, in {path}", err=True)

    def _info(self, session: Session, choice: ModelChoice, plan: Plan) -> dict[str, Any]:
        from specdec_cli import provenance
        from specdec_cli.llama import default_threads

        options, draft = session.options, session.draft_model
        texts = json.dumps([(prompt.category, prompt.text) for prompt in plan.prompts])
        return {
            "date": provenance.now(),
            "pair": choice.pair,
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            "models": {
                "target": provenance.model_file(session.target.path),
                "draft": None if draft is None else provenance.model_file(draft.path),
            },
            "settings": {
                "prompts": hashlib.sha256(texts.encode()).hexdigest(),
                "prompts_file": None if self.what.prompts is None else str(self.what.prompts),
                "num_prompts": len(plan.prompts),
                "num_repeats": plan.num_repeats,
                "max_tokens": plan.max_tokens,
                "num_ctx": None,
                "draft_format": session.tuned.label if session.tuned else None,
                "draft_method": session.draft_method(plan.sampling),
                "threads": options.threads or default_threads(),
                "kv_type": options.kv_type,
                "gpu_layers": options.gpu_layers,
                "draft_gpu_layers": options.draft_gpu_layers,
                "sampling": _sampling_fields(plan.sampling),
            },
        }


def _sampling_fields(params: SamplingParams) -> dict[str, object]:
    # JSON has no infinity; through JSON once, so that a report compares equal to one that was read from a file.
    bias = [[token, bias if math.isfinite(bias) else str(bias)] for token, bias in params.logit_bias]
    fields: dict[str, object] = json.loads(json.dumps({**dataclasses.asdict(params), "logit_bias": bias}))
    return fields


# --- what becomes of it ----------------------------------------------------------------------------------------------


def _deliver(document: dict[str, Any], report: ReportFlags, output: groups.OutputFlags) -> int:
    from specdec_cli.render.bench import document_text

    interrupted = document["interrupted"] and report.report is None
    if not interrupted and report.min_speedup is not None:
        document["checks"] = {**(document["checks"] or {}), "min_speedup": _min_speedup(document, report.min_speedup)}
    empty = not any(result["parts"]["all"]["num_pairs"] for result in document["results"])
    if interrupted and empty and not output.as_json:
        typer.echo("Interrupted before there was anything to compare", err=True)
        return ExitCode.INTERRUPTED
    # Files first: a pipe whose reader is gone must not cost them.
    _write_files(document, report)
    if output.as_json:
        sys.stdout.write(document_text(document))
    else:
        _print(document, report, output)
    if interrupted:
        return ExitCode.INTERRUPTED
    _raise_failures(document["checks"] or {})
    return ExitCode.OK


def _print(document: dict[str, Any], report: ReportFlags, output: groups.OutputFlags) -> None:
    from specdec_cli.render.bench import print_bench
    from specdec_cli.render.bench_files import csv_text, markdown_text
    from specdec_cli.render.compare import print_comparison
    from specdec_cli.render.sink import TextSink

    comparison = document["comparison"] if report.compare else None
    to_stdout = report.csv == Path("-") or report.markdown
    if to_stdout:
        TextSink(sys.stdout).write(markdown_text(document) if report.markdown else csv_text(document))
        for note in document["notes"] if not output.quiet else ():
            typer.echo(f"Note: {note}", err=True)
    elif not (comparison and report.report):
        print_bench(document, sys.stdout, output.color)
    if comparison:
        print_comparison(comparison, sys.stderr if to_stdout else sys.stdout, output.color)


def _write_files(document: dict[str, Any], report: ReportFlags) -> None:
    from specdec_cli.render.bench_files import csv_text

    if report.csv not in (None, Path("-")):
        report.csv.write_text(csv_text(document), encoding="utf-8")
    if report.plot is not None:
        from specdec_cli.render.plot import save_plot

        save_plot(document, report.plot)


def _min_speedup(document: dict[str, Any], wanted: float) -> dict[str, Any]:
    from specdec_cli.render.bench import ALL, chosen_result

    parts = chosen_result(document)["parts"]
    speedups = {name: part["speedup"] for name, part in parts.items() if part["speedup"] is not None}
    found = speedups.pop(ALL, None)
    below = [name for name, value in speedups.items() if value < wanted]
    return {"passed": found is not None and found >= wanted, "wanted": wanted, "speedup": found, "below": below}


def _raise_failures(checks: dict[str, Any]) -> None:
    failures, speedup, lossless = [], checks.get("min_speedup"), checks.get("lossless")
    if lossless and not lossless["passed"]:
        num = sum(not item["explained"] for item in lossless["disagreements"])
        failures.append(f"{num} greedy answer{'s' if num != 1 else ''} differ from the baseline's by no near-tie")
    if speedup and not speedup["passed"]:
        found = "unknown" if speedup["speedup"] is None else f"{speedup['speedup']:.2f}x"
        below = f"; below it: {', '.join(speedup['below'])}" if speedup["below"] else ""
        failures.append(f"the speed-up is {found}, {speedup['wanted']:g}x were wanted{below}")
    if failures:
        raise CheckFailedError("; ".join(failures))


def _check_writable(path: Path) -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write `{path}`: {error.strerror}", "name a file in a folder you may write") from None


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "permission denied"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise UsageError(f"cannot write into `{folder}`: {reason}", "check its rights, or set SPECDEC_HOME")
