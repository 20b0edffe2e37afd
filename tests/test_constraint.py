"""Grammars: the state follows every rollback, whole answers parse, cut ones are closed, bad ones are refused early."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from models import tiny
from schemas import SCHEMAS

from specdec_cli.constraint import Grammar, GrammarConstraint, Vocabulary, _allowed_ids
from specdec_cli.errors import BackendError, UsageError
from specdec_cli.llama import Model
from specdec_cli.session import Session, SessionOptions, Structure
from specdec_cli.testing import FakeModel
from specdec_cli.types import PLAIN_DECODING, Drafting, SamplingParams, Token

GREEDY = SamplingParams(temperature=0)
ARITHMETIC = """
# Sums and products in parentheses.
root ::= expr "\\n"
expr ::= term ([-+] term)*
term ::= factor ([*/] factor)*
factor ::= [0-9] [0-9]? [0-9]? | "(" expr ")"
"""
LIST = 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\u0085\\u2028]{1,30} "\\n"\n'
CSV = (
    'root ::= "id,name\\n" line{1,4}\n'
    'line ::= [0-9]{1,3} "," (word | "\\"" word " " word "\\"") "\\n"\nword ::= [a-z]+\n'
)
LARK = 'start: greeting (", " NAME)* "!"\ngreeting: "hello" | "good " ("morning" | "night")\nNAME: /[A-Z][a-z]{0,9}/\n'
LETTERS = '{}[]":,.-+*/()= \n\t0123456789abcdefghijklmnopqrstuvwxyzABTZ@_\\éü漢名前öß😀\u2028'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny(made, "target", quant="f32")
    tiny(made, "draft", quant="q8_0")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with Model(folder / "target.gguf", vocab_only=True) as model:
        yield model


@pytest.fixture(scope="module")
def vocabulary(model: Model) -> Vocabulary:
    return Vocabulary(model)


@pytest.fixture(scope="module")
def grammars() -> dict[str, Grammar]:
    return {name: schema(value) for name, value in SCHEMAS.items()}


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    options = SessionOptions(Drafting("model", 5, 0.0), num_ctx=512, threads=1)
    with Session.open(folder / "target.gguf", folder / "draft.gguf", options) as made:
        yield made


@pytest.fixture
def grammar_file(tmp_path: Path) -> Callable[..., Grammar]:
    def read(text: str | bytes, suffix: str = ".gbnf") -> Grammar:
        path = tmp_path / f"grammar{suffix}"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Grammar.from_file(path)

    return read


def schema(value: Any) -> Grammar:
    return Grammar.from_schema(json.dumps(value))


def fits(text: str, value: dict[str, Any]) -> None:
    """Parses, and validates."""
    jsonschema.validate(json.loads(text), value)


def accepts(grammar: Grammar, vocabulary: Vocabulary, text: str) -> bool:
    """Whether a text is a whole sentence, by a matcher of its own."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar.source, log_level=0)
    tokens = vocabulary.tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def fresh_allowed(grammar: Grammar, vocabulary: Vocabulary, answer: Sequence[int]) -> list[int]:
    """What may follow, by a matcher that has seen nothing else."""
    matcher = LLMatcher(vocabulary.tokenizer, grammar.source, log_level=0)
    stop = vocabulary.stop_tokens
    if matcher.try_consume_tokens(list(answer)) < len(answer) or matcher.is_stopped():
        return stop
    mask = np.zeros((1, (vocabulary.num_vocab + 31) // 32), dtype=np.int32)
    return _allowed_ids(matcher, mask, vocabulary.num_vocab).tolist() or stop


def walk(grammar: Grammar, vocabulary: Vocabulary, num_tokens: int, seed: int) -> list[int]:
    """A random answer, at most so long."""
    constraint, rng, tokens = GrammarConstraint(grammar, vocabulary, 0), np.random.default_rng(seed), list[int]()
    while len(tokens) < num_tokens:
        token = int(rng.choice(constraint.allowed(tokens)))
        if token in vocabulary.stop_tokens:
            break
        tokens.append(token)
    return tokens


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    return str(vocabulary.tokenizer.decode_bytes(list(tokens)).decode())


WALKED = {name: SCHEMAS[name] for name in ("arrays of arrays", "any and one of", "unicode keys", "recursion")}


class TestState:
    @settings(max_examples=40)
    @given(
        st.sampled_from(sorted(WALKED)),
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=8),
        st.data(),
    )
    def test_allowed_is_a_fresh_matchers_after_any_drafts_and_rejections(
        self, vocabulary: Vocabulary, name: str, rounds: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        grammar, prompt = schema(WALKED[name]), [7, 8, 9]
        constraint = GrammarConstraint(grammar, vocabulary, len(prompt))
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        answer: list[int] = []
        for num_drafted, num_accepted in rounds:
            path: list[int] = []
            for _ in range(num_drafted):
                ids = constraint.allowed(prompt + answer, path)
                assert ids.tolist() == fresh_allowed(grammar, vocabulary, answer + path)
                # Now and then a token that the grammar refuses: a drafter may do as it likes.
                path.append(int(rng.choice(ids)) if rng.random() < 0.9 else int(rng.integers(vocabulary.num_vocab)))
            # The target asks again along the path, then rejects the rest.
            for length in range(len(path)):
                expected = fresh_allowed(grammar, vocabulary, answer + path[:length])
                assert constraint.allowed(prompt + answer, path[:length]).tolist() == expected
            answer += path[:num_accepted]
            if fresh_allowed(grammar, vocabulary, answer) == vocabulary.stop_tokens:
                break

    def test_a_state_that_is_not_rolled_back_shows(
        self, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forgets(self: GrammarConstraint, answer: Sequence[int]) -> bool:
            new = list(answer[len(self._consumed) :])
            self._consumed += new
            return bool(self._matcher.try_consume_tokens(new) == len(new))

        monkeypatch.setattr(GrammarConstraint, "_move", forgets)
        grammar = schema(SCHEMAS["arrays of arrays"])
        constraint = GrammarConstraint(grammar, vocabulary, 0)
        whole = walk_text(vocabulary, "[[1],[2]]")
        constraint.allowed([], whole[:3])
        assert constraint.allowed(whole[:1]).tolist() != fresh_allowed(grammar, vocabulary, whole[:1])

    def test_end_tokens_where_the_answer_may_end(self, vocabulary: Vocabulary) -> None:
        constraint = GrammarConstraint(schema({"type": "integer"}), vocabulary, 0)
        digits = walk_text(vocabulary, "12")
        assert set(vocabulary.stop_tokens) < set(constraint.allowed(digits).tolist())
        assert not set(vocabulary.stop_tokens) & set(constraint.allowed([]).tolist())
        done = GrammarConstraint(schema({"const": 1}), vocabulary, 0)
        assert done.allowed(digits[:1]).tolist() == vocabulary.stop_tokens

    def test_complete(self, vocabulary: Vocabulary) -> None:
        constraint = GrammarConstraint(schema(SCHEMAS["arrays of arrays"]), vocabulary, 1)
        for text, complete in (("[[1],[2]]", True), ("[[1],[2]", False), ("[[1]]", False), ("x", False), ("", False)):
            assert constraint.is_complete([5, *walk_text(vocabulary, text)]) == complete


def walk_text(vocabulary: Vocabulary, text: str) -> list[int]:
    return list(vocabulary.tokenizer.tokenize_str(text))


class TestClosing:
    @pytest.mark.parametrize("name", SCHEMAS)
    @pytest.mark.parametrize("seed", range(2))
    def test_every_cut_of_a_random_answer(self, vocabulary: Vocabulary, name: str, seed: int) -> None:
        grammar = schema(SCHEMAS[name])
        tokens = walk(grammar, vocabulary, 40, seed)
        constraint = GrammarConstraint(grammar, vocabulary, 0)
        for end in range(len(tokens) + 1):
            closing = constraint.closing(tokens[:end])
            fits(text_of(vocabulary, tokens[:end] + closing), SCHEMAS[name])
            # Nothing is added to what is whole, and the state afterwards is the one before.
            assert bool(closing) != accepts(grammar, vocabulary, text_of_or_not(vocabulary, tokens[:end]))
            assert constraint.allowed(tokens[:end]).tolist() == fresh_allowed(grammar, vocabulary, tokens[:end])

    @pytest.mark.parametrize("source", [ARITHMETIC, LIST, CSV], ids=["arithmetic", "list", "csv"])
    def test_every_cut_under_a_grammar(
        self, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar], source: str
    ) -> None:
        grammar = grammar_file(source)
        for seed in range(3):
            tokens = walk(grammar, vocabulary, 40, seed)
            constraint = GrammarConstraint(grammar, vocabulary, 0)
            for end in range(len(tokens) + 1):
                assert accepts(
                    grammar, vocabulary, text_of(vocabulary, tokens[:end] + constraint.closing(tokens[:end]))
                )

    @pytest.mark.parametrize(
        ("source", "cut", "longest"),
        [
            (ARITHMETIC, "((((((1+", 10),
            ('root ::= [a-z]+ "."', "abc", 1),
            ('root ::= [^\\n]+ "\\n"', 'say "hi', 1),
            ('root ::= "<a>" [^<]* "</a>"', "<a>x", 4),
            ('root ::= ("ab" | "#b")* "z"', "a", 2),
            ('root ::= [a-y]+ "z"', "ab", 1),
            ('root ::= [a-z]+ "ü"', "ab", 2),
        ],
    )
    def test_ways_out_of_loops(
        self, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar], source: str, cut: str, longest: int
    ) -> None:
        grammar = grammar_file(source)
        closing = GrammarConstraint(grammar, vocabulary, 0).closing(walk_text(vocabulary, cut))
        assert 0 < len(closing) <= longest
        assert accepts(grammar, vocabulary, cut + text_of(vocabulary, closing))

    def test_nothing_where_no_end_exists(self, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar]) -> None:
        began = time.monotonic()
        constraint = GrammarConstraint(grammar_file('root ::= "a" root'), vocabulary, 0)
        assert constraint.closing(walk_text(vocabulary, "aa")) == []
        assert constraint.closing(walk_text(vocabulary, "ab")) == []
        assert time.monotonic() - began < 5

    def test_half_a_character(self, vocabulary: Vocabulary) -> None:
        grammar = schema({"type": "string", "maxLength": 3})
        tokens = walk_text(vocabulary, '"') + list("漢".encode())[:1]
        tokens = [*tokens[:1], *(t for t in range(256) if vocabulary.tokenizer.decode_bytes([t]) == "漢".encode()[:1])]
        closing = GrammarConstraint(grammar, vocabulary, 0).closing(tokens)
        assert len(json.loads(text_of(vocabulary, tokens + closing))) == 1


def text_of_or_not(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    """Of half a character something that no grammar accepts."""
    return str(vocabulary.tokenizer.decode_bytes(list(tokens)).decode("utf-8", "replace"))


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=seed)


class TestAnswers:
    @pytest.mark.parametrize("drafting", [None, PLAIN_DECODING], ids=["speculative", "plain"])
    @pytest.mark.parametrize("params", [GREEDY, sampled(1)], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_cut_at_any_length_it_validates(
        self, session: Session, name: str, params: SamplingParams, drafting: Drafting | None
    ) -> None:
        structure = Structure(grammar=schema(SCHEMAS[name]))
        prompt = session.encode("hello", raw=True)
        for num_tokens in (1, 2, 3, 7, 13, 24, 40):
            result = session.generate(
                prompt, sampling=params, max_tokens=num_tokens, structure=structure, drafting=drafting
            )
            fits(result.text, SCHEMAS[name])
            assert len(result.tokens) == result.stats.num_tokens <= num_tokens
            assert (result.reason == "eog") == (len(result.tokens) < num_tokens)
            assert result.stats.num_closing == 0 or result.reason == "length"

    @pytest.mark.parametrize("name", SCHEMAS)
    def test_greedy_tokens_are_the_baselines(self, session: Session, name: str) -> None:
        structure = Structure(grammar=schema(SCHEMAS[name]))
        for text in ("hello", "The house"):
            prompt = session.encode(text, raw=True)
            drafted, plain = (
                session.generate(prompt, sampling=GREEDY, max_tokens=100, structure=structure, drafting=drafting).tokens
                for drafting in (None, PLAIN_DECODING)
            )
            tie = session.near_tie(prompt, drafted, plain, structure=structure)
            assert tie is None or tie.gap < 1e-3, tie

    def test_every_cut_on_a_fake(self) -> None:
        target, draft = FakeModel(2, LETTERS), FakeModel(2, LETTERS, sharpness=1.5)
        value = SCHEMAS["any and one of"]
        structure = Structure(grammar=schema(value))
        with Session(target, draft, SessionOptions(Drafting("model", 5, 0.0))) as session:
            for num_tokens in range(1, 41):
                for params in (GREEDY, sampled(num_tokens)):
                    result = session.generate([1, 2], sampling=params, max_tokens=num_tokens, structure=structure)
                    fits(result.text, value)

    def test_closing_tokens_say_so(self, session: Session) -> None:
        structure = Structure(grammar=schema(SCHEMAS["nested objects"]))
        prompt = session.encode("hello", raw=True)
        events = list(session.stream(prompt, sampling=GREEDY, max_tokens=5, structure=structure))
        tokens = [event for event in events if isinstance(event, Token)]
        assert [token.source == "closing" for token in tokens] == [False] * 5 + [True] * (len(tokens) - 5)
        result = session.generate(prompt, sampling=GREEDY, max_tokens=5, structure=structure)
        assert result.stats.num_closing == len(tokens) - 5 > 0
        assert result.tokens == tuple(token.id for token in tokens[:5])
        assert result.text == "".join(token.text for token in tokens)

    def test_closed_where_the_context_is_full(self) -> None:
        structure = Structure(grammar=schema(SCHEMAS["nested objects"]))
        with Session(FakeModel(2, LETTERS), options=SessionOptions(num_ctx=16)) as small:
            result = small.generate([1, 2, 3], sampling=GREEDY, structure=structure)
        assert (result.reason, len(result.tokens)) == ("context", 14)
        fits(result.text, SCHEMAS["nested objects"])

    @pytest.mark.parametrize("source", [ARITHMETIC, LIST, CSV], ids=["arithmetic", "list", "csv"])
    @pytest.mark.parametrize("params", [GREEDY, sampled(3)], ids=["greedy", "sampled"])
    def test_grammars(
        self, session: Session, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar], source: str,
        params: SamplingParams,
    ) -> None:  # fmt: skip
        grammar = grammar_file(source)
        prompt = session.encode("hello", raw=True)
        for num_tokens in (1, 2, 3, 10, 60):
            result = session.generate(
                prompt, sampling=params, max_tokens=num_tokens, structure=Structure(grammar=grammar)
            )
            assert accepts(grammar, vocabulary, result.text), result.text

    def test_lark(self, session: Session, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar]) -> None:
        grammar = grammar_file(LARK, ".lark")
        assert accepts(grammar, vocabulary, "good night, Ann, Bob!")
        assert not accepts(grammar, vocabulary, "good evening!")
        result = session.generate(
            session.encode("hello", raw=True), sampling=GREEDY, max_tokens=9, structure=Structure(grammar=grammar)
        )
        assert accepts(grammar, vocabulary, result.text)

    def test_a_draft_under_the_grammar_is_accepted_more_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        structure = Structure(grammar=schema(SCHEMAS["nested objects"]))

        def acceptance() -> float:
            target, draft = FakeModel(2, LETTERS), FakeModel(2, LETTERS, sharpness=1.7)
            with Session(target, draft, SessionOptions(Drafting("model", 5, 0.0))) as session:
                runs = [
                    session.generate([1, 2], sampling=SamplingParams(seed=seed), max_tokens=60, structure=structure)
                    for seed in range(6)
                ]
            return sum(run.stats.num_accepted for run in runs) / sum(run.stats.num_drafted for run in runs)

        constrained = acceptance()
        drafter = Session._drafter
        monkeypatch.setattr(Session, "_drafter", lambda self, *args: drafter(self, *args[:4], None))
        free = acceptance()
        assert constrained > free + 0.2, (constrained, free)


DEEP_VALUE = {"a": 1, "b": [1, {"c": [2, {"d": None}]}]}


class TestWhiteSpace:
    @pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
    def test_pretty_printed(self, vocabulary: Vocabulary, indent: int | str | None) -> None:
        assert accepts(Grammar.json_object(), vocabulary, json.dumps(DEEP_VALUE, indent=indent))
        assert accepts(Grammar.json_object(), vocabulary, json.dumps(DEEP_VALUE, separators=(",", ":")))

    @pytest.mark.parametrize("blanks", ["  ", "\n\n", " \n", "\n" + " " * 49, "\t", "\r\n"])
    def test_nothing_beyond_indentation(self, vocabulary: Vocabulary, blanks: str) -> None:
        assert not accepts(Grammar.json_object(), vocabulary, '{"a":' + blanks + "1}")

    def test_blanks_end(self, vocabulary: Vocabulary) -> None:
        constraint = GrammarConstraint(Grammar.json_object(), vocabulary, 0)
        blanks = {t for t in range(vocabulary.num_vocab) if not vocabulary.tokenizer.decode_bytes([t]).strip()}
        tokens = walk_text(vocabulary, "{")
        while set(constraint.allowed(tokens).tolist()) & blanks - set(vocabulary.stop_tokens) and len(tokens) < 99:
            tokens.append(min(set(constraint.allowed(tokens).tolist()) & blanks - set(vocabulary.stop_tokens)))
        assert len(tokens) <= 50


class TestGbnf:
    @pytest.mark.parametrize(
        ("source", "good", "bad"),
        [
            ('root ::= "a" | "b" root', ["a", "bba"], ["b", ""]),
            ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
            ("root ::= a\r\na ::= [0-9]{2,3}\r\n", ["12", "123"], ["1", "1234"]),
            ('\ufeffroot ::= "x"', ["x"], ["y"]),
            (r'root ::= "\x41\u00e9\U0001F600"', ["Aé😀"], ["A"]),
            (r'root ::= [\x41-\x43]+ "\x22"', ['ABC"'], ["D", "A"]),
            (r'root ::= [^"\\\x7F\x00-\x1F]*', ["a b", ""], ['"', "\\", "\n"]),
            (r"root ::= [\u00e0-\u00fc]", ["à", "ü"], ["ý", "a"]),
            (r'root ::= "\\x41"', [r"\x41"], ["A"]),
            ('root ::= my-rule # why\nmy-rule ::=\n  "a" |\n  "b"\n', ["a", "b"], ["c"]),
        ],
    )
    def test_language(
        self, vocabulary: Vocabulary, grammar_file: Callable[..., Grammar], source: str, good: list[str], bad: list[str]
    ) -> None:
        grammar = grammar_file(source)
        assert [accepts(grammar, vocabulary, text) for text in good] == [True] * len(good)
        assert [accepts(grammar, vocabulary, text) for text in bad] == [False] * len(bad)


DEEP = 5000
BAD_SCHEMAS = [
    ('{"type":', "not JSON: Expecting value: line 1 column 9"),
    ('{"type": "intger"}', "Invalid type: intger"),
    ('{"type": "object", "dependentRequired": {"a": ["b"]}}', 'Unimplemented keys: ["dependentRequired"]'),
    ('{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ('{"if": {}, "then": {}}', '"if", "then"'),
    ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
    ('{"type": "string", "pattern": "("}', "unclosed group"),
    ('{"type": "string", "pattern": "^(?=a)b"}', "look-around"),
    ('{"type": "string", "format": "weird"}', "Unknown format: weird"),
    ('{"$ref": "#/nope"}', "'/nope' does not exist"),
    ('{"$ref": "http://example.org/x"}', "http://example.org/x"),
    ('{"type": "integer", "minimum": 5, "maximum": 2}', "minimum (5) is greater than maximum (2)"),
    ('{"enum": []}', "Unsatisfiable"),
    ('{"type": "object", "required": ["a"], "additionalProperties": false}', "'a' is unsatisfiable"),
    ('{"const": NaN}', "expected value"),
    ('{"const": "\\ud800"}', "hex escape"),
    ("[]", "a schema is an object, not []"),
    ("false", "a schema is an object, not false"),
    ("null", "a schema is an object, not null"),
    ("3", "a schema is an object, not 3"),
    ('"text"', 'a schema is an object, not "text"'),
    ('{"items":' * DEEP + "{}" + "}" * DEEP, "nested too deeply"),
    ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
    ("[" * 100_000, "nested too deeply"),
    ('{"$ref": "#"}', "is not usable"),
    ("nowhere.json", "cannot read `nowhere.json`: No such file"),
    ("/", "cannot read `/`: Is a directory"),
    ("", "cannot read"),
    ("\0", "cannot read"),
    ("x" * 5000, "File name too long"),
]
BAD_GRAMMARS: list[tuple[str | bytes, str, str]] = [
    ("", ".gbnf", "No 'root' rule found"),
    (" \n", ".gbnf", "No 'root' rule found"),
    ('start ::= "a"', ".gbnf", "No 'root' rule found"),
    ("root ::= nothing", ".gbnf", "Rule 'nothing' not found"),
    ('root ::= "a', ".gbnf", "Unexpected end of input at line 1"),
    ('root ::= ("a"', ".gbnf", "Expected ')' at line 1"),
    ("root ::= [a", ".gbnf", "Unexpected end of input"),
    ('root ::= "a"{3,2}', ".gbnf", "range end must be >= start"),
    ('root ::= "a\nb"', ".gbnf", "error"),
    ("root ::= a\na ::= b\nb ::= a", ".gbnf", "no text fits it"),
    ("root ::= " + "(" * DEEP + '"a"' + ")" * DEEP, ".gbnf", "nested too deeply"),
    (b"\xff\xfe\x00", ".gbnf", "it is not UTF-8 text"),
    (b"\x00\x01\x02", ".gbnf", "Expected name"),
    ("", ".lark", "Empty grammar"),
    ("start: nothing", ".lark", 'unknown name: "nothing"'),
    ('word: "a"', ".lark", "no start rule found"),
    ("start: /[a-z/", ".lark", "unclosed character class"),
    ('start: <|im_end|> "a"', ".lark", "unknown special token"),
    ("start: " + "(" * DEEP + '"a"' + ")" * DEEP, ".lark", "too deeply nested"),
]


class TestRefused:
    @pytest.mark.parametrize(("text", "problem"), BAD_SCHEMAS, ids=lambda value: str(value)[:40].replace("\0", "nul"))
    def test_schemas(self, text: str, problem: str, capfd: pytest.CaptureFixture[str]) -> None:
        began = time.monotonic()
        with pytest.raises(UsageError) as caught:
            Grammar.from_schema(text)
        assert problem in caught.value.message
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 600
        assert time.monotonic() - began < 5
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(("text", "suffix", "problem"), BAD_GRAMMARS, ids=lambda value: str(value)[:30])
    def test_grammars(
        self, grammar_file: Callable[..., Grammar], text: str | bytes, suffix: str, problem: str,
        capfd: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        began = time.monotonic()
        with pytest.raises(UsageError) as caught:
            grammar_file(text, suffix)
        assert problem in caught.value.message
        assert "\n" not in caught.value.message
        assert time.monotonic() - began < 5
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("path", ["nowhere.gbnf", "."])
    def test_files(self, path: str) -> None:
        with pytest.raises(UsageError, match=r"cannot read `.*`: (No such file|Is a directory)"):
            Grammar.from_file(Path(path))

    def test_true_is_any_value(self, vocabulary: Vocabulary) -> None:
        grammar = Grammar.from_schema(" true ")
        assert all(accepts(grammar, vocabulary, text) for text in ("1", '"a"', '{"a": [null]}'))

    def test_schema_files(self, vocabulary: Vocabulary, tmp_path: Path) -> None:
        path = tmp_path / "schema.json"
        path.write_text('\ufeff{"const": "é"}', encoding="utf-8")
        assert accepts(Grammar.from_schema(str(path)), vocabulary, '"é"')
        path.write_text("{", encoding="utf-8")
        with pytest.raises(UsageError, match=r"schema\.json is not usable: not JSON"):
            Grammar.from_schema(str(path))

    def test_grammar_that_is_too_much_in_the_middle_is_an_error(
        self, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        constraint = GrammarConstraint(Grammar.json_object(), vocabulary, 0)
        tokens = walk_text(vocabulary, '{"a"')
        constraint.allowed(tokens)
        constraint._matcher.consume_token(walk_text(vocabulary, "x")[0])
        with pytest.raises(BackendError, match="cannot be kept to any further"):
            constraint.allowed([*tokens, *walk_text(vocabulary, ":")])


class TestDeadEnds:
    def test_bytes_that_the_vocabulary_lacks(self) -> None:
        model = FakeModel(1, "abc")
        with Session(model) as session:
            structure = Structure(grammar=schema({"const": "a"}))
            with pytest.raises(BackendError, match="no token of this model fits"):
                session.generate([1], sampling=GREEDY, structure=structure)
            assert session.generate([1], sampling=GREEDY, max_tokens=5).stats.num_tokens > 0

    def test_model_without_an_end_token(self) -> None:
        model = FakeModel(1)
        model.stop_tokens = frozenset()
        with pytest.raises(UsageError, match="end token"):
            Vocabulary(model)
