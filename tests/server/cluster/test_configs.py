"""What `connect ray` prints is what Ray reads, and what the application takes; what it does not take is named."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import yaml

from localllm.cli.commands.connect import APPS, Server, snippet
from localllm.errors import ConfigError, ServerError

from .conftest import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray uses what others have deprecated
pytest.importorskip("ray", reason="ray is not installed: pip install -c constraints.txt -e '.[cluster]'")
SERVER = Server("http://127.0.0.1:8000", "qwen3-8b", 8192, True)


def test_ray_reads_what_connect_prints() -> None:
    from ray.serve.schema import ServeDeploySchema

    plain = yaml.safe_load(snippet(APPS["ray"], SERVER))
    service = yaml.safe_load(snippet(APPS["kuberay"], SERVER))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert set(service["spec"]) == {"serveConfigV2", "rayClusterConfig"}
    for config in (plain, yaml.safe_load(service["spec"]["serveConfigV2"])):
        (read,) = ServeDeploySchema.model_validate(config).applications
        assert (read.import_path, read.route_prefix) == ("localllm.server.cluster:app", "/")
    groups = [service["spec"]["rayClusterConfig"]["headGroupSpec"]]
    groups += service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {"keys", "models"}
        assert {volume["name"] for volume in group["template"]["spec"]["volumes"]} == {"keys", "models"}


def test_the_application_is_made_of_it() -> None:
    from localllm.server.cluster import app

    made = app(yaml.safe_load(snippet(APPS["ray"], SERVER))["applications"][0]["args"])
    door = made._bound_deployment
    assert door.name == "Door"
    replicas = door.init_args[0]._bound_deployment
    assert replicas.name == "Replica"
    assert replicas.ray_actor_options == {"num_cpus": 4.0, "num_gpus": 1.0}
    scaling = replicas._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 8)
    (options,) = replicas.init_args
    assert (options.model, options.engine.ctx, options.service.parallel) == ("qwen3-8b", 8192, 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"modle": "x"}, "there is no argument modle"),
        ({"model": ""}, "no model is named"),
        ({"engine": {"contex": 1}}, "engine has no setting contex"),
        ({"engine": {"kv": "int3"}}, "engine.kv"),
        ({"replicas": "4-1"}, "--replicas must be a number or a range, not '4-1'"),
        ({"replicas": 0}, "--replicas must be a number or a range, not '0'"),
        ({"gpus": "many"}, "not a number"),
        ({"insecure": False}, "no API key is set"),
        ({"cors": "*"}, "cors must be a list of origins"),
    ],
)
def test_what_it_does_not_take_is_named(wrong: dict[str, Any], said: str) -> None:
    from localllm.server.cluster import app

    with pytest.raises(ConfigError, match=said):
        app({"model": "smollm2", "insecure": True} | wrong)


def test_keys_that_cannot_be_read_end_the_door(tmp_path: Path) -> None:
    from localllm.server.cluster.deployment import _keys

    (tmp_path / "keys").write_text("# none\n")
    for path, said in (("nowhere", "cannot be read"), ("keys", "holds no keys")):
        with pytest.raises(ConfigError, match=said):
            _keys(str(tmp_path / path))
    (tmp_path / "keys").write_text("# clients\nthe-first-key\n")
    assert _keys(str(tmp_path / "keys")) == ("the-first-key",)


async def test_a_failed_stream_goes_on_with_the_next_sequence_number() -> None:
    """Text that looks like an event is not counted as one."""
    from localllm.server.cluster.door import _Answer, replica_lost
    from localllm.server.reply import named

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = _Answer({"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}, send)
    await answer._pass_on({"type": "http.response.start", "status": 200, "headers": []})
    events = [named(f"event-{i}", {"delta": "event: x\ndata: y", "sequence_number": i}) for i in range(3)]
    await answer._pass_on({"type": "http.response.body", "body": b"".join(events), "more_body": True})
    await answer.fail(replica_lost())
    assert b'"sequence_number":3' in sent[-1]["body"]


def test_a_cluster_that_is_not_there_is_named() -> None:
    """At once: Ray itself would try for many minutes."""
    from localllm.server.cluster.deployment import connect

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999"):
        with pytest.raises(ServerError, match=f"no Ray cluster answers at {address}"):
            connect(address)


def test_a_port_that_is_taken_is_named_before_ray_starts(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(tiny_models.tiny_gguf_bytes("Q8_0"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "localllm", "serve", str(tmp_path / "tiny.gguf"), "--ray", "--port", port]
        run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert run.returncode == 8 and f"port {port}" in run.stderr and "already in use" in run.stderr
    assert "starting" not in run.stderr
