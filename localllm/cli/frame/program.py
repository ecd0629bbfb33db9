"""The program behind the `localllm` command: how a command is found, run and ended."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from localllm._version import __version__
from localllm.cli import ALIASES, COMMANDS
from localllm.cli.frame.command import Options, Spec, broken_pipe, build, quick
from localllm.cli.frame.console import Console
from localllm.cli.frame.errors import CODE, code_of, explained, kinds, page
from localllm.cli.frame.help import program_help, reference
from localllm.errors import ConfigError


class Root(TyperGroup):
    """The program: finds commands by name without importing the others, and shows every usage error our way."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return [name for name, *_ in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and build one command."""
        from importlib import import_module

        name = ALIASES.get(cmd_name, cmd_name)
        for known, _, module, _ in COMMANDS:
            if known == name:
                spec = getattr(import_module(f"localllm.cli.commands.{module}"), known)
                assert isinstance(spec, Spec)
                return build(known, spec)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line, or say which was probably meant."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(name, self.list_commands(ctx), 2, 0.5)
            meant = f". Did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(
                f"no such command: {name}{meant}", f"localllm {near[0]} -h" if near else "localllm --help"
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the program."""
        formatter.write(program_help(_groups(), ctx.terminal_width) + "\n")

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; always ends in SystemExit with one of the documented codes."""
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == ["help"]:
            if len(words) > 1 and (text := explained(words[1])):
                sys.stdout.write(text)
                sys.exit(0)
            if len(words) > 1 and CODE.fullmatch(words[1]):
                known = ", ".join(code_of(kind) for kind in kinds())
                error = ConfigError(f"there is no error {words[1].upper()}; there are {known}", "localllm help E501")
                sys.exit(Console(as_json="--json" in words).fail(error))
            words = [*words[1:2], "--help"]
        try:
            code = super().main(words, "localllm", complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except ConfigError as error:
            code = Console(as_json="--json" in words).fail(error)
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            code = broken_pipe()
        except Exception as error:
            code = _usage_error(error, "--json" in words)
        sys.exit(code if isinstance(code, int) else 0)


def _groups() -> list[tuple[str, list[tuple[str, str]]]]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, group, _, summary in COMMANDS:
        groups.setdefault(group, []).append((name, summary))
    return list(groups.items())


def _usage_error(error: Exception, as_json: bool) -> int:
    """A wrong command line (an exception of Typer's parser) in the form of all errors; anything else is our fault."""
    message = getattr(error, "format_message", None)
    if message is None:
        from localllm.cli.frame.command import explain

        return Console(as_json=as_json).fail(explain(error))
    context = getattr(error, "ctx", None)
    command = getattr(context, "info_name", None)
    hint = f"localllm {command} -h" if command and command != "localllm" else "localllm --help"
    text = " ".join(str(message()).split()).rstrip(".")
    return Console(as_json=as_json).fail(ConfigError(text[:1].lower() + text[1:], hint))


app = typer.Typer(
    cls=Root,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"localllm {__version__}")
        raise typer.Exit


def _reference(ctx: typer.Context, value: bool) -> None:
    if value:
        helps = []
        for name, *_ in COMMANDS:
            command = ctx.command.get_command(ctx, name)  # type: ignore[attr-defined]
            with typer.Context(command, info_name=name, terminal_width=79) as inner:
                helps.append((name, command.get_help(inner)))
        print(reference(program_help(_groups(), 79), helps), end="")
        raise typer.Exit


def _errors(value: bool) -> None:
    if value:
        print(page(), end="")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
    _reference: Annotated[bool, typer.Option("--reference", callback=_reference, is_eager=True, hidden=True)] = False,
    _errors: Annotated[bool, typer.Option("--errors", callback=_errors, is_eager=True, hidden=True)] = False,
    **options: Any,
) -> None:
    """Run open-weight models on this machine."""
    ctx.obj = Options(**options)
    if ctx.invoked_subcommand is None:
        if _in_a_terminal():
            from localllm.cli.commands.chat import home
            from localllm.cli.frame.command import guarded

            raise typer.Exit(guarded(ctx.obj, home))
        print(ctx.get_help())


def _in_a_terminal() -> bool:
    """Whether the first screen can be shown: typed into and drawn on."""
    from localllm.terminal import dumb, is_tty

    return not dumb() and all(is_tty(stream) for stream in (sys.stdin, sys.stdout, sys.stderr))


def _with_globals() -> None:
    """Give the program itself the global options, so that they may also stand before the command."""
    import inspect

    from localllm.cli.frame.command import OPTION_HINTS

    own = [p for p in inspect.signature(root, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    shared = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, key), annotation=hint)
        for key, hint in OPTION_HINTS.items()
    ]
    root.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    root.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}


_with_globals()


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    """Run the command line of this process."""
    _usable_streams()
    # A crash in native code (SIGSEGV, or SIGBUS for a model file that is cut while it is being loaded) says where.
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        quick(typer.main.get_command(app)).main()
    except SystemExit as stop:
        if stop.code in (130, 143):
            leave_now(stop.code)
        raise


def leave_now(code: int) -> NoReturn:
    """End without waiting for a model that is loading or computing in another thread: tearing the interpreter down
    below it would abort the process instead."""
    import os

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _usable_streams() -> None:
    """Standard streams that are closed, or that cannot write every character, must not end in a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            import os

            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        elif mode == "w":
            stream.reconfigure(errors="replace")
        else:
            stream.reconfigure(errors="surrogateescape")
