"""The child that renders chat templates, `python -P -m localllm.chat.render`: requests on stdin, text on stdout.

Templates come from model files and are programs: they run here, in the one sandboxed Jinja environment of the code
base, under limits of address space and processor time, away from the model and its threads. What they see and how they
render is what `apply_chat_template` of transformers does, byte for byte, less the globals `lipsum`, `cycler` and
`joiner`. The parent is `render_child.py`; messages are JSON (`child_loop.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import ext, nodes, parser
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from localllm.chat.render_child import CPU_S
from localllm.sandbox.child_loop import confine, serve

MEMORY_BYTES = 192 << 20  # address space beyond what the started child already has
ALARM_S = 30  # the parent gives up sooner; this ends a child that waits, whose parent is gone
MAX_OUTPUT_BYTES = 4 << 20


class _Raised(Exception):
    """The template called `raise_exception`: its words are for the user."""


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)` for templates without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace(...)` that takes no underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: B902 - so that `namespace(self=...)` works, as in Jinja
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise _Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates may use
    return datetime.now().strftime(format)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    for name in ("lipsum", "cycler", "joiner"):
        del made.globals[name]
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def render(template: str, variables: dict[str, Any]) -> dict[str, str]:
    """`{"text": ...}`, or `{"error": kind, "message": ...}` with a kind that `template.py` turns into an exception."""
    try:
        compiled = _compiled(template)
        pieces, size = [], 0
        for piece in compiled.generate(variables):
            size += len(piece)
            if size > MAX_OUTPUT_BYTES:
                return {"error": "size", "message": ""}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except _Raised as error:
        return {"error": "raised", "message": str(error)}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"error": "security", "message": str(error)}
    except (UndefinedError, TemplateRuntimeError, TemplateError) as error:
        return {"error": "message", "message": str(error)}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"error": "limit", "message": type(error).__name__}
    except Exception as error:  # a template can raise anything that an expression can
        return {"error": "message", "message": f"{type(error).__name__}: {error}"}


def _answer(request: bytes) -> bytes:
    """One request, `{"template": ..., "variables": {...}}`."""
    body = json.loads(request)
    return json.dumps(render(body["template"], body["variables"])).encode()


def main() -> None:
    """Set the limits, serve."""
    confine(MEMORY_BYTES)
    _environment()
    serve(_answer, alarm_s=ALARM_S, cpu_s=CPU_S)


if __name__ == "__main__":
    main()
