"""`ls`, `show`, `rm`, `pull`, `plan` and `doctor` on real and broken files."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.checkpoint.packed_file import PackedWriter, packed_dir

from .conftest import LOCALLLM, Invoke, schema, valid

HUB_SERVER = Path(__file__).parents[1] / "hub/hub_server.py"


@pytest.fixture
def models(empty_home: Path, smollm2_path: Path) -> Path:
    """A home with one good model (by link) and one broken file."""
    folder = empty_home / "data/models"
    (folder / "smollm2").mkdir(parents=True)
    (folder / "smollm2" / smollm2_path.name).symlink_to(smollm2_path.resolve())
    (folder / "broken").mkdir()
    (folder / "broken/bad\x1b[2J.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    return folder


def test_ls_shows_what_runs_and_with_all_what_does_not(invoke: Invoke, models: Path) -> None:
    result = invoke("ls")
    assert "smollm2" in result.stdout and "broken" not in result.stdout
    assert "from the package index" in result.stdout
    assert "ls --all" in result.stderr and "free for downloads in" in result.stderr
    everything = invoke("ls", "--all")
    assert "broken" in everything.stdout
    assert "\x1b" not in everything.output


def test_ls_json(invoke: Invoke, models: Path) -> None:
    rows = valid(invoke("ls", "--all", "--json").stdout, "ls-1")["models"]
    assert {row["id"]: row["supported"] for row in rows}["smollm2"] is True
    assert any(row["broken"] and row["reason"] for row in rows)
    assert valid(invoke("ls", "--json").stdout, "ls-1")["models"][0]["path"].endswith(".gguf")
    few = {"LOCALLLM_ENGINE_CTX": "2048"}
    assert valid(invoke("ls", "--json", env=few).stdout, "ls-1")["models"][0]["fits"]["max_ctx"] == 8192
    assert "  8k  ✓ 8k " in invoke("ls", env=few).stdout


def test_a_log_that_cannot_be_written_is_said_at_once(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("ls", "--log-file", str(empty_home))
    assert result.exit_code == 2 and "--log-file: " in result.stderr and "Is a directory" in result.stderr
    assert invoke("ls", "--log-file", str(empty_home / "new/log")).exit_code == 0


def test_ls_without_models_is_a_success(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("ls")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "localllm pull smollm2" in result.stderr


def test_show(invoke: Invoke, models: Path, smollm2_path: Path) -> None:
    value = valid(invoke("show", "smollm2", "--json").stdout, "show-1")
    assert value["architecture"] == "llama" and value["template"] is True
    assert Path(value["path"]).name == smollm2_path.name
    text = invoke("show", str(smollm2_path)).stdout
    assert "Q4_1" in text and " at 8,192 tokens with 4 requests at once, " in text
    assert "<|im_start|>" in invoke("show", "smollm2", "--template").stdout


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, b"not a model at all" * 10])
def test_a_bad_file_exits_12(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    for words in (("show", str(bad)), ("show", str(bad), "--json")):
        result = invoke(*words)
        assert result.exit_code == 12
        assert "[E12" in result.stderr and "Traceback" not in result.stderr
    run = invoke("run", str(bad), "x", env={"LOCALLLM_ENGINE": None})
    assert run.exit_code == 12
    assert run.stdout == ""


def test_a_missing_file_or_name_exits_3(invoke: Invoke, empty_home: Path) -> None:
    for name in ("./no-such.gguf", "no-such-model-xyz"):
        assert invoke("show", name, "--offline").exit_code == 3
        result = invoke("run", name, "x", "--offline", env={"LOCALLLM_ENGINE": None})
        assert result.exit_code == 3
        assert "localllm" in result.stderr


def test_an_empty_name_does_not_mean_the_usual_model(invoke: Invoke, empty_home: Path) -> None:
    for words in (["run", "", "hi"], ["show", ""], ["plan", "smollm2", ""]):
        result = invoke(*words)
        assert result.exit_code == 2 and "the model name is empty" in result.stderr


def test_formats_that_are_none_are_refused_before_a_model_is_loaded(invoke: Invoke, models: Path) -> None:
    for option in ("--kv", "--quant"):
        result = invoke("eval", "smollm2", option, "auto,bogus")
        assert result.exit_code == 2 and result.stderr.startswith(f"error: {option} ") and "bogus" in result.stderr


def test_a_name_that_is_not_here_is_not_fetched_unasked(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("run", "smollm2", "x", "--offline", env={"LOCALLLM_ENGINE": None})
    assert result.exit_code == 3


def test_a_revision_that_a_model_does_not_have_is_an_error(invoke: Invoke, models: Path) -> None:
    assert invoke("show", "smollm2").exit_code == 0
    for command in ("show", "rm"):
        result = invoke(command, "smollm2@nosuchrev", "-y")
        assert result.exit_code == 3 and "smollm2@nosuchrev" in result.stderr and "  try   " in result.stderr
    assert (models / "smollm2").is_dir()


def test_rm_asks_and_without_a_terminal_exits_2(invoke: Invoke, models: Path) -> None:
    result = invoke("rm", "smollm2")
    assert result.exit_code == 2
    assert "-y" in result.stderr
    assert list((models / "smollm2").iterdir())
    dry = valid(invoke("rm", "smollm2", "-n", "--json").stdout, "rm-1")
    assert dry["removed"] is False and dry["paths"]
    assert list((models / "smollm2").iterdir())


def test_rm_removes_the_link_and_not_what_it_points_to(invoke: Invoke, models: Path, smollm2_path: Path) -> None:
    assert valid(invoke("rm", "smollm2", "-y", "--json").stdout, "rm-1")["removed"] is True
    assert not (models / "smollm2").exists()
    assert smollm2_path.exists()
    assert invoke("rm", "smollm2", "-y").exit_code == 3


def test_rm_takes_names_or_partial(invoke: Invoke, empty_home: Path) -> None:
    assert invoke("rm").exit_code == 2
    assert invoke("rm", "x", "--partial").exit_code == 2
    assert invoke("rm", "--partial").exit_code == 0


def test_rm_clears_what_is_kept_of_conversations(invoke: Invoke, empty_home: Path) -> None:
    assert invoke("rm", "--kv-store", "--partial").exit_code == 2
    folder = empty_home / "cache/kv" / ("0" * 32)
    folder.mkdir(parents=True)
    (folder / f"{'1' * 32}-{'2' * 32}.page").write_bytes(bytes(5000))
    assert valid(invoke("ps", "--json").stdout, "ps-1")["kv_store_bytes"] == 5000
    assert valid(invoke("rm", "--kv-store", "-n", "--json").stdout, "rm-1")["bytes"] == 5000
    done = valid(invoke("rm", "--kv-store", "-y", "--json").stdout, "rm-1")
    assert done["removed"] and not folder.exists()
    assert invoke("rm", "--kv-store").exit_code == 0


def test_rm_takes_the_repacked_weights_of_a_model_along(invoke: Invoke, models: Path) -> None:
    assert invoke("rm", "--packed", "--partial").exit_code == 2
    (source,) = (models / "smollm2").glob("*.gguf")
    folder = packed_dir()
    for name, files in (("own", [str(source)]), ("other", [__file__])):
        writer = PackedWriter(folder / f"{name}.packed", 1, 1 << 30)
        writer.append(memoryview(bytes(64)))
        writer.finish({"files": files})
    listed = valid(invoke("ls", "--json").stdout, "ls-1")
    assert listed["packed_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert "localllm rm --packed" in invoke("ls").stderr
    dry = valid(invoke("rm", "smollm2", "-n", "--json").stdout, "rm-1")
    assert [path for path in dry["paths"] if "own.packed" in path]
    assert invoke("rm", "smollm2", "-y").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["other.packed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localllm.checkpoint.packed_file.remove", lambda path: False)
        kept = invoke("rm", "--packed", "-y")
    assert kept.exit_code == 2 and "1 file could not be removed, such as" in kept.stderr
    assert invoke("rm", "--packed", "-y").exit_code == 0
    assert not list(folder.iterdir()) and "--packed" not in invoke("ls").stderr


def test_plan(invoke: Invoke, models: Path) -> None:
    assert "smollm2" in invoke("plan").stdout
    result = invoke("plan", "smollm2", "--ctx", "512,8k", "--json", env={"LOCALLLM_FAKE_HW": "cpu"})
    rows = valid(result.stdout, "plan-1")["rows"]
    assert [row["ctx"] for row in rows] == [512, 8192]
    assert all(sum(row["parts"].values()) == row["need_bytes"] for row in rows)
    assert invoke("plan", "smollm2", "--ctx", "lots").exit_code == 2


def test_doctor(invoke: Invoke, empty_home: Path) -> None:
    result = invoke("doctor", "--json", env={"LOCALLLM_FAKE_HW": "rtx4090"})
    value = valid(result.stdout, "doctor-1")
    assert all(check["fix"] for check in value["checks"] if check["status"] in ("warn", "fail"))
    assert result.exit_code == (11 if value["summary"]["fail"] else 0)
    assert "gpu.present" in invoke("doctor", "--list").stdout
    assert invoke("doctor", "--only", "no.such").exit_code == 2
    text = invoke("doctor", "--only", "ram").stdout
    assert "ram" in text and "1 check:" in text


# --- pull, from a hub of our own -------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> Iterator[str]:
    """A hub with one small GGUF model, as HF_ENDPOINT. The model is a real header with its first megabytes."""
    folder = tmp_path / "hub"
    repo = folder / "org/tiny-GGUF"
    repo.mkdir(parents=True)
    os.link(smollm2_path.resolve(), repo / "tiny.Q4_1.gguf") if _same_disk(smollm2_path, repo) else (
        repo / "tiny.Q4_1.gguf"
    ).write_bytes(smollm2_path.read_bytes())
    child = subprocess.Popen([sys.executable, "-P", str(HUB_SERVER), str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    url = f"http://127.0.0.1:{int(child.stdout.readline())}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    yield url
    child.kill()
    child.wait()
    child.stdout.close()


def _same_disk(one: Path, other: Path) -> bool:
    return one.resolve().stat().st_dev == other.stat().st_dev


def _fault(url: str, **fault: Any) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{url}/__fault", json.dumps(fault).encode(), timeout=10) as answer:
        answer.read()


NAME = "org/tiny-GGUF:Q4_1"


def test_pull_asks_lists_downloads_and_says_what_is_next(invoke: Invoke, hub: str) -> None:
    refused = invoke("pull", NAME)
    assert refused.exit_code == 2
    assert "pass -y" in refused.stderr
    dry = valid(invoke("pull", NAME, "-n", "--json").stdout, "pull-1")
    assert dry["files"][0]["will_download"] is True and dry["path"] is None
    result = invoke("pull", NAME, "-y", "--json", "--progress", "json")
    value = valid(result.stdout, "pull-1")
    assert Path(value["path"]).is_file() and value["fits"] is True
    events = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    done = [event["done"] for event in events if event["event"] == "download"]
    assert done == sorted(done)
    assert "Next: localllm chat" in result.stderr
    assert invoke("pull", f"{NAME}@main").exit_code == 0, "asked for again, and nothing is left to agree to"
    again = invoke("pull", NAME)
    assert again.exit_code == 0
    assert "already here" in again.stderr
    elsewhere = invoke("pull", NAME, "--device", "cuda:99", "--json")  # a card that is not there is no matter of files
    assert elsewhere.exit_code == 0 and valid(elsewhere.stdout, "pull-1")["fits"] is None
    assert "1 file checked, all intact" in invoke("pull", NAME, "--repair").stderr
    assert "org/tiny-GGUF" in invoke("ls").stdout
    assert "cuda:99 not found" in invoke("ls", "--device", "cuda:99", "--json").stdout
    assert invoke("rm", NAME, "-y").exit_code == 0
    assert "org/tiny" not in invoke("ls").stdout


@pytest.mark.slow
def test_pull_takes_only_the_files_that_are_wanted(invoke: Invoke, hub: str, empty_home: Path) -> None:
    (empty_home / "hub/org/tiny-GGUF/LICENSE").write_text("as is")
    whole = valid(invoke("pull", NAME, "-n", "--json").stdout, "pull-1")
    assert sorted(f["name"] for f in whole["files"]) == ["LICENSE", "tiny.Q4_1.gguf"]
    weights = next(f["size"] for f in whole["files"] if f["name"] == "tiny.Q4_1.gguf")
    for words in (("--exclude", "LICEN*"), ("--include", "*.gguf", "--max-workers", "1")):
        less = valid(invoke("pull", NAME, "-n", "--json", *words).stdout, "pull-1")
        assert [f["name"] for f in less["files"]] == ["tiny.Q4_1.gguf"]
        assert less["bytes"] == less["download_bytes"] == weights
    nothing = invoke("pull", NAME, "-n", "--exclude", "*.gguf")
    assert nothing.exit_code == 2 and "tiny.Q4_1.gguf" in nothing.stderr
    assert invoke("pull", NAME, "-y", "--exclude", "LICEN*", "--max-workers", "1").exit_code == 0
    assert "org/tiny-GGUF" in invoke("ls").stdout


def test_pull_codes(invoke: Invoke, hub: str) -> None:
    assert invoke("pull", "org/none", "-y").exit_code == 3
    assert invoke("pull", "org/tiny-GGUF:Q8_0", "-y").exit_code == 3
    assert invoke("pull", NAME, "-y", "--offline").exit_code == 3
    assert invoke("pull", NAME, "--quant", "Q8_0").exit_code == 2
    assert invoke("pull", NAME, "--repair", "-n").exit_code == 2
    _fault(hub, mode="gated")
    assert invoke("pull", NAME, "-y").exit_code == 4


def test_ctrl_c_pauses_and_the_same_command_resumes(hub: str) -> None:
    _fault(hub, mode="slow", delay=0.02)
    env = dict(os.environ)
    child = subprocess.Popen(
        [*LOCALLLM, "pull", NAME, "-y", "--progress", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, env=env, text=True,
    )  # fmt: skip
    assert child.stderr
    for line in child.stderr:
        if line.startswith("{") and json.loads(line).get("done", 0) > 3_000_000:
            break
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert time.monotonic() - start < 5
    assert child.returncode == 130
    assert "run the same command to resume" in errors
    paused = next(json.loads(line) for line in errors.splitlines() if '"paused"' in line)
    _fault(hub, mode="")
    run = subprocess.run(
        [*LOCALLLM, "pull", NAME, "-y", "--progress", "json"], capture_output=True, text=True, timeout=60, env=env
    )
    assert run.returncode == 0, run.stderr
    events = [json.loads(line) for line in run.stderr.splitlines() if line.startswith("{")]
    first = next(event["done"] for event in events if event["event"] == "download")
    assert first >= paused["done"] * 0.9


def test_events_of_a_pull_fit_the_schema() -> None:
    kinds = [one["properties"].get("event", {}) for one in schema("events-1")["$defs"].values()]
    assert {"download", "paused", "load", "ready", "token", "done"} <= {kind.get("const") for kind in kinds}


# --- serve, where the port is taken ----------------------------------------------------------------------------------


def test_serve_refuses_an_address_beside_a_socket_file(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    result = invoke("serve", "smollm2", "--unix", "/tmp/x", "--port", "8001")
    assert result.exit_code == 2 and "--unix listens on a socket file" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cors", "*"), "--cors must be a list of origins"),
        (("--alias", ""), "--alias must be a name, not blank"),
        (("other/model.gguf", "--alias", "model.gguf"), "--alias model.gguf is the id of another model"),
        (("some/model.gguf", "other/model.gguf"), "have the same id, model.gguf"),
        (("some/model.gguf", "--pin", "other/model.gguf"), "have the same id, model.gguf"),
    ],
)
def test_serve_refuses_ids_and_origins_that_no_request_has(
    invoke: Invoke, models: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    monkeypatch.chdir(models)
    for folder in ("some", "other"):
        Path(folder).mkdir()
        Path(folder, "model.gguf").symlink_to(smollm2_path.resolve())
    result = invoke("serve", "smollm2", *words)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


def test_a_model_named_twice_is_served_once() -> None:
    from localllm.cli.commands.serve import distinct
    from localllm.cli.names import Choice

    one, two = Choice("org/a", "a"), Choice("org/b", "b")
    assert distinct([one, two, one]) == [one, two]


def test_serve_prints_json_when_it_is_ready() -> None:
    from localllm.cli.commands.serve import _ServerHooks
    from localllm.cli.frame.console import Console

    out = io.StringIO()
    env: Any = SimpleNamespace(console=Console(as_json=True, quiet=True, stdout=out))
    options: Any = SimpleNamespace(insecure=False, preload=(), ollama=None)
    offers = [SimpleNamespace(name="smollm2"), SimpleNamespace(name="org/b:Q4_0")]
    service: Any = SimpleNamespace(pool=SimpleNamespace(models=lambda: offers))
    _ServerHooks(env, options, "", []).ready("http://127.0.0.1:8000", service)
    told = valid(out.getvalue(), "serve-1")
    assert (told["url"], told["pid"]) == ("http://127.0.0.1:8000", os.getpid())
    assert told["models"] == ["smollm2", "org/b:Q4_0"]


def test_names_and_remains_are_removed_separately(invoke: Invoke, models: Path) -> None:
    result = invoke("rm", "smollm2", "--partial")
    assert result.exit_code == 2 and "model names and --partial cannot be combined" in result.stderr


def test_a_port_that_is_taken_exits_8_and_names_a_server_of_ours(
    invoke: Invoke, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from localllm.device.processes import Record

    monkeypatch.delenv("LOCALLLM_ENGINE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(models.parent / "run"))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        stranger = invoke("serve", "smollm2", "--port", port)
        assert stranger.exit_code == 8 and "[E801]" in stranger.stderr
        assert re.search(rf"port {port} is taken by .* \(pid {os.getpid()}\)", stranger.stderr)
        assert f"localllm serve smollm2 --port {int(port) + 1}" in stranger.stderr
        record = Record("serve", f"http://127.0.0.1:{port}")
        record.update(("smollm2",))
        ours = invoke("serve", "smollm2", "--port", port, "--json")
        record.remove()
        assert ours.exit_code == 8
        assert f"localllm (pid {os.getpid()}) serves smollm2 there" in ours.stderr
        error = valid(ours.stdout, "error-1")["error"]
        assert [fix["cmd"] for fix in error["fixes"]] == [
            f"localllm stop {port}", f"localllm serve smollm2 --port {int(port) + 1}"
        ]  # fmt: skip


def test_models_of_other_programs_are_listed_and_kept(
    invoke: Invoke, empty_home: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    digest = hashlib.sha256(tiny_path.read_bytes()).hexdigest()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    blob = empty_home / "ollama/blobs" / f"sha256-{digest}"
    manifest = empty_home / "ollama/manifests/registry.ollama.ai/library/tiny/3b"
    for path, content in ((blob, tiny_path.read_bytes()), (manifest, json.dumps({"layers": [layer]}).encode())):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    monkeypatch.setenv("OLLAMA_MODELS", str(empty_home / "ollama"))
    monkeypatch.setenv("HOME", str(empty_home))
    monkeypatch.setenv("LOCALLLM_STORES", "auto")
    line = next(one for one in invoke("ls").stdout.splitlines() if "ollama/tiny:3b" in one)
    assert "Ollama" in line and "✓" in line
    (row,) = valid(invoke("ls", "--json").stdout, "ls-1")["models"]
    assert (row["source"], row["format"], row["path"]) == ("ollama", "gguf", str(blob))
    assert valid(invoke("show", "tiny:3b", "--json").stdout, "show-1")["id"] == "ollama/tiny:3b"
    assert valid(invoke("pull", "tiny:3b", "--json").stdout, "pull-1")["source"] == "foreign"
    assert "ollama/tiny:3b" in invoke("plan").stdout
    refused = invoke("rm", "tiny:3b", "-y")
    assert refused.exit_code == 2 and "ollama rm tiny:3b" in refused.stderr
    assert blob.exists() and manifest.exists()
