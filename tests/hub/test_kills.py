"""Real processes: kill -9 during a download, many at once. The heavy counts are marked slow."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from localllm import hub
from localllm.hub import cache

from .conftest import QUICK, FakeHub, noise, pull

CHILD = """
import sys
from localllm import hub
from localllm.hub import Patience

def show(phase):
    print(phase.name, phase.done, phase.detail, flush=True)

quick = Patience(backoff_s=0.05, stall_s=5)
print("path", hub.download(hub.resolve(sys.argv[1], patience=quick), progress=show, patience=quick), flush=True)
"""
FILES = {"config.json": b"{}", "tokenizer.json": noise(300_000, 9)} | {
    f"model-{i:05}-of-00003.safetensors": noise(size, i) for i, size in ((1, 4_000_000), (2, 2_500_000), (3, 1_500_000))
}
TOTAL = sum(map(len, FILES.values()))


def start(name: str, *, begun: bool = True) -> subprocess.Popen[str]:
    """A process that pulls, and has begun to receive when this returns (unless not `begun`)."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout
    for line in child.stdout if begun else ():
        if line.startswith(("download", "path")):
            break
    return child


@contextmanager
def ended(*children: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


def no_half_model(home: Path, name: str) -> None:
    """Whatever has a name in the cache is what the name says."""
    for blob in (home / "hf/hub").glob("models--*/blobs/*"):
        if len(blob.name) in (40, 64):
            assert cache.file_digest(blob, len(blob.name)) == blob.name
    for found in hub.list_local():
        assert not found.reason.startswith("model-"), f"{name} is registered with a file missing: {found.reason}"
    for link in (home / "hf/hub").glob("models--*/snapshots/*/*"):
        assert link.is_file(), f"{link.name} leads nowhere"


def one_trial(fake_hub: FakeHub, home: Path, chance: random.Random, name: str, delay: float) -> float:
    """Kill at a random moment, then let it finish. Returns the share of bytes the process was sent more than once.

    What the hub had sent and the process had not read when it was killed does not count: a busy machine made it 40 %.
    Both stand still while that is counted: a hub that went on made it 22 %.
    """
    fake_hub.fault("slow", delay=delay, times=10**9, path="resolve")
    child = start(name)
    with ended(child):
        time.sleep(chance.uniform(0, 65 * delay))
        child.send_signal(signal.SIGSTOP)
        os.kill(fake_hub.pid, signal.SIGSTOP)
        try:
            unread = under_way(urlsplit(fake_hub.url).port)
            child.kill()
            child.wait()
        finally:
            os.kill(fake_hub.pid, signal.SIGCONT)
    no_half_model(home, name)
    stored = {p.name.partition(".")[0]: p.stat().st_size for p in (home / "hf/hub").glob("models--*/blobs/*-partial")}
    before = len(fake_hub.files_asked())
    child = start(name)
    with ended(child):
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    rows = fake_hub.files_asked()
    resumed = {row[1].rsplit("/", 1)[1]: int((row[2] or "bytes=0-")[6:-1]) for row in rows[before:]}
    for file, data in FILES.items():
        kept = stored.get(digest_of(file, data), 0)
        assert resumed.get(file, kept) == kept, f"{file}: {kept} bytes were here"
    sent = sum(row[4] for row in rows)
    folder = hub.resolve(name).path
    assert folder is not None
    assert {n: hashlib.sha256((folder / n).read_bytes()).digest() for n in FILES} == {
        n: hashlib.sha256(data).digest() for n, data in FILES.items()
    }
    left = [p.name for p in (home / "hf").rglob("*localllm*") if ".locks" not in p.parts]
    assert left == [], "orphans"
    return (sent - unread - TOTAL) / TOTAL


def under_way(port: int | None) -> int:
    """Bytes that wait to be sent or read on connections of that port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = f":{port:04X}"
    queues = [row[4].split(":") for row in rows if row[1].endswith(ends) or row[2].endswith(ends)]
    return sum(int(size, 16) for queue in queues for size in queue)


def digest_of(file: str, data: bytes) -> str:
    if file.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def kill_many(fake_hub: FakeHub, home: Path, count: int, delay: float) -> list[float]:
    chance = random.Random(count)
    name = fake_hub.add("a/kill", FILES)
    shares = []
    for _ in range(count):
        shares.append(one_trial(fake_hub, home, chance, name, delay))
        hub.remove(name)
    return shares


def test_kills_during_a_download(fake_hub: FakeHub, empty_home: Path) -> None:
    kill_many(fake_hub, empty_home, 1, 0.008)


@pytest.mark.slow
def test_two_hundred_kills(fake_hub: FakeHub, empty_home: Path) -> None:
    shares = kill_many(fake_hub, empty_home, 200, 0.04)  # 5 MB/s in all
    assert max(shares) <= 0.10, f"up to {max(shares):.1%} fetched again"
    print(f"200 of 200 right; fetched again: at most {max(shares):.2%}, on average {sum(shares) / 200:.2%}")


def share_one(fake_hub: FakeHub, home: Path, name: str) -> None:
    """Four pull, one uses it as soon as it is there; then one removes it while two pull again."""
    fake_hub.fault("slow", delay=0.02, times=10**9, path="resolve")
    four = [start(name, begun=False) for _ in range(4)]
    with ended(*four):
        while (folder := hub.resolve(name, patience=QUICK).path) is None:
            time.sleep(0.05)
        assert (folder / "model-00001-of-00003.safetensors").read_bytes() == FILES["model-00001-of-00003.safetensors"]
        said = [child.communicate(timeout=60) for child in four]
    assert [child.returncode for child in four] == [0] * 4, [err for _, err in said]
    assert sum("waiting for another process to download" in out for out, _ in said) >= 1
    assert sum(row[4] for row in fake_hub.files_asked()) <= 1.1 * TOTAL
    code = "import sys\nfrom localllm import hub\nhub.remove(sys.argv[1])"
    remover = subprocess.Popen([sys.executable, "-P", "-c", code, name], stderr=subprocess.PIPE, text=True)
    two = [start(name, begun=False) for _ in range(2)]
    with ended(remover, *two):
        said = [child.communicate(timeout=60) for child in (remover, *two)]
    assert [child.returncode for child in (remover, *two)] == [0] * 3, [err for _, err in said]
    no_half_model(home, name)
    folder = pull(name)
    assert all((folder / n).read_bytes() == data for n, data in FILES.items())


@pytest.mark.slow
def test_many_processes_at_once(fake_hub: FakeHub, empty_home: Path) -> None:
    share_one(fake_hub, empty_home, fake_hub.add("a/many", FILES))


@pytest.mark.slow
def test_many_processes_at_once_fifty_times(fake_hub: FakeHub, empty_home: Path) -> None:
    name = fake_hub.add("a/many", FILES)
    for _ in range(50):
        share_one(fake_hub, empty_home, name)
        hub.remove(name)


def test_the_lock_of_a_dead_process_is_free(fake_hub: FakeHub, empty_home: Path) -> None:
    name = fake_hub.add("a/dead", FILES)
    fake_hub.fault("slow", delay=0.05, times=10**9, path="resolve")
    child = start(name)
    with ended(child):
        child.kill()
    fake_hub.fault()
    began = time.monotonic()
    pull(name)
    assert time.monotonic() - began < 5
