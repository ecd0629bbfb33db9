"""Replicas as a Ray Serve application: their number, resources, scaling, start and stop."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from localllm.config import KEYS, EngineOptions
from localllm.errors import ConfigError, ServerError
from localllm.request import extra_hint
from localllm.server.middleware import AppOptions
from localllm.server.service import ServiceOptions

# Ray reads this on import. Its own signal handler would abort the process 3 seconds after a signal.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
try:
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
except ImportError as error:
    raise ConfigError("replicas need Ray Serve, which is not installed", extra_hint("cluster")) from error

from .door import Door
from .replica import Replica, ReplicaOptions

NAME = "localllm"  # name of the application
SPARE_CALLS = 64  # concurrent requests per replica besides generation: models, tokenization, metrics
DRAIN_S = 600  # time for the running responses of a replica that is replaced or scaled down
START_TRIES = 3  # Ray gives up if it takes more than 30 seconds to start on a busy machine
LOADS = 2  # attempts to load a model before a replica fails
LOCAL = "local"
REACH_S = 10.0  # timeout for connecting to another machine
OBJECT_BYTES = 256 << 20  # object store for request bodies above 100 kB in transit


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The number of replicas, and the resources of each."""

    least: int = 1
    most: int = 1
    gpus: float = 0
    cpus: float = 1
    scale_up_s: float = 10  # a replica is added after more requests than all can run concurrently for this long
    scale_down_s: float = 300  # and one is removed after it was not needed for this long


def replicas_of(text: str) -> tuple[int, int]:
    """Parse `2` or `1-4` into (least, most). Raises ConfigError."""
    least, dash, most = text.partition("-")
    try:
        low, high = int(least), int(most if dash else least)
    except ValueError:
        low = high = 0
    if not 1 <= low <= high <= 1000:
        raise ConfigError(f"--replicas must be a number or a range, not {text!r}", "--replicas 2, or --replicas 1-4")
    return low, high


def deployment(options: ReplicaOptions, fleet: FleetOptions) -> Any:
    """Build the deployment of replicas with these options."""
    parallel = options.service.parallel
    scaling: dict[str, Any] = {"num_replicas": fleet.least}
    if fleet.most > fleet.least:
        scaling = {
            "num_replicas": None,
            "autoscaling_config": AutoscalingConfig(
                min_replicas=fleet.least, max_replicas=fleet.most, target_ongoing_requests=parallel,
                upscale_delay_s=fleet.scale_up_s, downscale_delay_s=fleet.scale_down_s,
                look_back_period_s=max(2.0, min(30.0, fleet.scale_up_s)),
            ),
        }  # fmt: skip
    router = RequestRouterConfig(
        request_router_class="localllm.server.cluster.router.AffinityRouter", request_router_kwargs={"spare": parallel}
    )
    return serve.deployment(Replica).options(
        name="Replica", max_ongoing_requests=parallel + options.service.max_queue + SPARE_CALLS,
        ray_actor_options={"num_cpus": fleet.cpus, "num_gpus": fleet.gpus}, request_router_config=router,
        graceful_shutdown_timeout_s=DRAIN_S, graceful_shutdown_wait_loop_s=1, max_constructor_retry_count=LOADS,
        **scaling,
    ).bind(options)  # fmt: skip


# --- for `localllm serve --ray` ---------------------------------------------------------------------------------------


def connect(address: str) -> str:
    """Connect to the Ray cluster at `address`, or start one here for `local`; returns its address.

    Raises ServerError if that fails.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 gives replicas only the CPU time left over
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Ray writes the rest to its own logs
    shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAME}
    if address != LOCAL:
        hint = "run ray status there; set RAY_AUTH_MODE=token if the cluster requires a token"
        _reach(address, hint)
        try:
            return str(ray.init(address=address, **shared).address_info["gcs_address"])
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ServerError(f"cannot connect to the Ray cluster at {address}", hint) from error
    for left in range(START_TRIES, 0, -1):
        try:
            context = ray.init(
                address=LOCAL, _node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=os.cpu_count(),
                object_store_memory=OBJECT_BYTES, **shared,
            )  # fmt: skip
            return str(context.address_info["gcs_address"])
        except Exception as error:
            ray.shutdown()
            if left == 1:
                raise ServerError(f"could not start Ray: {error}", "see its logs under /tmp/ray") from error
    raise AssertionError


def _reach(address: str, hint: str) -> None:
    """Raise ServerError if nothing listens at HOST:PORT; Ray itself would retry for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:  # `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ServerError(f"no Ray cluster answers at {address}: {error}", hint) from error


def share_of(fleet: FleetOptions, engine: EngineOptions, *, is_local: bool) -> tuple[FleetOptions, EngineOptions]:
    """Choose the resources of each replica, a GPU if the cluster has any, else its share of cores, and its threads."""
    resources = ray.cluster_resources()
    if engine.device != "cpu" and resources.get("GPU"):
        return replace(fleet, gpus=1), engine
    cores = resources.get("CPU", 1) / fleet.most
    if is_local and engine.threads == "auto":
        engine = replace(engine, threads=max(1, int(cores)))
    return replace(fleet, cpus=int(cores) if cores >= 1 else round(cores, 3)), engine


def deploy(options: ReplicaOptions, fleet: FleetOptions) -> Any:
    """Start the replicas, or replace running ones one by one; returns a streaming handle.

    Raises ServerError with the cause if they cannot start.
    """
    try:
        handle = serve.run(deployment(options, fleet), name=NAME, route_prefix=None)
        return handle.options(stream=True)  # from now on, its router is told about the replicas
    except RuntimeError as error:
        application = serve.status().applications.get(NAME)
        causes = [one.message for one in application.deployments.values()] if application is not None else []
        raise ServerError(f"the replicas could not start: {_cause(' '.join(causes) or str(error))}") from error


def _cause(text: str) -> str:
    """Return the last line of a traceback."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "unknown cause")


def is_deployed() -> bool:
    """Whether the application is already deployed. Starts Ray Serve if it is not running."""
    serve.start(proxy_location="Disabled")
    return NAME in serve.status().applications


def leave(*, ends_replicas: bool) -> None:
    """Disconnect from the cluster; one that was started here stops."""
    if ends_replicas:
        serve.delete(NAME, _blocking=False)
    ray.shutdown()


# --- for `serve run localllm.server.cluster:app` and Serve's own config files ------------------------------------

ARGS = (
    "model",
    "names",
    "replicas",
    "gpus",
    "cpus",
    "parallel",
    "max_queue",
    "api_key_file",
    "insecure",
    "cors",
    "engine",
)


def application(args: Mapping[str, Any]) -> Any:
    """Build the door and the replicas behind Ray's own proxy. Raises ConfigError for unknown or invalid arguments."""
    if unknown := sorted(set(args) - set(ARGS)):
        raise ConfigError(f"there is no argument {unknown[0]}", f"use {', '.join(ARGS)}")
    if not args.get("model"):
        raise ConfigError("no model is named", "args: {model: qwen3-8b}")
    engine = dict(args.get("engine") or {})
    if unknown := sorted(set(engine) - {field.name for field in fields(EngineOptions)}):
        raise ConfigError(f"engine has no setting {unknown[0]}", "docs/configuration.md lists them")
    if not args.get("api_key_file") and args.get("insecure") is not True:
        raise ConfigError(
            "the cluster's proxy can be reached from the network, and no API key is set",
            "api_key_file: /etc/localllm/keys, or insecure: true if you mean it",
        )
    least, most = replicas_of(str(args.get("replicas", 1)))
    try:
        engine["max_parallel"] = int(args.get("parallel", EngineOptions().max_parallel))
        queue = int(args.get("max_queue", ServiceOptions().max_queue))
        fleet = FleetOptions(least, most, float(args.get("gpus", 0)), float(args.get("cpus", 1)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"an argument is not a number: {error}", "parallel: 4") from None
    options = EngineOptions(**engine)
    service = ServiceOptions(options.max_parallel, queue, adapters=options.adapter_paths)
    names = tuple(args.get("names") or ())
    replicas = deployment(ReplicaOptions(str(args["model"]), names, options, service), fleet)
    origins = KEYS["server.cors"].parse(args.get("cors") or (), "argument")
    entry: Any = _Ingress  # a deployment, thanks to Ray's decorators
    return entry.bind(replicas, args.get("api_key_file"), origins)


def _keys(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file: {path} cannot be read: {error.strerror}", "mount the secret there") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file: {path} holds no keys", "write one key per line into it")
    return keys


@serve.deployment(name="Door", max_ongoing_requests=2048, graceful_shutdown_timeout_s=DRAIN_S)
@serve.ingress()
class _Ingress:
    """The door behind Ray's proxy."""

    def __init__(self, handle: Any, api_key_file: str | None, origins: tuple[str, ...]) -> None:
        self._door = Door(AppOptions(loopback=False, api_keys=_keys(api_key_file), origins=origins))
        self._door.handle = handle.options(stream=True)

    def __serve_build_asgi_app__(self) -> Any:
        return self._door.app
