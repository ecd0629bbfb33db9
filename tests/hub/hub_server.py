"""A model hub on loopback with faults on demand: `python hub_server.py FOLDER` prints its port, then serves.

FOLDER/org/name/<files> are the repositories; FOLDER/org/name@rev/<files> other revisions of them.
POST /__fault sets one fault: {"mode", "path": regex, "times", "at", "secs", "delay", "to", "names", "headers"}.
GET /__log lists [method, path, Range, whether a token came along, bytes sent] per request.

Modes: drop (cut at byte `at`), stall (stop at `at`, hold for `secs`), slow (`delay` per 64 KiB), flip, short, long,
lies (Content-Length too large), etag, norange, 401, 403, 404, 429, 500, 503, gated, norepo, redirect (to `to` + path),
loop, names (list these), digest (state `to` as digests), nodigest (list names only), junk (no JSON), huge.
Large files (.gguf, .safetensors, .bin, over 1 MB) carry a SHA-256, small ones a git blob SHA-1, as on the real hub.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
BLOCK = 65536
fault: dict[str, Any] = {}
log: list[list[Any]] = []
guard = threading.Lock()


@functools.lru_cache(None)
def digests(path: Path, _changed: int) -> tuple[str, str]:
    """(SHA-256, git blob SHA-1) of a file."""
    data = path.read_bytes()
    return hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry_of(path: Path, name: str) -> dict[str, Any]:
    """One sibling of a listing."""
    if len(name) > 255 or not path.is_file():  # an invented name
        return {"rfilename": name, "size": 4, "blobId": "0" * 40, "lfs": {"sha256": "0" * 64, "size": 4}}
    size = path.stat().st_size
    sha256, blob = digests(path, path.stat().st_mtime_ns)
    entry: dict[str, Any] = {"rfilename": name, "size": size, "blobId": blob}
    if size > 1_000_000 or name.endswith((".gguf", ".safetensors", ".bin")):
        entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 134}
    return entry


def commit_of(folder: Path) -> str:
    """A commit that changes with the files."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return hashlib.sha1(repr([(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files]).encode()).hexdigest()


def folder_of(repo: str, revision: str) -> Path | None:
    """The folder of a repository at a branch, tag or commit."""
    plain = FOLDER / repo
    if revision == "main":
        return plain if plain.is_dir() else None
    named = plain.with_name(f"{plain.name}@{revision}")
    if named.is_dir():
        return named
    same = [p for p in plain.parent.glob(f"{plain.name}*") if p.is_dir()] if plain.parent.is_dir() else []
    return next((p for p in same if p.name.split("@")[0] == plain.name and commit_of(p) == revision), None)


class Hub(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        """Set the fault."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        with guard:
            fault.clear()
            fault.update({"times": 1} | asked if asked else {})
            if asked.get("forget"):
                log.clear()
        self.answer(200, fault)

    def do_GET(self) -> None:
        """Listing, file, or log."""
        path = self.path.split("?")[0]
        if path == "/__log":
            return self.answer(200, log)
        mode = self.take_fault()
        self.sent = 0
        row = ["GET", self.path, self.headers.get("Range"), "Authorization" in self.headers, 0]
        log.append(row)
        try:
            self.route(path, mode)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            row[4] = self.sent

    def take_fault(self) -> str | None:
        with guard:
            if fault.get("times", 0) <= 0 or not re.search(fault.get("path", ""), self.path):
                return None
            fault["times"] -= 1
            return str(fault["mode"])

    def answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in ({"Content-Length": str(len(body))} | (headers or {}) | fault.get("headers", {})).items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(body)

    def route(self, path: str, mode: str | None) -> None:
        if mode in ("401", "403", "404", "429", "500", "503"):
            return self.answer(int(mode), {"error": "fault"})
        if mode == "gated":
            return self.answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        if mode == "norepo":
            return self.answer(401, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        if mode in ("redirect", "loop"):
            return self.answer(302, {}, {"Location": path if mode == "loop" else fault["to"] + self.path})
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path)
        if api:
            return self.listing(api[1], api[2], mode)
        got = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        folder = folder_of(got[1], got[2]) if got else None
        if not got or folder is None or not (folder / got[3]).is_file():
            return self.answer(404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
        return self.file(folder / got[3], got[3], commit_of(folder), mode)

    def listing(self, repo: str, revision: str, mode: str | None) -> None:
        folder = folder_of(repo, revision)
        if folder is None:
            code = "RevisionNotFound" if (FOLDER / repo).is_dir() else "RepoNotFound"
            return self.answer(404, {"error": "no"}, {"X-Error-Code": code})
        names = [
            str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "__info.json"
        ]
        if mode == "names":
            names = [*fault["names"], *(names if fault.get("keep") else [])]
        siblings = [entry_of(folder / n, n) for n in names]
        for sibling in siblings if mode == "digest" else []:
            sibling["blobId"] = fault["to"]
            if "lfs" in sibling:
                sibling["lfs"]["sha256"] = fault["to"]
        if mode == "nodigest":
            siblings = [{"rfilename": n} for n in names]
        if mode == "junk":
            return self.answer(200, b"<html>not a hub</html>")
        if mode == "huge":
            return self.answer(200, b'{"siblings": "' + b"x" * (65 << 20) + b'"}')
        about = folder / "__info.json"
        info = {"id": repo, "sha": commit_of(folder), "siblings": siblings, "gated": False, "tags": ["license:mit"]}
        return self.answer(200, info | (json.loads(about.read_text()) if about.is_file() else {}))

    def file(self, path: Path, name: str, commit: str, mode: str | None) -> None:
        data, about = path.read_bytes(), entry_of(path, name)
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and mode != "norange" else 0
        if start >= len(data) and start:
            return self.answer(416, {}, {"Content-Range": f"bytes */{len(data)}"})
        body = data[start:]
        if mode == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if mode == "short":
            body = body[:-1000]
        if mode == "long":
            body += b"x" * 1000
        tag = "1" * 64 if mode == "etag" else about["lfs"]["sha256"] if "lfs" in about else about["blobId"]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) + (500 if mode == "lies" else 0)))
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", commit)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        cut = min(fault.get("at", len(body)), len(body)) if mode in ("drop", "stall") else len(body)
        for at in range(0, cut, BLOCK):
            piece = body[at : min(at + BLOCK, cut)]
            self.wfile.write(piece)
            self.sent += len(piece)
            if fault.get("mode") == "slow":  # also for connections that were open before
                time.sleep(fault["delay"])
        if mode == "stall":
            self.wfile.flush()
            time.sleep(fault.get("secs", 60))
        if mode in ("drop", "stall", "lies"):
            self.wfile.flush()
            self.close_connection = True
        return None


class Server(ThreadingHTTPServer):
    """Clients that are killed in the middle are the point, not an error."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing on stderr."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
