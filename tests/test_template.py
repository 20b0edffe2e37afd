"""Chat templates that want to do harm are stopped, with a message; those of the model families come out as ever."""

# ruff: noqa: E501 - templates have long lines

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec_cli import template
from specdec_cli.errors import ModelLoadError, TemplateRefusedError
from specdec_cli.template import render

ROOT = Path(__file__).parents[1]
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "3"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds <x>", "parameters": {"type": "object", "properties": {"a": {}}}},
}


@pytest.fixture(scope="module", autouse=True)
def _limits() -> Iterator[None]:
    """Limits at which a test need not wait for long; enough for templates that mean well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "CPU_LIMIT_S", 0.5)
        patch.setattr(template, "MEMORY_LIMIT_BYTES", 1 << 28)
        patch.setattr(template, "MAX_CHARS", 1 << 16)
        template.stop()
        yield
        template.stop()


# --- harm ----------------------------------------------------------------------------------------------------------

NESTED = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
HARM = {
    "range": "{% for x in range(10**9) %}{% endfor %}",
    "nested loops": NESTED,
    "loop over a product": "{% for x in [1] * 10**9 %}{% endfor %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "two macros": "{% macro m(n) %}{% for i in range(9) %}{{ n(m) }}{% endfor %}{% endmacro %}{{ m(m) }}",
    "string": "{{ 'x' * 10**10 }}",
    "constant string": "{{ 'x' * 10000000000 }}",
    "list": "{{ ([0] * 10**10) | length }}",
    "power": "{{ 10**(10**10) }}",
    "constant power": "{{ 9**(9**(9**9)) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "center": "{{ 'x' | center(10**9) }}",
    "method": "{{ 'x'.center(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "tabs": "{{ '\\t'.expandtabs(10**9) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent filter": "{{ '%2000000000s' | format('x') }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "replace": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "indent": "{{ [[[[1]]]] | tojson(indent=10**9) }}",
    "words": "{{ lipsum(n=10**6) }}",
    "output": "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}",
    "block": "{% set x %}{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}{% endset %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute": "{{ (''|attr('__class__'))|attr('mro') }}",
    "code": "{{ raise_exception.__code__.co_consts[0] }}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "hash": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "chain": "{{ 1" + " + 1" * 20000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}  # fmt: skip


@pytest.mark.parametrize("source", HARM.values(), ids=HARM.keys())
def test_harm_is_stopped(source: str) -> None:
    with pytest.raises(ModelLoadError, match=r"the model's chat template (fails|was stopped): ") as caught:
        render(source, {"messages": [USER]})
    assert "--raw" in caught.value.hint
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("source", "reason"),
    [(NESTED, "it takes more than 0.5 s"), ("{{ 10**(10**10) }}", "it takes more than 0.5 s"),
     ("{{ 'x' * 10**10 }}", "it takes too much memory"), (HARM["output"], "it writes 9999900 characters"),
     (HARM["recursive macro"], "it calls itself without end"), (HARM["class"], "attribute '__class__' of 'str' object is unsafe")],
)  # fmt: skip
def test_reason_is_told(source: str, reason: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        render(source, {})
    assert reason in caught.value.message


def test_process_survives() -> None:
    with pytest.raises(ModelLoadError):
        render(HARM["nested loops"], {})
    assert render("{{ messages[0].content }}", {"messages": [USER]}) == "Hi"


def test_large_template_is_refused_before_it_is_read() -> None:
    with pytest.raises(ModelLoadError, match="too large: 2000000 characters"):
        render("x" * 2_000_000, {})


def test_message_of_a_template_is_one_harmless_line() -> None:
    with pytest.raises(TemplateRefusedError) as caught:
        render("{{ raise_exception('a\\n\\x1b[2Jb' * 100) }}", {})
    assert caught.value.message.startswith("the model's chat template fails: a  [2Jba")
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 400


# --- the process ---------------------------------------------------------------------------------------------------


def test_one_process_serves_many_and_is_replaced_when_it_is_gone() -> None:
    render("x", {})
    first = template._worker
    assert first is not None
    assert [render("{{ n }}", {"n": n}) for n in range(20)] == [str(n) for n in range(20)]
    assert template._worker is first
    first._process.kill()
    assert render("{{ 1 }}", {}) == "1"
    assert template._worker is not first


def test_threads_take_turns() -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        results[number] = render("{{ n }}", {"n": number})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: str(number) for number in range(8)}


def test_no_secret_goes_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_PlantedToken")
    template.stop()
    render("x", {})
    assert template._worker is not None
    environment = Path(f"/proc/{template._worker._process.pid}/environ")
    if not environment.exists():
        pytest.skip("no /proc here")
    assert b"PlantedToken" not in environment.read_bytes()


def test_prepared_process_is_used() -> None:
    template.stop()
    template.prepare()
    prepared = template._worker
    assert prepared is not None
    assert render("x", {}) == "x"
    assert template._worker is prepared


def test_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    template.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        template.prepare()
        with pytest.raises(ModelLoadError, match="no process for the chat template: No such file"):
            render("x", {})
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ModelLoadError, match="its process ends"):
            render("x", {})
    assert render("x", {}) == "x"


def test_interrupt_ends_it_and_nothing_is_left(tmp_path: Path) -> None:
    code = """
        import sys
        from specdec_cli import template
        template.CPU_LIMIT_S = 30
        template.prepare()
        print(template._worker._process.pid, flush=True)
        try:
            template.render("{{ 10**(10**10) }}", {})
        except KeyboardInterrupt:
            print(template.render("{{ 1 }}", {}), flush=True)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "1\n"
        assert process.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# --- families ------------------------------------------------------------------------------------------------------

# Written for this test in the manner of each family: the same constructs, other words.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Functions\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
                {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<r>\\n' }}{{- message.content }}{{- '\\n</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- else %}{%- set date_string = "x" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|h|>system<|/h|>\\n\\nDate: " ~ date_string|length ~ "\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|h|>' + message['role'] + '<|/h|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call only") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {%- for name, value in tool_call.arguments | items %}{{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}, {% endif %}{%- endfor %}
        {{- "<|eot|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if message['role'] == 'tool' -%}{%- continue -%}{%- endif -%}
    {%- if loop.index0 > 5 -%}{%- break -%}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<t>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '</t>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<t>model\\n'}}{%- endif -%}"""
MISTRAL = """{%- macro show(items) %}{%- for item in items %}[{{ loop.index }}/{{ loop.length }}:{{ item|upper }}]{%- endfor %}{%- endmacro %}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}{{ show(user_messages | map(attribute="content")) }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') %}
    {%- if message["role"] == "user" %}
        {%- if tools is defined and tools and (message == user_messages[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}{{- '{"function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}
            {%- endfor %}{{- "]" }}
        {%- endif %}
        {{- "[INST] %s[/INST]" % message["content"] }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[CALLS] " + (message.tool_calls | map(attribute='function') | map(attribute='name') | join(', ')) }}
    {%- else %}{{- " " ~ message["content"]|trim ~ eos_token }}{%- endif %}
{%- endfor %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system='', count=0) %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<U>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {%- set ns.count = ns.count + 1 %}{{'<A>' + content.strip() + '<E>'}}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<R>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{'</R>'}}{% endif %}{{ ns.count }}{% if add_generation_prompt and not ns.is_tool %}{{'<A><think>\\n'}}{% endif %}"""
SMOL = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|s|>system\\nYou are small<|e|>\\n' }}{% endif %}
{{'<|s|>' + message['role'] + '\\n' + message['content'] + '<|e|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|s|>assistant\\n' }}{% endif %}"""
FAMILIES = {"qwen": QWEN, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "deepseek": DEEPSEEK, "smollm": SMOL}


def plainly(source: str, variables: dict[str, Any]) -> str:
    """What the sandbox writes in this very process, as it did before there was another one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.globals["strftime_now"] = lambda pattern: time.strftime(pattern)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize("source", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, REPLY, USER], [USER, CALL, RESULT, REPLY]])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_families_come_out_as_ever(source: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    variables = {
        "messages": messages,
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tools": tools,
    }
    text = render(source, variables)
    assert text == plainly(source, variables)
    assert "Hi" in text
    assert ("add" in text) == (
        (tools is not None and source in (QWEN, LLAMA, MISTRAL))
        or (CALL in messages and source in (QWEN, LLAMA, MISTRAL))
    )


def test_some_of_them_word_for_word() -> None:
    variables = {
        "messages": [USER, CALL, RESULT],
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    assert render(QWEN, variables) == (
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<r>\n3\n</r><|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(MISTRAL, variables) == "<s>[1/1:HI][INST] Hi[/INST][CALLS] add 3</s>"
    assert (
        render(DEEPSEEK, {**variables, "messages": [SYSTEM, USER, REPLY]}) == "<s>Be brief<U>Hi<A>Yes<E>1<A><think>\n"
    )


def test_text_of_every_kind_survives_the_way() -> None:
    text = "a\nb\r\n\u2028 é 🦙 \ud800 \x00 \x1b[0m {{ 7 * 7 }}"
    assert render("{{ t }}", {"t": text}) == text
    assert render("{{ t | length }}", {"t": "x" * 3_000_000}) == "3000000"
