"""Break the package on purpose, one line at a time, and see the tests notice: `python tests/mutants.py [NAME ...]`.

Each mutant is applied to a copy of the package in a temporary directory; the tests that should catch it run there. A
mutant whose old text does not occur exactly once, or that survives, makes the script fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("distribution", "verify", "sampling", "context", "drafters", "engine")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong with it.
        file: inside the package.
        old: text that occurs once.
        new: what replaces it.
        tests: test files, the first failure of which is enough.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = FILES


ACCEPT = "return ratio >= 1.0 or (ratio > 0.0 and rng.random() < ratio)"
EXCESS = "np.maximum(self.probs - self._matching(draft), 0.0)"
VERDICT = "Verdict(tuple(path), target.sample(rng), _source(draft, bool(siblings)))"
KEEP_LAST = """            if not policy.keep_last([*confidences, confidence]):
                break
            token = proposal.sample(self._rng)
"""
SEEN_TOKEN = """            token = proposal.sample(self._rng)
            confidence = proposal.prob(token)
            if not policy.keep_last([*confidences, confidence]):
                break
"""
VERIFY, ENGINE = ("verify",), ("engine",)
EXACT = ("verify", "engine")

MUTANTS = (
    # the rule
    Mutant("accept always", "verify.py", ACCEPT, "return True", EXACT),
    Mutant("accept by match, probabilities attached", "verify.py", ACCEPT, "return target.sample(rng) == token", EXACT),
    Mutant("accept the other way round", "verify.py", "rng.random() < ratio", "rng.random() > ratio", EXACT),
    Mutant("accept by target probability alone", "verify.py", " / proposal.prob(token)", "", EXACT),
    Mutant("no random number", "verify.py", "rng.random() < ratio", "0.5 < ratio", EXACT),
    Mutant(
        "seeded again at every node",
        "verify.py",
        "        siblings = ",
        "        rng = np.random.default_rng(0)\n        siblings = ",
        EXACT,
    ),
    Mutant("no residual between siblings", "verify.py", "target = target.residual(proposal)", "pass", EXACT),
    Mutant("residual not normalized", "distribution.py", "excess / total", "excess", ("distribution", "verify")),
    Mutant("residual without clipping", "distribution.py", EXCESS, "self.probs - self._matching(draft)", VERIFY),
    Mutant(
        "residual by absolute difference", "distribution.py", EXCESS, "abs(self.probs - self._matching(draft))", VERIFY
    ),
    Mutant(
        "residual of the draft",
        "distribution.py",
        EXCESS,
        "np.maximum(self._matching(draft) - self.probs, 0.0)",
        VERIFY,
    ),
    Mutant(
        "bonus drawn from the draft",
        "verify.py",
        VERDICT,
        VERDICT.replace("target.sample", "(target if siblings or node < 0 else draft.probs[node] or target).sample"),
        EXACT,
    ),
    Mutant("stop token inside a draft ignored", "verify.py", "accepted[-1] in stop_tokens", "False", EXACT),
    Mutant(
        "sources mixed up",
        "verify.py",
        '"recovered" if rejected else "bonus"',
        '"bonus" if rejected else "recovered"',
        EXACT,
    ),
    Mutant(
        "sparse lookup ignores the id",
        "distribution.py",
        "np.where(self.ids[index] == ids, self.probs[index], 0.0)",
        "self.probs[index]",
        ("distribution",),
    ),
    Mutant("inversion off by one", "distribution.py", '[-1], side="right")', '[-1], side="left")', ("distribution",)),
    Mutant(
        "inversion in single precision",
        "distribution.py",
        "np.cumsum(self.probs, dtype=np.float64)",
        "np.cumsum(self.probs)",
        ("distribution",),
    ),
    # the drafter
    Mutant(
        "draft temperature not applied",
        "drafters/model.py",
        "self._sampler.distribution(row,",
        "self._sampler.distribution(row * (self._sampler.params.temperature or 1.0),",
        ("engine", "drafters"),
    ),
    Mutant(
        "draft penalties without drafted tokens",
        "drafters/model.py",
        ".history(committed, drafted)",
        ".history(committed)",
        ("engine", "drafters"),
    ),
    Mutant(
        "argmax drafts with probabilities",
        "drafters/model.py",
        "token = proposal.sample(self._rng)",
        "token = int(row.argmax())",
        ENGINE,
    ),
    Mutant(
        "sampled drafts as point masses of another model",
        "drafters/model.py",
        "probs.append(None if proposal.is_point else proposal)",
        "probs.append(Distribution.point(token) if len(drafted) > 1 else None)",
        ("drafters",),
    ),
    Mutant("keep_last sees the sampled token", "drafters/model.py", KEEP_LAST, SEEN_TOKEN, ENGINE),
    Mutant(
        "stop token does not end a draft",
        "drafters/model.py",
        "if token in self._stop_tokens:",
        "if False:",
        ("drafters",),
    ),
    Mutant("draft model's context overrun", "drafters/model.py", "len(tokens) + 1)", "len(tokens) + 2)", ("drafters",)),
    # the loop
    Mutant(
        "seeded again every round",
        "engine.py",
        "verify(draft, target_at, self.rng,",
        "verify(draft, target_at, np.random.default_rng(0),",
        ENGINE,
    ),
    Mutant(
        "target penalties without drafted tokens",
        "engine.py",
        ".history(self.tokens, accepted)",
        ".history(self.tokens)",
        ENGINE,
    ),
    Mutant("logits of the wrong row", "engine.py", "rows[node + 1]", "rows[node]", ENGINE),
    Mutant("stop token emitted", "engine.py", "new = new[:index]\n", "new = new[: index + 1]\n", ENGINE),
    Mutant(
        "one cell of the context unused",
        "engine.py",
        "len(self.tokens) > self.target.num_ctx",
        "len(self.tokens) >= self.target.num_ctx",
        ENGINE,
    ),
    Mutant(
        "prompt as long as the context let in",
        "engine.py",
        "if num_prompt >= num_ctx:",
        "if num_prompt > num_ctx:",
        ENGINE,
    ),
    Mutant(
        "target cache not trimmed",
        "engine.py",
        "self.target.keep(verdict.path)",
        "self.target.keep(range(len(draft)))",
        ENGINE,
    ),
    # the cache
    Mutant(
        "keep rolls back one too many",
        "context.py",
        "self._drop_tail(num_before + len(path))",
        "self._drop_tail(num_before + max(len(path) - 1, 0))",
        ("context",),
    ),
    Mutant(
        "keep rolls back one too few",
        "context.py",
        "self._drop_tail(num_before + len(path))",
        "self._drop_tail(num_before + len(path) + 1)",
        ("context",),
    ),
    Mutant("keep remembers one too few", "context.py", "for node in path]", "for node in path[:-1]]", ("context",)),
    Mutant(
        "abandoned draft stays in the cache",
        "context.py",
        "self._unsure = len(draft) > 0",
        "self._unsure = False",
        ("context",),
    ),
    Mutant(
        "failed call stays in the cache",
        "context.py",
        "        self._unsure = True\n        started",
        "        started",
        ("context",),
    ),
    Mutant(
        "sync drops one too many", "context.py", "len(tokens) - 1))", "max(len(tokens) - 2, 0)))", ("context", "engine")
    ),
    Mutant(
        "sync trusts its length",
        "context.py",
        "min(_common_prefix(self._cached, tokens), len(tokens) - 1)",
        "min(len(self._cached), len(tokens) - 1)",
        ("context",),
    ),
    Mutant(
        "a cache that cannot drop is believed",
        "context.py",
        "                self._forget()\n        self._draft",
        "                del self._cached[num_kept:]\n        self._draft",
        ("context",),
    ),
    # the settings
    Mutant(
        "temperature before top-p",
        "sampling.py",
        "weights = np.exp(values - values.max())\n        keep",
        "weights = np.exp((values - values.max()) / self.params.temperature)\n        keep",
        ("sampling",),
    ),
    Mutant(
        "nucleus without the token that reaches it",
        "sampling.py",
        "mass.searchsorted(top_p * total)) + 1",
        "mass.searchsorted(top_p * total))",
        ("sampling",),
    ),
    Mutant(
        "nucleus preselection too eager",
        "sampling.py",
        "(1 - top_p) * total / weights.size",
        "(1 - top_p) * total",
        ("sampling",),
    ),
    Mutant(
        "penalties before bias",
        "sampling.py",
        "if history:\n            self._penalize(row, history)\n",
        "pass\n",
        ("sampling",),
    ),
    Mutant(
        "repeat penalty ignores the sign",
        "sampling.py",
        "np.where(values <= 0, values * repeat, values / repeat)",
        "values / repeat",
        ("sampling",),
    ),
    Mutant("frequency counts once", "sampling.py", "values - counts * ", "values - ", ("sampling",)),
    Mutant("history cut in front of the path", "sampling.py", "whole[-size:]", "whole[:size]", ("sampling",)),
    Mutant("padding not cropped", "sampling.py", "logits[: self._num_vocab]", "logits", ("sampling",)),
    Mutant("the caller's row changed", "sampling.py", "row = row.copy()", "row = row[:]", ("sampling",)),
    Mutant(
        "top-k of one more",
        "sampling.py",
        "k = self.params.top_k",
        "k = self.params.top_k and self.params.top_k + 1",
        ("sampling",),
    ),
)


def main(names: list[str]) -> int:
    """Try the named mutants, or all (some 10 minutes); the exit status."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    misplaced = [
        mutant.name for mutant in chosen if (ROOT / "specdec_cli" / mutant.file).read_text().count(mutant.old) != 1
    ]
    if misplaced or not chosen:
        print("the text to replace must occur exactly once:", *(misplaced or names), sep="\n  ")
        return 1
    known = failures(None, FILES)
    if known:
        print("fails without any mutant, left out:", *known, sep="\n  ")
    survivors = []
    for mutant in chosen:
        caught = failures(mutant, mutant.tests, known)
        print(f"{mutant.name:50} {caught[0] if caught else 'SURVIVED'}", flush=True)
        survivors += [] if caught else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


def failures(mutant: Mutant | None, files: tuple[str, ...], left_out: list[str] | None = None) -> list[str]:
    """Tests that fail on a copy of the package with the mutant in it; only the first one for a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "specdec_cli", copy / "specdec_cli", ignore=shutil.ignore_patterns("__pycache__"))
        (copy / "tests").mkdir()
        for name in ["conftest", "lossless", *(f"test_{file}" for file in files)]:
            shutil.copy(ROOT / "tests" / f"{name}.py", copy / "tests")
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutant is not None:
            path = copy / "specdec_cli" / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        return run_tests(copy, files, [] if mutant is None else ["-x"], left_out or [])


def run_tests(copy: Path, files: tuple[str, ...], options: list[str], left_out: list[str]) -> list[str]:
    """Ids of the failing tests."""
    deselected = [f"--deselect={name}" for name in left_out]
    tests = [f"tests/test_{file}.py" for file in files]
    # A mutant that never ends is caught as well.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *deselected, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "mutants"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return ["(does not end)"]
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found or ([] if done.returncode == 0 else [f"(exit status {done.returncode})"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
