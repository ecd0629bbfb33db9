"""Who may ask, and what a stranger learns."""

import itertools
import json
import logging
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from localllm.errors import ConfigError, ServerError
from localllm.server.app import ROUTES
from localllm.server.run import ServeOptions, bind

from .conftest import CHAT, MESSAGES, RESPONSES, TEXT, ask

PATHS = sorted({re.sub(r"{\w+(:path)?}", "x", route.path) for route in ROUTES} | {"/docs", "/openapi.json", "/nothing"})
OPEN = {"/health", "/ping"}
ROOT = Path(__file__).resolve().parents[2]


# --- where it listens ------------------------------------------------------------------------------------------------


def test_one_listener_on_loopback(served):
    listening = [c.laddr for c in psutil.Process(served.process.pid).net_connections() if c.status == "LISTEN"]
    assert [(a.ip, a.port) for a in listening] == [("127.0.0.1", served.port)]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_the_network_needs_a_key(host):
    with pytest.raises(ConfigError, match="no API key"):
        bind(ServeOptions(host=host, port=0))


def test_unless_it_is_meant():
    bind(ServeOptions(host="0.0.0.0", port=0, insecure=True)).close()
    bind(ServeOptions(host="0.0.0.0", port=0, api_keys=("long-enough",))).close()


def test_a_busy_port_and_a_busy_socket_file(tmp_path):
    with bind(ServeOptions(port=0)) as first, pytest.raises(ServerError, match="cannot listen"):
        bind(ServeOptions(port=first.getsockname()[1]))
    for host in ("no such host", "192.0.2.1"):
        with pytest.raises(ConfigError, match="is not an address of this machine") as caught:
            bind(ServeOptions(host=host, port=0, insecure=True))
        assert "--host 127.0.0.1" in caught.value.hint
    path = tmp_path / "s.sock"
    with bind(ServeOptions(unix=path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ServerError, match="another server"):
            bind(ServeOptions(unix=path))
    bind(ServeOptions(unix=path)).close()  # what a dead server left is replaced


# --- browsers --------------------------------------------------------------------------------------------------------

HOSTS = [
    ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("127.0.0.1.nip.io", 403),
    ("0.0.0.0.evil", 403), ("", 403), ("[::1", 403), ("127.0.0.1@evil.example", 403),
]  # fmt: skip


@pytest.mark.parametrize(("host", "status"), HOSTS)
async def test_only_local_names_on_every_route(client, host, status):
    for path in PATHS:
        response = await client.get(path, headers={"host": host})
        assert response.status_code == status, path
        assert "host_not_allowed" in response.text or path.startswith((MESSAGES, "/api/"))


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "desk.local", "127.0.0.2"])
async def test_local_names_pass(client, host):
    assert (await client.get("/health", headers={"host": host})).status_code == 200


def test_exactly_one_host(live):
    assert live.raw("GET", "/health")[0] == 400
    assert live.raw("GET", "/health", "Host: localhost", "Host: localhost")[0] == 400
    assert live.raw("GET", "/health", "Host: localhost")[0] == 200


async def test_a_host_that_looks_like_a_path(make_client):
    async with make_client(api_keys=("secret-key",), loopback=False) as client:
        for path in ("/v1/models", CHAT):
            response = await client.post(path, json=ask(), headers={"host": "x/health?x="})
            assert response.status_code in (400, 401, 403)


def test_a_path_without_a_slash(live):
    for target in ("@evil/v1/models", "*", "http://evil/v1/models", "v1/models"):
        status, answer = live.raw("POST", target, "Host: localhost")
        assert status in (400, 404, 405), target
        assert b'"error"' in answer


def test_no_url_is_rebuilt_from_headers():
    for file in (ROOT / "localllm/server").glob("*.py"):
        assert "request.url" not in file.read_text(), file.name


async def test_origins_must_be_allowed(make_client):
    async with make_client(origins=("http://localhost:3000",)) as client:
        for origin in ("https://evil.example", "null", "http://localhost:3001"):
            for method in ("GET", "POST", "OPTIONS"):
                response = await client.request(method, CHAT, json=ask(), headers={"origin": origin})
                assert response.status_code == 403
                assert "access-control-allow-origin" not in response.headers
        allowed = await client.post(CHAT, json=ask(), headers={"origin": "http://localhost:3000"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert allowed.headers["vary"] == "Origin"


async def test_an_allowed_origin_may_read_errors(make_client):
    """Without the header, a browser hides the response, and its page sees only that the request failed."""
    async with make_client(origins=("http://localhost:3000",), api_keys=("secret-key",)) as client:
        headers = {"origin": "http://localhost:3000"}
        refused = await client.post(CHAT, json=ask(), headers=headers)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == headers["origin"]
        encoded = headers | {"authorization": "Bearer secret-key", "content-encoding": "gzip"}
        refused = await client.post(CHAT, json=ask(), headers=encoded)
        assert refused.status_code == 415 and refused.headers["access-control-allow-origin"] == headers["origin"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_simple_posts_are_not_executed(client, kind):
    """Nothing here takes multipart"""
    for path in (CHAT, MESSAGES, "/tokenize"):
        response = await client.post(path, content=json.dumps(ask()), headers={"content-type": kind})
        assert response.status_code == 415


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_programs_need_no_content_type_for_ollamas_routes(make_client, kind):
    """As its own documents have it (`curl -d`); a page that may call still has to say what it sends."""
    headers = {} if kind is None else {"content-type": kind}
    sent = json.dumps({"model": "tiny", "prompt": "x", "options": {"num_predict": 1}})
    async with make_client(origins=("http://localhost:3000",)) as client:
        assert (await client.post("/api/generate", content=sent, headers=headers)).status_code == 200
        for page in ({"origin": "http://localhost:3000"}, {"sec-fetch-site": "cross-site"}):
            refused = await client.post("/api/generate", content=sent, headers=headers | page)
            assert refused.status_code == 415 and "content-type" in refused.json()["error"]
        stranger = headers | {"origin": "https://evil.example"}
        assert (await client.post("/api/generate", content=sent, headers=stranger)).status_code == 403


async def test_the_preflight_needs_no_key(make_client):
    async with make_client(origins=("http://localhost:3000",), api_keys=("secret-key",)) as client:
        headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
        preflight = await client.options(CHAT, headers=headers)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "*" not in preflight.headers.values()
        assert "x-api-key" in preflight.headers["access-control-allow-headers"]
        # what the JavaScript SDKs of OpenAI and Anthropic add
        names = "anthropic-dangerous-direct-browser-access,authorization,content-type,x-stainless-lang"
        asked = await client.options(CHAT, headers=headers | {"access-control-request-headers": names})
        assert asked.headers["access-control-allow-headers"] == names
        odd = await client.options(CHAT, headers=headers | {"access-control-request-headers": "a\tb: *"})
        assert odd.headers["access-control-allow-headers"] == preflight.headers["access-control-allow-headers"]
        other = await client.options(CHAT, headers=headers | {"origin": "https://evil.example"})
        assert other.status_code == 403 and "access-control-allow-headers" not in other.headers
        assert (await client.post(CHAT, json=ask(), headers=headers)).status_code == 401
        answer = await client.post(CHAT, json=ask(), headers=headers | {"authorization": "Bearer secret-key"})
        assert answer.status_code == 200


# --- keys ------------------------------------------------------------------------------------------------------------

KEY = "sécret-key"
WRONG = [
    [], [("authorization", "Bearer ")], [("authorization", "Bearer wrong")], [("authorization", "Basic eDp5")],
    [("authorization", b"Bearer s\xe9cret-key")], [("authorization", "Bearer " + "x" * 20_000)],
    [("x-api-key", "wrong")],
    [("authorization", f"Bearer {KEY}".encode()), ("authorization", "Bearer wrong")],
    [("authorization", f"Bearer {KEY}".encode()), ("authorization", f"Bearer {KEY}".encode())],
    [("authorization", f"Bearer {KEY}".encode()), ("x-api-key", "wrong")],
]  # fmt: skip
RIGHT = [
    [("authorization", f"Bearer {KEY}".encode())], [("authorization", f"bearer {KEY}".encode())],
    [("x-api-key", KEY.encode())], [("authorization", b"Bearer second-key")],
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]
TRICKS = ["/v1/models/", "//v1/models", "/v1/./models", "/V1/models", "/health/", "/health/../v1/models", "/%68ealth"]


@pytest.mark.parametrize("headers", WRONG, ids=range(len(WRONG)))
async def test_wrong_keys_on_every_route_and_method(make_client, headers):
    async with make_client(api_keys=(KEY, "second-key"), loopback=False) as client:
        for path, method in itertools.product([*PATHS, *TRICKS], METHODS):
            response = await client.request(method, path, headers=headers)
            if path in OPEN or path == "/%68ealth":
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or path.startswith("/api/") or "authentication_error" in response.text


@pytest.mark.parametrize("headers", RIGHT, ids=range(len(RIGHT)))
async def test_right_keys_on_every_route_and_method(make_client, headers):
    """They open all but the owner's routes."""
    async with make_client(api_keys=(KEY, "second-key"), loopback=False) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        for path, method in itertools.product([*PATHS, *TRICKS], METHODS):
            status = (await client.request(method, path, headers=headers)).status_code
            takes = any(route.path == path and route.method == method.replace("HEAD", "GET") for route in ROUTES)
            assert (status == 401) is (takes and path.startswith("/localllm/")), (method, path, status)
            assert status < 500


async def test_the_owner_may_ask_everything(make_client):
    async with make_client(api_keys=(KEY,), token="owner-token", loopback=False) as client:
        for path, method in itertools.product(PATHS, METHODS):
            response = await client.request(method, path, headers={"authorization": "Bearer owner-token"})
            assert response.status_code < 500 and response.status_code != 401, (method, path)


def test_a_key_too_large_for_any_header(live):
    status, _ = live.raw("GET", "/v1/models", "Host: localhost", "Authorization: Bearer " + "x" * 100_000)
    assert status in (0, 400, 431)


async def test_management_needs_the_owner(make_client, pool):
    async with make_client(api_keys=("secret-key",), token="owner-token") as client:
        for method, path in (
            ("GET", "/localllm/ps"),
            ("GET", "/localllm/kv_events"),
            ("POST", "/localllm/unload"),
            ("POST", "/localllm/park"),
        ):
            key = await client.request(
                method, path, json={"model": "tiny"}, headers={"authorization": "Bearer secret-key"}
            )
            assert key.status_code == 401
        owner = {"authorization": "Bearer owner-token"}
        assert (await client.get("/localllm/ps", headers=owner)).json()["models"][0]["model"] == "tiny"
        assert (await client.get("/v1/models", headers=owner)).status_code == 200
        for name in ("unload", "park"):  # the model belongs to who opened the server, such as a chat
            refused = await client.post(f"/localllm/{name}", json={"model": "tiny"}, headers=owner)
            assert refused.status_code == 409 and refused.json()["error"]["code"] == "model_in_use"
        assert [row.llm.is_awake for row in pool.loaded()] == [True]
    async with make_client() as client:
        assert (await client.get("/localllm/ps", headers={"authorization": "Bearer "})).status_code == 401


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "\\\\srv\\x",
    "hf.co/x/y",
    "a\0b",
    "x" * (1 << 20),
    "~/x",
    "*",
    "tiny/../tiny",
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_names_of_models_open_no_file(client, name):
    """Names from HTTP are only looked up among the models there are."""
    opened = []
    watching = True

    def hook(event, args):
        if watching and event == "open" and "passwd" in str(args[0]):
            opened.append(args)

    sys.addaudithook(hook)
    for path, sent in (
        (CHAT, ask(model=name)),
        ("/api/show", {"model": name}),
        ("/v1/embeddings", {"model": name, "input": "x"}),
    ):
        response = await client.post(path, json=sent)
        error = response.json()["error"]
        assert response.status_code == 404, path
        assert "not found" in error if path == "/api/show" else error["code"] == "model_not_found"
        assert len(response.content) < 1000
    watching = False
    assert opened == []


MANAGING = [
    "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/sha256:" + "0" * 64,
    "/models/apply", "/v1/models/load", "/pause", "/shutdown", "/reset_prefix_cache",
    "/collective_rpc", "/invocations", "/start_profile", "/sleep", "/slots/0",
]  # fmt: skip


async def test_what_manages_models_is_absent(client):
    """Other servers were broken through these: nothing here downloads, deletes or runs what a request names, but at
    the address of `serve --ollama`.
    """
    for path, method in itertools.product(MANAGING, ["POST", "PUT", "DELETE"]):
        response = await client.request(method, path, json={"name": "http://127.0.0.1:9/x", "model": "tiny"})
        assert response.status_code in (404, 405), (method, path)
    for path, method in (("/api/pull", "POST"), ("/api/copy", "POST"), ("/api/delete", "DELETE")):
        sent = {"model": "tiny", "source": "tiny", "destination": "other"}
        response = await client.request(method, path, json=sent)
        assert response.status_code == 404 and "serve --ollama" in response.json()["error"]
    changing = {route.path for route in ROUTES if route.path.startswith("/localllm/")}
    assert changing == {f"/localllm/{name}" for name in ("ps", "kv_events", "pins", "unpin", "unload", "park")}


def test_nothing_parses_multipart_and_no_files_are_served():
    project = (ROOT / "pyproject.toml").read_text()
    assert "multipart" not in project
    source = "".join(file.read_text() for file in (ROOT / "localllm/server").glob("*.py"))
    assert not re.search(r"StaticFiles|FileResponse|\.form\(", source)


async def test_a_405_names_every_method_that_is_taken(client):
    for path, methods in (
        ("/v1/responses/resp_x", "DELETE, GET, HEAD"), ("/v1/responses", "POST"), ("/health", "GET, HEAD"),
        ("/v1/models/org/tiny", "GET, HEAD"),
    ):  # fmt: skip
        response = await client.put(path, json={})
        assert (response.status_code, response.headers["allow"]) == (405, methods)
        assert response.json()["error"]["code"] == "method_not_supported"


async def test_an_operation_that_does_not_exist_is_no_id(client):
    for path in ("/v1/responses/compact", "/v1/models/load"):
        response = await client.post(path, json={})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


async def test_reading_changes_nothing(client, tiny_llm):
    for path in PATHS:
        assert (await client.get(path)).status_code in (200, 401, 404, 405)
    assert tiny_llm.is_awake


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
async def test_what_clients_invent_is_no_label(client, count):
    def series(text):
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    await client.get("/health")
    before = series((await client.get("/metrics")).text)
    for number in range(count):
        await client.request(f"FOO{number}", f"/path/{number}", headers={"user-agent": f"agent-{number}"})
    assert len(series((await client.get("/metrics")).text) - before) <= 5


# --- the protocol ----------------------------------------------------------------------------------------------------

LENGTHS = [
    ["Content-Length: 2", "Transfer-Encoding: chunked"], ["Content-Length: -1"], ["Content-Length: abc"],
    ["Content-Length: 2", "Content-Length: 3"], ["Content-Length: 2, 3"], ["Content-Length: +2"],
    ["Transfer-Encoding: gzip"], ["Content-Length: " + "9" * 30],
]  # fmt: skip


@pytest.mark.parametrize("headers", LENGTHS, ids=range(len(LENGTHS)))
def test_bodies_of_two_lengths(live, headers):
    status, answer = live.raw("POST", CHAT, "Host: localhost", "Content-Type: application/json", *headers, body=b"{}")
    assert status in (400, 413, 501)
    assert status == 501 or b'"error"' in answer


def test_a_request_of_two_lengths_ends_its_connection(live):
    """A proxy that counts the other length would take what follows for the body of this request."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n"
    with live.connect() as sock:
        sock.sendall(head.encode() + b"0\r\n\r\n" + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert answer.lower().count(b"connection: close") == 1


@pytest.mark.parametrize("size", [64 << 10, 200 << 10, 10 << 20])
def test_one_large_header(live, size):
    before = psutil.Process().memory_info().rss
    status, _ = live.raw("GET", "/health", "Host: localhost", "X-Large: " + "x" * size)
    assert status in (0, 400, 431)
    assert psutil.Process().memory_info().rss - before < (16 << 20) + 3 * size  # ours is here, too


def test_many_headers_and_a_long_address(live):
    many = [f"X-{number}: y" for number in range(10_000)]
    assert live.raw("GET", "/health", "Host: localhost", *many)[0] in (0, 400, 431)
    assert live.raw("GET", "/health", "Host: localhost", *many[:150])[0] == 431
    assert live.raw("GET", "/" + "x" * (1 << 20), "Host: localhost")[0] in (0, 400, 414, 431)
    assert live.raw("GET", "/" + "x" * 10_000, "Host: localhost")[0] == 414
    assert live.raw("GET", "/health", "Host: localhost")[0] == 200


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100, b"GET /\r\n\r\n"])
def test_what_is_no_http(live, junk):
    answer = live.exchange(junk, timeout=1.0)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


# --- what leaks ------------------------------------------------------------------------------------------------------


async def test_no_key_or_token_shows(served):
    """Everything the server said, at the most talkative level, and everything it wrote."""
    async with served.client() as client:
        texts = [(await client.get(path)).text for path in ("/metrics", "/v1/models", "/openapi.json", "/nothing")]
        texts.append((await client.post(CHAT, json={"bad": served.KEY})).text)
        texts.append((await client.post(CHAT, json=ask())).text)
    assert httpx.get(f"{served.url}/v1/models").status_code == 401
    shown = subprocess.run(["ps", "-o", "args=", "-p", str(served.process.pid)], capture_output=True, text=True).stdout
    files = [p for p in served.home.rglob("*") if p.is_file()]
    written = b"".join(p.read_bytes() for p in [served.log, *files])
    for canary in (served.KEY, served.HF_TOKEN):
        assert not any(canary in text for text in (*texts, shown))
        assert canary.encode() not in written
    run = served.home / "run"
    assert run.stat().st_mode & 0o777 == 0o700
    assert [p.stat().st_mode & 0o777 for p in run.iterdir()] == [0o600]


async def test_a_fault_shows_nothing_of_our_insides(client, tiny_llm, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("<_io.BytesIO object at 0x7a95e299e750> in /home/user/secret.py")

    monkeypatch.setattr(tiny_llm, "encode_chat", fail)
    response = await client.post(CHAT, json=ask())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error" and response.headers["x-request-id"]
    assert "0x7a95" not in response.text and "/home" not in response.text


def test_messages_are_scrubbed():
    from localllm.server.errors import sanitize

    assert sanitize("<object at 0x7a95e299e750>") == "<object at 0x…>"
    assert sanitize("cannot open /home/u/x.py now") == "cannot open … now"
    assert sanitize("see http://127.0.0.1:8000/v1 and a/b") == "see http://127.0.0.1:8000/v1 and a/b"
    for route in ("/api/chat", "/v1/chat/completions", "/v1/models"):  # what a client is to use instead
        assert sanitize(f"use {route}.") == f"use {route}."
    assert "\x1b" not in sanitize("\x1b[2Jx") and sanitize("org/name:Q4") == "org/name:Q4"


@pytest.mark.parametrize("form", ["text", "json"])
async def test_log_lines_are_one_line_and_hold_no_text(make_client, caplog, form):
    secret = "the very secret prompt"
    caplog.set_level(logging.INFO, "localllm.access")
    async with make_client(log_format=form) as client:
        messages = [{"role": "user", "content": secret}]
        await client.post(CHAT, json=ask(messages=messages), headers={"x-request-id": "id-1"})
        await client.get("/v1/models/a%0d%0aInjected: yes%1b[2J")
        await client.post(CHAT, json=ask(model="x\r\ny\x1b[31m", user=secret))
    lines = [record.getMessage() for record in caplog.records if record.name == "localllm.access"]
    assert len(lines) == 3 and "id-1" in lines[0]
    for line in lines:
        assert secret not in line and line.isprintable()
    if form == "json":
        first = json.loads(lines[0])
        assert first["status"] == 200 and first["completion_tokens"] == 8 and first["prompt_tokens"] > 0


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_full_queue_is_logged_once_a_second(make_service, make_client, caplog, monkeypatch, form):
    """Whatever is asked; nothing of it is read. The next line says how many had none."""
    caplog.set_level(logging.INFO, "localllm.access")
    service = make_service(parallel=1, max_queue=0)
    ticket = service.queues["tiny"].reserve("somebody")
    async with make_client(service, log_format=form) as client:
        for path in (CHAT, TEXT, RESPONSES, MESSAGES):
            refused = await client.post(path, content=b"this is not even JSON")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        monkeypatch.setattr("localllm.server.exchange.REFUSALS_S", 0.0)
        assert (await client.post(CHAT, json=ask())).status_code == 429
        kept = []
        monkeypatch.setattr(service.pool, "keep", lambda name, seconds: kept.append((name, seconds)) or True)
        unloaded = await client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
        assert unloaded.json()["done_reason"] == "unload"  # what needs no place is not refused
        assert kept == [("tiny", 0.0)]
        ticket.release()
        assert (await client.post(CHAT, json=ask())).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "localllm.access"]
    assert len(lines) == 4 and all("queue_full" in line for line in lines[:2])
    if form == "json":
        assert ["more" in json.loads(line) for line in lines] == [False, True, False, False]
        assert json.loads(lines[1])["more"] == 3
    else:
        assert "more" not in lines[0] and "queue_full (and 3 more)" in lines[1]


def test_ipv6_only():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        sock = bind(ServeOptions(host="::1", port=0))
    except ServerError:
        pytest.skip("no IPv6 here")
    with sock:
        assert sock.getsockname()[0] == "::1"


def test_a_key_file_has_a_key_a_line(tmp_path):
    from localllm.cli.commands.serve import api_keys
    from localllm.cli.frame.command import Env, Options
    from localllm.config import UserConfig

    file = tmp_path / "keys"
    file.write_text("# of the editor\nkey-one-1234\n\n  key-two-1234  \n")
    env, config = Env(Options()), UserConfig()
    assert api_keys(env, config, None, file) == ("key-one-1234", "key-two-1234")
    for text, message in (("short\n", "5 characters"), ("# none\n", "contains no keys")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            api_keys(env, config, None, file)
