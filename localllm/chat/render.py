"""The child process that renders chat templates (`python -P -m localllm.chat.render`): requests on stdin, text out.

Templates come from model files and are programs. They run in this process, separate from the model, in the code base's
only sandboxed Jinja environment, with limits on address space and CPU time. The output is byte for byte that of
`apply_chat_template` in transformers; the globals `lipsum`, `cycler` and `joiner` are removed. The parent's side is
`render_child.py`; messages are JSON (`child_loop.py`).
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

MEMORY_BYTES = 192 << 20  # address space in addition to that of the started child
ALARM_S = 30  # the parent gives up sooner; this ends a child whose parent is gone
MAX_OUTPUT_BYTES = 4 << 20


class _Raised(Exception):
    """The template called `raise_exception`; its message is for the user."""


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
    """`dict(...)` for templates, without access to the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace(...)` that rejects names with a leading underscore."""

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
        raise SecurityError(f"a namespace attribute must not start with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise _Raised(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter without the HTML escapes of Jinja's own."""
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
    """Return `{"text": ...}`, or `{"error": kind, "message": ...}`, which `render_child.py` turns into an exception."""
    try:
        compiled = _compiled(template)
        pieces, size = [], 0
        for piece in compiled.generate(variables):
            size += len(piece.encode(errors="surrogatepass"))
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
    except Exception as error:  # a template expression can raise anything
        return {"error": "message", "message": f"{type(error).__name__}: {error}"}


def _answer(request: bytes) -> bytes:
    """Answer one request, `{"template": ..., "variables": {...}}`."""
    body = json.loads(request)
    return json.dumps(render(body["template"], body["variables"])).encode()


def main() -> None:
    """Set the limits and serve requests."""
    confine(MEMORY_BYTES)
    _environment()
    serve(_answer, alarm_s=ALARM_S, cpu_s=CPU_S)


if __name__ == "__main__":
    main()
