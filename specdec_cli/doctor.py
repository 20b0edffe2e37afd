"""What this machine can do: library, devices, files, network; and what speculation is worth here, measured.

Nothing here fails: what cannot be looked at is a finding too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from specdec_cli import memory, paths, selfcheck
from specdec_cli.errors import BackendError, ExitCode, ModelMissingError, SpecdecError
from specdec_cli.wording import describe, format_size, scrub

if TYPE_CHECKING:
    from specdec_cli.choice import ModelChoice
    from specdec_cli.cost import CostModel
    from specdec_cli.session import Session, SessionOptions

Status = Literal["ok", "warning", "problem"]

HUB_LIMIT_S = 4.0
_LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
_MAX_FILES = 20_000
_GIB = 1 << 30
_LITTLE_MEMORY, _LITTLE_DISK = 2 * _GIB, 5 * _GIB
_BUSY = 0.2
"""Share of the cores that other programs may take before times are in doubt."""

_FEATURES = {
    "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8", "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip
"""Linux's name of an instruction set -> llama.cpp's, for those that make a difference."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is, one word.
        status: "problem" is what keeps specdec from working.
        text: what was found, in a line.
        hint: the next step, where there is one.
        facts: the same for programs.
        exit_code: of a problem, what other commands end with.
    """

    name: str
    status: Status
    text: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.FAILURE

    @classmethod
    def of_error(cls, name: str, error: SpecdecError, facts: Mapping[str, Any] | None = None) -> Finding:
        """What other commands fail with."""
        return cls(name, "problem", error.message, error.hint, facts or {}, error.exit_code)


def looked_at(name: str, look: Callable[[], Finding]) -> Finding:
    """The finding, also where looking fails."""
    try:
        return look()
    except SpecdecError as error:
        return Finding(name, "warning", error.message, error.hint)
    except Exception as error:
        return Finding(name, "warning", f"could not be looked at: {type(error).__name__}: {error}")


# --- program and library ---------------------------------------------------------------------------------------------


def look_at_program() -> Finding:
    """Versions of specdec and of what it stands on."""
    import specdec_cli

    facts = {
        "specdec": specdec_cli.__version__,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "llama_cpp_python": _version("llama-cpp-python"),
        "platform": platform.platform(),
    }
    text = f"{facts['specdec']}, Python {facts['python']}, NumPy {facts['numpy']}, {facts['platform']}"
    return Finding("specdec", "ok", text, facts=facts)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def look_at_library() -> Finding:
    """Whether llama.cpp works: first in a child process, because a crash inside it takes the process."""
    facts: dict[str, Any] = {"llama_cpp_python": _version("llama-cpp-python"), "llama_cpp": None, "repacks": None}
    try:
        verdict = selfcheck.check()
        from specdec_cli import llama

        versions = llama.versions()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        text = error.message if isinstance(error, BackendError) else f"cannot be loaded: {reason}"
        hint = f"build it again: {selfcheck.repair_command()}"
        if os.environ.get(_LIBRARY_VARIABLE):
            hint = f"unset `{_LIBRARY_VARIABLE}`, which names another library, or {hint}"
        return Finding("llama.cpp", "problem", text, hint, facts)
    facts |= {
        "llama_cpp_python": versions["llama-cpp-python"],
        "llama_cpp": versions["llama.cpp"],
        "repacks": verdict.use_extra_bufts,
    }
    text = f"{versions['llama.cpp']}, by llama-cpp-python {versions['llama-cpp-python']}; a test decode works"
    if verdict.use_extra_bufts:
        return Finding("llama.cpp", "ok", text, facts=facts)
    text = "this build crashes in its fastest kernels, so they are left out, which costs 25-40 % of the speed"
    return Finding("llama.cpp", "warning", text, f"repair it: {selfcheck.repair_command()}", facts)


def look_at_build() -> Finding:
    """What llama.cpp was built for, against what the CPU has."""
    from specdec_cli import llama, provenance

    build = llama.versions()["system"].strip().strip("|").strip()
    flags = provenance.cpu_flags()
    missing = [name for flag, name in _FEATURES.items() if flag in flags and f"{name} = 1" not in build]
    facts = {"build": build, "unused": missing}
    if missing:
        text = f"the CPU has {', '.join(missing)}, which this build does not use; it uses {build}"
        return Finding("build", "warning", text, f"build it on this machine: {selfcheck.repair_command()}", facts)
    return Finding("build", "ok", build, facts=facts)


def look_at_devices() -> Finding:
    """CPU and GPUs as llama.cpp sees them."""
    from specdec_cli import llama

    found = llama.devices()
    facts = {
        "offload": llama.supports_gpu_offload(),
        "devices": [
            {name: getattr(device, name) for name in device.__dataclass_fields__} for device in found
        ],
    }  # fmt: skip
    gpus = [device for device in found if device.kind in ("gpu", "igpu")]
    if gpus:
        texts = [f"{gpu.backend} {gpu.description or gpu.name}{_memory_text(gpu)}" for gpu in gpus]
        return Finding("devices", "ok", "; ".join(texts), facts=facts)
    if facts["offload"]:
        hint = "check the driver; on NVIDIA, `nvidia-smi` must list the card"
        return Finding("devices", "warning", "this build can use a GPU, and there is none", hint, facts)
    return Finding("devices", "ok", "CPU only", facts=facts)


def _memory_text(device: Any) -> str:
    if not device.total_bytes:
        return ""
    return f", {format_size(device.free_bytes)} of {format_size(device.total_bytes)} free"


# --- machine ---------------------------------------------------------------------------------------------------------


def look_at_cpu(threads: int | None) -> Finding:
    """Cores, and the threads that decoding uses.

    Args:
        threads: those asked for; None is every physical core that this process may use.
    """
    from specdec_cli import provenance

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    physical, logical, limit = psutil.cpu_count(logical=False) or allowed, psutil.cpu_count() or 1, container_cpus()
    used = threads or max(1, min(allowed, physical))
    flags = provenance.cpu_flags()
    facts = {
        "name": provenance.cpu_name(), "num_cores": physical, "num_threads": logical, "num_allowed": allowed,
        "container_cpus": limit, "threads_used": used,
        "features": [name for flag, name in _FEATURES.items() if flag in flags],
    }  # fmt: skip
    text = f"{facts['name']}, {physical} cores, {logical} threads; decoding uses {used}"
    if limit is not None and used > limit + 0.5:
        hint = f"`specdec config set threads {max(1, int(limit))}`: threads that wait for each other make decoding slow"
        return Finding("cpu", "warning", f"{text}, and this container gets {limit:g}", hint, facts)
    if used > allowed:
        hint = f"`--threads {min(allowed, physical)}`: more threads than cores make decoding slow"
        return Finding("cpu", "warning", f"{text}, of {allowed} that it may use", hint, facts)
    return Finding("cpu", "ok", text, facts=facts)


def look_at_memory() -> Finding:
    """Memory that models can have, as `run` reckons, and what the container allows."""
    try:
        free = memory.available()
    except SpecdecError as error:
        return Finding.of_error("memory", error)
    total, limit = psutil.virtual_memory().total, memory.container_limit()
    facts = {"free_bytes": free.ram, "total_bytes": total, "container_bytes": limit}
    text = f"{format_size(free.ram)} free of {format_size(total)}"
    text += f"; the container may use {format_size(limit)}" if limit else ""
    text += f"; `{memory.LIMIT_VARIABLE}` allows no more" if free.is_set else ""
    if free.ram < _LITTLE_MEMORY:
        hint = f"raise `{memory.LIMIT_VARIABLE}`" if free.is_set else "close other programs"
        return Finding("memory", "warning", text, f"{hint}, or use a small pair", facts)
    return Finding("memory", "ok", text, facts=facts)


def container_cpus(root: Path = Path("/")) -> float | None:
    """CPUs that a Linux control group leaves to this process; None without a limit."""
    quotas = []
    for folder in memory.control_groups("cpu", root):
        words = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


# --- files and network -----------------------------------------------------------------------------------------------


def look_at_files() -> Finding:
    """Where specdec and the hub keep their files, how much there is, and how much room."""
    from huggingface_hub import constants

    folders = {
        "cache": paths.cache_dir(), "config": paths.config_dir(), "state": paths.state_dir(),
        "hub": Path(constants.HF_HUB_CACHE),
    }  # fmt: skip
    facts: dict[str, Any] = {
        name: {"path": str(folder), "size_bytes": _size_of(folder)} for name, folder in folders.items()
    }
    existing = next(path for path in (folders["hub"], *folders["hub"].parents) if path.exists())
    facts["free_bytes"] = shutil.disk_usage(existing).free
    parts = [f"{name} {folder} ({_size_text(facts[name]['size_bytes'])})" for name, folder in folders.items()]
    text = f"{format_size(facts['free_bytes'])} free for models; {', '.join(parts)}"
    locked = [name for name, folder in folders.items() if not _takes_files(folder)]
    if locked:
        text = f"no files can be written to {', '.join(f'{name} {folders[name]}' for name in locked)}"
        hint = "check the rights, or set `HF_HOME`" if locked == ["hub"] else "check the rights, or set `SPECDEC_HOME`"
        return Finding("files", "warning" if locked == ["hub"] else "problem", text, hint, facts)
    if facts["free_bytes"] < _LITTLE_DISK:
        return Finding("files", "warning", text, "free some space, or move the hub's files with `HF_HOME`", facts)
    return Finding("files", "ok", text, facts=facts)


def _takes_files(folder: Path) -> bool:
    """Whether files can be written to a folder, or to where it would be made; nothing is tried."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _size_text(num_bytes: int | None) -> str:
    return "very many files" if num_bytes is None else format_size(num_bytes) if num_bytes else "empty"


def _size_of(folder: Path) -> int | None:
    """Bytes of all files below, links not followed; None when there are too many to count."""
    total = num_files = 0
    for root, _, names in os.walk(folder):
        num_files += len(names)
        if num_files > _MAX_FILES:
            return None
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total


def look_at_config(mistake: SpecdecError | None) -> Finding:
    """Whether the user's file is one that commands take.

    Args:
        mistake: what a command says of it.
    """
    from specdec_cli.config import config_file, unknown_pairs

    path = config_file()
    facts = {"path": str(path), "exists": path.exists()}
    if mistake is not None:
        return Finding.of_error("config", mistake, facts)
    with contextlib.suppress(SpecdecError):  # of `models.toml`: another finding
        if mistakes := unknown_pairs():
            return Finding("config", "warning", "; ".join(mistakes), "correct the names, or delete the tables", facts)
    return Finding("config", "ok", f"{path}" if path.exists() else "none; `specdec config set` makes one", facts=facts)


def look_at_hub(*, offline: bool) -> Finding:
    """Whether models can be downloaded.

    Args:
        offline: do not try.
    """
    from huggingface_hub import constants, get_token

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    facts: dict[str, Any] = {
        "custom_endpoint": bool(os.environ.get("HF_ENDPOINT")), "has_token": get_token() is not None, "reachable": None,
    }  # fmt: skip
    token = "with an access token" if facts["has_token"] else "without an access token"
    if offline or constants.HF_HUB_OFFLINE:
        return Finding("hub", "ok", f"not tried, downloads are off; {token}", facts=facts)
    reason = _within(HUB_LIMIT_S, lambda: _ask(endpoint))
    facts["reachable"] = not reason
    if not reason:
        return Finding("hub", "ok", f"{scrub(endpoint)} answers; {token}", facts=facts)
    hint = "behind a proxy set `HTTPS_PROXY`, for a mirror `HF_ENDPOINT`; several pairs come from a package index too"
    return Finding("hub", "warning", f"{scrub(endpoint)} {scrub(reason)}; {token}", hint, facts)


def _ask(endpoint: str) -> str:
    """Why the hub is no use; empty when it answers."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        answer = get_session().get(f"{endpoint}/api/models?limit=1", timeout=HUB_LIMIT_S)
        status, kind = int(answer.status_code), str(answer.headers.get("Content-Type", ""))
    except Exception as error:  # whichever HTTP library lies below
        # Not all of its text: that may name a proxy.
        detail = re.search(r"\[Errno[^\]]*\][^'\")]*", str(error))
        return f"cannot be reached: {detail[0].strip() if detail else type(error).__name__}"
    if status >= 500:
        return f"answers HTTP {status}"
    return "answers with a web page, which no hub does: a login page, or another server" if "html" in kind else ""


def _within(seconds: float, ask: Callable[[], str]) -> str:
    """The answer; looking up a name may take longer than any limit that a library has."""
    answers: list[str] = []
    worker = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    worker.start()
    worker.join(seconds)
    return answers[0] if answers else f"does not answer within {seconds:g} s"


# --- the pair --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalPair:
    """Model files on this machine.

    Attributes:
        pair: name; None when they were given as files.
        target: the target.
        draft: the draft model; None without one.
    """

    pair: str | None
    target: Path
    draft: Path | None


def look_at_pair(
    pair: str | None, target: str | Path | None, draft: str | Path | None
) -> tuple[Finding, LocalPair | None]:
    """Whether there is something to decode with; without a name the default pair, or else any that is here.

    Args:
        pair: name, or None.
        target: file in place of the pair's.
        draft: file in place of the pair's.
    """
    from specdec_cli.choice import choose_models
    from specdec_cli.registry import load_registry

    try:
        choices = [choose_models(pair, target, draft)]
        if pair is None and target is None and draft is None:
            choices += [choose_models(name, None, None) for name in load_registry().pairs]
        found = next((found for choice in choices if (found := _find_files(choice))), None)
        if found is not None:
            _check_files(found)
    except SpecdecError as error:
        return Finding.of_error("pair", error, {"pair": pair, "installed": False}), None
    if found is None:
        return _absent(choices[0], target, draft), None
    names = " with ".join(path.name for path in (found.target, found.draft) if path is not None)
    text = f"{found.pair}: {names}" if found.pair else names
    return Finding("pair", "ok", text, facts={"pair": found.pair, "installed": True}), found


def _absent(wanted: ModelChoice, target: str | Path | None, draft: str | Path | None) -> Finding:
    facts = {"pair": wanted.pair, "installed": False}
    paths = [model for model in (wanted.target, wanted.draft) if isinstance(model, Path)]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        error = ModelMissingError(f"no model file `{', '.join(missing)}`", "check the path")
        return Finding.of_error("pair", error, facts)
    if wanted.pair is not None and not paths:
        return Finding("pair", "warning", f"{wanted.pair} is not installed", f"`specdec pull {wanted.pair}`", facts)
    names = " with ".join(model.name for model in (wanted.target, wanted.draft) if model is not None)
    given = {"": wanted.pair, "--target ": target, "--draft ": draft}
    words = " ".join(f"{flag}{describe(str(value))}" for flag, value in given.items() if value is not None)
    return Finding("pair", "warning", f"{names}: not all is on this machine", f"`specdec pull {words}`", facts)


def _check_files(found: LocalPair) -> None:
    """Raises what `run` would, before it loads anything."""
    from specdec_cli.gguf import check_header
    from specdec_cli.split import check_path

    for path in (found.target, found.draft):
        if path is not None:
            check_path(path)
            check_header(path)


def _find_files(choice: ModelChoice) -> LocalPair | None:
    from specdec_cli.stored import locate

    def path_of(model: Any) -> Path | None:
        found = model if isinstance(model, Path) else locate(model)
        return found if found is not None and found.is_file() else None

    target, draft = path_of(choice.target), None if choice.draft is None else path_of(choice.draft)
    if target is None or (draft is None and choice.draft is not None):
        return None
    return LocalPair(choice.pair, target, draft)


# --- what it is worth ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text.

    Attributes:
        name: of it.
        examples: for people.
        acceptance: of a draft token, given those before it: typical of a draft model of the target's family.
        drafter: what proposes.
    """

    name: str
    examples: str
    acceptance: float
    drafter: str = "model"


KINDS = (
    Kind("predictable", "code and JSON", 0.9),
    Kind("ordinary", "chat", 0.75),
    Kind("unpredictable", "stories", 0.55),
    Kind("repeated", "text copied from the prompt", 0.95, "ngram"),
)

PASS_SIZES = (1, 2, 3, 4, 5, 8, 16)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a kind of text gains; a speed-up of 1 means that drafting switches itself off."""

    kind: Kind
    speedup: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times on this machine.

    Attributes:
        pair: its name, None when files were given.
        target: file name.
        draft: file name, None without a draft model.
        draft_format: what tuning chose; None when the pair was not tuned here.
        pass_s: tokens of a target pass -> seconds.
        step_s: seconds of a draft step, None without a draft model.
        others: share of the cores that other programs took meanwhile, from 0 to 1.
        expectations: for each kind of text that can be drafted for.
        advice: what would make drafting pay more, most useful first.
    """

    pair: str | None
    target: str
    draft: str | None
    draft_format: str | None
    pass_s: Mapping[int, float]
    step_s: float | None
    others: float
    expectations: tuple[Expectation, ...]
    advice: tuple[str, ...]

    @property
    def is_doubtful(self) -> bool:
        """Whether other programs were in the way."""
        return self.others > _BUSY

    def in_passes(self, seconds: float) -> float:
        """A time in target passes over one token."""
        return seconds / self.pass_s[1]


def measure(files: LocalPair, options: SessionOptions) -> Measurement:
    """Time target passes and draft steps, in about ten seconds.

    Args:
        files: the models.
        options: how to load them; what they say of drafting does not count.

    Raises:
        SpecdecError: the models cannot be loaded, or do not fit together.
    """
    from specdec_cli import measuring, provenance
    from specdec_cli.session import Session
    from specdec_cli.types import PLAIN_DECODING, Drafting

    # A fixed length: by costs these would be measured, or remembered, on the way.
    drafting = PLAIN_DECODING if files.draft is None else Drafting("model", 1)
    others = provenance.load()
    with Session.open(files.target, files.draft, replace(options, drafting=drafting)) as session:
        target, draft = session.prepare(1, min(256, session.target.max_ctx - 1))
        costs = measuring.measure(target, {} if draft is None else {"model": draft})
        session.scale(costs)
        return _result(files, session, costs, others)


def _result(files: LocalPair, session: Session, costs: CostModel, others: float) -> Measurement:
    from specdec_cli.llama import supports_gpu_offload
    from specdec_cli.prediction import expected_speedup

    has_model = "model" in costs.drafts
    expected = tuple(
        Expectation(kind, expected_speedup(costs, kind.drafter, kind.acceptance))
        for kind in KINDS
        if has_model or kind.drafter != "model"
    )
    advice = _advice(
        files,
        session.tuned is not None,
        costs,
        on_cpu=not supports_gpu_offload(),
        is_translated=session.translator is not None,
    )
    return Measurement(
        files.pair, files.target.name, None if files.draft is None else files.draft.name,
        session.tuned.label if session.tuned else None,
        {size: costs.target(size) for size in PASS_SIZES}, costs.step_s("model") if has_model else None, others,
        expected, tuple(advice),
    )  # fmt: skip


def _advice(
    files: LocalPair, is_tuned: bool, costs: CostModel, *, on_cpu: bool, is_translated: bool = False
) -> list[str]:
    """What would make drafting pay more; nothing where it pays well on ordinary text."""
    plain_s, advice = costs.target(1), []
    if files.draft is None:
        return ["a draft model of the target's family, with `--draft FILE`, drafts for all kinds of text"]
    if is_translated:
        advice.append(
            "a draft model of the target's family: this one has another tokenizer, and fewer drafts are accepted"
        )
    if on_cpu and not is_tuned:
        which = files.pair or f"--target {files.target} --draft {files.draft}"
        advice.append(f"`specdec tune {which}` looks for a format of the draft that is faster here")
    if costs.step_s("model") > 0.2 * plain_s:
        advice.append("a larger target: this one costs too little beside its draft, see `specdec models`")
    if on_cpu and costs.target(5) > 2 * plain_s:
        advice.append("a GPU: there a pass over a few tokens costs little more than one over a single token")
    return advice


def private_words() -> dict[str, str]:
    """What must not be in a bug report -> what stands for it, longest first."""
    from huggingface_hub import constants

    words = {str(Path.home()): "~", sys.executable: "python3", sys.prefix: "$VIRTUAL_ENV"}
    if os.environ.get(paths.HOME_VARIABLE):
        words[str(paths.cache_dir().parent)] = f"${paths.HOME_VARIABLE}"
    if os.environ.get("HF_HOME"):
        words[str(constants.HF_HOME)] = "$HF_HOME"
    if os.environ.get(_LIBRARY_VARIABLE):
        words[os.environ[_LIBRARY_VARIABLE]] = f"${_LIBRARY_VARIABLE}"
    words |= dict.fromkeys(_spellings(os.environ.get("HF_ENDPOINT", "")), "$HF_ENDPOINT")
    return {word: words[word] for word in sorted(words, key=len, reverse=True) if len(word) > 1}


def _spellings(address: str) -> list[str]:
    """An address as messages may have it: also without login and query, and its host alone."""
    plain = address.rstrip("/")
    host = re.sub(r"^.*@", "", re.split(r"[/?#]", plain.partition("://")[2])[0])
    name = host.partition(":")[0]
    # A name without dots may be an ordinary word.
    return [address, plain, scrub(plain), host, name if "." in name else ""]
