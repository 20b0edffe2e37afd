"""Renders chat templates, one request a line, in a process of its own: see `template`.

Nothing of specdec is imported here, and nothing heavy: the process has to be there quickly.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_MESSAGE = 300


def serve(memory_bytes: int, cpu_limit_s: float, max_chars: int) -> None:
    """Answer requests until standard input ends.

    Args:
        memory_bytes: the most that this process may have, where the platform can say so.
        cpu_limit_s: computing time for one template; then the process ends itself, where the platform can do that.
        max_chars: the most that a template may write.
    """
    _limit(memory_bytes)
    answers = sys.stdout.buffer
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        _alarm(cpu_limit_s)
        answer = json.dumps(_answer(json.loads(line), max_chars)).encode()
        _alarm(0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(request: dict[str, Any], max_chars: int) -> dict[str, str | bool]:
    try:
        text = _compiled(request["template"]).render(**request["variables"])
    except MemoryError:
        return {"error": "it takes too much memory", "refuses": False}
    except RecursionError:
        return {"error": "it calls itself without end", "refuses": False}
    except Exception as error:  # the template is code, and may fail in any way
        words = f"{error}" or type(error).__name__
        line = "".join(letter if letter.isprintable() else " " for letter in words[:_MAX_MESSAGE])
        return {"error": line, "refuses": isinstance(error, TemplateError)}
    if len(text) > max_chars:
        return {"error": f"it writes {len(text)} characters", "refuses": False}
    return {"text": text}


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which templates of chat models do not want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _alarm(seconds: float) -> None:
    # Its signal's default action ends the process even inside a single long operation.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit(memory_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
