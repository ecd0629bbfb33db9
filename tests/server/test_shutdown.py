"""How a server ends, and what the commands see of it; ps, stop."""

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from localllm.server.run import drain

from .conftest import CHAT, Served, ask, events, live_server

COMMAND = [sys.executable, "-c", "from localllm.cli import main; main()"]


def command(served, *words):
    """(exit status, stdout, stderr) of a command in the home of a server, in this process."""
    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    try:
        result = CliRunner().invoke(app, list(words), env={"LOCALLLM_HOME": str(served.home), "COLUMNS": "200"})
    finally:
        logs.stop()
    return result.exit_code, result.stdout, result.stderr


def post(served, **fields):
    headers = {"authorization": f"Bearer {served.KEY}"}
    return httpx.post(served.url + CHAT, json=ask(**fields), headers=headers, timeout=60)


def gone(served, children):
    """Nothing is left: no process, no file, and the port can be bound at once."""
    _, left = psutil.wait_procs(children, 5)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in left)
    assert list((served.home / "run").glob("*")) == []
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", served.port))


class Streams(threading.Thread):
    """A few streams, begun before something happens to the server."""

    def __init__(self, served, count=8, max_tokens=200):
        super().__init__()
        self.served, self.count, self.max_tokens = served, count, max_tokens
        self.texts = []
        self.begun = threading.Semaphore(0)
        self.start()
        for _ in range(count):
            assert self.begun.acquire(timeout=20)

    def run(self):
        def one():
            headers = {"authorization": f"Bearer {self.served.KEY}"}
            sent = ask(stream=True, max_tokens=self.max_tokens, ignore_eos=True)
            with httpx.stream("POST", self.served.url + CHAT, json=sent, headers=headers, timeout=60) as response:
                parts = response.iter_text()
                text = next(parts)
                self.begun.release()
                with contextlib.suppress(httpx.TransportError):  # cut: not in the list
                    self.texts.append(text + "".join(parts))

        threads = [threading.Thread(target=one) for _ in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)


def test_a_busy_server_drains(tiny_path, tmp_path):
    """`stop`: streams end regularly, new requests get 503, the status is 0, nothing is left behind."""
    served = Served(tiny_path, tmp_path).wait()
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert command(served, "ps")[1].count("serve") == 1
    streams = Streams(served)
    served.process.send_signal(signal.SIGTERM)
    refused = []
    while served.process.poll() is None:
        try:
            response = post(served)
        except httpx.TransportError:
            break
        if response.status_code != 200:
            refused.append((response.status_code, response.json()["error"]["code"], "retry-after" in response.headers))
            break
    assert served.process.wait(40) == 0
    streams.join(60)
    assert len(streams.texts) == 8
    for text in streams.texts:
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert set(refused) <= {(503, "shutting_down", True)}
    gone(served, children)
    assert "CANARY" not in served.log.read_text()


@pytest.mark.parametrize("stream", [True, False])
def test_what_still_waits_when_the_time_is_over_is_refused(pool, tiny_llm, monkeypatch, stream):
    """The server's last moment: what runs ends regularly, what waits for its turn gets 503, nothing breaks off."""
    monkeypatch.setattr(tiny_llm.engine.stepper, "fault", lambda step: time.sleep(0.02))  # 4 s an answer
    with live_server(pool, parallel=1) as live, ThreadPoolExecutor(6) as threads:
        sent = ask(stream=stream, max_tokens=200, ignore_eos=True)
        asked = [threads.submit(httpx.post, live.url + CHAT, json=sent, timeout=30) for _ in range(6)]
        deadline = time.monotonic() + 10
        while live.service.num_reserved < 6 or tiny_llm.stats().num_running < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        asyncio.run_coroutine_threadsafe(drain(live.service, live.server, 0.0), live.loop).result(20)
        answers = [one.result(20) for one in asked]
    cut = [one for one in answers if one.status_code == 200]
    ends = [events(one.text)[-1] if stream else one.json() for one in cut]
    reasons = [(choice["finish_reason"], choice["stop_reason"]) for one in ends for choice in one["choices"]]
    assert reasons == [("length", "shutdown")] * 2
    refused = [one for one in answers if one.status_code != 200]
    assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(503, "shutting_down")] * 4


@pytest.mark.parametrize("stream", [True, False])
def test_what_an_engine_that_hangs_does_not_end_ends_in_an_error(pool, tiny_llm, monkeypatch, stream):
    gate, hung = threading.Event(), threading.Event()
    monkeypatch.setattr("localllm.server.service.CUT_WAIT_S", 0.2)
    monkeypatch.setattr(tiny_llm.engine.stepper, "fault", lambda step: hung.set() or gate.wait(60))
    with contextlib.ExitStack() as stack:
        stack.callback(gate.set)
        live, threads = stack.enter_context(live_server(pool, parallel=1)), stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(gate.set)
        asked = threads.submit(httpx.post, live.url + CHAT, json=ask(stream=stream), timeout=30)
        assert hung.wait(20)
        asyncio.run_coroutine_threadsafe(drain(live.service, live.server, 0.0), live.loop).result(20)
        answer = asked.result(20)
    said = events(answer.text)[-1] if stream and answer.status_code == 200 else answer.json()
    assert said["error"]["code"] == "engine_dead" and "did not end the request" in said["error"]["message"]


def test_ps_shows_what_is_loaded(served):
    code, out, _ = command(served, "ps", "--json")
    (row,) = json.loads(out)["processes"]
    assert code == 0 and row["url"] == served.url
    assert (row["model"], row["state"], row["ctx"], row["parallel"]) == ("tiny.gguf", "ready", 256, 8)
    assert "tiny.gguf" in command(served, "ps")[1]


def test_stop_names_what_is_not_there(served):
    code, _, err = command(served, "stop", "1")
    assert code == 8 and "no server has port" in err
    code, _, err = command(served, "stop", "nosuch")
    assert code == 8 and "loaded" in err


def test_connect_knows_the_server_that_runs(served):
    code, out, err = command(served, "connect", "opencode")
    settings = json.loads(out)
    assert code == 0 and "opencode.json" in err
    assert settings["provider"]["localllm"]["options"] == {"baseURL": f"{served.url}/v1", "apiKey": "YOUR-KEY"}
    assert settings["model"] == "localllm/tiny.gguf"
    assert served.KEY not in out + err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_server_ends_at_once(tiny_path, tmp_path, number):
    for _ in range(3):
        served = Served(tiny_path, tmp_path).wait()
        children = psutil.Process(served.process.pid).children(recursive=True)
        post(served)
        with served_connection(served):  # an idle connection does not hold it up
            code, seconds = served.stop(number)
        assert code == 0 and seconds < 20  # ten times the line
        gone(served, children)


def served_connection(served):
    return socket.create_connection(("127.0.0.1", served.port))


@pytest.mark.slow
def test_a_second_signal_drops_what_runs(tiny_path, tmp_path):
    served = Served(tiny_path, tmp_path).wait()
    children = psutil.Process(served.process.pid).children(recursive=True)
    streams = Streams(served)
    served.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    if served.process.poll() is None:
        code, seconds = served.stop(signal.SIGINT)
        assert code in (0, 130) and seconds < 10
    streams.join(30)
    gone(served, children)


@pytest.mark.slow
def test_ended_while_it_loads(smollm2_path, tmp_path):
    for wait in (0.0, 0.3, 1.0):
        served = Served(smollm2_path, tmp_path)
        deadline = time.monotonic() + 60
        while not served.record() and time.monotonic() < deadline:
            time.sleep(0.02)
        served.port = int(served.record()["url"].rsplit(":", 1)[1])
        time.sleep(wait)
        code, seconds = served.stop()
        assert code == 0 and seconds < 20, served.log.read_text()
        gone(served, [])


@contextlib.contextmanager
def slow_hub(folder):
    """A hub with one model, of which 64 KiB come every half second; what asks it."""
    import tiny_models

    repo = folder / "hub/org/tiny-GGUF"
    repo.mkdir(parents=True)
    tiny_models.tiny_gguf(repo / "tiny.Q8_0.gguf", "Q8_0", layers=20)  # 0.8 MB
    words = [sys.executable, "-P", str(Path(__file__).parents[1] / "hub/hub_server.py"), str(folder / "hub")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        try:
            url = f"http://127.0.0.1:{int(child.stdout.readline())}"

            def asked(route, sent=None):
                return (httpx.post(url + route, json=sent) if sent else httpx.get(url + route)).json()

            asked("/__fault", {"mode": "slow", "delay": 0.5, "path": ".*gguf"})
            yield url, asked
        finally:
            child.kill()


@pytest.mark.slow
def test_ended_while_it_downloads(tmp_path):
    """By each signal in turn; every download goes on where the one before was ended, and the last one serves."""
    with slow_hub(tmp_path) as (url, asked):
        home = {"LOCALLLM_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": url}
        words = [*COMMAND, "--yes", "serve", "org/tiny-GGUF", "--port", "0", "--threads", "1"]

        def begin():
            return subprocess.Popen(words, env=dict(os.environ) | home, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True)  # fmt: skip

        def received():
            return sum(path.stat().st_size for path in (tmp_path / "hf").rglob("*.localllm-partial"))

        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)):
            before = received()
            process = begin()
            deadline = time.monotonic() + 60
            while received() <= before and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            started = time.monotonic()
            process.send_signal(number)
            said, _ = process.communicate(timeout=20)
            assert process.returncode == code, said
            assert time.monotonic() - started < 20  # ten times the line
            assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
            assert "Traceback" not in said and not (tmp_path / "home/run").exists()
            assert received() > before
        kept = received()
        asked("/__fault", {"mode": "", "forget": True})
        process = begin()
        run, deadline = tmp_path / "home/run", time.monotonic() + 60
        while not list(run.glob("serve-*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=40)
        assert process.returncode == 0, said
        size = (tmp_path / "hub/org/tiny-GGUF/tiny.Q8_0.gguf").stat().st_size
        sent = sum(row[4] for row in asked("/__log") if "/resolve/" in row[1])
        assert sent <= size - kept + 4096 and received() == 0


@pytest.mark.slow
def test_fifty_ends(tiny_path, tmp_path):
    """Idle or busy, by one signal or two: nothing is ever left behind."""
    draw = random.Random(11)
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        served = Served(tiny_path, folder).wait()
        children = psutil.Process(served.process.pid).children(recursive=True)
        streams = Streams(served) if draw.random() < 0.7 else None
        served.process.send_signal(draw.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        if draw.random() < 0.3:
            time.sleep(draw.random() * 0.2)
            with contextlib.suppress(ProcessLookupError):
                served.process.send_signal(signal.SIGINT)
        assert served.process.wait(40) in (0, 130), served.log.read_text()
        if streams is not None:
            streams.join(60)
            assert not streams.is_alive()
        psutil.wait_procs(children, 5)  # those of a process that a signal ended see that by themselves
        gone(served, children)
        assert "Traceback" not in served.log.read_text()


@pytest.mark.slow
def test_killed_leaves_a_file_that_nobody_believes(tiny_path, tmp_path):
    served = Served(tiny_path, tmp_path).wait()
    children = psutil.Process(served.process.pid).children(recursive=True)
    served.stop(signal.SIGKILL)
    assert served.record() is not None
    assert json.loads(command(served, "ps", "--json")[1])["processes"] == []
    assert served.record() is None
    gone(served, children)
    again = Served(tiny_path, tmp_path, "--port", str(served.port))
    again.wait()
    again.stop()


@pytest.mark.slow
def test_too_little_memory_is_told_before_loading(smollm2_path, tmp_path):
    """With an address space too small for the model: both numbers, exit status 5."""
    environment = dict(os.environ) | {"LOCALLLM_HOME": str(tmp_path)}

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1600 << 20, 1600 << 20))

    run = subprocess.run(
        [*COMMAND, "serve", str(smollm2_path), "--port", "0", "--ctx", "8192"],
        capture_output=True, text=True, env=environment, preexec_fn=limit, timeout=120,
    )  # fmt: skip
    assert run.returncode == 5, run.stderr
    assert "GiB" in run.stderr and "Traceback" not in run.stderr
    assert len([word for word in run.stderr.split() if word.replace(".", "").isdigit()]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", ["C", "no home", "closed stdin", "dumb"])
def test_odd_surroundings(tiny_path, tmp_path, surroundings, monkeypatch):
    changes = {"C": {"LANG": "C", "LC_ALL": "C"}, "dumb": {"TERM": "dumb", "NO_COLOR": "1"}}.get(surroundings, {})
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    if surroundings == "no home":
        monkeypatch.delenv("HOME", raising=False)
    served = Served(tiny_path, tmp_path).wait()
    assert post(served).status_code == 200
    code, _ = served.stop()
    assert code == 0 and "Traceback" not in served.log.read_text()


@pytest.mark.slow
def test_a_busy_port_and_ipv6(tiny_path, tmp_path):
    served = Served(tiny_path, tmp_path).wait()
    code, _, err = command(served, "serve", str(tiny_path), "--port", str(served.port))
    assert code == 8 and "is taken" in err and str(served.port) in err
    served.stop()
    six = Served(tiny_path, tmp_path, "--host", "::1")
    try:
        deadline = time.monotonic() + 60
        while not six.record() and six.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert six.record()["url"].startswith("http://[::1]:")
    finally:
        six.stop()
