"""What a name stands for: path, repository, alias of the settings, family, part of a local name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from localllm import hub
from localllm.config import UserConfig
from localllm.errors import (
    ConfigError,
    DoesNotFit,
    DownloadError,
    InvalidRequest,
    LocalLLMError,
    ModelNotFound,
    UnsupportedModel,
)
from localllm.hub import catalog

from .conftest import QUICK, FakeHub, noise, pull

GGUF = {"x-Q4_K_M.gguf": noise(2000), "x-Q8_0.gguf": noise(3000)}
GPU = catalog.Memory("gpu", 24 << 30, 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "../x/y",
        "a/b/c",
        "a//b",
        "-rf/x",
        "a\\b/c",
        "~/x",
        "a/b@../../",
        "x" * 1_000_000,
        "а/b",
        "a/b\0",
        "~nobody/x",
        "",
    ],
    ids=lambda n: repr(n[:12]),
)
def test_bad_names_are_refused_before_any_request(fake_hub: FakeHub, name: str) -> None:
    with pytest.raises((InvalidRequest, ModelNotFound)) as caught:
        hub.resolve(name, patience=QUICK)
    assert len(caught.value.message) < 400
    assert fake_hub.log() == []


def test_paths(fake_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "f.gguf").write_bytes(b"12345")
    (tmp_path / "qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in (str(tmp_path / "m"), "./m", "m"):
        assert hub.resolve(text).kind == "path"
        assert hub.resolve(text).path.resolve() == tmp_path / "m"  # type: ignore[union-attr]
    assert hub.resolve("f.gguf").size_bytes == 5
    assert hub.download(hub.resolve("./f.gguf")) == Path("f.gguf")
    with pytest.raises(ModelNotFound, match=r"no file or folder \./nothing"):
        hub.resolve("./nothing")
    with pytest.raises(LocalLLMError, match="qwen is not on this machine"):
        hub.resolve("qwen", offline=True)  # a folder that holds no model does not hide the family
    assert fake_hub.log() == []


def test_repositories(fake_hub: FakeHub) -> None:
    fake_hub.add("a/plain", GGUF)
    resolved = hub.resolve("a/plain", patience=QUICK)
    assert (resolved.kind, resolved.name, resolved.quant) == ("hub", "a/plain:Q4_K_M", "Q4_K_M")
    assert (resolved.size_bytes, resolved.download_bytes, resolved.license) == (2000, 2000, "mit")
    assert len(resolved.revision) == 40
    assert resolved.path is None
    assert resolved.lines[0] == "a/plain → a/plain:Q4_K_M"
    assert "license mit" in resolved.lines[1]
    assert hub.resolve("a/plain:q8_0", patience=QUICK).size_bytes == 3000
    with pytest.raises(ModelNotFound, match="has no Q5_0; it has Q4_K_M, Q8_0"):
        hub.resolve("a/plain:Q5_0", patience=QUICK)
    with pytest.raises(ModelNotFound, match="no repository a/none") as caught:
        hub.resolve("a/none", patience=QUICK)
    assert caught.value.exit_code == 3


def test_an_mmproj_file_comes_with_the_model(fake_hub: FakeHub) -> None:
    towers = {name: b"t" * size for name, size in (("mmproj-F32.gguf", 40), ("mmproj-F16.gguf", 20))}
    fake_hub.add("a/sees", GGUF | towers | {"BF16/mmproj-x-BF16.gguf": b"t" * 7})
    resolved = hub.resolve("a/sees", patience=QUICK)
    assert {file.name for file in resolved.files if "mmproj" in file.name} == {"mmproj-F16.gguf"}
    assert resolved.size_bytes == resolved.download_bytes == 2020
    path = hub.download(resolved, patience=QUICK)
    assert "mmproj" not in path.name and (path.parent / "mmproj-F16.gguf").stat().st_size == 20
    assert [model.name for model in hub.local.scan() if model.repo == "a/sees"] == ["a/sees:Q4_K_M"]


def test_a_drafter_comes_with_the_model_and_is_none(fake_hub: FakeHub) -> None:
    """Repositories of Gemma 4 hold one in a file of its own, and copies of it in other formats."""
    copies = dict.fromkeys(("MTP/mtp-gemma-4-x-Q8_0.gguf", "MTP/gemma-4-x-BF16-MTP.gguf"), b"d" * 30)
    fake_hub.add("a/drafts", GGUF | copies | {"mtp-gemma-4-x-Q8_0.gguf": b"d" * 30, "dflash-x-Q8_0.gguf": b"d"})
    resolved = hub.resolve("a/drafts:Q8_0", patience=QUICK)
    assert {file.name for file in resolved.files} == {"x-Q8_0.gguf", "mtp-gemma-4-x-Q8_0.gguf"}
    path = hub.download(resolved, patience=QUICK)
    assert path.name == "x-Q8_0.gguf" and (path.parent / "mtp-gemma-4-x-Q8_0.gguf").exists()
    assert [model.name for model in hub.local.scan() if model.repo == "a/drafts"] == ["a/drafts:Q8_0"]
    fake_hub.add("a/qwen", GGUF | {"mtp-Qwen3.6-x-Q8_0.gguf": b"d" * 30})
    assert {file.name for file in hub.resolve("a/qwen:Q8_0", patience=QUICK).files} == {"x-Q8_0.gguf"}
    fake_hub.add("a/alone", {"mtp-gemma-4-x-Q8_0.gguf": b"d" * 30})
    assert hub.download(hub.resolve("a/alone", patience=QUICK), patience=QUICK).name == "mtp-gemma-4-x-Q8_0.gguf"


def test_a_second_quant_of_a_cached_repository_is_asked_for(fake_hub: FakeHub) -> None:
    fake_hub.add("a/q", GGUF)
    pull("a/q:Q8_0")
    assert hub.resolve("a/q").quant == "Q8_0", "what is here comes first"
    assert hub.resolve("a/q:Q4_K_M", patience=QUICK).path is None
    pull("a/q:Q4_K_M")
    with pytest.raises(ModelNotFound, match="a/q could be a/q:Q4_K_M, a/q:Q8_0"):
        hub.resolve("a/q")
    assert hub.resolve("a/q", refresh=True, patience=QUICK).revision
    assert hub.resolve("a/q:Q8_0", refresh=True, patience=QUICK).download_bytes == 0
    assert hub.resolve("a/q:Q8_0", refresh=True, offline=True).path


@pytest.mark.parametrize(
    ("info", "architecture"),
    [
        ({"config": {"architectures": ["JambaForCausalLM"]}}, "JambaForCausalLM"),
        ({"gguf": {"architecture": "mpt"}}, "mpt"),
        ({"gguf": {"architecture": "jamba"}}, "jamba"),
        ({"config": {"architectures": ["\u001b[2JEvil"]}}, "Evil"),
    ],
)
def test_unknown_architectures_are_refused_before_the_download(
    fake_hub: FakeHub, info: dict[str, object], architecture: str
) -> None:
    fake_hub.add(f"a/arch-{len(architecture)}", GGUF, info)
    with pytest.raises(UnsupportedModel, match=architecture) as caught:
        hub.resolve(f"a/arch-{len(architecture)}", patience=QUICK)
    assert len(caught.value.message) < 120 and "localllm catalog" in caught.value.why
    assert "\x1b" not in caught.value.message


@pytest.mark.parametrize("info", [{"cardData": None, "tags": None}, {"cardData": {"license": ["x"]}}, {"config": {}}])
def test_odd_listings_are_read(fake_hub: FakeHub, info: dict[str, object]) -> None:
    fake_hub.add("a/odd", GGUF, info)
    assert hub.resolve("a/odd", patience=QUICK).files


@pytest.mark.parametrize(
    "info", [{"siblings": 5}, {"siblings": [5]}, {"siblings": [{}]}, {"cardData": 5}, {"config": [5]}]
)
def test_wrong_listings_are_refused(fake_hub: FakeHub, info: dict[str, object]) -> None:
    fake_hub.add("a/wrong", GGUF, info)
    with pytest.raises(LocalLLMError) as caught:
        hub.resolve("a/wrong", patience=QUICK)
    assert caught.value.hint


def test_offline(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/plain", "qwen", "smollm2"):
        with pytest.raises(ModelNotFound, match="offline mode is on") as caught:
            hub.resolve(name, offline=True)
        assert f"localllm pull {name}" in caught.value.hint
        assert caught.value.exit_code == 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="offline mode is on"):
        hub.resolve("a/plain")
    assert fake_hub.log() == []


def test_a_family_that_is_not_here_names_its_base_models(
    fake_hub: FakeHub, empty_home: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gemma-base", "other-base"):
        (empty_home / "data/models" / name).mkdir(parents=True)
        base = tiny_path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templat_")
        (empty_home / "data/models" / name / "x.gguf").write_bytes(base)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for offline, error in ((True, ModelNotFound), (False, DownloadError)):
        with pytest.raises(error) as caught:
            hub.resolve("gemma", offline=offline, patience=QUICK)
        assert caught.value.fixes == (('localllm run gemma-base "Once upon a time"', "a base model on this machine"),)
    assert fake_hub.log() == []


def test_odd_settings_are_named(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://x")
    with pytest.raises(ConfigError, match="proxy or certificate settings cannot be used"):
        hub.resolve("a/b", patience=QUICK)


def test_aliases_of_the_settings(fake_hub: FakeHub, tmp_path: Path) -> None:
    fake_hub.add("a/alias", GGUF)
    (tmp_path / "x.gguf").write_bytes(b"1")
    config = UserConfig(aliases={"work": "a/alias:Q8_0", "file": str(tmp_path / "x.gguf"), "qwen": "a/alias"})
    assert hub.resolve("work", config=config, patience=QUICK).size_bytes == 3000
    assert hub.resolve("work:Q4_K_M", config=config, patience=QUICK).size_bytes == 2000
    assert hub.resolve("file", config=config).kind == "path"
    assert hub.resolve("qwen", config=config, patience=QUICK).repo == "a/alias", "the user's alias hides ours"


def test_a_part_of_a_local_name(fake_hub: FakeHub) -> None:
    fake_hub.add("a/Falcon-tiny", GGUF)
    fake_hub.add("a/Falcon-mini", GGUF)
    pull("a/Falcon-tiny:Q8_0")
    assert hub.resolve("falcon").name == "a/Falcon-tiny:Q8_0"
    pull("a/Falcon-mini:Q8_0")
    assert hub.resolve("tiny").name == "a/Falcon-tiny:Q8_0"
    with pytest.raises(ModelNotFound, match="falcon could be a/Falcon-mini:Q8_0, a/Falcon-tiny:Q8_0"):
        hub.resolve("falcon")
    assert hub.resolve("tiny@main").name == "a/Falcon-tiny:Q8_0"
    for name in ("tiny@none", "a/Falcon-tiny@none"):
        with pytest.raises(ModelNotFound):
            hub.resolve(name, offline=True)


def test_unknown_names_get_a_suggestion(fake_hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no model 'qwem3-8b'") as caught:
        hub.resolve("qwem3-8b")
    assert "qwen3-8b" in caught.value.hint
    assert fake_hub.log() == []


def repository(spec: str) -> dict[str, bytes]:
    repo, _, quant = spec.partition(":")
    return {f"m-{quant}.gguf": noise(100)} if quant else {"config.json": b"{}", "model.safetensors": noise(100)}


def test_families_take_the_best_the_hub_has(fake_hub: FakeHub, unrunnable: str) -> None:
    """Ids in the catalog are not verified: one the hub does not know is passed over."""
    fits = catalog.default_fits(GPU)
    best = catalog.choose("mistral", fits, free_label="x", on_gpu=True).best
    second = catalog.choose("mistral", fits, free_label="x", on_gpu=True, skip=frozenset({best.spec})).best
    fake_hub.add(second.repo, repository(second.spec))
    resolved = hub.resolve("mistral", judge=on_gpu, patience=QUICK)
    assert (resolved.repo, resolved.quant) == (second.repo, second.quant)
    assert "candidates; best that fits" in resolved.reason
    assert any(c.note == "not on the hub" for c in resolved.candidates)
    fake_hub.add(best.repo, repository(best.spec))
    resolved = hub.resolve("mistral", judge=on_gpu, patience=QUICK)
    assert resolved.repo == best.repo
    assert any(unrunnable in line and "a newer localllm" in line for line in resolved.lines)


def on_gpu() -> hub.Judgement:
    """On a machine with one large card."""
    return hub.Judgement(GPU, catalog.default_fits(GPU))


def test_local_members_come_first(fake_hub: FakeHub) -> None:
    small = catalog.members("qwen3-0.6b")[0]
    fake_hub.add(small.repo, repository(small.spec))
    pull(small.spec)
    fake_hub.fault()
    resolved = hub.resolve("qwen", judge=on_gpu)
    assert resolved.path is not None
    assert resolved.reason == "on this machine, the best qwen here that fits"
    assert "also fits: localllm pull qwen3" in resolved.also[0]
    assert hub.resolve("qwen3-0.6b", offline=True).path == resolved.path
    with pytest.raises(ModelNotFound, match="not on this machine"):
        hub.resolve("qwen3-0.6b@none", offline=True)
    assert fake_hub.log() == []


def test_ollamas_names_of_the_catalog(fake_hub: FakeHub) -> None:
    small = catalog.members("qwen3-0.6b")[0]
    fake_hub.add(small.repo, repository(small.spec))
    for name in ("qwen3:0.6b", "qwen3-0.6b:latest", f"hf.co/{small.spec}"):
        assert hub.resolve(name, patience=QUICK).repo == small.repo
    with pytest.raises(ModelNotFound, match="not on this machine"):
        hub.resolve("ollama/a/b/c", patience=QUICK)


def test_families_are_refused_by_name(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, unrunnable: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{unrunnable} needs a newer localllm"):
        hub.resolve(unrunnable)
    with pytest.raises(DoesNotFit, match="no mistral fits"):
        hub.resolve("mistral", judge=lambda: hub.Judgement(GPU, lambda c: (False, 0.0)))
    assert fake_hub.log() == []
    with pytest.raises(ModelNotFound, match="no repository"):
        hub.resolve("gemma3-1b", patience=QUICK)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        hub.resolve("llama", patience=QUICK)


def test_a_family_never_takes_more_than_it_may(fake_hub: FakeHub) -> None:
    config = UserConfig()
    limited = UserConfig(pull=type(config.pull)(max_auto_bytes=700_000_000))
    fake_hub.add("Qwen/Qwen3-0.6B-GGUF", {"m-Q8_0.gguf": noise(100)})
    resolved = hub.resolve("qwen", judge=on_gpu, config=limited, patience=QUICK)
    assert resolved.repo == "Qwen/Qwen3-0.6B-GGUF"
    assert any("over the limit of 0.7 GiB (pull.max_auto_bytes)" in c.note for c in resolved.candidates)


def test_a_family_takes_a_share_of_the_free_disk(
    fake_hub: FakeHub, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is not what is short then, and the refusal does not say so."""
    fits = catalog.default_fits(GPU)
    usage = shutil.disk_usage(empty_home)

    def with_free(num_bytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=num_bytes))

    least = min(c.download_bytes for c in catalog.members("qwen") if fits(c)[0])
    with_free(int(least / 0.4) + 10)
    small = next(c for c in catalog.members("qwen") if c.download_bytes == least)
    fake_hub.add(small.repo, repository(small.spec))
    resolved = hub.resolve("qwen", judge=on_gpu, patience=QUICK)
    assert resolved.repo == small.repo
    assert "free on the disk)" in " ".join(resolved.also)
    with_free(1 << 30)
    with pytest.raises(DoesNotFit, match=r"no qwen is small enough .* \(40% of the 1\.0 GiB free on the disk\)") as no:
        hub.resolve("qwen", judge=on_gpu, patience=QUICK)
    assert f"localllm pull {small.name}" in no.value.hint
    assert no.value.context == {"download_bytes": least, "limit_bytes": int(0.4 * (1 << 30))}
    assert hub.resolve(small.name, judge=on_gpu, patience=QUICK).repo == small.repo, "the user's choice"
    pull(small.spec)
    assert hub.resolve("qwen", judge=on_gpu).path, "what is here needs no room"
