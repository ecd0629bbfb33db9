"""What every command shares: the global options, the environment it runs in, and one way out for every failure.

Global options are accepted before and after the command; the one nearer to the command wins.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.frame import logs
from localllm.cli.frame.console import Console
from localllm.errors import Aborted, ConfigError, DoesNotFit, InternalError, LocalLLMError, OutOfMemory
from localllm.testing import refuse_outside_tests

if TYPE_CHECKING:
    from localllm.config import UserConfig

GLOBAL_PANEL = "Global options"


@dataclass(frozen=True)
class Options:
    """The global options; None where nothing was said."""

    quiet: Annotated[bool | None, typer.Option("-q", "--quiet", help="Only results, warnings and errors.")] = None
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Log lines on stderr; twice: all.")
    ] = 0
    json: Annotated[bool | None, typer.Option("--json", help="One JSON object on stdout.")] = None
    progress: Annotated[str | None, typer.Option(metavar="auto|plain|json|none", help="How progress is shown.")] = None
    color: Annotated[str | None, typer.Option(metavar="auto|always|never", help="Colour on terminals.")] = None
    offline: Annotated[bool | None, typer.Option("--offline", help="Use no network.")] = None
    yes: Annotated[bool | None, typer.Option("-y", "--yes", help="Agree to every question.")] = None
    no_input: Annotated[bool | None, typer.Option("--no-input", help="Ask nothing; exit 2 instead.")] = None
    config: Annotated[Path | None, typer.Option(metavar="PATH", help="Another settings file.")] = None
    device: Annotated[str | None, typer.Option(metavar="auto|cuda:0|cpu", help="Where to run.")] = None
    log_file: Annotated[Path | None, typer.Option(metavar="PATH", help="Where to write the log.")] = None

    def over(self, outer: Options) -> Options:
        """These options, with gaps filled from the ones given before the command."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, 0)}
        return replace(outer, **given)


OPTION_HINTS = typing.get_type_hints(Options, include_extras=True)
OPTION_NAMES = tuple(OPTION_HINTS)


class Env:
    """What a command gets beside its own arguments: the console, the options, the settings."""

    def __init__(self, options: Options) -> None:
        if options.color not in (None, "auto", "always", "never"):
            raise ConfigError(f"--color is {options.color!r}, it can be auto, always or never", "pass --color never")
        self.options = options
        self._warned = False
        self.debug_invariants = False
        """--debug-invariants of the commands that run a model"""
        self.console = Console(
            as_json=bool(options.json),
            quiet=bool(options.quiet),
            verbose=options.verbose,
            color=options.color or "auto",
            ask=not options.no_input,
            yes=bool(options.yes),
        )

    @cached_property
    def config(self) -> UserConfig:
        """The settings, without a command's own flags."""
        return self.settings({})

    def settings(self, flags: Mapping[str, Any], *, strict: bool = False) -> UserConfig:
        """The settings with a command's flags (paths of settings -> values) on top; warnings are shown once.

        strict   a settings file that cannot be read is an error: for a command that its defaults would lay open
        """
        from localllm.config import load_config

        said = {"offline": self.options.offline, "engine.device": self.options.device, **flags}
        config = load_config(said, path=self.options.config, strict=strict)
        for warning in config.warnings if not self._warned else ():
            self.console.warn(warning)
        self._warned = True
        return config

    @property
    def offline(self) -> bool:
        """Whether the network may not be used."""
        return bool(self.config.offline)

    @property
    def interactive(self) -> bool:
        """Whether a question can be asked."""
        return not self.options.no_input and self.console.err_tty and sys.stdin is not None and sys.stdin.isatty()


@dataclass(frozen=True)
class Spec:
    """A command as written down: its function and its examples."""

    run: Callable[..., Any]
    examples: tuple[str, ...]


def command(*examples: str) -> Callable[[Callable[..., Any]], Spec]:
    """Mark `def name(env: Env, ...)` as a command; its docstring is the help, `examples` stand below the usage line."""
    return lambda run: Spec(run, examples)


def build(name: str, spec: Spec) -> Any:
    """The Typer command of a `Spec`: its own parameters, then the global ones."""
    from localllm.cli.frame.help import HelpCommand

    hints = typing.get_type_hints(spec.run, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(spec.run).parameters.values())[1:]]
    taken = {letter for p in own for letter in _letters(p.annotation)}
    shared = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, key), annotation=hint)
        for key in OPTION_NAMES
        if key not in {p.name for p in own}
        for hint in [_without(OPTION_HINTS[key], taken)]
    ]
    context = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters = [context, *own, *shared]

    def call(**values: Any) -> None:
        context = values.pop("typer_context")
        said = Options(**{key: values.pop(key) for key in OPTION_NAMES if key in values and key not in hints})
        outer = context.obj if isinstance(context.obj, Options) else Options()
        code = guarded(said.over(outer), lambda env: spec.run(env, **values))
        if code:
            raise typer.Exit(code)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__ = inspect.cleandoc(spec.run.__doc__ or "")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(
        name,
        cls=HelpCommand,
        epilog="\n".join(spec.examples),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )(call)
    return quick(typer.main.get_command(app))


def quick(built: Any) -> Any:
    """`built`, without the checks of values that need none: their library loads for 50 ms, as long as all else."""
    completes = "_LOCALLLM_COMPLETE" in os.environ
    if completes:
        built.add_help_option = False
    for param in built.params:
        param.process_value = (lambda ctx, value: value) if completes else _checked_when_needed(param)
    get_help_option = built.get_help_option

    def help_option(ctx: Any) -> Any:
        option = get_help_option(ctx)
        if option is not None:
            option.process_value = _checked_when_needed(option)
        return option

    built.get_help_option = help_option
    return built


def _checked_when_needed(param: Any) -> Callable[[Any, Any], Any]:
    """The conversion of a parameter; what was not given, text as text and switches pass as they are."""
    convert = param.process_value
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    plain: tuple[type, ...] = tuple(kind for kind in (str, bool) if annotation in (kind, kind | None))

    def process(ctx: Any, value: Any) -> Any:
        nothing = value is None or (param.default is None and isinstance(value, (tuple, list)) and not value)
        same = isinstance(value, (int, float, str)) and value == param.default
        if not (nothing or same or isinstance(value, plain)) or (param.required and nothing):
            return convert(ctx, value)
        value = None if nothing else value
        return value if param.callback is None else param.callback(ctx, param, value)

    return process


def _letters(annotation: Any) -> list[str]:
    return [d for info in getattr(annotation, "__metadata__", ()) for d in _declared(info)]


def _declared(info: Any) -> list[str]:
    names = [info.default, *(info.param_decls or ())] if hasattr(info, "param_decls") else []
    return [n for n in names if isinstance(n, str) and n.startswith("-")]


def _without(hint: Any, taken: set[str]) -> Any:
    """A global option's annotation in the global panel, less the spellings that a command uses for itself."""
    import copy

    base, info = hint.__origin__, copy.copy(hint.__metadata__[0])
    names = [n for n in _declared(info) if n not in taken]
    if _declared(info):
        info.default, info.param_decls = names[0], tuple(names[1:])
    info.rich_help_panel = GLOBAL_PANEL
    return Annotated[base, info]


# --- the one way out -------------------------------------------------------------------------------------------------


def guarded(options: Options, body: Callable[[Env], Any]) -> int:
    """Run a command's body; every failure becomes a message and an exit code. Returns the code."""
    try:
        refuse_outside_tests()
        env = Env(options)
    except LocalLLMError as error:
        return Console(as_json=bool(options.json)).fail(error)
    console = env.console
    logs.start(options.log_file, options.verbose)
    try:
        result = body(env)
        console.stdout.flush()
        return result if isinstance(result, int) else 0
    except LocalLLMError as error:
        logging.getLogger("localllm").debug("command failed", exc_info=True)
        if isinstance(error, Aborted):
            return interrupted(console, error)
        return _fail(console, error)
    except (KeyboardInterrupt, EOFError):
        return interrupted(console)
    except BrokenPipeError:
        return broken_pipe()
    except (typer.Exit, SystemExit):
        raise
    except Exception as error:
        return _fail(console, explain(error))


def interrupted(console: Console, error: Aborted | None = None) -> int:
    """Ctrl-C: say so at once; a second one ends the process without waiting for anything."""
    with _hard_interrupt():
        if console.as_json:
            return console.fail(error or Aborted("stopped by Ctrl-C"))
        said = error.message if error else "stopped"
        console.stderr.write(f"\n{said}\n" if console.err_tty else f"{said}\n")
        console.stderr.flush()
    return 130


@contextmanager
def _hard_interrupt() -> Iterator[None]:
    try:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    except ValueError:  # not in the main thread: tests
        yield
        return
    yield


def broken_pipe() -> int:
    """The reader of stdout went away: be quiet, also when the interpreter flushes at its end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return 141


def explain(error: Exception) -> LocalLLMError:
    """What a user can do about an exception that nobody expected; the traceback goes to the log."""
    import errno

    log = logging.getLogger("localllm")
    if isinstance(error, MemoryError):
        return OutOfMemory("memory ran out", "close other programs, or use a smaller model or --ctx")
    if isinstance(error, OSError) and error.strerror and error.errno:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            return DoesNotFit(f"no space left on the disk{where}", "free some space, then run the same command again")
        log.error("operating system error", exc_info=error)
        return LocalLLMError(f"{error.strerror}{where}", "check the path, its permissions and the disk")
    log.error("unexpected error", exc_info=error)
    first = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__
    return InternalError(f"unexpected error: {what}", f"the details are in {logs.path()}; `localllm doctor` may help")


def _fail(console: Console, error: LocalLLMError) -> int:
    try:
        code = console.fail(error)
        if console.verbose >= 2:
            import traceback

            traceback.print_exception(error.__cause__ or error, file=console.stderr)
        return code
    except BrokenPipeError:
        return broken_pipe()
