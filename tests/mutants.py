"""Break the package on purpose, one line at a time, and see the tests notice: `python tests/mutants.py [NAME ...]`.

Each mutant is applied to a copy of the package in a temporary directory; the tests that should catch it run there. A
mutant whose old text does not occur exactly once, or that survives, makes the script fail. The suite itself tries those
with a `quick` test (test_mutants.py).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = ("distribution", "verify", "sampling", "repetition", "context", "drafters", "engine", "retokenize")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong with it.
        file: inside the package.
        old: text that occurs once.
        new: what replaces it.
        tests: test files, the first failure of which is enough.
        quick: one test, `file::name`, that catches it in a second.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = FILES
    quick: str = ""


ACCEPT = "return ratio >= 1.0 or (ratio > 0.0 and rng.random() < ratio)"
EXCESS = "np.maximum(self.probs - self._matching(draft), 0.0)"
VERDICT = "Verdict(tuple(path), target.sample(rng), _source(draft, bool(siblings)))"
DRAWN = """            self.tokens.append(token)
"""
SEEN_TOKEN = """            if probs is not None and probs.prob(token) < 0.3:
                continue
            self.tokens.append(token)
"""
MEMORIES = ("context", "memories")
SIBLING = """            self._proposal = self._proposal.without(self._last) or self._proposal
"""
WHOLE = """            self._last = (self._proposal.without(self._last) or self._proposal).sample(self._rng)
            return self._last, self._proposal
"""
GROWS = "llama::test_a_tree_that_grows_has_the_logits_of_its_branches"
SIBLINGS = "drafters::test_siblings_are_drawn_without_replacement_from_what_they_carry[plain]"
VERIFY, ENGINE, SAMPLING = ("verify",), ("engine",), ("sampling",)
RETOKENIZE = ("retokenize",)
RULE = "verify::test_rule_for_a_fixed_draft"
ANSWERS = "engine::test_answers_have_exactly_the_targets_distribution"
ACCEPTED = "engine::test_a_draft_model_equal_to_the_target_is_always_accepted"
EXACT = ("verify", "engine")

MUTANTS = (
    # the rule
    Mutant("accept always", "verify.py", ACCEPT, "return True", EXACT, RULE),
    Mutant(
        "accept by match, probabilities attached",
        "verify.py",
        ACCEPT,
        "return target.sample(rng) == token",
        EXACT,
        RULE,
    ),
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
    Mutant("residual not normalized", "distribution.py", "excess / total", "excess", ("distribution", "verify"), RULE),
    Mutant("residual without clipping", "distribution.py", EXCESS, "self.probs - self._matching(draft)", VERIFY, RULE),
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
        RULE,
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
    Mutant(
        "inversion off by one", "distribution.py", '(value, side="right")', '(value, side="left")', ("distribution",)
    ),
    Mutant(
        "inversion in single precision",
        "distribution.py",
        "np.cumsum(probs.astype(np.float64))",
        "np.cumsum(probs)",
        ("distribution",),
    ),
    # the drafter
    Mutant(
        "draft temperature not applied",
        "drafters/model.py",
        "self._sampler.distribution(row,",
        "self._sampler.distribution(row * (self._sampler.params.temperature or 1.0),",
        ("engine", "drafters"),
        "drafters::test_attached_distributions_are_the_settings_own_and_what_was_sampled_from",
    ),
    Mutant(
        "draft penalties without drafted tokens",
        "drafters/model.py",
        "self._sampler.distribution(row, tokens, path)",
        "self._sampler.distribution(row, tokens)",
        ("engine", "drafters"),
        "drafters::test_attached_distributions_are_the_settings_own_and_what_was_sampled_from",
    ),
    Mutant(
        "argmax drafts with probabilities",
        "drafters/model.py",
        "self._last = self._proposal.sample(self._rng)",
        "self._last = self._proposal.mode()",
        ENGINE,
    ),
    Mutant(
        "sampled drafts as point masses of another model",
        "drafters/model.py",
        "return self._last, None if self._proposal.is_point else self._proposal",
        "return self._last, Distribution.point(self._last)",
        ("drafters",),
    ),
    Mutant(
        "an unlikely token is dropped again",
        "drafters/tree.py",
        DRAWN,
        SEEN_TOKEN,
        ENGINE,
        f"{ANSWERS}[plain-tree_model]",
    ),
    Mutant(
        "stop token does not end a draft",
        "drafters/tree.py",
        " and draft.tokens[node] not in stop_tokens",
        "",
        ("drafters",),
    ),
    Mutant(
        "siblings not normalized",
        "distribution.py",
        "Distribution(ids, probs / total)",
        "Distribution(ids, probs)",
        ("drafters", "engine"),
        SIBLINGS,
    ),
    Mutant("siblings with replacement", "drafters/model.py", SIBLING, "            pass\n", ("drafters",), SIBLINGS),
    Mutant("siblings carry what the first was drawn from", "drafters/model.py", SIBLING, WHOLE, ENGINE),
    Mutant(
        "siblings reached as if none were before them",
        "drafters/tree.py",
        "left *= 1.0 - acceptance",
        "pass",
        ("drafters",),
        "drafters::test_a_fixed_number_of_tokens_makes_a_best_first_tree[12]",
    ),
    Mutant(
        "one leaf too many",
        "drafters/tree.py",
        "self._num_free = max_leaves - 1",
        "self._num_free = max_leaves",
        ("drafters",),
        "drafters::test_a_tree_keeps_to_its_limits",
    ),
    Mutant(
        "outcomes in the order of the tokens",
        "draft_length.py",
        "zip(record.tried_nodes, ",
        "zip(range(len(record.outcomes)), ",
        ("draft_length::test_siblings_are_learned_apart",),
    ),
    Mutant(
        "wrong sequence copied", "llama.py", "(self.of(parent), sequence, parent)", "(0, sequence, parent)", (GROWS,)
    ),
    Mutant(
        "a token too few copied", "llama.py", "(depths[node] if node >= 0 else 0)", "max(depths[node] - 1, 0)", (GROWS,)
    ),
    Mutant(
        "the branch that was taken is decoded again",
        "context.py",
        "if path := self._followed(tokens[:-1]):",
        "if path := list[int]():",
        ("drafters::test_the_draft_models_cache_keeps_the_branch_that_was_taken",),
    ),
    Mutant(
        "a tree grows from what a failed call left",
        "context.py",
        "if self._pending or (self._unsure and not num_old):",
        "if self._pending:",
        ("context::test_after_failing_to_grow_only_sync_helps",),
    ),
    Mutant(
        "a later sibling before an earlier one",
        "drafters/tree.py",
        "reach = min(reach, left * acceptance)",
        "reach = left * acceptance",
        ("drafters::test_greedy_siblings_are_the_likeliest_tokens_by_conditional_probability",),
    ),
    Mutant(
        "a draft ends with its last leaf",
        "drafters/tree.py",
        "            if place.rank and not num_free:\n                continue\n",
        "            if place.rank and not num_free:\n                break\n",
        ("drafters::test_a_tree_with_all_its_leaves_still_grows",),
    ),
    Mutant("draft model's context overrun", "drafters/model.py", "len(tokens) + 1", "len(tokens) + 2", ("drafters",)),
    # another tokenizer
    Mutant(
        "shared tokens by the draft's ids",
        "drafters/retokenize.py",
        "rows[:, self._shared.target] = own[:, self._shared.draft]",
        "rows[:, self._shared.target] = own[:, self._shared.target]",
        RETOKENIZE,
        "retokenize::test_a_draft_model_equal_to_the_target_is_always_accepted",
    ),
    Mutant(
        "translated drafts with another model's probabilities",
        "drafters/retokenize.py",
        "for token, _ in kept], None, [",
        "for token, _ in kept], "
        "[self._sampler.distribution(np.zeros(4)).__class__(None, np.ones(4) / 4)] * len(kept), [",
        RETOKENIZE,
        "retokenize::test_answers_have_exactly_the_targets_distribution",
    ),
    Mutant(
        "special tokens read from text",
        "translation.py",
        "add_special=False, parse_special=False)",
        "add_special=False, parse_special=True)",
        RETOKENIZE,
        "retokenize::test_the_text_of_a_special_token_stays_text",
    ),
    Mutant(
        "the last token proposed whatever follows",
        "drafters/retokenize.py",
        "        num = len(tokens)\n        else:\n            num = num_settled",
        "        num = len(tokens)\n        else:\n            num = len(tokens) or num_settled",
        RETOKENIZE,
    ),
    Mutant(
        "no look-back into the committed text",
        "drafters/retokenize.py",
        "                break\n        return text\n",
        '                break\n        return b""\n',
        RETOKENIZE,
    ),
    Mutant(
        "look-back of one token",
        "drafters/retokenize.py",
        "_LOOK_BACK = 6",
        "_LOOK_BACK = 1",
        ("translation::test_a_draft_is_read_behind_all_of_the_number_that_it_goes_on_with",),
    ),
    Mutant(
        "a border within a character",
        "drafters/retokenize.py",
        "    if is_cut(text, place):\n        return False\n",
        "",
        ("retokenize::test_what_stands",),
    ),
    Mutant(
        "half a character read",
        "drafters/retokenize.py",
        "text = text[: num_complete(text)]",
        "pass",
        ("retokenize::test_no_part_of_a_character_is_proposed_that_the_target_has_whole",),
    ),
    Mutant(
        "an end behind what the target cannot write",
        "drafters/retokenize.py",
        "if eos is not None and (ends[-1] if ends else 0) == len(text):",
        "if eos is not None:",
        ("retokenize::test_no_end_behind_what_the_target_cannot_write",),
    ),
    Mutant(
        "tokens across the border proposed",
        "translation.py",
        "return num if num and self.decode(tokens[:num]) == data else None",
        "return num or len(tokens[:1])",
        RETOKENIZE,
    ),
    Mutant(
        "bytes of a proposal not compared",
        "translation.py",
        "if not piece or data[position : position + len(piece)] != piece:",
        "if not piece:",
        RETOKENIZE,
    ),
    Mutant(
        "the draft's end under its own id",
        "drafters/retokenize.py",
        "eos = self._target.model.eos",
        "eos = self._draft.model.eos",
        RETOKENIZE,
        "retokenize::test_an_end_is_the_targets_end_and_settles_what_was_written",
    ),
    Mutant(
        "a draft's special token passed over",
        "drafters/retokenize.py",
        "            chain.left.insert(0, (token, confidence))\n            return False\n",
        "",
        RETOKENIZE,
    ),
    Mutant(
        "drafted tokens of an abandoned text used",
        "drafters/retokenize.py",
        "if [token for token, _ in drafted[:num_new]] != prefix[len(last.prefix) :]:",
        "if False:",
        RETOKENIZE,
        "retokenize::test_another_text_forgets_what_was_drafted",
    ),
    Mutant(
        "what was not proposed is drafted again",
        "drafters/retokenize.py",
        "return _Chain(prefix, drafted[num_new:])",
        "return _Chain(prefix, [])",
        RETOKENIZE,
    ),
    Mutant(
        "translation not shortened",
        "translation.py",
        "not 0 <= self._id_ends[-1] <= len(self._text):",
        "self._id_ends[-1] < 0:",
        RETOKENIZE,
    ),
    Mutant(
        "a long word read anew in part",
        "translation.py",
        "_LOOK_BACK = 32",
        "_LOOK_BACK = 0",
        ("retokenize::test_a_long_word_is_read_anew_until_it_ends",),
    ),
    Mutant(
        "the first of several tokens with the same bytes shared",
        "translation.py",
        "if piece in found and tokenizer.encode(piece) != [token]:",
        "if piece in found:",
        ("translation::test_of_tokens_with_the_same_bytes_the_one_that_is_written_is_shared",),
    ),
    Mutant(
        "draft model's context overrun by a translation",
        "drafters/retokenize.py",
        "len(chain.prefix) + len(chain.tokens) > self._context.num_ctx",
        "False",
        RETOKENIZE,
    ),
    Mutant(
        "a step told as one draft token's",
        "drafters/retokenize.py",
        "seconds * self._ratio)",
        "seconds)",
        RETOKENIZE,
        "retokenize::test_a_step_counts_for_all_steps_of_a_token",
    ),
    Mutant(
        "confidence of the first draft token only",
        "drafters/retokenize.py",
        "found[place] *= confidence",
        "found[place] = min(found[place], confidence)",
        RETOKENIZE,
        "retokenize::test_confidences_are_products_of_the_draft_tokens_that_begin_in_a_token",
    ),
    # the loop
    Mutant(
        "seeded again every round",
        "engine.py",
        "verify(draft, target_at, self.rng,",
        "verify(draft, target_at, np.random.default_rng(0),",
        ENGINE,
        f"{ANSWERS}[plain-fixed_chain]",
    ),
    Mutant(
        "target penalties without drafted tokens",
        "engine.py",
        "rows[node + 1], self.tokens, accepted)",
        "rows[node + 1], self.tokens)",
        ENGINE,
        f"{ANSWERS}[penalties-other_model]",
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
        "context::test_keep_drops_exactly_the_rejected",
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
        "self._unsure, self._held = True, None\n            result",
        "self._held = None\n            result",
        ("context",),
    ),
    Mutant(
        "sync drops one too many",
        "context.py",
        "tokens)), len(tokens) - 1)",
        "tokens)), max(len(tokens) - 2, 0))",
        ("context", "engine"),
    ),
    Mutant(
        "sync trusts its length",
        "context.py",
        "min(common_prefix(self._cached, tokens) + len(self._followed(tokens)), len(tokens) - 1)",
        "min(len(self._cached), len(tokens) - 1)",
        ("context",),
    ),
    Mutant("a cache that cannot drop is believed", "context.py", "if can_drop and drop():", "if drop():", MEMORIES),
    Mutant(
        "checkpoint not restored",
        "context.py",
        "and not self._restore()",
        "and False",
        MEMORIES,
        "context::test_a_checkpoint_is_gone_back_to",
    ),
    Mutant(
        "snapshots believed beyond the last call",
        "context.py",
        "min(self._num_snapshots or 0, num - 1)",
        "self._num_snapshots or 0",
        MEMORIES,
        "context::test_snapshots_are_of_the_last_call_only",
    ),
    Mutant("one snapshot too many", "context.py", "min(self._num_snapshots or 0, num - 1)", "num", MEMORIES),
    Mutant(
        "snapshots used twice",
        "context.py",
        "= left, 0\n",
        "= left, self._num_droppable\n",
        MEMORIES,
        "context::test_snapshots_serve_once",
    ),
    Mutant(
        "checkpoint of other tokens",
        "context.py",
        "if left < self._num_saved:",
        "if False:",
        MEMORIES,
        "context::test_a_checkpoint_goes_with_its_text",
    ),
    Mutant(
        "checkpoint behind what is wanted",
        "context.py",
        "return self._num_saved if self._num_saved <= num_kept else 0",
        "return self._num_saved",
        MEMORIES,
    ),
    Mutant(
        "state after a failed call believed",
        "context.py",
        "self._unsure, self._held = True, None\n            result",
        "self._unsure = True\n            result",
        MEMORIES,
    ),
    Mutant("no checkpoint before a draft", "context.py", "self._needs_checkpoint(draft) or num", "num", MEMORIES),
    Mutant("no checkpoint before drafting", "context.py", "self._save_next and not len(draft)", "False", MEMORIES),
    Mutant(
        "no checkpoint between tokens that come one by one",
        "context.py",
        "_MOST_UNSAVED = 32",
        "_MOST_UNSAVED = 10**9",
        ("context::test_an_interruption_costs_few_of_the_tokens_that_came_one_by_one",),
    ),
    Mutant(
        "half a checkpoint believed",
        "context.py",
        "        self._num_saved = 0\n        if self._save():",
        "        if self._save():",
        ("context::test_a_checkpoint_that_was_half_overwritten_is_not_gone_back_to",),
    ),
    Mutant("ever more is read again", "context.py", "len(pending) > _MOST_REREAD", "False", MEMORIES),
    Mutant("window not looked after", "llama.py", "and self._reaches_back(num_kept)", "", ("memories",)),
    Mutant("attention not cut with the state", "llama.py", " and self._remove(self._num_saved)", "", ("memories",)),
    Mutant("failed restore believed", "llama.py", "num_read == size and ", "", ("memories",)),
    Mutant(
        "several sequences in a recurrent model",
        "llama.py",
        "max_leaves=1 if model.is_recurrent else options.max_leaves",
        "max_leaves=options.max_leaves",
        ("memories",),
    ),
    Mutant(
        "window of a tree's cache too small",
        "llama.py",
        "model.is_recurrent or options.max_leaves > 1",
        "model.is_recurrent",
        ("memories",),
    ),
    # the settings
    Mutant(
        "temperature before top-p",
        "sampling.py",
        "_top_p_min_p(values, params.top_p, params.min_p)",
        "_top_p_min_p(values / (params.temperature or 1.0), params.top_p, params.min_p)",
        SAMPLING,
    ),
    Mutant(
        "nucleus without the token that reaches it",
        "sampling.py",
        "mass.searchsorted(top_p * total)) + 1",
        "mass.searchsorted(top_p * total))",
        SAMPLING,
    ),
    Mutant(
        "nucleus preselection too eager",
        "sampling.py",
        "(1 - top_p) * total / weights.size",
        "(1 - top_p) * total",
        SAMPLING,
    ),
    Mutant("no penalties", "sampling.py", "penalize(row, penalized, params)", "pass", SAMPLING),
    Mutant(
        "repeat penalty ignores the sign",
        "repetition.py",
        "np.where(values <= 0, values * params.repeat_penalty, values / params.repeat_penalty)",
        "values / params.repeat_penalty",
        ("repetition", "sampling"),
    ),
    Mutant("frequency counts once", "repetition.py", "values -= counts * ", "values -= ", ("repetition", "sampling")),
    Mutant("history cut in front of the path", "sampling.py", "whole[-window:]", "whole[:window]", SAMPLING),
    Mutant("padding not cropped", "sampling.py", "logits[: self._num_vocab]", "logits", SAMPLING),
    Mutant("the caller's row changed", "sampling.py", "row = row.copy()", "row = row[:]", SAMPLING),
    Mutant(
        "top-k of one more", "sampling.py", "_top_k(values, params.top_k)", "_top_k(values, params.top_k + 1)", SAMPLING
    ),
    Mutant(
        "typical sorted by the signed distance",
        "sampling.py",
        "np.abs(surprise - entropy)",
        "surprise - entropy",
        SAMPLING,
        "sampling::test_typical_keeps_what_is_as_surprising_as_expected",
    ),
    Mutant(
        "typical stops before its mass is exceeded",
        "sampling.py",
        'typical_p, side="right")) + 1',
        "typical_p))",
        SAMPLING,
    ),
    Mutant(
        "deviation with impossible tokens as zeros",
        "sampling.py",
        "values[values > -np.inf]",
        "np.maximum(values, 0)",
        SAMPLING,
    ),
    Mutant(
        "XTC's coin thrown inside",
        "sampling.py",
        "share = self.params.xtc_probability",
        "share = float(np.random.default_rng(len(values)).random() < self.params.xtc_probability)",
        ("sampling", "engine"),
        "sampling::test_xtc_is_the_mixture_of_its_two_outcomes",
    ),
    Mutant(
        "XTC keeps the likeliest of the top", "sampling.py", 'kind="stable")][:-1]', 'kind="stable")][1:]', SAMPLING
    ),
    Mutant("XTC removes impossible tokens' rivals", "sampling.py", " & (weights > 0))", ")", SAMPLING),
    Mutant(
        "dynamic temperature normalized by the vocabulary",
        "sampling.py",
        "np.log(shifted.size)",
        "np.log(self._num_vocab)",
        SAMPLING,
    ),
    Mutant(
        "DRY without drafted tokens",
        "sampling.py",
        "_last(params.dry_window, tokens, path)",
        "_last(params.dry_window, tokens, ())",
        ("sampling", "engine"),
        f"{ANSWERS}[dry-fixed_chain]",
    ),
    Mutant("DRY across breakers", "repetition.py", "length = min(length, limit)", "pass", ("repetition",)),
    Mutant(
        "DRY takes the last match", "repetition.py", "max(longest.get(following, 0), length)", "length", ("repetition",)
    ),
    Mutant(
        "DRY punishes breakers", "repetition.py", "if () not in breakers.get(token, ())", "if True", ("repetition",)
    ),
    Mutant(
        "a constraint's state without drafted tokens",
        "sampling.py",
        "self._constraint.allowed(tokens, path)",
        "self._constraint.allowed(tokens, ())",
        ("sampling", "engine"),
        "engine::test_a_constraint_keeps_the_distribution_it_defines[plain-fixed_chain]",
    ),
    Mutant(
        "target not constrained",
        "engine.py",
        "self.sampler.distribution(rows[node + 1], self.tokens",
        "Sampler(self.sampler.params, rows.shape[1]).distribution(rows[node + 1], self.tokens",
        ENGINE,
        "engine::test_a_constraint_keeps_the_distribution_it_defines[plain-other_model]",
    ),
    # Still lossless: the acceptance shows it.
    Mutant(
        "draft not constrained",
        "drafters/model.py",
        "self._sampler.distribution(row,",
        "Sampler(self._sampler.params, len(row)).distribution(row,",
        ENGINE,
        f"{ACCEPTED}[plain-constrained]",
    ),
    Mutant(
        "grammar state not rolled back",
        "constraint.py",
        "            self._matcher.rollback(len(self._consumed) - shared)\n",
        "",
        ENGINE,
        "engine::test_a_real_grammar_keeps_its_state_under_speculation[other_model]",
    ),
    Mutant(
        "Mirostat's budget follows the committed token",
        "sampling.py",
        "before.prob((path or tokens)[-1])",
        "before.prob(tokens[-1])",
        ("sampling", "engine"),
        "sampling::test_mirostat_equals_the_reference",
    ),
    Mutant(
        "Mirostat's budget not taken back after a rejection",
        "sampling.py",
        "next(reversed(self._budgets)) >= position",
        "False",
        ("sampling", "engine"),
        "sampling::test_mirostat_2_keeps_what_is_within_the_budget",
    ),
    Mutant(
        "Mirostat's surprise before truncation", "sampling.py", "/ probs[kept].sum())", "/ 1.0)", ("sampling", "engine")
    ),
)


def main(names: list[str]) -> int:
    """Try the named mutants, or all (some 10 minutes); the exit status."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if misplaced := [mutant.name for mutant in chosen if not is_in_place(mutant)]:
        print("the text to replace must occur exactly once:", *misplaced, sep="\n  ")
    if misplaced or not chosen:
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


def is_in_place(mutant: Mutant) -> bool:
    """Whether the text to replace occurs exactly once."""
    return (ROOT / "specdec_cli" / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1


def failures(mutant: Mutant | None, tests: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """Tests that fail on a copy of the package with the mutant in it; only the first one for a mutant.

    Args:
        mutant: None leaves the package as it is.
        tests: `file` or `file::test`.
        left_out: ids of tests that are not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        make_copy(copy, mutant, tests)
        command = [sys.executable, "-m", "pytest", *arguments(mutant, tests, left_out)]
        environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "mutants"}
        # A mutant that never ends is caught as well.
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=180, check=False
            )
        except subprocess.TimeoutExpired:
            return ["(does not end)"]
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found or ([] if done.returncode == 0 else [f"(exit status {done.returncode})"])


def make_copy(copy: Path, mutant: Mutant | None, tests: Sequence[str]) -> None:
    """The package with the mutant in it, and what the tests need."""
    # With the compiled files, of which the mutant's is out of date.
    shutil.copytree(ROOT / "specdec_cli", copy / "specdec_cli")
    (copy / "tests").mkdir()
    for name in {"conftest", "lossless", "models", "simulator", *(f"test_{test.partition('::')[0]}" for test in tests)}:
        shutil.copy(ROOT / "tests" / f"{name}.py", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    if mutant is not None:
        path = copy / "specdec_cli" / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def arguments(mutant: Mutant | None, tests: Sequence[str], left_out: Sequence[str] = ()) -> list[str]:
    """For pytest, in the copy."""
    places = [f"tests/test_{file}.py{colons}{name}" for file, colons, name in (test.partition("::") for test in tests)]
    # In a process that has imported Hypothesis already, pytest warns.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", *quiet, *([] if mutant is None else ["-x"])]
    return [*options, *(f"--deselect={name}" for name in left_out), *places]


# ------------------------------------------------------------------ quickly: what every run imports is imported once

SEVERAL_AT_A_TIME = 2
IMPORTED_BEFORE = ["numpy", "pytest", "hypothesis.extra.numpy", "hypothesis.stateful", "scipy.stats", "llguidance"]


def quick_failures(tests: Sequence[tuple[Mutant | None, Sequence[str]]]) -> Iterator[tuple[list[str], float]]:
    """Failing tests and seconds of each of several runs, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    with context.Pool(SEVERAL_AT_A_TIME, maxtasksperchild=1) as pool:
        pending = [pool.apply_async(_run_here, run) for run in tests]
        yield from (result.get(timeout=180) for result in pending)


class _Recorder:
    """A pytest plugin that remembers failures."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _run_here(mutant: Mutant | None, tests: Sequence[str]) -> tuple[list[str], float]:
    """Run in this process, which must not have imported the package."""
    import pytest

    started = time.perf_counter()
    assert "specdec_cli" not in sys.modules
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    recorder = _Recorder()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:  # noqa: PTH123
        make_copy(Path(folder), mutant, tests)
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.dup2(nowhere.fileno(), 1)
        status = pytest.main(arguments(mutant, tests), plugins=[recorder])
        os.chdir(ROOT)
    failed = recorder.failed or ([] if status == 0 else [f"(exit status {int(status)})"])
    return failed, time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
