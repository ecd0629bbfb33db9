"""Models of Ollama, LM Studio, llama.cpp and other Hugging Face caches: listed, run in place, never changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from localllm import hub
from localllm.errors import BadModelFile, ConfigError, ModelNotFound
from localllm.hub import foreign, local
from localllm.hub.names import parse_name

MODEL = "application/vnd.ollama.image.model"
LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def user(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user who has nothing yet."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME", "TRANSFORMERS_CACHE", foreign.ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    home = empty_home / "user"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def ollama(root: Path, name: str, model: Path | bytes, **layer: Any) -> Path:
    """Put a model into Ollama's folder as `ollama pull` does: host/namespace/model/tag. Returns its blob."""
    data = model.read_bytes() if isinstance(model, Path) else model
    digest = hashlib.sha256(data).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    described = {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(data)} | layer
    license_ = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'0' * 64}", "size": 9}
    manifest(root, name, {"schemaVersion": 2, "layers": [described, license_]})
    return blob


def manifest(root: Path, name: str, content: object) -> Path:
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def link(target: Path, source: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)
    return target


def tree(root: Path) -> dict[str, tuple[int, float]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime) for p in sorted(root.rglob("*"))}


@pytest.fixture
def stores(user: Path, tiny_path: Path) -> Path:
    """One model or more with each program."""
    root = user / ".ollama/models"
    ollama(root, f"{LIBRARY}/llama3.2/3b", tiny_path)
    ollama(root, f"{LIBRARY}/llama3.2/latest", tiny_path)
    ollama(root, "registry.ollama.ai/ann/mine/v1", tiny_path)
    ollama(root, "hf.co/bart/Tiny-GGUF/Q4_K_M", tiny_path)
    link(user / ".lmstudio/models/pub/Small Model-GGUF/small-Q8_0.gguf", tiny_path)
    link(user / ".lmstudio/models/pub/Small Model-GGUF/mmproj-small.gguf", tiny_path)
    link(user / ".cache/llama.cpp/ggml-org_gemma-GGUF_gemma-Q8_0.gguf", tiny_path)
    (user / ".cache/llama.cpp/ggml-org_gemma-GGUF_gemma-Q8_0.gguf.json").write_text("{}")
    link(user / ".cache/llama.cpp/ggml-org_gemma-GGUF_mmproj-gemma-Q8_0.gguf", tiny_path)
    link(user / f".cache/huggingface/hub/models--org--other/snapshots/{'1' * 40}/o-Q6_K.gguf", tiny_path)
    return user


NAMES = {
    "ollama/llama3.2:3b": "ollama rm llama3.2:3b",
    "ollama/llama3.2:latest": "ollama rm llama3.2:latest",
    "ollama/ann/mine:v1": "ollama rm ann/mine:v1",
    "ollama/hf.co/bart/Tiny-GGUF:Q4_K_M": "ollama rm hf.co/bart/Tiny-GGUF:Q4_K_M",
    "lmstudio/pub/Small-Model-GGUF:Q8_0": "in LM Studio: My Models",
    "llama.cpp/ggml-org/gemma-GGUF:Q8_0": "rm /",
    "hf/org/other:Q6_K": "hf cache rm model/org/other --cache-dir /",
}


def test_every_store_is_listed_and_its_names_can_be_typed(stores: Path, tiny_path: Path) -> None:
    rows = {m.name: m for m in hub.list_local()}
    assert set(rows) == set(NAMES)
    for name, row in rows.items():
        assert row.supported and not row.broken and row.params > 0, row.reason
        assert row.is_foreign and row.source == name.partition("/")[0]
        assert row.size_bytes == tiny_path.stat().st_size
        found = hub.resolve(name, offline=True)
        assert (found.path, found.kind, found.pulled_as) == (row.path, "foreign", "")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("llama3.2:3b", "ollama/llama3.2:3b"),
        ("llama3.2", "ollama/llama3.2:latest"),
        ("Ollama/Llama3.2", "ollama/llama3.2:latest"),
        ("ann/mine:v1", "ollama/ann/mine:v1"),
        ("hf.co/bart/Tiny-GGUF:Q4_K_M", "ollama/hf.co/bart/Tiny-GGUF:Q4_K_M"),
        ("bart/Tiny-GGUF", "ollama/hf.co/bart/Tiny-GGUF:Q4_K_M"),
        ("pub/Small-Model-GGUF", "lmstudio/pub/Small-Model-GGUF:Q8_0"),
        ("ggml-org/gemma-GGUF:Q8_0", "llama.cpp/ggml-org/gemma-GGUF:Q8_0"),
        ("org/other", "hf/org/other:Q6_K"),
        ("small-model", "lmstudio/pub/Small-Model-GGUF:Q8_0"),
    ],
)
def test_the_name_of_the_other_program_finds_its_model(stores: Path, typed: str, name: str) -> None:
    assert hub.resolve(typed, offline=True).name == name


def test_a_tag_among_several_without_latest_is_asked_for(stores: Path) -> None:
    root = stores / ".ollama/models/manifests" / LIBRARY
    (root / "llama3.2/latest").rename(root / "llama3.2/1b")
    with pytest.raises(ModelNotFound, match="could be ollama/llama3.2:1b, ollama/llama3.2:3b"):
        hub.resolve("llama3.2", offline=True)


def test_ours_come_first(stores: Path, empty_home: Path, tiny_path: Path) -> None:
    ours = link(empty_home / "data/models/llama3.2/x.gguf", tiny_path)
    assert hub.resolve("llama3.2", offline=True).path == ours
    assert hub.resolve("llama3", offline=True).path == ours, "a part of the name, too"
    assert hub.remove("llama3").names == ("llama3.2",)


def test_nothing_of_theirs_is_removed_or_repaired(stores: Path) -> None:
    before = tree(stores)
    for name, command in NAMES.items():
        for act in (hub.remove, lambda n: hub.remove(n, dry_run=True)):
            with pytest.raises(ConfigError, match="is read-only here") as caught:
                act(name)
            assert caught.value.hint.startswith(command)
        with pytest.raises(ConfigError, match="is read-only here") as caught:
            hub.repair(name, offline=True)
        assert caught.value.hint == command.replace(" rm ", " pull ") or not name.startswith("ollama")
    with pytest.raises(ModelNotFound, match="no model here was quantized"):
        hub.remove("llama3.2", derived_only=True)
    hub.remove_partials()
    path = hub.resolve("llama3.2:3b", offline=True).path
    assert path is not None and hub.download(hub.resolve("llama3.2:3b", offline=True)) == path
    assert tree(stores) == before


BAD_MANIFESTS: dict[str, object] = {
    "not-json": b"{",
    "no-object": [],
    "deep": b"[" * 100_000,
    "huge": b" " * (2 << 20),
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "no-layers": {"layers": None},
    "numbers": {"layers": [1, None, "x", {"mediaType": 5}]},
    "outside": {"layers": [{"mediaType": MODEL, "digest": "sha256:../../../../etc/passwd", "size": 1}]},
    "two": {"layers": [{"mediaType": MODEL, "digest": f"sha256:{'a' * 64}"}] * 2},
    "missing-blob": {"layers": [{"mediaType": MODEL, "digest": f"sha256:{'a' * 64}", "size": 1}]},
    "digest-list": {"layers": [{"mediaType": MODEL, "digest": ["sha256:"], "size": "x"}]},
    "adapter": {"layers": [{"mediaType": "application/vnd.ollama.image.adapter"}, {"mediaType": MODEL}]},
    "tensors": {"layers": [{"mediaType": "application/vnd.ollama.image.tensor; name=x"}]},
    "cloud": {"layers": [], "config": {}},
}


def test_bad_manifests_hide_no_model(stores: Path) -> None:
    root = stores / ".ollama/models"
    for name, content in BAD_MANIFESTS.items():
        manifest(root, f"{LIBRARY}/bad/{name}", content)
    os.mkfifo(root / "manifests" / LIBRARY / "bad/fifo")
    (root / "manifests" / LIBRARY / "bad/folder").mkdir()
    link(root / "manifests" / LIBRARY / "bad/loop", Path("loop"))
    (root / "manifests/a-file").write_text("x")
    link(root / "manifests" / LIBRARY / "up", root / "manifests")
    rows = {m.name: m for m in hub.list_local()}
    assert set(NAMES) <= set(rows) and all(rows[name].supported for name in NAMES)
    bad = {name: row for name, row in rows.items() if name not in NAMES and not name.startswith("ollama/up")}
    assert len(bad) == len(BAD_MANIFESTS) + 3
    for row in bad.values():
        assert row.broken and row.reason and not row.supported
    assert "no such file" in rows["ollama/bad:missing-blob"].reason
    assert "LoRA" in rows["ollama/bad:adapter"].reason
    with pytest.raises(BadModelFile, match="ollama/bad:adapter: it has a LoRA adapter") as caught:
        hub.resolve("bad:adapter", offline=True)
    assert caught.value.hint == "ollama pull bad:adapter"
    assert "passwd" not in rows["ollama/bad:outside"].reason


def test_a_blob_that_is_not_what_the_manifest_says(stores: Path, tiny_path: Path) -> None:
    root = stores / ".ollama/models"
    ollama(root, f"{LIBRARY}/long/latest", tiny_path, size=5)
    noise = ollama(root, f"{LIBRARY}/noise/latest", b"noise" * 100)
    rows = {m.name: m for m in hub.list_local()}
    assert "its manifest says 5" in rows["ollama/long:latest"].reason
    assert rows["ollama/noise:latest"].broken
    noise.unlink()
    os.mkfifo(noise)
    assert {m.name: m for m in hub.list_local()}["ollama/noise:latest"].reason.endswith("is not a file")


def test_links_that_leave_a_store_are_read_and_nothing_more(stores: Path, tiny_path: Path) -> None:
    """A link to a file is a model if it is one; a folder of safetensors may not reach outside."""
    secret = stores / "secret"
    secret.write_text("password")
    folder = stores / ".lmstudio/models/pub/linked"
    for name in ("config.json", "model.safetensors"):
        link(folder / name, secret)
    link(folder / "secret-Q4_0.gguf", secret)
    link(stores / ".lmstudio/models/loop", stores / ".lmstudio/models")
    rows = {m.name: m for m in hub.list_local()}
    assert rows["lmstudio/pub/linked"].broken and rows["lmstudio/pub/linked:Q4_0"].broken
    assert not any("password" in row.reason for row in rows.values())
    assert all(rows[name].supported for name in NAMES)


def test_names_stay_unique_and_typable(stores: Path, tiny_path: Path) -> None:
    root = stores / ".ollama/models"
    ollama(root, "localhost:5000/team/Über model/v 1\x1b", tiny_path)
    models = stores / ".lmstudio/models/pub"
    for folder in ("a b", "a-b", "-", "..."):
        link(models / folder / "weights.gguf", tiny_path)
    names = [f.name for f in local.scan()]
    assert len({name.casefold() for name in names}) == len(names) == len(NAMES) + 4  # "..." is hidden
    assert "lmstudio/pub/a-b:weights" in names and "lmstudio/pub/a-b-2:weights" in names
    for found in local.scan():
        assert local.find(parse_name(found.name))[0].path == found.path
        assert found.remove_with.isprintable()


def test_a_store_that_changes_while_it_is_listed(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = foreign._entries

    def emptied(folder: Path) -> list[Path]:
        found = entries(folder)
        if folder.name == "llama3.2":
            shutil.rmtree(stores / ".ollama")
        return found

    monkeypatch.setattr(foreign, "_entries", emptied)
    rows = {m.name: m for m in hub.list_local()}
    assert rows["ollama/llama3.2:3b"].broken
    assert all(row.supported for name, row in rows.items() if not name.startswith("ollama/"))


def test_stores_in_other_places(user: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(user / "elsewhere"))
    monkeypatch.setenv("LLAMA_CACHE", str(user / "llama"))
    (user / ".ollama").mkdir()
    link(user / ".ollama/models", user / "elsewhere")
    ollama(user / "elsewhere", f"{LIBRARY}/tiny/latest", tiny_path)
    link(user / "llama/plain.gguf", tiny_path)
    link(user / f"llama/models--org--new/snapshots/{'1' * 40}/n-Q6_K.gguf", tiny_path)
    (user / ".lmstudio-home-pointer").write_text(f"{user}/lms\n")
    (user / "lms").mkdir()
    (user / "lms/settings.json").write_text(json.dumps({"downloadsFolder": f"{user}/big disk"}))
    link(user / "big disk/pub/model/m-Q4_0.gguf", tiny_path)
    names = [f.name for f in local.scan()]
    expected = ["ollama/tiny:latest", "lmstudio/pub/model:Q4_0", "llama.cpp/plain", "hf/org/new:Q6_K"]
    assert names == expected, "no store twice"
    for pointer in (b"\0", b"\xff", b"relative", b"/dev/zero", b"~nobody-x", b"x" * 10_000):
        (user / ".lmstudio-home-pointer").write_bytes(pointer)
        assert "ollama/tiny:latest" in [f.name for f in local.scan()]
    monkeypatch.setenv(foreign.ENVIRONMENT, "none")
    assert local.scan() == []


def test_our_own_cache_is_not_another_one(user: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(user / ".cache/huggingface"))
    link(user / f".cache/huggingface/hub/models--org--other/snapshots/{'1' * 40}/o-Q6_K.gguf", tiny_path)
    assert [(f.name, f.source) for f in local.scan()] == [("org/other:Q6_K", "hub")]


def test_a_file_is_read_again_when_it_changes(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(row.supported for row in hub.list_local())
    monkeypatch.setattr(local, "_read_facts", lambda path: pytest.fail(f"{path} was read twice"))
    assert all(row.supported for row in hub.list_local())
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(stores))
    monkeypatch.delenv(foreign.ENVIRONMENT)
    blob = next((stores / ".ollama/models/blobs").iterdir())
    blob.write_bytes(b"noise" + blob.read_bytes()[5:])
    rows = {row.name: row for row in hub.list_local()}
    assert rows["ollama/llama3.2:3b"].broken and rows["hf/org/other:Q6_K"].supported
