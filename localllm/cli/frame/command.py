"""How a command is declared, the environment it runs in, and the Typer command built from it.

Global options are accepted before and after the command; the one closer to the command wins.
"""

from __future__ import annotations

import copy
import gc
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from localllm.cli.frame import logs
from localllm.cli.frame.console import Console, one_of
from localllm.cli.frame.exits import exit_code
from localllm.cli.frame.help import GLOBAL_PANEL, HelpCommand
from localllm.errors import LocalLLMError
from localllm.testing import refuse_outside_tests

if TYPE_CHECKING:
    from localllm.cli.frame.progress import Progress
    from localllm.config import UserConfig

# for every Typer application: help and errors are our own
SETTINGS = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
PROGRESS = ("auto", "plain", "json", "none")
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Options:
    """The global options; None where an option was not given."""

    quiet: Annotated[bool | None, Option("-q", "--quiet", help="Print only results, warnings and errors.")] = None
    verbose: Annotated[
        int, Option("-v", "--verbose", count=True, show_default=False, help="Print log lines to stderr; twice for all.")
    ] = 0
    json: Annotated[bool | None, Option("--json", help="Print one JSON object to stdout.")] = None
    progress: Annotated[str | None, Option(metavar="auto|plain|json|none", help="How to show progress.")] = None
    color: Annotated[str | None, Option(metavar="auto|always|never", help="When to use color.")] = None
    offline: Annotated[bool | None, Option("--offline", help="Do not use the network.")] = None
    yes: Annotated[bool | None, Option("-y", "--yes", help="Answer yes to every question.")] = None
    no_input: Annotated[bool | None, Option("--no-input", help="Never ask; exit 2 instead.")] = None
    config: Annotated[Path | None, Option(metavar="PATH", help="Use this settings file.")] = None
    device: Annotated[str | None, Option(metavar="auto|cuda:0|cpu", help="Device to run on.")] = None
    log_file: Annotated[Path | None, Option(metavar="PATH", help="File to write the log to.")] = None

    def over(self, outer: Options) -> Options:
        """Return these options, with gaps filled from those given before the command."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, 0)}
        return replace(outer, **given)


class Env:
    """The environment of a command: console, options and settings."""

    def __init__(self, options: Options) -> None:
        color = "auto" if options.color is None else options.color
        one_of("--color", color, ("auto", "always", "never"), "pass --color never")
        one_of("--progress", options.progress or "auto", PROGRESS, "pass --progress plain")
        self.options = options
        self._warned = False
        self.console = Console(
            as_json=bool(options.json),
            quiet=bool(options.quiet),
            verbose=options.verbose,
            color=color,
            ask=not options.no_input,
            yes=bool(options.yes),
            as_events=options.progress == "json",
        )

    @cached_property
    def config(self) -> UserConfig:
        """The settings, without the command's own flags."""
        return self.settings({})

    def settings(self, flags: Mapping[str, Any], *, strict: bool = False) -> UserConfig:
        """Load the settings with a command's flags (setting paths -> values) on top; warnings are shown once.

        strict   an unreadable settings file is an error, for commands whose defaults would be less safe than the file
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
        return bool(self.config.offline)

    def progress(self, title: str) -> Progress:
        """The progress display for slow phases."""
        from localllm.cli.frame.progress import make_progress

        return make_progress(self.console, self.options.progress or "auto", title)


@dataclass(frozen=True)
class Spec:
    """A declared command: its function and its examples."""

    run: Callable[..., Any]
    examples: tuple[str, ...]


def command(*examples: str) -> Callable[[Callable[..., Any]], Spec]:
    """Declare `def name(env: Env, ...)` as a command; its docstring is the help, `examples` follow the usage line.

    A parameter annotated with a dataclass is a group of options: each field is an option.
    """
    return lambda run: Spec(run, examples)


def build(name: str, spec: Spec) -> Any:
    """Build the Typer command of a `Spec`: its own parameters, then the global ones."""
    hints = typing.get_type_hints(spec.run, include_extras=True)
    groups: dict[str, type[Any]] = {key: hint for key, hint in hints.items() if is_dataclass(hint)}  # type: ignore[misc]
    own: list[inspect.Parameter] = []
    for p in list(inspect.signature(spec.run).parameters.values())[1:]:
        own += options_of(groups[p.name]) if p.name in groups else [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        ]  # fmt: skip
    names = {p.name for p in own}
    spelled = {word for p in own for info in getattr(p.annotation, "__metadata__", ()) for word in _words(info)}
    shared = [p.replace(annotation=_without(p.annotation, spelled)) for p in options_of(Options) if p.name not in names]
    context = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def call(typer_context: typer.Context, **values: Any) -> None:
        said = Options(**{p.name: values.pop(p.name) for p in shared})
        for key, group in groups.items():
            values[key] = group(**{p.name: values.pop(p.name) for p in options_of(group)})
        outer = typer_context.obj if isinstance(typer_context.obj, Options) else Options()
        code = guarded(said.over(outer), lambda env: spec.run(env, **values))
        if code:
            raise typer.Exit(code)

    call.__doc__ = inspect.cleandoc(spec.run.__doc__ or "")
    app = typer.Typer(add_completion=False, **SETTINGS)  # type: ignore[arg-type]
    settings = HELP_NAMES | {"max_content_width": 100}
    app.command(name, cls=HelpCommand, epilog="\n".join(spec.examples), context_settings=settings)(
        with_parameters(call, [context, *own, *shared])
    )
    return typer.main.get_command(app)


def options_of(group: type[Any]) -> list[inspect.Parameter]:
    """Turn the fields of a dataclass into parameters of a command."""
    hints = typing.get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]


def with_parameters(call: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """Give the function a signature for Typer to read."""
    call.__signature__ = inspect.Signature(list(parameters))
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _words(info: Any) -> list[str]:
    """The spellings of an option: `-a`, `--attach`."""
    names = [info.default, *(info.param_decls or ())] if hasattr(info, "param_decls") else []
    return [n for n in names if isinstance(n, str) and n.startswith("-")]


def _without(hint: Any, taken: set[str]) -> Any:
    """A global option's annotation for the global panel, without the spellings that the command uses itself."""
    base, info = hint.__origin__, copy.copy(hint.__metadata__[0])
    if words := _words(info):
        info.default, *info.param_decls = [word for word in words if word not in taken]
    info.rich_help_panel = GLOBAL_PANEL
    return Annotated[base, info]


def guarded(options: Options, body: Callable[[Env], Any]) -> int:
    """Run a command's body in its environment; every failure becomes a message and an exit code."""
    try:
        refuse_outside_tests()
        env = Env(options)
        logs.start(options.log_file, options.verbose)
    except LocalLLMError as error:
        return Console(as_json=bool(options.json)).fail(error)
    if not gc.isenabled():
        gc.freeze()  # imported modules stay for good
        gc.enable()
    return exit_code(env.console, lambda: body(env))
