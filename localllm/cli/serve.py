"""`localllm serve`: the OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm._version import __version__
from localllm.errors import ConfigError
from localllm.terminal import clean_line, seconds_short

from . import params
from .command import Env, command
from .names import choose
from .session import fake_engine, llm_options

if TYPE_CHECKING:
    from localllm.server.service import Service

MIN_KEY = 8
"""Characters of an API key: a shorter one is a typing error."""


@command(
    "localllm serve qwen",
    "localllm serve smollm2 --port 8001 --alias gpt-4o-mini",
    "localllm serve qwen --host 0.0.0.0 --api-key-file ~/.localllm.key",
)
def serve(
    env: Env,
    model: params.MaybeModel = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Port; 0 takes a free one.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the key clients send.")] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Visible to others in `ps`: prefer the file.")
    ] = None,
    alias: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Another model id to answer to.")] = None,
    cors: Annotated[list[str] | None, typer.Option(metavar="ORIGIN", help="Web origin that may call.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on the network without a key.")] = False,
    parallel: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="Requests side by side.")] = None,
    ctx: params.Ctx = None,
    kv: params.Kv = None,
    dtype: params.Dtype = None,
    threads: params.Threads = None,
    debug_invariants: params.DebugInvariants = False,
) -> int:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health.

    Ctrl-C lets running requests finish; a second one drops them.
    """
    if fake_engine():
        raise ConfigError("the scripted engine has no server", "`unset LOCALLLM_ENGINE`")
    env.debug_invariants = debug_invariants
    values = {"ctx": ctx, "kv": kv, "dtype": dtype, "threads": threads}
    config = env.settings(
        params.engine_flags(values) | {"server.host": host, "server.port": port, "engine.max_parallel": parallel}
    )
    from localllm import server

    key = _key(env, api_key, api_key_file or (Path(config.server.api_key_file) if config.server.api_key_file else None))
    options = server.ServeOptions(
        host=config.server.host,
        port=config.server.port,
        api_key=key,
        origins=tuple(cors or config.server.cors),
        insecure=insecure,
    )
    console = env.console

    def load() -> tuple[Any, tuple[str, ...]]:
        from .loading import load_llm

        choice = choose(env, config, model)
        llm = load_llm(env, choice, llm_options(env, config, ctx))
        return llm, (choice.shown, *(name for name in alias or () if name != choice.shown))

    def on_ready(url: str, service: Service) -> None:
        llm = service.llm
        plan = llm.plan
        console.say(f"localllm {__version__}")
        console.say(
            f"ready  {clean_line(service.names[0])}  ctx {plan.ctx:,} × {plan.max_parallel}  {plan.device}"
            f"  loaded in {seconds_short(llm.load_s)}"
        )
        console.say(f"  OpenAI  {url}/v1      model id  {', '.join(clean_line(name) for name in service.names)}")
        console.say(f"  try     curl {url}/v1/chat/completions -H 'content-type: application/json' \\")
        auth = '-H "authorization: Bearer $KEY" ' if options.api_key else ""
        body = f'{{"model":"{service.names[0]}","messages":[{{"role":"user","content":"hi"}}]}}'
        console.say(f"            {auth}-d '{body}'")
        console.say(f"  {clean_line(llm.truth_line)}")

    server.serve(load, options, on_ready)
    console.say("stopped")
    return 0


def _key(env: Env, given: str | None, file: Path | None) -> str | None:
    if given is not None:
        env.console.warn("--api-key can be read by every user of this machine in `ps`; --api-key-file cannot")
        key = given
    elif file is not None:
        key = params.read_text(file, "--api-key-file").strip()
    else:
        return None
    if len(key) < MIN_KEY or not key.isprintable():
        raise ConfigError(
            f"the API key has {len(key)} characters, it needs {MIN_KEY} printable ones", "make a longer one"
        )
    return key
