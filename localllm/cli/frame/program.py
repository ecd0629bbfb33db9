"""The program behind the `localllm` command: finds, runs and ends a command."""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from localllm._version import __version__
from localllm.cli.commands import ALIASES, COMMANDS
from localllm.cli.frame.command import HELP_NAMES, SETTINGS, Options, Spec, build, guarded, options_of, with_parameters
from localllm.cli.frame.console import Console
from localllm.cli.frame.errors import CODE, explained, kinds, page
from localllm.cli.frame.exits import broken_pipe, explain, leave_now
from localllm.cli.frame.help import QuickParams, man_page, program_help, reference
from localllm.errors import ConfigError, LocalLLMError

NAMES = tuple(one.name for one in COMMANDS)


class Root(QuickParams, TyperGroup):
    """The program: imports only the command that is called, and shows every usage error in our format."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in NAMES:
            return None
        spec = getattr(import_module(f"localllm.cli.commands.{name}"), name)
        assert isinstance(spec, Spec)
        return build(name, spec)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line, or suggest the one that was probably meant."""
        name = args[0]
        if not name.startswith("-") and ALIASES.get(name, name) not in NAMES and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, NAMES, 2)
            meant = f". Did you mean {' or '.join(near)}?" if near else ""
            hint = f"localllm {near[0]} -h" if near else "localllm --help"
            raise ConfigError(f"unknown command: {name}{meant}", hint)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(program_help(_groups(), ctx.terminal_width) + "\n")

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """Run a command line; always ends in SystemExit with a documented code."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        if words[:1] == ["help"]:
            if len(words) > 1 and (text := explained(words[1])):
                sys.stdout.write(text)
                sys.exit(0)
            if len(words) > 1 and CODE.fullmatch(words[1]):
                error = ConfigError(
                    f"unknown error code {words[1].upper()}; the codes are {', '.join(kinds())}", "localllm help E501"
                )
                sys.exit(Console(as_json=as_json).fail(error))
            words = [*words[1:2], "--help"]
        try:
            code = super().main(words, "localllm", **extra | {"standalone_mode": False})
            sys.stdout.flush()
        except LocalLLMError as error:
            code = Console(as_json=as_json).fail(error)
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            code = broken_pipe()
        except SystemExit as stop:  # click answers a closed reader with exit code 1
            code = broken_pipe() if isinstance(stop.__context__, BrokenPipeError) else stop.code
        except Exception as error:
            code = _usage_error(error, as_json)
        sys.exit(code if isinstance(code, int) else 0)


def _groups() -> list[tuple[str, list[tuple[str, str]]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for one in COMMANDS:
        groups.setdefault(one.group, []).append((one.name, one.summary))
    return list(groups.items())


def _usage_error(error: Exception, as_json: bool) -> int:
    """Show a wrong command line (an exception of Typer's parser) as one of our errors; anything else is a bug."""
    message = getattr(error, "format_message", None)
    if message is None:
        return Console(as_json=as_json).fail(explain(error))
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    hint = f"localllm {command} -h" if command and command != "localllm" else "localllm --help"
    text = " ".join(str(message()).split()).rstrip(".").partition(", unable to parse")[0]
    text = text.replace("Input should be", "it must be")
    text = re.sub(r"^Got unexpected extra arguments?(\(s\))? \((.*)\)$", r"too many arguments: \2", text)
    return Console(as_json=as_json).fail(ConfigError(text[:1].lower() + text[1:], hint))


app = typer.Typer(cls=Root, invoke_without_command=True, context_settings=HELP_NAMES, **SETTINGS)  # type: ignore[arg-type]


def _version(value: bool) -> None:
    if value:
        print(f"localllm {__version__}")
        raise typer.Exit


def _all_help(write: Callable[[str, list[tuple[str, str]]], str]) -> Callable[[typer.Context, bool], None]:
    """An option that prints all help texts in the form that `write` gives them."""

    def callback(ctx: typer.Context, value: bool) -> None:
        if value:
            helps = []
            for name in NAMES:
                command = ctx.command.get_command(ctx, name)  # type: ignore[attr-defined]
                with typer.Context(command, info_name=name, terminal_width=79) as inner:
                    helps.append((name, command.get_help(inner)))
            print(write(program_help(_groups(), 79), helps), end="")
            raise typer.Exit

    return callback


def _errors(value: bool) -> None:
    if value:
        print(page(), end="")
        raise typer.Exit


def root(
    ctx: typer.Context,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True)] = False,
    _reference: Annotated[
        bool, Option("--reference", callback=_all_help(reference), is_eager=True, hidden=True)
    ] = False,
    _man: Annotated[bool, Option("--man", callback=_all_help(man_page), is_eager=True, hidden=True)] = False,
    _errors: Annotated[bool, Option("--errors", callback=_errors, is_eager=True, hidden=True)] = False,
    **options: Any,
) -> None:
    """Run open-weight models on this machine."""
    ctx.obj = Options(**options)
    if ctx.invoked_subcommand is None:
        if _in_a_terminal():
            from localllm.cli.commands.chat import home

            raise typer.Exit(guarded(ctx.obj, home))
        print(ctx.get_help())


# the program also takes the global options, so they may come before the command
_own = [p for p in inspect.signature(root, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
app.callback()(with_parameters(root, [*_own, *options_of(Options)]))


def _in_a_terminal() -> bool:
    """Whether the home screen can be shown: stdin, stdout and stderr are terminals."""
    from localllm.terminal import dumb, is_tty

    return not dumb() and all(is_tty(stream) for stream in (sys.stdin, sys.stdout, sys.stderr))


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Run the command line of this process."""
    _usable_streams()
    # a crash in native code (SIGSEGV, or SIGBUS when a model file is truncated during loading) prints a traceback
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _terminated)
    try:
        typer.main.get_command(app).main()
    except SystemExit as stop:
        if stop.code in (129, 130, 143):
            leave_now(stop.code)
        raise


def _usable_streams() -> None:
    """Keep closed standard streams, and characters they cannot encode, from ending in a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        else:
            stream.reconfigure(errors="replace" if mode == "w" else "surrogateescape")
