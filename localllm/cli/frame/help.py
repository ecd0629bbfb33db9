"""Help as text: examples first, then arguments and options; for the program itself, its commands in groups.

Drawn without Rich, so that `--help` costs no import and means the same in a pipe, a log and the reference.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typer.core import TyperCommand

from localllm.cli.frame.console import Console
from localllm.cli.frame.errors import explanations
from localllm.terminal import cell_width

EXAMPLES = (
    ("localllm chat qwen", "talk to a model that fits this machine"),
    ('git diff | localllm run qwen "write a commit message"', ""),
    ("localllm serve qwen --port 8000", "OpenAI-compatible endpoint"),
    ("localllm doctor", "check hardware, drivers and best flags"),
)
SUMMARY = "Run open-weight models on this machine: terminal chat, scripts, OpenAI-compatible API."
GLOBAL_PANEL = "Global options"
OPTIONAL_NUMBER = "[PORT]"  # The metavar of an option that may stand without its number.
GLOBALS = "-q -v --json --progress --color --offline -y --no-input --config --device --log-file"


def width() -> int:
    """Columns to fill."""
    return max(40, min(79, shutil.get_terminal_size().columns - 1))


def program_help(groups: Sequence[tuple[str, Sequence[tuple[str, str]]]], columns: int | None = None) -> str:
    """`localllm --help`: summary, usage, examples, a box per group of commands, the global options."""
    console = Console(stdout=sys.stdout)
    columns = columns or width()
    usage = f"{console.style('Usage:', 'bold')} localllm [OPTIONS] COMMAND [ARGS]..."
    lines = [*textwrap.wrap(SUMMARY, columns - 1), "", usage, ""]
    longest = max(len(command) for command, note in EXAMPLES if note)
    for command, note in EXAMPLES:
        text = f"$ {command}"
        if note and longest + len(note) + 6 <= columns:
            text += " " * (longest - len(command) + 3) + console.style(note, "dim")
        lines.append(text)
    lines.append("")
    name_width = max(len(name) for _, commands in groups for name, _ in commands)
    for title, commands in groups:
        lines += _box(console, title, commands, name_width, columns)
    lines += textwrap.wrap(f"Global options, before or after the command: {GLOBALS}", columns - 1)
    lines += ["", "-h, --help   --version   --install-completion   --show-completion"]
    lines += ["One command: localllm COMMAND -h      An error's code: localllm help E501"]
    return "\n".join(f" {line}".rstrip() for line in lines)


def reference(program: str, commands: Iterable[tuple[str, str]]) -> str:
    """docs/cli.md: the help of everything, and the exit codes. `commands` are (name, help) pairs."""
    codes = [f"| {code} | {meaning} |" for code, meaning in explanations()["exits"].items()]
    parts = ["# Commands", "", "Made by `localllm --reference > docs/cli.md`; a test compares.", ""]
    parts += ["```", program.rstrip(), "```", "", "## Exit codes", "", "| code | meaning |", "|---|---|", *codes, ""]
    parts += [
        "An error says what happened, then `try` and what to do next; with `--json` it is also an object on stdout"
    ]
    parts += ["(`localllm.error/1`). Its code is `E`, the exit code and two digits: E501 ends in exit code 5."]
    parts += ["`localllm help E501`, and [errors.md](errors.md), say what each means and what helps.", ""]
    for name, text in commands:
        parts += [f"## localllm {name}", "", "```", text.rstrip(), "```", ""]
    return "\n".join(parts)


def man_page(program: str, commands: Iterable[tuple[str, str]]) -> str:
    """docs/localllm.1: the same help for `man localllm`, in man(7) macros."""

    def shown(text: str) -> str:
        lines = (line.replace("\\", "\\e").rstrip() for line in text.strip("\n").splitlines())
        escaped = ("\\&" + line if line.startswith((".", "'")) else line for line in lines)
        return "\n".join([".EX", *escaped, ".EE"])

    codes = [f".TP\n.B {code}\n{meaning}" for code, meaning in explanations()["exits"].items()]
    parts = ['.TH LOCALLLM 1 "" "localllm" "User Commands"', ".SH NAME"]
    parts += [f"localllm \\- {SUMMARY[:1].lower()}{SUMMARY[1:].rstrip('.')}", ".SH SYNOPSIS", shown(program)]
    parts += [f".SH LOCALLLM {name.upper()}\n{shown(text)}" for name, text in commands]
    return "\n".join([*parts, ".SH EXIT STATUS", *codes, ""])


def _box(console: Console, title: str, commands: Sequence[tuple[str, str]], name_width: int, columns: int) -> list[str]:
    inner = columns - 4
    rows = [f"╭─ {title} " + "─" * (columns - len(title) - 5) + "╮"]
    for name, summary in commands:
        for number, part in enumerate(textwrap.wrap(summary, inner - name_width - 3)):
            label = name if number == 0 else ""
            text = console.style(label, "accent") + " " * (name_width - len(label) + 3) + part
            padding = " " * (inner - name_width - 3 - cell_width(part))
            rows.append(f"│ {text}{padding} │")
    rows.append("╰" + "─" * (columns - 2) + "╯")
    return [console.glyphs(row) for row in rows]


class QuickParams:
    """Of a Typer command or group: its values without the checks that need none, whose library loads for 50 ms."""

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`; none for a shell that completes."""
        return None if _completes() else super().get_help_option(ctx)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        """Click asks for the parameters here before it reads a command line."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if "process_value" not in vars(param):
                param.process_value = (lambda ctx, value: value) if _completes() else _checked_when_needed(param)
        return params


def _completes() -> bool:
    return "_LOCALLLM_COMPLETE" in os.environ


def _checked_when_needed(param: Any) -> Callable[[Any, Any], Any]:
    """The conversion of a parameter; what was not given, text as text and switches pass as they are."""
    convert = param.process_value
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    plain: tuple[type, ...] = tuple(kind for kind in (str, bool) if annotation in (kind, kind | None))
    is_texts = annotation in (list[str], list[str] | None)
    info = getattr(getattr(param, "type_descriptor", None), "parameter_info", None)
    bounded = getattr(info, "min", None) is not None or getattr(info, "max", None) is not None
    number = None if bounded else next((kind for kind in (int, float) if annotation in (kind, kind | None)), None)

    def process(ctx: Any, value: Any) -> Any:
        nothing = value is None or (param.default is None and isinstance(value, (tuple, list)) and not value)
        same = isinstance(value, (int, float, str)) and value == param.default
        if is_texts and value and not param.callback:
            return list(value)
        if number and isinstance(value, str) and value.isdecimal() and not param.callback:
            return number(value)
        if not (nothing or same or isinstance(value, plain)) or (param.required and nothing):
            return convert(ctx, value)
        value = None if nothing else value
        return value if param.callback is None else param.callback(ctx, param, value)

    return process


class HelpCommand(QuickParams, TyperCommand):
    """A command whose help shows its examples first and the global options last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Before anything else, give options that stand without their number an empty value: `--serve qwen`."""
        names = {name for param in self.params if param.metavar == OPTIONAL_NUMBER for name in param.opts}
        end = args.index("--") if "--" in args else len(args)
        whole: list[str] = []
        for number, word in enumerate(args):
            whole.append(word)
            if word in names and number < end and not (number + 1 < end and args[number + 1].isdigit()):
                whole.append("")
        return list(super().parse_args(ctx, whole))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console(stdout=sys.stdout)
        columns = ctx.terminal_width or width()
        names = [str(p.metavar or p.name.upper()) for p in self.params if p.param_type_name == "argument"]
        usage = " ".join(["localllm", str(ctx.info_name), "[OPTIONS]", *names])
        parts = [f" {console.style('Usage:', 'bold')} {usage}", ""]
        for paragraph in (self.help or "").split("\n\n"):
            parts += [f" {line}" for line in textwrap.wrap(" ".join(paragraph.split()), columns)]
            parts.append("")
        if self.epilog:
            parts.append(" " + console.style("Examples", "bold"))
            parts += [f"   $ {line}" for line in self.epilog.splitlines()]
            parts.append("")
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], GLOBAL_PANEL: []}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                panels["Arguments"].append((str(param.metavar or param.name.upper()), str(param.help or "")))
            elif record := param.get_help_record(ctx):
                panels[param.rich_help_panel or "Options"].append(record)
        for title, rows in panels.items():
            if rows:
                parts += [" " + console.style(title, "bold"), *_definitions(rows, columns), ""]
        formatter.write("\n".join(parts).rstrip() + "\n")


def _definitions(rows: Sequence[tuple[str, str]], columns: int) -> Iterable[str]:
    left = min(28, max(len(name) for name, _ in rows)) + 3
    indent = " " * (left + 3)
    for name, text in rows:
        head = f"   {name.ljust(left)}"
        if len(name) > left - 3:
            yield head.rstrip()
            head = indent
        wrapped = textwrap.wrap(text, max(20 + len(indent), columns), initial_indent=head, subsequent_indent=indent)
        yield from wrapped or [head.rstrip()]
