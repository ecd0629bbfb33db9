"""What every test gets: a home of its own, no network, fixed seeds, and the two real models where they are on disk."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest


def _hush() -> None:
    """The last thing before the interpreter ends: Triton's nanobind lists there, on stderr, what Python still holds."""
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_hush)  # registered first, it runs last
SMOLLM2 = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "gemma3-270m/gemma-3-270m-Q4_K_M.gguf"
UNROUTABLE = "http://127.0.0.1:9"


def _default_models() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
    home = os.environ.get("LOCALLLM_HOME")
    return Path(home) / "data/models" if home else Path(data) / "localllm/models"


REAL_MODELS = Path(os.environ.get("LOCALLLM_TEST_MODELS") or _default_models())
CACHE = Path(__file__).resolve().parents[1] / ".cache"
LINKED_MODELS = CACHE / "test-models"
"""`make models` links here what it finds in a hub cache."""


def _on_disk(name: str) -> Path | None:
    return next((p for p in (REAL_MODELS / name, LINKED_MODELS / name) if p.is_file()), None)


def _isolate(home: Path) -> None:
    """Point this process and its children at `home`, with no way out to a hub or an index.

    The real models appear there as links to files inside real folders: a test that removes a model removes the link.
    """
    for name in [n for n in os.environ if n.startswith(("LOCALLLM_", "HF_", "HUGGING_FACE_"))]:
        del os.environ[name]
    for name in os.environ.keys() & {"LINES", "COLUMNS"}:  # readline exports what it found: no width of anybody's
        del os.environ[name]
    os.environ |= {
        "LOCALLLM_HOME": str(home),
        "LOCALLLM_TESTING": "1",
        "LOCALLLM_CACHE": str(CACHE),  # the compiled CPU kernels: once per change of their source, not once per run
        "LOCALLLM_STORES": "none",  # models of other programs on this machine
        "OMP_WAIT_POLICY": "passive",  # else processes beside each other spin: a seventh of their time
        "HF_HOME": str(home / "hf"),
        "HF_ENDPOINT": UNROUTABLE,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PIP_NO_INDEX": "1",
    }
    for name in (SMOLLM2, GEMMA):
        source = _on_disk(name)
        for file in source.parent.glob(source.name + "*") if source is not None else ():  # and the note of its origin
            link = (home / "data/models" / name).with_name(file.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


def pytest_configure(config: pytest.Config) -> None:
    home = Path(tempfile.mkdtemp(prefix="localllm-tests-"))
    config.stash[_HOME] = home
    if config.option.basetemp is None:  # runs beside each other would clear away each other's old folders
        config.option.basetemp = str(home / "tmp")
    _isolate(home)
    # ignored under nohup and in the background of a shell, also by what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "hypothesis" in sys.modules or config.pluginmanager.has_plugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
        settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives to the end: looking through it again and again took a tenth of a run."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_HOME], ignore_errors=True)


_HOME = pytest.StashKey[Path]()


@pytest.fixture(autouse=True)
def ample_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte is free, whatever is: what a family's name may download is a share of it."""
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=10**12))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The same random numbers in every test, whatever ran before. Loads nothing that is not loaded yet."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, for this test alone."""
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) and not item.get_closest_marker("slow"):
            test = item.nodeid.split("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker("slow")
            seen[test] += 1
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/dxg").exists():
        for item in items:
            if item.get_closest_marker("gpu"):  # a keyword may be the name of a folder, too
                item.add_marker(pytest.mark.skip(reason="no NVIDIA driver on this machine"))


def _real_model(name: str) -> Path:
    path = _on_disk(name)
    if path is None:
        message = f"{REAL_MODELS / name} is not there: run `make models`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 98 MB: the starter model."""
    return _real_model(SMOLLM2)


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M: a base model, without a chat template."""
    return _real_model(GEMMA)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer, 32 kB."""
    import tiny_models

    return tiny_models.tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", "Q8_0")  # type: ignore[no-any-return]


@pytest.fixture
def unrunnable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model in the catalog whose architecture this version does not have."""
    from localllm.hub import catalog

    name, known = "mistral-small4", catalog.candidates()
    other = {"architecture": "of_tomorrow", "config": "", "layers": 36}
    changed = tuple(replace(one, **other) if one.name == name else one for one in known)
    monkeypatch.setattr(catalog, "candidates", lambda: changed)
    return name
