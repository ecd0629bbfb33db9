"""Serve: OpenAI-compatible HTTP endpoint"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from localllm._version import __version__
from localllm.chat.mcp.servers import read_servers
from localllm.cli.attach import fake_engine
from localllm.cli.background import cut_log
from localllm.cli.frame.command import Env, command
from localllm.cli.frame.console import one_of
from localllm.cli.frame.exits import leave_now
from localllm.cli.frame.options import EngineFlags, Parallel, model_argument, read_text
from localllm.cli.loading import within_models
from localllm.cli.names import Choice, agree, choice_of, resolve
from localllm.errors import ConfigError, LocalLLMError, ModelNotFound, ServerError
from localllm.terminal import clean_line, counted, seconds_short

if TYPE_CHECKING:
    from localllm.cli.frame.progress import Progress
    from localllm.config import UserConfig
    from localllm.device.processes import Record
    from localllm.llm.llm import LLM
    from localllm.request import LoadProgress
    from localllm.server.pool import ModelPool
    from localllm.server.served_model import ServedModel
    from localllm.server.service import Service

OLLAMA = ("127.0.0.1", 11434)  # where Ollama's clients look
MIN_KEY = 8  # characters in an API key: a shorter one is a typing error


@command(
    "localllm serve qwen",
    "localllm serve                       # every local model, loaded on demand",
    "localllm serve smollm2 --port 8001 --alias gpt-4o-mini",
    "localllm serve --ollama              # also for programs that expect Ollama",
    "localllm serve qwen --host 0.0.0.0 --api-key-file ~/.localllm.key",
    "localllm serve qwen --ray --replicas 1-4   # one endpoint over several replicas",
)
def serve(
    env: Env,
    models: Annotated[
        list[str] | None, model_argument("[MODEL]...", "Models; without one, every local model on demand.")
    ] = None,
    host: Annotated[str | None, Option(metavar="ADDRESS", help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, Option(metavar="N", help="Port; 0 picks a free one.")] = None,
    ollama: Annotated[
        bool, Option("--ollama", help="Also listen on 127.0.0.1:11434 as Ollama, and accept pulls.")
    ] = False,
    unix: Annotated[Path | None, Option(metavar="PATH", help="Listen on a Unix socket instead of a port.")] = None,
    api_key_file: Annotated[Path | None, Option(metavar="FILE", help="File of API keys, one per line.")] = None,
    api_key: Annotated[
        str | None, Option(metavar="KEY", help="API key; others can see it in `ps`, so prefer the file.")
    ] = None,
    alias: Annotated[list[str] | None, Option(metavar="NAME", help="Another id for the first model.")] = None,
    cors: Annotated[list[str] | None, Option(metavar="ORIGIN", help="Web origin allowed to call.")] = None,
    insecure: Annotated[bool, Option("--insecure", help="Allow listening on the network without a key.")] = False,
    parallel: Parallel = None,
    mcp: Annotated[Path | None, Option(metavar="FILE", help="MCP servers whose tools /v1/responses may use.")] = None,
    max_queue: Annotated[
        int, Option(metavar="N", min=0, max=100_000, help="Maximum number of waiting requests.")
    ] = 256,
    ttl: Annotated[
        str | None, Option(metavar="TIME", help="Unload after this idle time, such as 30m; 0 never.")
    ] = None,
    pin: Annotated[list[str] | None, Option(metavar="MODEL", help="Load this model at startup and keep it.")] = None,
    pin_prefix: Annotated[
        list[Path] | None, Option(metavar="FILE", help="System prompt whose pages are evicted last.")
    ] = None,
    kv_events: Annotated[
        str | None, Option(metavar="tcp://HOST:PORT", help="Publish prefix cache events over ZMQ, like vLLM.")
    ] = None,
    preload: Annotated[bool, Option("--preload", help="Load the default model at startup.")] = False,
    log_format: Annotated[str, Option(metavar="text|json", help="Format of the request log on stderr.")] = "text",
    ray: Annotated[
        bool, Option("--ray", help="Run replicas in Ray, here or in the cluster at `--ray HOST:PORT`.")
    ] = False,
    replicas: Annotated[str | None, Option(metavar="N|MIN-MAX", help="Number of replicas, with --ray.")] = None,
    engine: EngineFlags = EngineFlags(),
) -> int:
    """Serve models over HTTP: OpenAI, Anthropic and Ollama APIs, metrics and health.

    Ctrl+C lets running requests finish; a second Ctrl+C drops them.
    """
    if fake_engine():
        raise ConfigError("the scripted engine has no server", "`unset LOCALLLM_ENGINE`")
    if unix is not None and (host is not None or port is not None):
        raise ConfigError("--unix listens on a socket file, --host and --port on an address", "drop one of them")
    one_of("--log-format", log_format, ("text", "json"), "--log-format json")
    flags: dict[str, Any] = {"server.host": host, "server.port": port, "server.cors": cors or None}
    flags |= {"engine.max_parallel": parallel, "engine.ttl": ttl}
    config = engine.config(env, flags, strict=True)  # a server runs exactly as configured, or not at all
    from localllm import server
    from localllm.cli.replicas import FleetLife, address_in, serve_replicas
    from localllm.cli.served_models import HubLibrary

    console = env.console
    alone = {"--ollama": ollama, "--pin": bool(pin), "--kv-events": bool(kv_events)}
    models, address = address_in(models or [], replicas, alone, ray=ray)
    keys = api_keys(env, config, api_key, api_key_file)
    token = secrets.token_urlsafe(24)  # authenticates the owner's own commands, see `processes.Running`
    prefixes = [read_text(path, "--pin-prefix") for path in pin_prefix or ()]
    prefixes += [preset.system for preset in config.presets.values() if preset.system]
    pins = [here(env, config, name) for name in pin or ()]
    choices = distinct([*(here(env, config, name) for name in models or ()), *pins])
    lowered = within_models(env, config, choices)
    config = config if ollama else lowered  # with --ollama, other models are served, too
    default, offers = offered(env, config, choices, alias or (), every=not models or ollama, may_be_none=ollama)
    named = tuple(dict.fromkeys(choice.shown for choice in choices))
    entries = tuple(read_servers(mcp)) if mcp is not None else ()
    options = server.ServeOptions(
        host=config.server.host,
        port=config.server.port,
        unix=unix,
        api_keys=keys,
        token=token,
        origins=config.server.cors,
        insecure=insecure,
        preload=named or ((default,) if preload else ()),
        log_format=log_format,
        ollama=OLLAMA if ollama else None,
        library=HubLibrary(config, offline=env.offline) if ollama else None,
        service=server.ServiceOptions(
            config.engine.max_parallel, max_queue, meant(config), entries, config.engine.adapter_paths, default
        ),
    )
    stays = bool(models) and ttl is None  # a named model stays loaded unless --ttl says otherwise
    pinned = named if stays else tuple(choice.shown for choice in pins)
    life = _ServerHooks(env, options, token, prefixes, kv_events)
    if address:
        fleet = FleetLife(life, env.console, choices[0].shown)
        run = partial(serve_replicas, config, options, choices[0], prefixes, fleet, (address, replicas or "1", alias))
    else:
        run = partial(server.serve, new_pool(env, config, offers, pinned, life, default), options, life)
    access = _log_requests(env)
    try:
        freed = run()
    except ServerError as error:
        if unix or f"port {options.port}:" not in error.message:
            raise
        raise taken_by(error, options.port, models) from None
    finally:
        logging.getLogger("localllm.access").removeHandler(access)
        life.end()
    console.say("stopped")
    if not freed:
        leave_now(0)
    return 0


def taken_by(error: ServerError, port: int, models: Sequence[str] = ()) -> ServerError:
    """Name the program that holds the port in the error. `models` are for the command that uses another port."""
    from localllm.device.host import port_holder
    from localllm.device.processes import running

    other = port + 1 if 1023 < port < 65535 else 8000
    again = (shlex.join(["localllm", "serve", *models, "--port", str(other)]), "use another port")
    ours = next((one for one in running() if one.url.endswith(f":{port}")), None)
    if ours is None:
        holder = port_holder(port)
        return ServerError(f"port {port} is taken by {clean_line(holder)}", again[0]) if holder else error
    who = "localllm" if ours.kind == "serve" else "a chat of localllm"
    what = f"{who} (pid {ours.pid}) serves {', '.join(ours.models) or 'no model yet'} there"
    fixes = [(f"localllm stop {port}", "stop it")] if ours.kind == "serve" else []
    fixes.append(again)
    return ServerError(f"port {port} is taken: {clean_line(what)}", fixes[0][0], fixes=fixes)


def here(env: Env, config: UserConfig, name: str) -> Choice:
    """Resolve a model on this machine; offer to download a missing one first."""
    resolved = resolve(env, config, name)
    if resolved.path is None:
        from localllm import hub
        from localllm.cli.loading import watched
        from localllm.device import machine
        from localllm.kernels.cpu.build import start_build

        agree(env, resolved, asked_for=True)
        if not machine().gpus:
            start_build()
        watched(
            env, clean_line(resolved.name), lambda tell, cancel: hub.download(resolved, progress=tell, cancel=cancel)
        )
        resolved = resolve(env, config, name)
    return choice_of(resolved)


def distinct(choices: Sequence[Choice]) -> list[Choice]:
    """Each model once. Raises ConfigError for two with one id, which requests could not tell apart."""
    found: dict[str, Choice] = {}
    for choice in choices:
        other = found.setdefault(choice.shown, choice)
        if other.name != choice.name:
            both = f"{clean_line(other.name)} and {clean_line(choice.name)}"
            raise ConfigError(f"{both} have the same id, {choice.shown}", "give one of the files another name")
    return list(found.values())


def offered(
    env: Env,
    config: UserConfig,
    choices: list[Choice],
    aliases: Sequence[str],
    *,
    every: bool = False,
    may_be_none: bool = False,
) -> tuple[str, Any]:
    """Return (the default model, a function that lists the offered models).

    every        also offer all local models, besides the named ones
    may_be_none  allow starting without a model: one can be pulled later
    """
    from localllm.cli.served_models import local_offers, named_offers
    from localllm.llm.local_models import default_model

    if not all(alias.strip() and alias.isprintable() for alias in aliases):
        raise ConfigError("--alias must be a name, not blank", "--alias gpt-4o-mini")
    if choices:
        fixed = named_offers(choices, aliases)
        names = {offer.name for offer in fixed}
        if taken := names.intersection(aliases) - {fixed[0].name}:
            raise ConfigError(f"--alias {min(taken)} is the id of another model of this server", "choose another alias")
        if not every:
            return fixed[0].name, lambda: fixed
        return fixed[0].name, lambda: [*fixed, *(offer for offer in local_offers() if offer.name not in names)]
    if aliases:
        raise ConfigError("--alias needs a model", f"localllm serve MODEL --alias {aliases[0]}")
    wanted = meant(config) or default_model(config.engine)
    known = local_offers()
    default = next((o.name for o in known if o.name == wanted), known[0].name if known else "")
    if not known and not may_be_none:
        raise ModelNotFound("no model is on this machine", "localllm serve smollm2 -y")
    return default, lambda: sorted(local_offers(), key=lambda offer: offer.name != default)


def meant(config: UserConfig) -> str:
    """The full name of the model in the settings; "" when unset or not on this machine."""
    from localllm.plan import fit
    from localllm.plan.planner import Planner

    if not config.model:
        return ""
    with suppress(LocalLLMError):
        return choice_of(fit.resolve(config.model, Planner.here(config.engine), offline=True, config=config)).shown
    return ""


def new_pool(
    env: Env, config: UserConfig, offers: Any, pinned: tuple[str, ...], life: _ServerHooks | None, adapted: str = ""
) -> ModelPool:
    """Make the pool that loads these models on demand with the command's options; `adapted` gets the adapters."""
    from localllm.cli.served_models import HubLoader
    from localllm.device import machine
    from localllm.server.pool import ModelPool
    from localllm.server.served_model import PoolOptions

    on_progress, on_loaded = (life.on_progress, life.on_loaded) if life is not None else (None, None)
    options = PoolOptions(config.engine.ttl_s or None, pinned, on_progress, on_loaded)
    return ModelPool(offers, HubLoader(config.engine, adapted), machine, options)


def _log_requests(env: Env) -> logging.Handler:
    """Write request log lines to stderr."""
    access = logging.getLogger("localllm.access")
    handler = logging.NullHandler() if env.console.quiet else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    return handler


def api_keys(env: Env, config: UserConfig, given: str | None = None, file: Path | None = None) -> tuple[str, ...]:
    """Return the keys, one of which clients must send: the given key, or those of the given or configured file."""
    file = file or (Path(config.server.api_key_file) if config.server.api_key_file else None)
    if given is not None:
        env.console.warn("every user of this machine can read --api-key in `ps`; prefer --api-key-file")
        keys = [given]
    elif file is not None:
        lines = [line.strip() for line in read_text(file, "--api-key-file").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"--api-key-file: {file} contains no keys", "write one key per line into it")
    else:
        return ()
    for key in keys:
        if len(key) < MIN_KEY or not key.isprintable():
            raise ConfigError(
                f"the API key has {len(key)} characters; it needs {MIN_KEY} or more, all printable", "make a longer one"
            )
    return tuple(keys)


class _ServerHooks:
    """Notices and records over the server's life (`server.run.Hooks`)."""

    def __init__(self, env: Env, options: Any, token: str, prefixes: list[str], kv_events: str | None = None) -> None:
        from localllm.server.kv_publisher import KVPublisher

        self._publisher = KVPublisher(kv_events, insecure=options.insecure) if kv_events else None
        self._env, self._console, self._options = env, env.console, options
        self._token, self._prefixes = token, prefixes
        self._record: Record | None = None
        self._phases: list[tuple[str, LoadProgress]] = []
        self._progress: Progress | None = None
        self._service: Service | None = None

    def on_progress(self, model: str, phase: LoadProgress) -> None:
        """Runs in the loading thread."""
        self._phases.append((model, phase))

    def on_loaded(self, offer: ServedModel, llm: LLM) -> None:
        """Runs in the loading thread: pin pages of system prompts, and prepare grammars before a request needs them."""
        from localllm.server.prefixes import pin_system_prompts

        if self._publisher is not None:
            self._publisher.attach(offer.name, llm)
        llm.output_rules.prepare()
        pin_system_prompts(llm, self._prefixes)

    def listening(self, url: str) -> None:
        from localllm.device.processes import Record

        self._record = Record("serve", url, self._token)
        if not self._options.preload:
            self._console.say(f"localllm {__version__}")
            apis = f"OpenAI  {url}/v1   Anthropic  {url}   Ollama  {url}"
            self._console.say(f"ready  {apis if url.startswith('http') else url}")
        if self._options.ollama:
            self._console.say("ready  Ollama  http://{}:{}   accepts pulls".format(*self._options.ollama))

    def ready(self, url: str, service: Service) -> None:
        self._close_progress()
        self._service = service
        console = self._console
        offered = [offer.name for offer in service.pool.models()]
        console.emit("serve/1", {"url": url, "pid": os.getpid(), "models": offered})
        if not self._options.preload:
            names = [clean_line(offer.name) for offer in service.pool.models()]
            console.say(
                f"  {counted(len(names), 'model')}, loaded on demand: {', '.join(names[:6])}{' …' if names[6:] else ''}"
            )
            return
        console.say(f"localllm {__version__}")
        for row in service.pool.loaded():
            if row.llm is not None:
                plan = row.llm.plan
                console.say(
                    f"ready  {clean_line(row.name)}  ctx {plan.ctx:,} × {plan.max_parallel}  {plan.device}"
                    f"  loaded in {seconds_short(row.llm.load_s)}"
                )
                console.paragraph(f"  {clean_line(row.llm.run_summary)}")
                for warning in row.llm.state().warnings:
                    console.warn(warning)
        offer = service.pool.models()[0]
        ids = ", ".join(clean_line(name) for name in (offer.name, *offer.aliases))
        if not url.startswith("http"):
            console.say(f"  OpenAI  curl --unix-socket {url.removeprefix('unix:')} http://localhost/v1/models")
        else:
            console.say(f"  OpenAI  {url}/v1      model id  {ids}")
            console.say(f"  try     curl {url}/v1/chat/completions -H 'content-type: application/json' \\")
            auth = '-H "authorization: Bearer $KEY" ' if self._options.api_keys else ""
            body = f'{{"model":"{offer.name}","messages":[{{"role":"user","content":"hi"}}]}}'
            console.say(f"            {auth}-d '{body}'")
            console.say("  apps    localllm connect opencode | open-webui | llm | aider | continue | zed | claude-code")

    def tick(self) -> None:
        """Show loading progress, and record the loaded models."""
        phases, self._phases = self._phases, []
        for model, phase in phases:
            if phase.name in ("ready", "failed"):
                self._close_progress()
                continue
            if self._progress is None:
                self._progress = self._env.progress(clean_line(model))
            self._progress.update(phase)
        if self._progress is not None:
            self._progress.tick()
        cut_log()
        if self._service is not None:
            self.note(tuple(row.name for row in self._service.pool.loaded()))

    def note(self, models: tuple[str, ...]) -> None:
        """Record the loaded models for `ps`."""
        if self._record is not None:
            self._record.update(models)

    def draining(self, running: int, again: bool) -> None:
        self._close_progress()
        if again:
            self._console.say("dropped the running requests")
            self.end()
        elif running:
            self._console.say(f"stopping: {counted(running, 'request')} running; press Ctrl+C again to drop them")

    def end(self) -> None:
        self._close_progress()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._record is not None:
            self._record.remove()
        if self._options.unix is not None:
            self._options.unix.unlink(missing_ok=True)

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
