"""Options that several commands share, spelled once: which model, how it is loaded, how tokens are chosen.

Ranges and defaults are those of the settings (`localllm.config`): a flag is a setting for one command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.errors import ConfigError


def complete_model(incomplete: str) -> list[str]:
    """Names of local models, for the shell."""
    from localllm.cli.frame.completion import local_names

    return [name for name in local_names() if name.startswith(incomplete)]


_MODEL_HELP = "A name, alias, org/repo[:quant][@revision], file or folder."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=complete_model)]
MaybeModel = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=_MODEL_HELP, autocompletion=complete_model)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=_MODEL_HELP, autocompletion=complete_model)]

Ctx = Annotated[str | None, typer.Option("--ctx", metavar="N|max|auto", help="Context window in tokens: 8192, 32k.")]
Kv = Annotated[
    str | None, typer.Option("--kv", metavar="auto|bf16|fp16|f32|int8|fp8", help="How keys and values are stored.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="auto|float32|bfloat16|float16", help="Arithmetic.")]
DebugInvariants = Annotated[
    bool,
    typer.Option(
        "--debug-invariants",
        help="Check every page and count after every step; slow. run, serve and batch exit 3 if one is off.",
    ),
]
Threads = Annotated[str | None, typer.Option("--threads", metavar="N|auto", help="CPU threads.")]

System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT|@FILE", help="Instructions for the model.")]
Temp = Annotated[
    float | None, typer.Option("--temp", "--temperature", metavar="N", help="0 takes the likeliest token.")
]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", help="Keep the likeliest tokens up to this share.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Keep the N likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="P", help="Drop tokens below this share of the best.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Same seed, same text.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Length limit of an answer.")]
Repeat = Annotated[float | None, typer.Option("--repetition-penalty", metavar="N", help="Above 1: repeat less.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.")]


def sampling_flags(values: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings among a command's arguments, as paths of settings."""
    names = {"temp": "temperature"} | {
        name: name for name in ("top_p", "top_k", "min_p", "seed", "max_tokens", "repetition_penalty")
    }
    return {f"sampling.{setting}": values[name] for name, setting in names.items() if name in values}


def engine_flags(values: dict[str, Any]) -> dict[str, Any]:
    """The engine settings among a command's arguments, as paths of settings. `--ctx max` is no setting."""
    flags = {f"engine.{name}": values.get(name) for name in ("ctx", "kv", "dtype", "threads")}
    if flags["engine.ctx"] == "max":
        del flags["engine.ctx"]
    return flags


def text_or_file(value: str | None, option: str) -> str | None:
    """`@path` is the text of a file, anything else itself. Raises ConfigError when it cannot be read."""
    if value is None or not value.startswith("@"):
        return value
    return read_text(Path(value[1:]), option)


def read_text(path: Path, option: str) -> str:
    """A file's text, undecodable bytes replaced. Raises ConfigError when it cannot be read."""
    try:
        return path.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}", "name a readable text file") from None
