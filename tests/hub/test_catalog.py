"""The catalog: well-formed; every alias gives something runnable on every memory class, or is refused by name."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.errors import DoesNotFit, UnsupportedModel
from localllm.hub import catalog
from localllm.hub.names import check_repo_id
from localllm.models.architectures import registry
from localllm.terminal import GIB

MEMORIES = [catalog.Memory("cpu", c, 20e9) for c in catalog.CPU_CLASSES]
MEMORIES += [catalog.Memory("gpu", c, 250e9) for c in catalog.GPU_CLASSES]
ALIASES = [a for a in catalog.aliases() if catalog.members(a)]


def pick(alias: str, memory: catalog.Memory, **options: object) -> catalog.Choice:
    fits = catalog.default_fits(memory)
    return catalog.choose(alias, fits, free_label=memory.label, on_gpu=memory.kind == "gpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("candidate", catalog.candidates(), ids=lambda c: f"{c.name}-{c.format}")
def test_entries_are_well_formed(candidate: catalog.Candidate) -> None:
    check_repo_id(candidate.repo)
    assert candidate.format
    bits = candidate.weight_bytes * 8 / candidate.params
    assert 2.4 < bits < 21, f"{bits:.1f} bits per weight"
    assert ("GGUF" in candidate.repo) == bool(candidate.quant)
    assert candidate.device in ("gpu", "any")
    assert re.fullmatch(r"(\d{4}-\d\d)?", candidate.released)
    assert 0 < candidate.active_params <= candidate.params
    assert 1024 <= candidate.kv_bytes_per_token <= 1 << 19
    assert candidate.context >= 8192
    assert candidate.license
    assert candidate.need_bytes() > candidate.weight_bytes
    if candidate.drafter:
        check_repo_id(candidate.drafter)
        assert catalog.drafter_of(candidate.repo.upper()) == candidate.drafter
    assert candidate.released or candidate.needs, "what can run has a date"


WEIGHT_BITS = {"bf16": 16, "fp8": 8, "awq": 4.16, "nvfp4": 4.5, "compressed-tensors int4": 4.125}  # of the layers
VISION_BYTES = {"mistral3": 840_000_000, "gemma3": 840_000_000}  # of the tower beside the text model
BLOCK_BYTES = {"Q4_K": 144 / 256, "Q5_K": 176 / 256, "Q6_K": 210 / 256, "Q8_0": 34 / 32, "Q5_0": 22 / 32}
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where a row is no multiple of 256


def gguf_bytes(candidate: catalog.Candidate) -> float:
    """What the matrices take as Q8_0 or as llama.cpp's Q4_K_M, which keeps some of them in 6 bits."""
    s = candidate.shape
    assert s

    def stored(rows: int, columns: int, kind: str) -> float:
        kind = "Q8_0" if candidate.quant == "Q8_0" else FALLBACK.get(kind, kind) if columns % 256 else kind
        return rows * columns * BLOCK_BYTES[kind]

    kv = s.kv_heads * s.head_dim
    total = stored(s.vocab, s.hidden, "Q6_K") + (0 if s.tied else stored(s.vocab, s.hidden, "Q4_K"))
    for layer in range(s.layers):
        eighth = s.layers // 8
        finer = layer < eighth or layer >= 7 * s.layers // 8 or (layer - eighth) % 3 == 2
        kind = "Q6_K" if finer else "Q4_K"
        total += stored(kv, s.hidden, kind if finer or s.layers < 80 else "Q5_K") + stored(
            s.hidden, s.intermediate, kind
        )
        plain = s.heads * s.head_dim + kv + 2 * s.intermediate
        total += stored(plain, s.hidden, "Q4_K") + stored(s.hidden, s.heads * s.head_dim, "Q4_K")
    return total


@pytest.mark.parametrize(
    "candidate", [c for c in catalog.candidates() if c.shape], ids=lambda c: f"{c.name}-{c.format.split()[0]}"
)
def test_sizes_are_those_that_shape_and_format_make(candidate: catalog.Candidate) -> None:
    s = candidate.shape
    assert s
    layers = s.layers * s.hidden * (2 * s.head_dim * (s.heads + s.kv_heads) + 3 * s.intermediate)
    embeddings = s.vocab * s.hidden
    assert candidate.params == pytest.approx(layers + embeddings * (1 if s.tied else 2), rel=0.005)
    if candidate.quant:
        assert candidate.download_bytes == pytest.approx(gguf_bytes(candidate), rel=0.03)
    else:
        plain = layers * WEIGHT_BITS[candidate.format] / 8
        # some files hold the head although it is tied
        made = [plain + 2 * n * embeddings for n in ((1, 2) if s.tied else (2,))]
        made = [size + VISION_BYTES.get(candidate.architecture, 0) for size in made]
        assert any(candidate.download_bytes == pytest.approx(size, rel=0.03) for size in made)


# hidden, layers, heads, heads of K and V, value heads of the delta rule, MLP (of all experts), tied, tower's parameters
HYBRIDS = {
    "qwen3.5-0.8b": (1024, 24, 8, 2, 16, 3584, True, 1e8),
    "qwen3.5-2b": (2048, 24, 8, 2, 16, 6144, True, 3.3e8),
    "qwen3.5-4b": (2560, 32, 16, 4, 32, 9216, True, 3.3e8),
    "qwen3.5-9b": (4096, 32, 16, 4, 32, 12_288, False, 4.6e8),
    "qwen3.5-27b": (5120, 64, 24, 4, 48, 17_408, False, 4.6e8),
    "qwen3.6-27b": (5120, 64, 24, 4, 48, 17_408, False, 4.6e8),
    "qwen3.8-27b": (5120, 64, 24, 4, 48, 17_408, False, 4.6e8),
    "qwen3.5-35b-a3b": (2048, 40, 16, 2, 32, 257 * 512, False, 4.6e8),
    "qwen3.6-35b-a3b": (2048, 40, 16, 2, 32, 257 * 512, False, 4.6e8),
    "qwen3.5-122b-a10b": (3072, 48, 32, 2, 64, 257 * 1024, False, 4.6e8),
}
HYBRID_BITS = {"fp8": 8, "gptq": 4.156, "nvfp4": 4.5, "compressed-tensors int4": 4.125, "autoround": 4.125, "bf16": 16}


@pytest.mark.parametrize(
    "candidate", [c for c in catalog.candidates() if c.name in HYBRIDS], ids=lambda c: f"{c.name}-{c.repo}-{c.format}"
)
def test_sizes_of_hybrids_lie_between_what_their_parts_make(candidate: catalog.Candidate) -> None:
    """From all matrices quantized, without the draft head, to the MLPs alone, with it."""
    hidden, layers, heads, kv_heads, value_heads, mlp, tied, tower = HYBRIDS[candidate.name]
    attention = hidden * 256 * (3 * heads + 2 * kv_heads)
    delta = hidden * 128 * (2 * 16 + 3 * value_heads)
    mixers = layers // 4 * attention + (layers - layers // 4) * delta
    ffn = layers * 3 * hidden * mlp
    embeddings = 248_320 * hidden * (1 if tied else 2)
    draft = attention + ffn // layers + 2 * hidden**2
    if candidate.quant:
        bits = {"Q8": (8.5, 8.9), "UD-Q8": (8.5, 9.5), "UD-IQ4": (4.1, 4.6), "Q4": (4.7, 5.2), "UD-Q4": (4.7, 5.2)}
        low, high = bits[candidate.quant.split("_")[0]]
        text = mixers + ffn + embeddings
        assert text * low / 8 < candidate.download_bytes < (text + draft) * high / 8
    else:
        share = HYBRID_BITS[candidate.format] / 8
        all_of_it = (mixers + ffn) * share + 2 * (embeddings + tower)
        mlps = ffn * share + 2 * (mixers + embeddings + tower + draft)
        assert 0.97 * all_of_it < candidate.download_bytes < 1.03 * mlps


def test_rows_name_their_source() -> None:
    models = tomllib.loads(Path(catalog.__file__).with_name("catalog.toml").read_text(encoding="utf-8"))["model"]
    assert [m["name"] for m in models if "source" not in m] == []
    for file in (f for m in models for f in m["file"]):
        assert file["verified"] == ("source" in file), file["repo"]


def test_names_are_unique_and_families_complete() -> None:
    assert {"qwen", "llama", "gemma", "mistral", "gpt-oss", "phi"} <= set(catalog.families())
    names = [*dict.fromkeys(c.name for c in catalog.candidates()), *catalog.families(), *catalog.starters()]
    assert len(names) == len(set(names))
    assert {c.architecture for c in catalog.candidates() if not c.needs} >= {
        "llama",
        "qwen2",
        "qwen3",
        "gemma3",
        "phi3",
    }


def test_what_people_run_today_is_listed() -> None:
    """For other engines too, from those who publish for them and not from a personal upload."""
    wanted = """qwen3.5-27b qwen3.5-35b-a3b qwen3.5-122b-a10b qwen3-coder-30b-a3b qwen3-coder-next glm4.5-air
        lfm2.5-1.2b qwen3-4b-instruct-2507 qwen3-4b-thinking-2507 qwen2.5-coder-7b r1-0528-qwen3-8b devstral-small"""
    assert set(wanted.split()) <= {c.name for c in catalog.candidates()}
    repos = """ggml-org/gpt-oss-20b-GGUF ggml-org/gpt-oss-120b-GGUF unsloth/Qwen3.6-35B-A3B-GGUF
        RedHatAI/Qwen3.8-27B-INT4 unsloth/gemma-3-27b-it-qat-GGUF nvidia/Qwen3-8B-NVFP4 nvidia/Qwen3-14B-NVFP4
        nvidia/Qwen3-32B-NVFP4"""
    assert set(repos.split()) <= {c.repo for c in catalog.candidates()}


def test_bf16_comes_after_ready_made_quantised_files() -> None:
    for name in {c.name for c in catalog.candidates()}:
        formats = [c.format for c in catalog.members(name)]
        assert "bf16" not in formats[:-1]


def test_every_alias_resolves_or_is_refused_by_name() -> None:
    """For all memory classes, the four "CPU only" ones included."""
    for memory in MEMORIES:
        fits = catalog.default_fits(memory)
        for alias in ALIASES:
            try:
                best = pick(alias, memory).best
            except (UnsupportedModel, DoesNotFit) as refusal:
                assert alias in refusal.message
                near = refusal.hint.removeprefix("localllm chat ")
                assert near in catalog.aliases()
                assert near == "smollm2" or any(not c.needs and fits(c)[0] for c in catalog.members(near))
            else:
                assert best.architecture in registry.names()
                assert fits(best)[0]
                assert not (memory.kind == "cpu" and best.device == "gpu")


@pytest.mark.parametrize("alias", [name for name in catalog.families() if all(c.needs for c in catalog.members(name))])
def test_families_that_cannot_run_name_the_reason_and_the_nearest(alias: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{alias} needs a newer localllm.*architecture") as caught:
        pick(alias, MEMORIES[-1])
    assert caught.value.hint.startswith("localllm chat ")
    assert caught.value.exit_code == 12


@pytest.mark.parametrize(
    ("alias", "memory", "spec"),
    [
        ("qwen", MEMORIES[0], "unsloth/Qwen3.5-4B-GGUF:Q4_K_M"),
        ("qwen", catalog.Memory("gpu", 24 * GIB, 1e12), "unsloth/Qwen3.8-27B-NVFP4"),
        ("qwen", catalog.Memory("gpu", 16 * GIB, 5e11), "unsloth/Qwen3.8-27B-GGUF:UD-IQ4_XS"),
        ("gemma", MEMORIES[0], "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M"),
        ("llama", catalog.Memory("gpu", 8 * GIB, 3e11), "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"),
        ("mistral", catalog.Memory("gpu", 24 * GIB, 1e12), "unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF:Q4_K_M"),
    ],
)
def test_choices(alias: str, memory: catalog.Memory, spec: str) -> None:
    choice = pick(alias, memory)
    assert choice.best.spec == spec
    assert "candidates; best that fits" in choice.reason


def test_a_choice_says_what_else_there_is(unrunnable: str) -> None:
    choice = pick("qwen", MEMORIES[2])
    assert any("would be larger: needs" in line for line in choice.also)
    assert any("a newer localllm" in line for line in pick("mistral", MEMORIES[2]).also)
    assert len(choice.considered) == len(catalog.members("qwen"))
    assert all(c.note for c in choice.considered if not c.fits)


def test_a_newer_model_with_two_files_is_one_model(unrunnable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [(c, replace(c, quant="Q8_0")) if c.name == unrunnable else (c,) for c in catalog.candidates()]
    monkeypatch.setattr(catalog, "candidates", lambda: tuple(c for files in twice for c in files))
    assert f"{unrunnable}: needs a newer localllm" in pick("mistral", MEMORIES[2]).also


def test_limits_quants_and_missing_repositories() -> None:
    big = catalog.Memory("gpu", 96 * GIB, 3e12)
    assert pick("llama", big).best.name == "llama3.3-70b"
    assert pick("llama", big, limit=catalog.DownloadLimit(32 * GIB)).best.name == "llama3.1-8b"
    assert pick("llama3.3-70b", big, limit=catalog.DownloadLimit(32 * GIB)).best.name == "llama3.3-70b", (
        "a model's own name is no family"
    )
    assert pick("qwen3-8b", big, quant="Q4_K_M").best.format == "Q4_K_M"
    skip = frozenset({"Qwen/Qwen3-8B-FP8"})
    assert pick("qwen3-8b", big, skip=skip).best.format == "awq"
    with pytest.raises(DoesNotFit, match="no qwen3-8b fits CPU with 4 GiB free"):
        pick("qwen3-8b", MEMORIES[0])


def test_memory_classes_have_labels() -> None:
    assert catalog.Memory("cpu", int(15 * GIB), 1).label == "CPU with 8 GiB free"
    assert catalog.Memory("gpu", int(23.5 * GIB), 1).label == "GPU with 24 GiB free"
    assert catalog.memory_of(None).kind == "cpu"


MODEL = {
    "name": "a-1b", "family": "a", "generation": "a1", "title": "A", "architecture": "llama", "params": 1_000_000_000,
    "context": 8192, "license": "mit", "shape": [1, 64, 128, 2, 2, 32, 100], "file": [],
}  # fmt: skip
FILE = {"repo": "a/b", "format": "bf16", "download_bytes": 2_000_000_000}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"colour": "red"}, "colour"),
        ({"params": "1B"}, "params"),
        ({"shape": ["1", 64, 128, 2, 2, 32, 100]}, "layers"),
        ({"shape": [1, 64]}, "missing"),
        ({"title": None}, "title"),
    ],
)
def test_wrong_rows_are_refused(wrong: dict[str, object], named: str) -> None:
    assert catalog.read_candidate(MODEL, FILE).kv_bytes_per_token == 4 * 2 * 32
    with pytest.raises((TypeError, ValueError), match=named):
        catalog.read_candidate(MODEL | wrong, FILE)
