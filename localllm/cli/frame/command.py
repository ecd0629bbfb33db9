"""A command as it is written down, what it runs in, and the Typer command that is made of it.

Global options are accepted before and after the command; the one nearer to the command wins.
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

# of every Typer application: help and errors are ours
SETTINGS = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
PROGRESS = ("auto", "plain", "json", "none")
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True)
class Options:
    """The global options; None where nothing was said."""

    quiet: Annotated[bool | None, Option("-q", "--quiet", help="Only results, warnings and errors.")] = None
    verbose: Annotated[
        int, Option("-v", "--verbose", count=True, show_default=False, help="Log lines on stderr; twice: all.")
    ] = 0
    json: Annotated[bool | None, Option("--json", help="One JSON object on stdout.")] = None
    progress: Annotated[str | None, Option(metavar="auto|plain|json|none", help="How progress is shown.")] = None
    color: Annotated[str | None, Option(metavar="auto|always|never", help="Colour on terminals.")] = None
    offline: Annotated[bool | None, Option("--offline", help="Use no network.")] = None
    yes: Annotated[bool | None, Option("-y", "--yes", help="Agree to every question.")] = None
    no_input: Annotated[bool | None, Option("--no-input", help="Ask nothing; exit 2 instead.")] = None
    config: Annotated[Path | None, Option(metavar="PATH", help="Another settings file.")] = None
    device: Annotated[str | None, Option(metavar="auto|cuda:0|cpu", help="Where to run.")] = None
    log_file: Annotated[Path | None, Option(metavar="PATH", help="Where to write the log.")] = None

    def over(self, outer: Options) -> Options:
        """These options, with gaps filled from the ones given before the command."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, 0)}
        return replace(outer, **given)


class Env:
    """What a command gets beside its own arguments: the console, the options, the settings."""

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
        return bool(self.config.offline)

    def progress(self, title: str) -> Progress:
        """How slow phases are shown."""
        from localllm.cli.frame.progress import make_progress

        return make_progress(self.console, self.options.progress or "auto", title)


@dataclass(frozen=True)
class Spec:
    """A command as written down: its function and its examples."""

    run: Callable[..., Any]
    examples: tuple[str, ...]


def command(*examples: str) -> Callable[[Callable[..., Any]], Spec]:
    """Mark `def name(env: Env, ...)` as a command; its docstring is the help, `examples` stand below the usage line.

    A parameter whose annotation is a dataclass is a group of options: its fields are the options.
    """
    return lambda run: Spec(run, examples)


def build(name: str, spec: Spec) -> Any:
    """The Typer command of a `Spec`: its own parameters, then the global ones."""
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
    """The fields of a dataclass as parameters of a command."""
    hints = typing.get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in fields(group)]


def with_parameters(call: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """The function, with a signature for Typer to read."""
    call.__signature__ = inspect.Signature(list(parameters))
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _words(info: Any) -> list[str]:
    """How an option is spelled: `-a`, `--attach`."""
    names = [info.default, *(info.param_decls or ())] if hasattr(info, "param_decls") else []
    return [n for n in names if isinstance(n, str) and n.startswith("-")]


def _without(hint: Any, taken: set[str]) -> Any:
    """A global option's annotation in the global panel, less the spellings that a command uses for itself."""
    base, info = hint.__origin__, copy.copy(hint.__metadata__[0])
    if words := _words(info):
        info.default, *info.param_decls = [word for word in words if word not in taken]
    info.rich_help_panel = GLOBAL_PANEL
    return Annotated[base, info]


def guarded(options: Options, body: Callable[[Env], Any]) -> int:
    """Run the body of a command in its environment; every failure becomes a message and an exit code."""
    try:
        refuse_outside_tests()
        env = Env(options)
        logs.start(options.log_file, options.verbose)
    except LocalLLMError as error:
        return Console(as_json=bool(options.json)).fail(error)
    if not gc.isenabled():
        gc.freeze()  # what was imported stays
        gc.enable()
    return exit_code(env.console, lambda: body(env))
