"""What is on the machine: listed, broken ones too, removed, repaired; section 2.3's damage to every file of a model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm import hub
from localllm.errors import ConfigError, DownloadError, LocalLLMError, ModelNotFound
from localllm.hub import cache, local, local_model
from localllm.request import LoadProgress

from .conftest import QUICK, FakeHub, noise, pull, tree

CONFIG = b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
INDEX = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
WHOLE = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}" * 50,
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    "model-00001-of-00002.safetensors": noise(4000, 1),
    "model-00002-of-00002.safetensors": noise(4000, 2),
}
TWO = {"m-Q4_0.gguf": noise(3000, 3), "m-Q8_0.gguf": noise(5000, 4), "LICENSE": b"x"}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_models_are_named_as_one_would_type_them(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/whole", WHOLE)
    fake_hub.add("a/two", TWO)
    pull("a/whole")
    pull("a/two:Q8_0")
    pull("a/two:Q4_0")
    put(empty_home / "data/models/mine", {"mine-Q6_K.gguf": b"GGUF"})
    put(empty_home / "data/models/smollm2", {"SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF"})
    rows = {m.name: m for m in hub.list_local()}
    assert set(rows) == {"mine", "smollm2", "a/two:Q4_0", "a/two:Q8_0", "a/whole"}
    assert {n: r.source for n, r in rows.items() if "/" not in n} == {"mine": "folder", "smollm2": "index"}
    assert rows["a/two:Q8_0"].size_bytes == 5000
    assert all(r.broken and r.reason and not r.supported for r in rows.values()), "all of these are noise"
    assert "4 bytes, expected 98,362,432" in rows["smollm2"].reason


def test_folders_of_safetensors_in_the_models_folder(empty_home: Path) -> None:
    models = empty_home / "data/models"
    put(models / "Tiny-1B", WHOLE)
    put(models / "Tiny-1B-int4", WHOLE | {local_model.QUANTIZED: b"{}"})
    put(models / "Tiny-1B-fp8", WHOLE | {local_model.QUANTIZED: b"{}"})
    put(models / "Tiny-2B", {"config.json": CONFIG})  # no weights yet
    put(models / ".Tiny-1B-mxfp4.partial", WHOLE)
    assert {f.name: f.derived for f in local.scan()} == {"Tiny-1B": False, "Tiny-1B-int4": True, "Tiny-1B-fp8": True}
    assert hub.resolve("Tiny-1B-int4", offline=True).path == models / "Tiny-1B-int4"

    with pytest.raises(ModelNotFound, match="no model here was quantized"):
        hub.remove("Tiny-2B", derived_only=True)
    planned = hub.remove("org/Tiny-1B", derived_only=True, dry_run=True)
    assert set(planned.names) == {"Tiny-1B-int4", "Tiny-1B-fp8"}
    assert hub.remove("org/Tiny-1B", derived_only=True).paths == planned.paths
    assert [f.name for f in local.scan()] == ["Tiny-1B"]
    assert hub.remove_partials().paths == (models / ".Tiny-1B-mxfp4.partial",)
    hub.remove("Tiny-1B")
    assert [name for name in sorted(tree(models)) if not name.startswith(".")] == ["Tiny-2B", "Tiny-2B/config.json"]


def test_folders_of_other_tools_are_not_models(fake_hub: FakeHub, empty_home: Path) -> None:
    hub_folder = empty_home / "hf/hub"
    put(
        hub_folder / "models--x--tokenizer-only/snapshots" / ("0" * 40), {"config.json": b"{}", "tokenizer.json": b"{}"}
    )
    put(hub_folder / "datasets--x--y/snapshots" / ("0" * 40), {"m.gguf": b"GGUF"})
    put(hub_folder / "models--broken", {"snapshots": b"a file"})
    (hub_folder / "models--empty").mkdir()
    assert hub.list_local() == []


def test_one_model_that_cannot_be_read_hides_no_other(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.models import architectures

    models = empty_home / "data/models"
    put(models / "Bad", WHOLE)
    put(models / "Other", WHOLE)
    plain = architectures.open_model

    def fail(path: Path) -> architectures.OpenModel:
        if path.name == "Bad":
            raise ValueError("the truth value of an array")
        return plain(path)

    monkeypatch.setattr(architectures, "open_model", fail)
    rows = {row.name: row for row in hub.list_local()}
    assert rows.keys() == {"Bad", "Other"}
    assert rows["Bad"].broken and rows["Bad"].reason == "cannot be read (ValueError)"


@pytest.mark.parametrize("when", ["1e300", "NaN", "-5", '"today"', "[1]", "1" + "0" * 400, "true"])
def test_a_time_of_use_that_is_none_is_passed_over(
    when: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(empty_home / "data/models/Tiny", WHOLE)
    put(empty_home / "state", {"models.json": f'{{"used": {{"Tiny": {when}}}}}'.encode()})
    (row,) = hub.list_local()
    assert row.last_used in (None, True)
    assert time.gmtime(row.last_used or 0).tm_year == 1970


def test_a_cached_model_is_found_at_once(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usable offline, with no request; the hub may be gone."""
    fake_hub.add("a/whole", WHOLE)
    folder = pull("a/whole")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    for text in ("a/whole", "A/Whole", "whole", f"a/whole@{folder.name}"):
        assert hub.resolve(text, offline=text == "whole").path == folder
    assert time.monotonic() - started < 0.5


def test_an_interrupted_pull_by_another_tool_is_not_a_model(fake_hub: FakeHub) -> None:
    fake_hub.add("a/whole", WHOLE)
    folder = pull("a/whole")
    (folder / "model-00002-of-00002.safetensors").unlink()
    (row,) = hub.list_local()
    assert row.broken
    assert "1 of 2 weight files are missing" in row.reason
    assert hub.resolve("a/whole", patience=QUICK).path is None, "not taken for whole"
    assert pull("a/whole") == folder


def test_an_index_that_no_reader_follows_makes_nothing_broken(tmp_path: Path) -> None:
    index = {"weight_map": {"a.weight": "model-00001-of-00009.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = ["model.safetensors.index.json"]
    assert local_model.missing_shards(tmp_path, names) and not local_model.missing_shards(
        tmp_path, [*names, "model.safetensors"]
    )


def test_remove_keeps_what_others_need(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/two", TWO)
    pull("a/two:Q4_0")
    pull("a/two:Q8_0")
    before = tree(empty_home / "hf")
    planned = hub.remove("a/two:Q8_0", dry_run=True)
    assert (planned.names, planned.num_bytes, planned.done) == (("a/two:Q8_0",), 5000, False)
    assert "other tools" in planned.note
    assert tree(empty_home / "hf") == before
    assert hub.remove("a/two:Q8_0").done
    assert [f.name for f in local.scan()] == ["a/two:Q4_0"]
    assert hub.resolve("a/two:Q4_0").path.read_bytes() == TWO["m-Q4_0.gguf"]  # type: ignore[union-attr]
    assert hub.remove("two").num_bytes == 3001
    assert [p for p in tree(empty_home / "hf/hub") if "models--" in p] == []


def test_remove_takes_all_quants_and_revisions_of_a_repository(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/rev", TWO)
    fake_hub.add("a/rev@old", TWO | {"m-Q4_0.gguf": noise(3000, 5)})
    for name in ("a/rev:Q4_0", "a/rev:Q8_0", "a/rev:Q4_0@old"):
        pull(name)
    removed = hub.remove("a/rev")
    assert len(removed.revisions) == 2
    assert removed.num_bytes == 3000 + 3000 + 5000 + 1
    assert hub.list_local() == []


def test_remove_takes_a_quant_that_only_an_older_commit_has(fake_hub: FakeHub) -> None:
    fake_hub.add("a/grown", TWO)
    pull("a/grown:Q4_0")
    fake_hub.add("a/grown", {"m-Q8_0.gguf": noise(5000, 9)})
    pull("a/grown:Q8_0")
    assert hub.remove("a/grown").names == ("a/grown:Q8_0", "a/grown:Q4_0")
    assert local.scan() == []


def test_remove_takes_the_named_revision_alone(fake_hub: FakeHub) -> None:
    fake_hub.add("a/rev", TWO)
    fake_hub.add("a/rev@old", TWO | {"m-Q4_0.gguf": noise(3000, 5)})
    kept, old = pull("a/rev:Q4_0"), pull("a/rev:Q4_0@old")
    removed = hub.remove("a/rev:Q4_0@old")
    assert (removed.revisions, removed.num_bytes) == ((old.parent.name,), 3000)
    assert [f.path for f in local.scan()] == [kept]
    assert kept.read_bytes() == TWO["m-Q4_0.gguf"]


def test_remove_names_what_it_cannot_find(fake_hub: FakeHub, empty_home: Path) -> None:
    with pytest.raises(ModelNotFound, match="not on this machine"):
        hub.remove("nothing")
    for name in ("one", "onetwo"):
        put(empty_home / "data/models" / name, {"x.gguf": b"GGUF"})
    with pytest.raises(ModelNotFound, match="could be one, onetwo"):
        hub.remove("on")
    assert hub.remove("one").names == ("one",), "an exact name beats parts"
    assert not (empty_home / "data/models/one").exists()


def test_a_lock_that_is_held_too_long_is_named(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(cache, "REPO_WAIT_S", 0.05)
    cache.prepare("a/b")
    held = FileLock(cache.hub_dir() / ".locks" / "models--a--b" / "localllm-snapshot.lock")
    with held, pytest.raises(ConfigError, match="changing a/b for 0.05 s"), cache.repo_lock("a/b"):
        pass


def test_partials_are_removed_unless_they_grow(fake_hub: FakeHub, empty_home: Path) -> None:
    from filelock import FileLock

    cache.prepare("a/b")
    for digest in ("1" * 64, "2" * 64):
        data, facts = cache.partial_of("a/b", digest)
        data.write_bytes(b"xyz")
        facts.write_text("{}")
    put(empty_home / "data/models/smollm2/.fetch-abc", {"wheels/x.whl": b"12345"})
    assert hub.remove_partials(dry_run=True).num_bytes == 15
    with FileLock(cache.blob_lock_path("a/b", "1" * 64)):
        assert hub.remove_partials().num_bytes == 10
    assert len(cache.partials()) == 2
    assert hub.remove_partials().num_bytes == 5
    assert list((empty_home / "hf/hub/models--a--b/blobs").iterdir()) == []


def test_whole_files_of_a_model_that_never_came_are_removed_too(fake_hub: FakeHub, empty_home: Path) -> None:
    from filelock import FileLock

    fake_hub.add("a/two", TWO)
    fake_hub.add("a/whole", WHOLE)
    kept = pull("a/two:Q4_0")
    fake_hub.fault("503", path="00002-of-00002", times=99)
    with pytest.raises(DownloadError):
        pull("a/whole")
    came = [p for p in (empty_home / "hf/hub/models--a--whole/blobs").iterdir() if "." not in p.name]
    assert came
    data, facts = cache.partial_of("a/whole", "1" * 64)
    data.write_bytes(b"xyz")
    with FileLock(cache.blob_lock_path("a/whole", "1" * 64)):  # as if the pull were still running
        hub.remove_partials()
    assert all(p.exists() for p in came)
    removed = hub.remove_partials()
    assert set(came) < set(removed.paths) and "other tools" in removed.note
    assert not any(p.exists() for p in came)
    assert kept.read_bytes() == TWO["m-Q4_0.gguf"]


def test_a_disk_without_links_holds_copies(
    fake_hub: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    fake_hub.add("a/copies", TWO)
    path = pull("a/copies:Q4_0")
    assert hub.repair("a/copies", patience=QUICK).bad == ()
    path.write_bytes(b"x" * 3000)
    assert hub.repair("a/copies", patience=QUICK).bad == ("m-Q4_0.gguf",)
    assert path.read_bytes() == TWO["m-Q4_0.gguf"]
    assert hub.remove_partials().paths == ()
    assert hub.remove("a/copies").num_bytes == 2 * 3001
    assert [p for p in tree(empty_home / "hf/hub") if "models--" in p] == []


def test_repair_finds_a_flipped_bit(fake_hub: FakeHub, empty_home: Path) -> None:
    fake_hub.add("a/whole", WHOLE)
    folder = pull("a/whole")
    assert hub.repair("a/whole", patience=QUICK).bad == ()
    blob = (folder / "model-00002-of-00002.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[7] ^= 1
    blob.write_bytes(data)
    fake_hub.fault()
    phases: list[LoadProgress] = []
    found = hub.repair("whole", patience=QUICK, progress=phases.append)
    assert found.bad == ("model-00002-of-00002.safetensors",)
    assert found.checked == 6
    assert {p.name for p in phases} == {"verify", "download"}
    assert len(fake_hub.files_asked()) == 1
    assert {n: (folder / n).read_bytes() for n in WHOLE} == WHOLE


def test_repair_brings_back_every_quant_it_found_bad(fake_hub: FakeHub) -> None:
    fake_hub.add("a/two", TWO)
    four, eight = pull("a/two:Q4_0"), pull("a/two:Q8_0")
    eight.resolve().write_bytes(b"x" * 5000)
    assert hub.repair("a/two:Q4_0", patience=QUICK).bad == ("m-Q8_0.gguf",)
    assert eight.read_bytes() == TWO["m-Q8_0.gguf"], "a blob that was removed is fetched again"
    for blob in (four.resolve(), eight.resolve()):
        blob.unlink()
    found = hub.repair("a/two", patience=QUICK)
    assert (found.name, found.bad) == ("a/two", ("m-Q4_0.gguf", "m-Q8_0.gguf"))
    assert (four.read_bytes(), eight.read_bytes()) == (TWO["m-Q4_0.gguf"], TWO["m-Q8_0.gguf"])


def test_repair_offline_says_what_is_bad(fake_hub: FakeHub) -> None:
    fake_hub.add("a/whole", WHOLE)
    folder = pull("a/whole")
    assert hub.repair("a/whole", offline=True).checked == 6
    (folder / "config.json").resolve().write_bytes(b"x" * len(CONFIG))
    with pytest.raises(DownloadError, match=r"damaged \(config.json\)") as caught:
        hub.repair("a/whole", offline=True)
    assert caught.value.hint == "localllm pull --repair a/whole"


def test_repair_keeps_the_commit(fake_hub: FakeHub) -> None:
    """A newer main does not leak into a repaired snapshot."""
    fake_hub.add("a/moved", WHOLE)
    folder = pull("a/moved")
    fake_hub.add("a/moved@old", WHOLE)
    old = pull("a/moved@old")
    fake_hub.add("a/moved", {"config.json": CONFIG + b" "})
    (old / "config.json").unlink()
    assert hub.repair(f"a/moved@{old.name}", patience=QUICK).bad == ("config.json",)
    assert (old / "config.json").read_bytes() == CONFIG
    assert folder != old


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x20
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda p: os.truncate(p, 0),
    "truncated": lambda p: os.truncate(p, p.stat().st_size // 2),
    "flipped": _flip,
    "folder": _folder,
    "unreadable": lambda p: p.chmod(0),
    "loop": _loop,
}


SAMPLE = ("config.json", "model-00001-of-00002.safetensors", "m-Q4_0.gguf")
EVERY = [*WHOLE, "m-Q4_0.gguf", "refs/main", "snapshot"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", [f if f in SAMPLE else pytest.param(f, marks=pytest.mark.slow) for f in EVERY])
def test_damage_is_listed_and_repaired(fake_hub: FakeHub, empty_home: Path, file: str, damage: str) -> None:
    """Section 2.3, both where a name leads (the blob) and the name itself."""
    single = file == "m-Q4_0.gguf"
    name = fake_hub.add("a/gguf" if single else "a/whole", {file: noise(3000)} if single else WHOLE)
    folder = pull(name)
    folder = folder if folder.is_dir() else folder.parent
    for direct in (False, True):
        target = folder / file
        if file == "refs/main":
            target = folder.parents[1] / file
            if direct:
                return
        elif file == "snapshot":
            if damage not in ("missing", "folder", "loop"):
                return
            shutil.rmtree(folder)
            target = folder
            target.write_text("")
        elif not direct:
            target = target.resolve()
        elif target.is_symlink():
            shutil.copy(target, copy := target.with_name("copy"))
            os.replace(copy, target)
        DAMAGE[damage](target)
        rows = hub.list_local()
        assert all(r.broken or not r.supported for r in rows)
        try:
            resolved = hub.resolve(name, patience=QUICK)
            hub.download(resolved, patience=QUICK)
            hub.repair(name, patience=QUICK)
        except LocalLLMError as error:
            assert error.hint, "a sentence with the next command"
            pytest.fail(f"{file} {damage}: {error.message}")
        expected = {file: noise(3000)} if single else WHOLE
        assert {n: (folder / n).read_bytes() for n in expected} == expected


def test_the_model_used_last_comes_first(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.default_model(lambda _: 1.0) == "smollm2"
    hub.remember_model("gone/model", chats=True)
    assert hub.default_model(lambda _: 1.0) == "smollm2", "a model that is no longer here is not offered"
    monkeypatch.chdir(empty_home)
    (empty_home / "gone").mkdir()
    hub.remember_model("gone", chats=True)
    assert hub.default_model(lambda _: 1.0) == "smollm2", "a folder that has the name of a removed model is not it"
    put(empty_home / "data/models/mine", {"mine.gguf": b"GGUF"})
    hub.remember_model(str(empty_home / "data/models/mine"), chats=True)
    assert hub.default_model(lambda _: 1.0) == str(empty_home / "data/models/mine")
    hub.remember_model("mine", chats=True)
    assert hub.default_model(lambda _: 1.0) == "mine"
    assert local.list_local()[0].last_used is not None
    for text in ("", "[]", '{"used": 7}', '{"used": {"mine": "x"}}', '{"not_for_chat": [7, [1]]}', "[" * 100_000):
        (empty_home / "state/models.json").write_text(text)
        hub.default_model(lambda _: 1.0)
        local.list_local()


def test_a_chat_is_not_offered_a_model_that_only_completes(empty_home: Path) -> None:
    for name in ("older", "newer", "base"):
        put(empty_home / "data/models" / name, {f"{name}.gguf": b"GGUF"})
    hub.remember_model("base", chats=False)
    assert hub.default_model(lambda _: 1.0) == "smollm2", "as if none had been used"
    hub.remember_model("older", chats=True)
    hub.remember_model("newer", chats=True)
    hub.remember_model("base", chats=False)
    assert hub.default_model(lambda _: 1.0) == "newer"
    shutil.rmtree(empty_home / "data/models/newer")
    assert hub.default_model(lambda _: 1.0) == "older"
    used = {row.name: row.last_used or 0 for row in hub.list_local()}
    assert used["base"] > used["older"] > 0, "the list still shows when it was used"
    hub.remember_model("base", chats=True)
    assert hub.default_model(lambda _: 1.0) == "base", "its files have a template now"


def test_the_chat_model_of_most_worth(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = local.LocalModel("x", Path("x"), "hub", size_bytes=10)
    sizes = {"small": 1, "large": 9, "base": 99, "slow": 50, "broken": 70}
    rows = [
        local.LocalModel(n, Path(n), "hub", size_bytes=10, params=p, chat=n != "base", broken=n == "broken")
        for n, p in sizes.items()
    ]
    monkeypatch.setattr(local, "list_local", lambda: rows)
    assert hub.default_model(lambda m: -1.0 if m.name == "slow" else float(m.params)) == "large"
    assert hub.default_model(lambda m: 1.0 if m.name == "small" else None) == "small"
    assert hub.default_model(lambda m: None) == "smollm2"
    assert row.max_context == 0


def test_a_state_folder_that_cannot_be_written_does_not_fail_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_HOME", "/proc/nowhere")
    hub.remember_model("x", chats=True)
