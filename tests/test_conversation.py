"""Chat templates: those that model families use in short form, and those that want to do harm."""

from __future__ import annotations

import datetime
from itertools import pairwise

import pytest

from specdec_cli.conversation import encode_chat, encode_raw, encode_rendered, render_chat
from specdec_cli.errors import ModelLoadError
from specdec_cli.testing import FakeModel

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{% endif %}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '<end>\\n' }}{% endfor %}{{ '<turn>model\\n' }}"""
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
REPLY = {"role": "assistant", "content": "Yes"}


class Lettered(FakeModel):
    """A token a letter, and a BOS token whose text is `<s>`."""

    bos = 1

    def __init__(self, template: str | None, *, adds_bos: bool = True) -> None:
        super().__init__(template=template)
        self.adds_bos = adds_bos

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [1] if add_special and self.adds_bos else []
        if parse_special:
            text = text.replace("<s>", "\1")
        return tokens + [ord(letter) for letter in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in (self.bos, self.eos):
            return (b"<s>" if token == self.bos else b"</s>") if special else b""
        return chr(token).encode()


class NoBos(Lettered):
    bos = None  # type: ignore[assignment]


def render(template: str, *messages: dict[str, str]) -> str:
    return render_chat(Lettered(template), messages or [USER])


# --- families ------------------------------------------------------------------------------------------------------


def test_chatml() -> None:
    text = render(CHATML, SYSTEM, USER, REPLY, USER)
    assert text == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama_like() -> None:
    assert render(LLAMA3, SYSTEM, USER) == (
        "<s><|start|>system<|end|>\n\nToday Date: 26 Jul 2024\n\nBe brief<|eot|>"
        "<|start|>user<|end|>\n\nHi<|eot|><|start|>assistant<|end|>\n\n"
    )


def test_gemma_like_takes_the_system_message_with_the_first_question() -> None:
    assert render(GEMMA, USER) == "<s><turn>user\nHi<end>\n<turn>model\n"
    assert render(GEMMA, SYSTEM, USER) == "<s><turn>user\nBe brief\n\nHi<end>\n<turn>model\n"
    assert render(GEMMA, SYSTEM, USER, REPLY, USER).startswith("<s><turn>user\nBe brief\n\nHi<end>\n<turn>model\nYes")


def test_refusal_for_another_reason_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="roles must alternate") as caught:
        render(GEMMA, SYSTEM, USER, USER)
    assert "--raw" in caught.value.hint
    with pytest.raises(ModelLoadError, match="System role not supported"):
        render(GEMMA, SYSTEM)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "023"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{%- for m in messages %}\n    {%- if m.role == 'user' %}\n{{ m.content }}\n    {%- endif %}\n{%- endfor %}",
         "Hi"),
        ("{% if true %}\nx\n{% endif %}\n", "x\n"),
        ("{{ messages[0].content.split('i')[0].strip().upper() }}", "H"),
        ("{{ messages[-1]['content'] is string }}{{ missing is defined }}", "TrueFalse"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].role) }}", "[user]"),
        ("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}", "<s>|</s>|True"),
        ("{{ '<b>&' }}", "<b>&"),
    ],
)  # fmt: skip
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template) == text


def test_date() -> None:
    today = datetime.datetime.now().astimezone()
    assert render("{{ strftime_now('%Y') }}") in (str(today.year), str(today.year + 1))


def test_message_texts_are_not_templates() -> None:
    assert render("{{ messages[0].content }}", {"role": "user", "content": "{{ 7 * 7 }}"}) == "{{ 7 * 7 }}"


def test_given_messages_are_not_changed() -> None:
    messages = [dict(SYSTEM), dict(USER)]
    render_chat(Lettered(GEMMA), messages)
    assert messages == [SYSTEM, USER]


# --- BOS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, CHATML, "{{ messages[0].content }}"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER]])
def test_exactly_one_bos(template: str, messages: list[dict[str, str]]) -> None:
    tokens = encode_chat(Lettered(template), messages)
    assert tokens[0] == 1
    assert tokens.count(1) == 1


def test_no_bos_where_the_model_wants_none() -> None:
    assert encode_chat(Lettered(CHATML, adds_bos=False), [USER]).count(1) == 0
    assert encode_chat(NoBos("{{ bos_token }}x", adds_bos=False), [USER]) == [ord("x")]


def test_raw_text_gets_its_bos_and_special_tokens() -> None:
    assert encode_raw(Lettered(None), "a<s>b") == [1, ord("a"), 1, ord("b")]


# --- templates that fail -------------------------------------------------------------------------------------------


def test_no_template() -> None:
    with pytest.raises(ModelLoadError, match="no chat template") as caught:
        render_chat(Lettered(None), [USER])
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__.datetime }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ('{0.__class__.__mro__}').format(1)[0].x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__'))|attr('__mro__')|attr('x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_sandbox_refuses(template: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template fails"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ unclosed",
        "{% for x in messages %}",
        "{{ messages[7].content.x }}",
        "{{ nothing.x }}",
        "{{ raise_exception('no') }}",
        "{% generation %}x{% endgeneration %}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ strftime_now(1) }}",
        "{{ nothing | tojson }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ messages | map('nofilter') | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_broken_template_is_a_load_error(template: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template") as caught:
        render(template)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("arguments", ["ensure_ascii=False", "separators=(',', ':')", "sort_keys=True"])
def test_json_filter_takes_what_templates_of_the_hub_pass(arguments: str) -> None:
    assert render("{{ {'a': 'é'} | tojson(%s) }}" % arguments) in ('{"a": "é"}', '{"a":"é"}')  # noqa: UP031


# --- what a cache holds ----------------------------------------------------------------------------------------------


class Paired(FakeModel):
    """Pairs of letters are one token, but a model may say them one by one; `<e>` ends a turn; BOS is no text."""

    bos = 500

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [500] if add_special else []
        place = 0
        while place < len(text):
            if text.startswith("<e>", place):
                tokens.append(501)
                place += 3
            elif text[place : place + 2] in ("ab", "cd"):
                tokens.append(300 + ord(text[place]))
                place += 2
            else:
                tokens.append(ord(text[place]))
                place += 1
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token >= 500:
            return (b"<s>", b"<e>")[token - 500] if special else b""
        return bytes([token - 300, token - 299]) if token >= 300 else bytes([token])


PAIRED = Paired()
AB, CD, END = 300 + ord("a"), 300 + ord("c"), 501


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("held", "text", "tokens"),
    [
        # Sampled letter by letter, and kept so; what is new is cut as the tokenizer does.
        ([500, AB, END, *letters("ab")], "ab<e>ab<e>abx", [500, AB, END, *letters("ab"), END, AB, *letters("x")]),
        # Kept up to the first difference, and a token that reaches beyond it stays whole.
        ([500, AB, END, *letters("abab")], "ab<e>abcd", [500, AB, END, *letters("ab"), CD]),
        ([500, AB, END, *letters("xa")], "ab<e>xab", [500, AB, END, *letters("x"), AB]),
        # Canonical: nothing to decide.
        ([500, AB, END], "ab<e>ab", [500, AB, END, AB]),
        ([], "ab", [500, AB]),
        ([500, AB, CD, END], "ab", [500, AB]),
        # Another beginning.
        ([500, *letters("ab")], "cdab", [500, CD, AB]),
        # The answer's last token is the beginning of something else now.
        ([500, END, *letters("ab")], "<e>a<e>", [500, END, *letters("a"), END]),
    ],
    ids=str,
)
def test_held_tokens_are_kept(held: list[int], text: str, tokens: list[int]) -> None:
    assert encode_rendered(PAIRED, text, held) == tokens


def test_held_tokens_with_a_space_that_is_no_text() -> None:
    class Spaced(Paired):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            tokens = super().tokenize(text, add_special=add_special, parse_special=parse_special)
            # As SentencePiece: a space in front of the text and behind special tokens, as part of the next token.
            return [tokens[0], *(1000 + token if before in (500, END) else token for before, token in pairwise(tokens))]

        def piece(self, token: int, *, special: bool = False) -> bytes:
            if token >= 1000:
                return b" " + super().piece(token - 1000)
            return super().piece(token, special=special)

    model = Spaced()
    held = [*model.tokenize("x<e>y", add_special=True, parse_special=True), *letters("ab")]
    text = "x<e>yabcd"
    assert encode_rendered(model, text, held) == [*held, CD]


@pytest.mark.parametrize("template", ["{% if false %}x{% endif %}", "\n{# nothing #}\n"])
def test_template_that_renders_to_nothing_is_named(template: str) -> None:
    with pytest.raises(ModelLoadError, match="chat template makes an empty text") as caught:
        encode_chat(Lettered(template), [USER])
    assert "--raw" in caught.value.hint
