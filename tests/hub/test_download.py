"""Against a hub with faults: what arrives is right, or nothing is registered."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from localllm import hub
from localllm.errors import Aborted, AuthRequired, ConfigError, DoesNotFit, DownloadError, LocalLLMError, ModelNotFound
from localllm.hub import Patience, cache, client, meter
from localllm.hub.partial_file import PartialFile
from localllm.hub.redirects import judge_redirect
from localllm.request import LoadProgress

from .conftest import CANARY, QUICK, FakeHub, noise, pull, tree

SIZE = 400_000
FILES = {"m-Q4_0.gguf": noise(SIZE), "LICENSE": b"do as you like\n"}
SPLITS = {"config.json": b"{}", "tokenizer.json": noise(50_000, 1)} | {
    f"model-{i:05}-of-00003.safetensors": noise(SIZE, i + 2) for i in (1, 2, 3)
}


def registered(home: Path) -> list[str]:
    """What any tool would find in the cache: snapshot names and whole blobs."""
    hub_folder = home / "hf/hub"
    links = [str(p) for p in hub_folder.glob("models--*/snapshots/*/*")]
    return links + [str(p) for p in hub_folder.glob("models--*/blobs/*") if "." not in p.name]


def partials(home: Path) -> list[Path]:
    """Of weight files; a small file's may be left too when another file fails."""
    found = sorted((home / "hf/hub").glob("models--*/blobs/*.localllm-partial"))
    return [p for p in found if len(p.name.partition(".")[0]) == 64]


def test_a_pull_is_right_and_looks_like_the_hubs_own(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/split", SPLITS)
    events: list[LoadProgress] = []
    folder = pull("a/split", events)
    assert all(row[1].startswith(("/api/models/a/split/revision/main", "/a/split/resolve/")) for row in fake_hub.log())
    assert {n: (folder / n).read_bytes() for n in SPLITS} == SPLITS
    assert all((folder / n).is_symlink() for n in SPLITS)
    assert [e.done for e in events] == sorted(e.done for e in events)
    assert (events[-1].done, events[-1].total) == (sum(map(len, SPLITS.values())),) * 2
    assert not partials(empty_home)
    assert not list((empty_home / "hf").rglob("*.json.tmp"))
    fake_hub.fault()
    again = hub.resolve("a/split", patience=QUICK)
    assert again.path == folder
    assert fake_hub.log() == [], "what is cached needs no request"


def test_other_tools_find_it(fake_hub: FakeHub, empty_home: Path) -> None:
    """huggingface_hub in a process of its own: its constants are read at import."""
    fake_hub.add("a/shared", SPLITS)
    folder = pull("a/shared")
    code = (
        "import huggingface_hub as h, sys\n"
        "print(h.snapshot_download('a/shared', local_files_only=True))\n"
        "report = h.scan_cache_dir()\n"
        "print([r.repo_id for r in report.repos], len(report.warnings), report.size_on_disk)"
    )
    env = os.environ | {"HF_HOME": str(empty_home / "hf"), "HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert out.stdout.splitlines() == [str(folder), f"['a/shared'] 0 {sum(map(len, SPLITS.values()))}"], out.stderr


def test_what_other_tools_have_fetched_is_not_fetched_again(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/blob", FILES)
    blobs = empty_home / "hf/hub/models--a--blob/blobs"
    blobs.mkdir(parents=True)
    (blobs / hashlib.sha256(FILES["m-Q4_0.gguf"]).hexdigest()).write_bytes(FILES["m-Q4_0.gguf"])
    assert pull("a/blob").read_bytes() == FILES["m-Q4_0.gguf"]
    assert [row[1].rsplit("/", 1)[1] for row in fake_hub.files_asked()] == ["LICENSE"]


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("drop", {"at": 100_000, "times": 3}),
        ("stall", {"at": 100_000, "secs": 3}),
        ("norange", {}),
        ("short", {}),
        ("long", {}),
        ("lies", {}),
        ("etag", {}),
        ("429", {"headers": {"Retry-After": "0"}, "times": 5}),
        ("500", {"times": 5}),
        ("503", {"times": 2}),
    ],
)
def test_passing_faults_heal(fake_hub: FakeHub, empty_home: Path, mode: str, more: dict[str, Any]) -> None:
    fake_hub.add("a/heals", FILES)
    resolved = hub.resolve("a/heals", patience=QUICK)
    fake_hub.fault(mode, path="gguf", **more)
    path = hub.download(resolved, patience=QUICK)
    assert path.read_bytes() == FILES["m-Q4_0.gguf"]
    assert not partials(empty_home)


def test_a_drop_costs_no_bytes_twice(fake_hub: FakeHub) -> None:
    fake_hub.add("a/drop", FILES)
    resolved = hub.resolve("a/drop", patience=QUICK)
    fake_hub.fault("drop", path="gguf", at=100_000, times=3)
    hub.download(resolved, patience=QUICK)
    rows = [row for row in fake_hub.files_asked() if "gguf" in row[1]]
    assert [row[2] for row in rows] == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]
    assert sum(row[4] for row in rows) == SIZE


def test_a_stall_is_seen_and_said(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "STALL_NOTICE_S", 0.2)
    fake_hub.add("a/stall", FILES)
    resolved = hub.resolve("a/stall", patience=QUICK)
    fake_hub.fault("stall", path="gguf", at=200_000, secs=2)
    events: list[LoadProgress] = []
    started = time.monotonic()
    hub.download(resolved, progress=events.append, patience=QUICK)
    assert time.monotonic() - started < 3
    assert any("stalled" in e.detail for e in events)
    assert Patience().stall_s <= 30, "the promise for real downloads"
    assert Patience().retries >= 5


@pytest.mark.parametrize("mode", ["flip", "long", "short", "lies", "etag"])
def test_lasting_faults_register_nothing(fake_hub: FakeHub, empty_home: Path, mode: str) -> None:
    fake_hub.add("a/bad", FILES)
    resolved = hub.resolve("a/bad", patience=QUICK)
    fake_hub.fault(mode, path="gguf", times=1000)
    with pytest.raises(DownloadError) as caught:
        hub.download(resolved, patience=QUICK)
    if mode != "short":
        assert "checksum mismatch" in caught.value.message
    assert caught.value.exit_code == 7
    assert not [n for n in registered(empty_home) if "gguf" in n]
    assert hub.list_local() == []
    if mode == "flip":
        assert not partials(empty_home), "a file that fails its checksum is removed"
        assert len([r for r in fake_hub.files_asked() if "gguf" in r[1]]) == 1
    fake_hub.fault()
    assert hub.download(resolved, patience=QUICK).read_bytes() == FILES["m-Q4_0.gguf"]


def test_bytes_that_went_bad_on_this_disk_are_fetched_again(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/disk", FILES)
    resolved = hub.resolve("a/disk", patience=QUICK)
    fake_hub.fault("drop", path="gguf", at=300_000, times=1000)
    with pytest.raises(DownloadError):
        hub.download(resolved, patience=Patience(retries=0, stall_s=1))
    (part,) = partials(empty_home)
    data = bytearray(part.read_bytes())
    data[1000] ^= 1
    part.write_bytes(data)
    fake_hub.fault()
    assert hub.download(resolved, patience=QUICK).read_bytes() == FILES["m-Q4_0.gguf"]


@pytest.mark.parametrize("damage", ["facts missing", "facts garbled", "too long", "other file"])
def test_partial_files_that_cannot_be_trusted_start_again(fake_hub: FakeHub, empty_home: Path, damage: str) -> None:
    fake_hub.add("a/part", FILES)
    resolved = hub.resolve("a/part", patience=QUICK)
    digest = hashlib.sha256(FILES["m-Q4_0.gguf"]).hexdigest()
    cache.prepare("a/part")
    part, facts = cache.partial_of("a/part", digest)
    part.write_bytes(noise(SIZE * 2, 9) if damage == "too long" else noise(5000, 9))
    if damage == "facts garbled":
        facts.write_text('{"etag": ')
    elif damage != "facts missing":
        about = {"etag": digest, "size": SIZE if damage == "too long" else 7, "file": "m-Q4_0.gguf", "repo": "a/part"}
        cache.write_json(facts, about)
    assert hub.download(resolved, patience=QUICK).read_bytes() == FILES["m-Q4_0.gguf"]


def test_paused_downloads_resume(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/pause", FILES)
    resolved = hub.resolve("a/pause", patience=QUICK)
    fake_hub.fault("stall", path="gguf", at=196_608, secs=20)
    cancel = threading.Event()

    def watch(event: LoadProgress) -> None:
        if event.done >= 196_608:
            cancel.set()

    started = time.monotonic()
    with pytest.raises(Aborted, match=r"paused at 49 %; run the same command to resume") as caught:
        hub.download(resolved, progress=watch, cancel=cancel, patience=Patience(stall_s=30))
    assert time.monotonic() - started < 3, "a read that blocks is ended"
    assert caught.value.exit_code == 130
    fake_hub.fault()
    events: list[LoadProgress] = []
    hub.download(resolved, progress=events.append, patience=QUICK)
    assert next(e for e in events if e.name == "download").done >= 196_608
    assert [r[2] for r in fake_hub.files_asked() if "gguf" in r[1]] == ["bytes=196608-"]


def test_ctrl_c_pauses(fake_hub: FakeHub) -> None:
    fake_hub.add("a/ctrl", FILES)
    resolved = hub.resolve("a/ctrl", patience=QUICK)

    def press(event: LoadProgress) -> None:
        if event.name == "download":
            raise KeyboardInterrupt

    with pytest.raises(Aborted, match="paused at"):
        hub.download(resolved, progress=press, patience=QUICK)


@pytest.mark.parametrize(
    ("mode", "error", "code", "text"),
    [
        ("401", AuthRequired, 4, "the token is wrong"),
        ("403", AuthRequired, 4, "the token is wrong"),
        ("gated", AuthRequired, 4, "gated"),
        ("norepo", ModelNotFound, 3, "no repository"),
        ("404", ModelNotFound, 3, "no repository"),
    ],
)
@pytest.mark.parametrize("where", ["listing", "file"])
def test_refusals(fake_hub: FakeHub, mode: str, error: type[LocalLLMError], code: int, text: str, where: str) -> None:
    fake_hub.add("a/auth", FILES)
    resolved = hub.resolve("a/auth", patience=QUICK) if where == "file" else None
    fake_hub.fault(mode, times=1000)
    with pytest.raises(error, match=text) as caught:
        hub.download(resolved, patience=QUICK) if resolved else hub.resolve("a/auth", patience=QUICK)
    assert caught.value.exit_code == code
    assert CANARY not in f"{caught.value.message}{caught.value.hint}{caught.value.why}{caught.value.context}"
    if mode == "gated":
        assert "https://huggingface.co/a/auth" in caught.value.hint
        assert "hf auth login" in caught.value.hint


def test_a_gated_repository_without_a_token_is_refused_before_the_download(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    fake_hub.add("a/gated", FILES, {"gated": "manual", "cardData": {"license": "llama3.2"}})
    with pytest.raises(AuthRequired, match="requires an accepted license"):
        hub.resolve("a/gated", patience=QUICK)
    assert not fake_hub.files_asked()


def test_a_long_retry_after_is_an_answer(fake_hub: FakeHub) -> None:
    fake_hub.add("a/later", FILES)
    fake_hub.fault("429", times=1000, headers={"Retry-After": "4000"})
    with pytest.raises(DownloadError, match="asks to wait 4000 s"):
        hub.resolve("a/later", patience=QUICK)


def test_retry_after_is_honoured(fake_hub: FakeHub) -> None:
    fake_hub.add("a/wait", FILES)
    fake_hub.fault("503", times=1, headers={"Retry-After": "1"})
    started = time.monotonic()
    hub.resolve("a/wait", patience=QUICK)
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize(("mode", "text"), [("junk", "sent no valid listing"), ("huge", "larger than 64 MiB")])
def test_a_listing_that_is_none(fake_hub: FakeHub, mode: str, text: str) -> None:
    fake_hub.add("a/junk", FILES)
    fake_hub.fault(mode)
    with pytest.raises(DownloadError, match=text):
        hub.resolve("a/junk", patience=QUICK)


@pytest.mark.parametrize(
    "digest", ["sha256-../../x", "a" * 63, "A" * 64, "", "../" * 21 + "a"], ids=lambda d: d[:8] or "empty"
)
def test_digests_in_a_listing(fake_hub: FakeHub, empty_home: Path, digest: str) -> None:
    fake_hub.add("a/digest", FILES)
    fake_hub.fault("digest", to=digest)
    with pytest.raises(DownloadError, match="instead of a digest of"):
        pull("a/digest")
    assert not (empty_home / "hf").exists()


def test_files_without_digests_are_refused(fake_hub: FakeHub) -> None:
    fake_hub.add("a/mirror", FILES)
    fake_hub.fault("nodigest")
    with pytest.raises(DownloadError, match="no size and checksum"):
        pull("a/mirror")


@pytest.mark.parametrize(
    "name", ["../../pwn.gguf", "/abs.gguf", "..\\p.gguf", "C:\\x.gguf", "\x1b[2J.gguf", "n" * 300 + ".gguf"]
)
def test_names_in_a_listing(fake_hub: FakeHub, empty_home: Path, name: str) -> None:
    fake_hub.add("a/names", FILES)
    before = tree(empty_home)
    fake_hub.fault("names", names=[name], keep=True)
    with pytest.raises(LocalLLMError, match="lists the file"):
        pull("a/names")
    assert tree(empty_home) == before


def test_the_token_stays_with_the_hub(fake_hub: FakeHub, hub_process: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same server under another name is another origin."""
    fake_hub.add("a/away", FILES)
    resolved = hub.resolve("a/away", patience=QUICK)
    assert all(row[3] for row in fake_hub.log())
    fake_hub.fault("redirect", path="gguf", to=fake_hub.url.replace("127.0.0.1", "localhost"))
    assert hub.download(resolved, patience=QUICK).read_bytes() == FILES["m-Q4_0.gguf"]
    rows = [row for row in fake_hub.files_asked() if "gguf" in row[1]]
    assert [row[3] for row in rows] == [True, False]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("file:///etc/passwd?", "file: URL"),
        ("http://169.254.169.254/latest?", "link-local"),
        ("http://[::ffff:169.254.169.254]/?", "link-local"),
        ("gopher://x/", "gopher: URL"),
    ],
)
def test_redirects_refused(fake_hub: FakeHub, target: str, text: str) -> None:
    fake_hub.add("a/to", FILES)
    resolved = hub.resolve("a/to", patience=QUICK)
    fake_hub.fault("redirect", path="gguf", to=target)
    with pytest.raises(DownloadError, match=text):
        hub.download(resolved, patience=QUICK)


def test_no_downgrade_no_inside_and_at_most_ten_hops(fake_hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match="not a valid URL"):
        judge_redirect("https://h.co/x", "http://[::1", "https://h.co")
    with pytest.raises(DownloadError, match="from https to http"):
        judge_redirect("https://h.co/x", "http://h.co/x", "https://h.co")
    for inside in (
        "https://127.0.0.1/x",
        "https://10.1.2.3/x",
        "https://localhost:8/x",
        "https://[::1]/x",
        "https://2130706433",
    ):
        with pytest.raises(DownloadError, match="internal address"):
            judge_redirect("https://h.co/x", inside, "https://h.co")
    assert judge_redirect("https://h.co/x", "https://cdn.example/x", "https://h.co")
    fake_hub.add("a/loop", FILES)
    resolved = hub.resolve("a/loop", patience=QUICK)
    fake_hub.fault("loop", path="gguf", times=1000)
    with pytest.raises(DownloadError, match="more than 10 times"):
        hub.download(resolved, patience=QUICK)
    assert len([r for r in fake_hub.files_asked() if "gguf" in r[1]]) == 11


def test_an_unencrypted_hub_is_said(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.add("a/http", FILES)
    events: list[LoadProgress] = []
    resolved = hub.resolve("a/http", patience=QUICK)
    hub.download(resolved, progress=events.append, patience=QUICK)
    assert "is not encrypted" in events[0].detail
    for wrong in ("ftp://x", "huggingface.co", "http://user:pw@x", "http://[::1", "http://x:99999"):
        monkeypatch.setenv("HF_ENDPOINT", wrong)
        with pytest.raises(ConfigError, match="HF_ENDPOINT"):
            hub.resolve("x/y")


def test_no_network(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1 cannot be reached") as caught:
        hub.resolve("a/b", patience=QUICK)
    assert time.monotonic() - started < 2
    assert caught.value.exit_code == 7
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    with pytest.raises(DownloadError, match="cannot be reached"):
        hub.resolve("a/b", patience=QUICK)


def test_a_proxy_that_is_not_there_is_named(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9/")
    with pytest.raises(
        DownloadError, match=r"hub\.example cannot be reached through the proxy http://127\.0\.0\.1:9"
    ) as caught:
        hub.resolve("a/b", patience=QUICK)
    assert "secret" not in caught.value.message
    monkeypatch.setenv("no_proxy", "hub.example")
    assert client.proxy_of("http://hub.example/a") == ""


def test_tls_errors_are_not_retried(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    error = client._unreachable(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "https://h.co/x")
    assert isinstance(error, DownloadError)
    assert "certificate of h.co" in error.message
    monkeypatch.setenv("HF_ENDPOINT", fake_hub.url.replace("http:", "https:"))  # speaks no TLS at all
    with pytest.raises(DownloadError, match="cannot be reached"):
        hub.resolve("a/b", patience=QUICK)


def test_the_disk_is_checked_first(fake_hub: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.add("a/big", FILES)
    resolved = hub.resolve("a/big", patience=QUICK)
    fake_hub.fault()
    usage = shutil.disk_usage(empty_home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=300_000))
    with pytest.raises(DoesNotFit, match=r"needs 430 KiB of free disk; .* has 293 KiB") as caught:
        hub.download(resolved, patience=QUICK)
    assert caught.value.exit_code == 5
    assert not fake_hub.files_asked()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_the_disk_is_full_midway(
    fake_hub: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fake_hub.add("a/full", FILES)
    resolved = hub.resolve("a/full", patience=QUICK)
    write = PartialFile.write

    def full(self: PartialFile, chunk: bytes) -> None:
        if self.size > 200_000:
            raise OSError(code, os.strerror(code))
        write(self, chunk)

    monkeypatch.setattr(PartialFile, "write", full)
    with pytest.raises(DoesNotFit, match=r"no space left on .* after .* KiB of 391 KiB of a/full") as caught:
        hub.download(resolved, patience=QUICK)
    assert "run the same command to resume" in caught.value.hint
    kept = partials(empty_home)[0].stat().st_size
    assert kept > 200_000
    monkeypatch.setattr(PartialFile, "write", write)
    fake_hub.fault()
    assert hub.download(resolved, patience=QUICK).read_bytes() == FILES["m-Q4_0.gguf"]
    assert [r[2] for r in fake_hub.files_asked() if "gguf" in r[1]] == [f"bytes={kept}-"]


def test_a_real_limit_of_file_size(fake_hub: FakeHub, empty_home: Path) -> None:
    """RLIMIT_FSIZE in a process of its own: the kernel refuses the write."""
    fake_hub.add("a/limit", FILES)
    code = (
        "import resource\nfrom localllm import hub\nfrom localllm.errors import DoesNotFit\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n    hub.download(hub.resolve('a/limit'))\nexcept DoesNotFit as error:\n    print(error.message)"
    )
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert "the file size limit is reached" in out.stdout, out.stderr
    assert out.stderr == ""
    assert partials(empty_home)[0].stat().st_size == 200_000
    assert pull("a/limit").read_bytes() == FILES["m-Q4_0.gguf"]


def test_folders_that_cannot_be_used(fake_hub: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.add("a/ro", FILES)
    resolved = hub.resolve("a/ro", patience=QUICK)
    for place in ("/proc/hf", str(empty_home / "file")):
        (empty_home / "file").write_text("not a folder")
        monkeypatch.setenv("HF_HOME", place)
        with pytest.raises(ConfigError, match="cannot write to the model folder") as caught:
            hub.download(resolved, patience=QUICK)
        assert "HF_HOME" in caught.value.hint
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match="read-only file system"):
        hub.download(resolved, patience=QUICK)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_there_is_no_home(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)  # what it does when HOME and the user are unknown
    fake_hub.add("a/home", FILES)
    with pytest.raises(ConfigError, match="no home folder"):
        pull("a/home")
    monkeypatch.delenv("LOCALLLM_HOME")
    with pytest.raises(ConfigError, match="no home folder"):
        hub.resolve("smollm2")


def test_a_new_cache_is_private_and_an_open_one_is_said(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/mode", FILES)
    pull("a/mode")
    assert (empty_home / "hf/hub").stat().st_mode & 0o777 == 0o700
    (empty_home / "hf/hub").chmod(0o777)
    assert "every user" in cache.prepare("a/mode")[0]


def test_a_cache_behind_a_link(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/link", FILES)
    (empty_home / "other").mkdir()
    (empty_home / "hf").symlink_to(empty_home / "other")
    assert pull("a/link").read_bytes() == FILES["m-Q4_0.gguf"]
    assert [m.name for m in hub.list_local()] == ["a/link:Q4_0"]


def test_every_file_comes_from_the_pinned_commit(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/pin", SPLITS)
    fake_hub.add("a/pin@v1", {n: d[:-1] + b"1" for n, d in SPLITS.items()})
    folder = pull("a/pin@v1")
    commits = {row[1].split("/resolve/")[1].split("/")[0] for row in fake_hub.files_asked()}
    assert commits == {folder.name}
    assert folder.name in {row[1].split("/")[-1].split("?")[0] for row in fake_hub.log()} | commits
    assert (folder / "config.json").read_bytes() == b"{1"
    fake_hub.fault()
    assert hub.resolve("a/pin@v1").path == folder
    assert hub.resolve(f"a/pin@{folder.name}").path == folder
    assert fake_hub.log() == []
    assert pull(f"a/pin@{folder.name}") == folder
    with pytest.raises(ModelNotFound, match="no such revision"):
        pull("a/pin@v2")


def test_the_token_is_never_shown(fake_hub: FakeHub, empty_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    fake_hub.add("a/token", FILES)
    events: list[LoadProgress] = []
    pull("a/token", events)
    assert CANARY not in repr(events) + caplog.text
    for path in empty_home.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes()


def test_tokens_with_odd_characters_are_refused(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_é\n")
    with pytest.raises(ConfigError, match="HF_TOKEN contains characters") as caught:
        hub.resolve("a/b", patience=QUICK)
    assert "é" not in caught.value.message
