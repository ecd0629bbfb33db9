"""How other engines are started: flags by card and model against the reference tables, each with a reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from localllm import doctor, paths
from localllm.device.fake import PROFILES, fake_host, fake_machine
from localllm.doctor import Survey
from localllm.doctor.conditions import KEYS
from localllm.doctor.engines import Launch, engine_names, flag_table, launch, names_in, recipes
from localllm.doctor.model_kind import model_kind
from localllm.doctor.rules import rules
from localllm.errors import ConfigError, DeviceError, DoesNotFit, ModelNotFound, UnsupportedFormat
from localllm.hub import catalog
from localllm.quant.encode import Target
from localllm.quant.export import configuration

GIB = 1 << 30
DENSE = "nvidia/Qwen3.6-27B-NVFP4"
MOE = "nvidia/Qwen3.6-35B-A3B-NVFP4"


def made(engine: str, hw: str, model: str | None = None) -> Launch:
    return launch(engine, model_kind(model) if model else None, Survey(fake_machine(hw), fake_host(hw)))


def text(found: Launch) -> str:
    return "\n".join(found.lines)


@pytest.mark.parametrize(
    ("engine", "hw", "model", "has", "lacks"),
    [
        # recipes: as they were run
        (
            "vllm", "rtx5090", DENSE,
            ["--max-model-len 131072", "--max-num-seqs 4", "--kv-cache-dtype fp8", "--attention-backend flashinfer",
             "--enable-chunked-prefill", "--enable-prefix-caching", "--max-num-batched-tokens 4096",
             "--gpu-memory-utilization 0.95", '"num_speculative_tokens":3', "--tool-call-parser qwen3_coder"],
            ["--moe-backend", "--enforce-eager", "--quantization", "DEEP_GEMM"],
        ),
        (
            "vllm", "rtx5090", MOE,
            ["--max-model-len 65536", "--gpu-memory-utilization 0.85", "--quantization modelopt_fp4",
             "--block-size 128", '"use_trtllm_attention":true', "VLLM_HAS_FLASHINFER_CUBIN=1",
             '"num_speculative_tokens":4,"moe_backend":"flashinfer_cutlass"'],
            ["--enable-expert-parallel", "131072", "0.95"],
        ),
        ("vllm", "rtx5090", "Inferact/Qwen3.8-27B-NVFP4", ["--max-model-len 32768", "--enforce-eager"], []),
        ("vllm", "rtx5090", "RedHatAI/gemma-4-26B-A4B-it-NVFP4",
         ["VLLM_USE_V2_MODEL_RUNNER=1", "--gpu-memory-utilization 0.9 "], []),
        ("vllm", "rtxpro6000", MOE, ["--async-scheduling", "fastsafetensors", "marlin"], []),
        ("vllm", "gb10", DENSE, ["--gpu-memory-utilization 0.5", "CUTE_DSL_ARCH=sm_121a", "TRITON_PTXAS_PATH"], []),
        # the same model on another card, another model on the same card: what suits, nothing of the recipe
        ("vllm", "rtx5090", "RadixArk/Qwen3.8-27B-NVFP4", ["--attention-backend flashinfer"], ["0.95", "131072"]),
        ("vllm", "rtx5090", "Qwen/Qwen3-14B-FP8", ["VLLM_USE_DEEP_GEMM=0"], ["--moe-backend", "131072", "0.95"]),
        ("vllm", "rtx5090", "openai/gpt-oss-20b", ["--attention-backend TRITON_ATTN", "--moe-backend marlin"], []),
        ("vllm", "gb10", "openai/gpt-oss-120b", ["--gpu-memory-utilization 0.6"], ["marlin", "TRITON_ATTN"]),
        ("vllm", "rtx4090", "Qwen/Qwen3-14B-FP8", ["--kv-cache-dtype fp8_e4m3", "VLLM_USE_DEEP_GEMM=0"], ["TRITON"]),
        ("vllm", "rtx3090", "Qwen/Qwen3-14B-AWQ", ["--kv-cache-dtype fp8_e5m2", "num-batched-tokens 2048"], ["mtp"]),
        ("vllm", "rtx3090", "Qwen/Qwen3-14B-FP8", ["--kv-cache-dtype auto"], ["e5m2"]),
        ("vllm", "rtx3090", "ministral3-8b",
         ["--kv-cache-dtype auto", "--tokenizer-mode mistral", "--config-format mistral", "--load-format mistral"],
         ["e5m2"]),
        ("vllm", "rtx3090", "RedHatAI/Qwen3.8-27B-INT4", ['"method":"mtp"', "--kv-cache-dtype auto"], ["e5m2"]),
        ("vllm", "rtx2070", "Qwen/Qwen3-4B-AWQ", ["--dtype half", "TRITON_ATTN", "--kv-cache-dtype auto"], ["fp8"]),
        ("vllm", "h100", "Qwen/Qwen3-32B-FP8", ["VLLM_USE_DEEP_GEMM=1", "--async-scheduling"], ["TRITON_ATTN"]),
        ("vllm", "wsl2", "Qwen/Qwen3-8B-AWQ", ["VLLM_WSL2_ENABLE_PIN_MEMORY=1"], []),
        ("vllm", "rtx5090x2", DENSE,
         ["--tensor-parallel-size 2", "NCCL_IB_DISABLE=1", "--disable-custom-all-reduce"], ["SKIP_WARMUP"]),
        (
            "sglang", "rtx5090", DENSE,
            ["--quantization modelopt_fp4", "--kv-cache-dtype fp8_e4m3", "--fp4-gemm-backend flashinfer_cudnn",
             "--fp8-gemm-backend triton", "--triton-attention-num-kv-splits 64", "--chunked-prefill-size 4096",
             "SGLANG_ENABLE_JIT_DEEPGEMM=0", "--sleep-on-idle", "--cuda-graph-max-bs-decode",
             "--mamba-radix-cache-strategy extra_buffer", "--reasoning-parser qwen3"],
            ["--ep", "--moe-runner", "SPEC_V2", "--mamba-scheduler"],
        ),
        ("sglang", "rtx5090x2", MOE,
         ["--moe-runner-backend cutlass", "NEXTN", "NCCL_P2P_LEVEL=PHB", "--tp 2"], ["--ep"]),
        ("sglang", "rtx5090", "gpt-oss-20b", ["--reasoning-parser gpt-oss"], ["--moe-runner-backend"]),
        ("sglang", "rtx5090", "QuantTrio/GLM-4.7-Flash-AWQ", ["NEXTN"], ["--moe-runner-backend", "mamba"]),
        ("sglang", "gb10", DENSE, ["--mem-fraction-static 0.5", "--attention-backend flashinfer"], []),
        ("sglang", "rtx3090", "Qwen/Qwen3-14B-AWQ", ["flashinfer", "fp8_e5m2"], ["modelopt_fp4"]),
        ("sglang", "h100", "Qwen/Qwen3-32B-FP8", ["--sleep-on-idle"], ["--attention-backend", "DEEPGEMM"]),
        ("tensorrt-llm", "rtx5090", MOE, ["--backend pytorch", "cfg.yml"], []),
        ("tensorrt-llm", "h100", "openai/gpt-oss-20b", ["TIKTOKEN_ENCODINGS_BASE"], []),
        ("llama.cpp", "rtx5090", "unsloth/Qwen3.6-27B-MTP-GGUF:Q4_K_M",
         ["--spec-type draft-mtp --spec-draft-n-max 4", "--fit"], ["ncmoe"]),
        ("llama.cpp", "rtx5090", "ggml-org/gpt-oss-120b-GGUF:MXFP4", ["--fit on", "-ctk q8_0"], ["ncmoe", "-ngl"]),
        ("llama.cpp", "rtx3060", "ggml-org/GLM-4.7-Flash-GGUF:Q4_K", ["--fit on"], ["ncmoe", "--cache-reuse"]),
        ("llama.cpp", "rtx3060", "unsloth/Qwen3-8B-GGUF:Q4_K_M", ["-ub 512"], ["-ncmoe"]),
        ("llama.cpp", "cpu", None, ["-t 16", "GGUF"], ["--fit"]),
        ("llama.cpp", "rtx5090x2", None, ["-sm layer"], []),
    ],
)  # fmt: skip
def test_flags(engine: str, hw: str, model: str | None, has: list[str], lacks: list[str]) -> None:
    found = made(engine, hw, model)
    shown = text(found) + " \n"
    assert [flag for flag in has if flag not in shown] == []
    assert [flag for flag in lacks if flag in shown] == []


@pytest.mark.parametrize(
    ("engine", "hw", "model"),
    [
        ("vllm", "rtx3060", "Qwen/Qwen3-32B"), ("vllm", "rtx3060", "meta-llama/Llama-3.3-70B-Instruct"),
        ("vllm", "rtx3060", "openai/gpt-oss-120b"), ("vllm", "rtx3060", "qwen3-32b"),
        ("sglang", "rtx4090", "llama3.3-70b"), ("tensorrt-llm", "rtx5090", "openai/gpt-oss-120b"),
        ("llama.cpp", "cpu-small", "gpt-oss"),
        ("llama.cpp", "rtx3060", "unsloth/GLM-4.5-Air-GGUF:Q4_K_M"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(empty_home: Path, engine: str, hw: str, model: str) -> None:
    with pytest.raises(
        DoesNotFit, match=r"needs [\d.]+ GiB with 4,096 tokens of context, but .* can use [\d.]+ GiB"
    ) as error:
        launch(engine, model, Survey(fake_machine(hw), fake_host(hw)))
    assert error.value.context["need_bytes"] > error.value.context["have_bytes"]
    assert error.value.hint == f"localllm doctor --for {engine}"


@pytest.mark.parametrize(
    ("engine", "hw", "model"),
    [
        ("tensorrt-llm", "rtx5090", "unsloth/Qwen3.8-27B-NVFP4"), ("tensorrt-llm", "rtx4090", "Qwen/Qwen3-8B-AWQ"),
        ("sglang", "rtx5090", "unsloth/Qwen3.8-27B-NVFP4"), ("sglang", "rtx3090", "nvidia/Qwen3-8B-NVFP4"),
        ("vllm", "rtx4090", "unsloth/Qwen3-4B-GGUF:Q4_K_M"), ("llama.cpp", "rtx4090", "Qwen/Qwen3-8B-AWQ"),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_read_is_refused(engine: str, hw: str, model: str) -> None:
    with pytest.raises(UnsupportedFormat, match="cannot read") as error:
        made(engine, hw, model)
    assert error.value.hint.startswith("localllm doctor --for ")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hw", [*PROFILES, "rtx4060"])
@pytest.mark.parametrize("engine", engine_names())
def test_what_is_suggested_can_start(engine: str, hw: str) -> None:
    """Read by the engine, with room, grade A in a recipe only, and with the parsers of the model."""
    try:
        found = made(engine, hw)
    except DeviceError:
        return
    if found.model.name == "MODEL":
        assert (engine, hw) == ("tensorrt-llm", "rtx4060") or hw == "cpu"
        return
    assert found.room is None or found.room.need_bytes <= found.room.have_bytes
    grades = {piece.confidence for piece in found.flags}
    assert ("A" in grades) is bool(found.recipe)
    if engine in ("vllm", "sglang"):
        assert "parser" in text(found)
    if engine == "sglang" and found.model.format == "nvfp4":
        assert found.model.method == "modelopt"
    if found.room and not found.recipe:
        shown = {
            int(number) for number in re.findall(r"(?:model-len|context-length|max_seq_len|-c) (\d+)", text(found))
        }
        assert shown == {found.room.ctx}


def test_mixtures_of_experts_come_first_where_memory_is_shared() -> None:
    for engine in ("vllm", "llama.cpp"):
        assert "35B-A3B" in made(engine, "gb10").model.name
    assert made("llama.cpp", "cpu").model.kind == "moe", "so they do on a CPU"
    assert made("vllm", "rtx4090").model.kind == "dense"


def test_memory_of_two_cards_and_of_the_host_counts() -> None:
    """vLLM divides a model over the cards; llama.cpp leaves experts, and what is too much, in RAM."""
    large = "nvidia/Llama-3.3-70B-Instruct-NVFP4"
    with pytest.raises(DoesNotFit):
        made("vllm", "rtx5090", large)
    found = made("vllm", "rtx5090x2", large)
    assert "--tensor-parallel-size 2" in text(found) and found.room and found.room.ctx >= 32_768
    split = made("llama.cpp", "rtx5090", "ggml-org/gpt-oss-120b-GGUF:MXFP4")
    assert split.room and 20 * GIB < split.room.in_ram < 40 * GIB
    assert any("stay in RAM" in note for note in split.notes)
    assert made("llama.cpp", "rtxpro6000", "ggml-org/gpt-oss-120b-GGUF:MXFP4").room.in_ram == 0  # type: ignore[union-attr]


def test_larger_files_for_larger_cards(empty_home: Path) -> None:
    survey = {hw: Survey(fake_machine(hw), fake_host(hw)) for hw in ("rtx4090", "rtxpro6000")}
    assert "8B" in launch("llama.cpp", "llama", survey["rtx4090"]).model.name
    assert "31B" in launch("llama.cpp", "gemma", survey["rtx4090"]).model.name
    assert "Q8" in launch("llama.cpp", None, survey["rtxpro6000"]).model.name
    assert launch("vllm", None, survey["rtxpro6000"]).model.format == "fp8"


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.6-35b-a3b", "gemma4-e4b", "phi4", "ministral3-14b", "nemotron"])
def test_llama_cpp_has_files_of_what_it_runs(name: str, empty_home: Path) -> None:
    found = launch("llama.cpp", name, Survey(fake_machine("rtx5090"), fake_host("rtx5090")))
    assert "GGUF" in found.model.name and found.room and not found.room.in_ram


def test_a_named_model_gets_the_context_that_fits(empty_home: Path) -> None:
    found = launch("vllm", "qwen3-32b", Survey(fake_machine("rtx4090"), fake_host("rtx4090")))
    assert found.room and found.room.ctx < 24_000 and f"--max-model-len {found.room.ctx} " in text(found)


def test_recipes_are_for_one_model_on_one_card_with_one_version() -> None:
    for recipe in recipes():
        assert recipe.engine in engine_names() and recipe.flags and recipe.source.count(": ") == 1
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", recipe.date) and re.fullmatch(r">=[\d.]+", recipe.version)
        names = [name for piece in recipe.flags for name in names_in(piece)]
        assert len(names) == len(set(names))
    found = made("vllm", "rtx5090", MOE)
    assert found.recipe and {piece.confidence for piece in found.flags} == {"A"}
    assert all("2026-09-02" in piece.why and ">=0.28" in piece.why for piece in found.flags)
    assert any("0.27.1 is installed, but the recipe needs >=0.28" in note for note in found.notes)
    assert made("vllm", "rtx5090x2", MOE).recipe is None, "two cards are another machine"


def test_every_name_is_in_the_table_and_none_was_given_up() -> None:
    """A review walks down flags.toml: what is printed or advised stands there with its file."""
    data = paths.toml_beside(doctor.__file__, "engines.toml")
    told = [(flag["engine"], flag.get(key, "")) for flag in data["flag"] for key in ("flags", "env")]
    told += [(engine, parser.get(engine, "")) for parser in data["parser"] for engine in engine_names()]
    told += [(one.engine, words) for one in recipes() for words in (*one.flags, one.env)]
    cures = [fix for rule in rules() for fix in rule.fixes if fix.engine and fix.do.startswith(("-", "export"))]
    told += [(fix.engine, fix.do) for fix in cures if not fix.unconfirmed]
    table = flag_table()
    for engine, words in told:
        for name in names_in(words):
            if name == "SGLANG_PYNCCL_SKIP_WARMUP":
                continue
            row = table.get((engine, name))
            assert row is not None, f"{engine} {name} is not in flags.toml"
            assert not row.gone, f"{engine} {name} was given up: {row.now or row.change}"
    for row in table.values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+: \S+", row.file), row
        assert not row.until or row.gone, row
        assert not row.now or (row.engine, row.now) in table
        assert not row.before or (row.engine, row.before) in table or not row.before.startswith("-")
    old = launch("sglang", None, Survey(fake_machine("rtxpro6000"), fake_host("rtxpro6000")))
    assert any("0.5.12 is installed, which calls it --cuda-graph-max-bs" in note for note in old.notes)


def test_every_name_was_read_in_a_source_or_says_that_it_was_not() -> None:
    """`seen` is the newest version whose source has the name; a name without it rests on what others write."""
    unread = {(row.engine, row.name) for row in flag_table().values() if not row.seen and not row.until}
    assert unread == {
        ("llama.cpp", "--moe-cache-mib"),
        ("sglang", "SGLANG_DISABLE_DEEP_GEMM"),
        ("sglang", "SGLANG_ENABLE_DEEP_GEMM"),
        ("tensorrt-llm", "TIKTOKEN_ENCODINGS_BASE"),
    }
    newest = {
        engine["name"]: engine.get("checked") for engine in paths.toml_beside(doctor.__file__, "engines.toml")["engine"]
    }
    for row in flag_table().values():
        if newest.get(row.engine) and row.seen and row.file.startswith(("vllm-project", "sgl-project")):
            assert row.seen == newest[row.engine], row


def test_an_engine_newer_than_what_was_read_is_said() -> None:
    machine, host = fake_machine("rtx5090"), fake_host("rtx5090")
    assert not any("were read in" in note for note in launch("vllm", None, Survey(machine, host)).notes)
    newer = replace(host, packages={**host.packages, "vllm": "0.99.0"})
    notes = launch("vllm", None, Survey(machine, newer)).notes
    assert any("checked against vLLM 0.33.0; the installed 0.99.0" in note for note in notes)


@pytest.mark.parametrize("hw", [*PROFILES, "rtx2070"])
@pytest.mark.parametrize("engine", engine_names())
def test_every_flag_has_a_reason(engine: str, hw: str) -> None:
    try:
        found = made(engine, hw)
    except DeviceError as error:
        assert hw in ("cpu", "rtx2070")
        assert error.hint == "localllm doctor --for llama.cpp"
        return
    for piece in (*found.env, *found.flags, *found.build, *found.unconfirmed):
        assert piece.why and piece.confidence in "ABC" and "{" not in piece.text.replace("'{", "").replace("}'", "")
    assert not any(piece.unconfirmed for piece in (*found.env, *found.flags))
    names = [piece.text.split()[0] for piece in found.flags]
    assert len(names) == len(set(names)), "no flag twice"
    assert found.lines[-1].endswith("\\") is False
    assert ("cfg.yml" in text(found)) is bool(found.file)


def test_builds_and_what_is_heard() -> None:
    assert "120a-real" in made("llama.cpp", "rtx5090").build[0].text
    assert "121a-real" in made("llama.cpp", "gb10").build[0].text
    assert not made("llama.cpp", "rtx4090").build
    heard = made("sglang", "rtx5090x2", MOE).heard
    assert any("SKIP_WARMUP" in one.claim for one in heard)
    assert [p.text for p in made("sglang", "rtx5090x2").unconfirmed] == ["SGLANG_PYNCCL_SKIP_WARMUP=1"]
    assert {rule.id for rule in made("vllm", "gb10").rules} >= {"R23", "R33"}
    assert "R24" not in {rule.id for rule in made("vllm", "rtx4090").rules}
    assert "moe_config: {backend: CUTLASS}" in made("trtllm", "rtx5090", MOE).file


def test_names_of_engines() -> None:
    assert made("TRT", "h100").engine == "tensorrt-llm"
    with pytest.raises(ConfigError, match="did you mean vllm"):
        made("vlm", "rtx4090")
    with pytest.raises(ConfigError, match="supported: vllm, sglang"):
        made("abacus", "rtx4090")


def test_the_data_is_well_formed() -> None:
    data = paths.toml_beside(doctor.__file__, "engines.toml")
    known = {rule.id for rule in rules()}
    for engine in data["engine"]:
        assert set(engine["rules"]) <= known
    for flag in data["flag"]:
        assert flag["engine"] in engine_names()
        assert set(flag.get("when", {})) <= KEYS
        assert set(flag.get("model", {})) <= {"kind", "format", "method", "hybrid", "mtp", "name"}
        assert flag["why"] and flag["confidence"] in "BC"
        assert {"flags", "env", "build"} & set(flag)


@pytest.mark.parametrize(
    ("name", "kind", "stored", "hybrid", "mtp"),
    [
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "moe", "nvfp4", True, True),
        ("Frozenlock/Qwen3.8-27B-int4-AutoRound", "dense", "int4", True, True),
        ("openai/gpt-oss-120b", "moe", "mxfp4", False, False),
        ("someone/Qwen3-14B-AWQ", "dense", "int4", False, False),
        ("someone/Qwen3-30B-A3B-GPTQ-Int4", "moe", "int4", False, False),
        ("someone/Mixtral-8x7B-Instruct", "moe", "bf16", False, False),
        ("someone/Llama-3.1-8B-Instruct-FP8", "dense", "fp8", False, False),
        ("someone/Qwen3.6-27B-GGUF:Q4_K_M", "dense", "gguf", True, False),
        ("someone/Qwen3.6-27B-MTP-GGUF", "dense", "gguf", True, True),
        ("someone/GLM-4.7-Flash-AWQ", "moe", "int4", False, True),
        ("Qwen/Qwen3-8B", "dense", "bf16", False, False),
        ("someone/Qwen3_8B-AWQ", "dense", "int4", False, False),
        ("someone/qwen3_5-9b", "dense", "bf16", True, False),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "dense", "bf16", False, False),
        ("someone/Kimi-Linear-48B-A3B-Instruct", "moe", "bf16", True, False),
        ("someone/Ling-3.0-flash-fp8", "moe", "fp8", True, True),
        ("someone/Qwen3.8-Flash-Next-FP8", "moe", "fp8", True, True),
        ("ling3-tiny", "moe", "fp8", True, False),
    ],
)
def test_kinds_from_names(name: str, kind: str, stored: str, hybrid: bool, mtp: bool) -> None:
    found = model_kind(name)
    assert (found.kind, found.format, found.hybrid, found.mtp) == (kind, stored, hybrid, mtp)
    assert found.words


def test_a_config_file_counts_more_than_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "plain-name"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            "num_experts": 256, "layer_types": ["linear_attention", "full_attention"], "mtp_num_hidden_layers": 1,
        },
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found = model_kind(str(folder))
    expected = ("moe", "nvfp4", True, True, "its config.json")
    assert (found.kind, found.format, found.hybrid, found.mtp, found.known_from) == expected
    (gemma,) = {c.config for c in catalog.members("gemma4-31b")}
    (folder / "config.json").write_text(gemma)
    found, listed = model_kind(str(folder)), catalog.members("gemma4-31b")[0]
    assert (found.kv_per_token, found.kv_fixed) == (listed.kv_bytes_per_token, listed.kv_fixed_bytes)
    kimi = catalog.members("kimi-linear-48b-a3b")[0]  # which lists no layer types and has a context key of its own
    (folder / "config.json").write_text(kimi.config)
    found = model_kind(str(folder))
    assert (found.hybrid, found.context, found.kv_fixed) == (True, 1_048_576, kimi.kv_fixed_bytes)
    (folder / "config.json").write_text(gemma)
    for stored, wanted in [
        ({"quant_method": "fp8"}, "fp8"), ({"quant_method": "awq"}, "int4"), ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"), (None, "bf16"), ("x", "bf16"),
        (configuration(Target("int8"), ["lm_head"]), "int8"), (configuration(Target("int4"), []), "int4"),
        (configuration(Target("mxfp4"), []), "mxfp4"), (configuration(Target("nvfp4"), []), "nvfp4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
    ]:  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"quantization_config": stored, "num_experts": "many"}))
        assert model_kind(str(folder)).format == wanted
    for broken in ("{", "[]", "[" * 100_000):
        (folder / "config.json").write_text(broken)
        assert model_kind(str(folder)).known_from == "its name"


@pytest.mark.parametrize(
    ("engine", "hw", "asked", "command"),
    [
        ("vllm", "rtx5090", "qwen", "vllm serve unsloth/Qwen3.8-27B-NVFP4"),
        ("vllm", "rtx3090", "qwen3-8b", "vllm serve Qwen/Qwen3-8B-AWQ"),
        ("vllm", "rtx4090", "gpt-oss", "vllm serve openai/gpt-oss-20b"),
        ("sglang", "h100", "Qwen3-14B", "python -m sglang.launch_server --model-path Qwen/Qwen3-14B-FP8"),
        ("tensorrt-llm", "rtx5090", "qwen3-8b", "trtllm-serve Qwen/Qwen3-8B-FP8 --backend pytorch"),
        ("llama.cpp", "rtx3060", "qwen3-8b", "llama-server -hf Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("llama.cpp", "cpu", "smollm2", "llama-server -hf bartowski/SmolLM2-135M-Instruct-GGUF:Q4_1"),
        ("vllm", "rtx4090", "someone/Else-7B", "vllm serve someone/Else-7B"),
    ],
)
def test_names_become_what_the_engine_can_open(
    engine: str, hw: str, asked: str, command: str, empty_home: Path
) -> None:
    assert launch(engine, asked, Survey(fake_machine(hw), fake_host(hw))).command == command


def test_every_name_of_the_catalog_becomes_a_repository_or_says_why_not(empty_home: Path) -> None:
    survey = Survey(fake_machine("rtx5090"), fake_host("rtx5090"))
    for name in catalog.aliases():
        commands, refused = [], set()
        for engine in engine_names():
            try:
                found = launch(engine, name, survey)
            except (ModelNotFound, DoesNotFit, UnsupportedFormat) as error:
                refused.add(type(error))
                kind = "GGUF" if engine == "llama.cpp" else "safetensors"
                assert f"{kind} files of {name}" in error.message or not isinstance(error, ModelNotFound)
                continue
            assert "/" in found.model.name and (found.model.format == "gguf") is (engine == "llama.cpp"), found.command
            commands.append(found.command)
        assert commands or refused & {DoesNotFit}, name
    for unknown in ("qwne", "no-such-model:Q4_K_M"):
        with pytest.raises(ModelNotFound, match="or a repository"):
            launch("vllm", unknown, survey)


def test_models_of_this_machine_are_not_downloaded_again(empty_home: Path) -> None:
    folder = paths.models_dir() / "mine"
    folder.mkdir(parents=True)
    file = folder / "mine-7B.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    survey = Survey(fake_machine("rtx5090"), fake_host("rtx5090"))
    made = launch("llama.cpp", "mine", survey)
    assert made.command == f"llama-server -m {file}" and made.model.format == "gguf"
    assert launch("llama.cpp", str(file), survey).command == f"llama-server -m {file}"
    with pytest.raises(ModelNotFound, match="no safetensors files of mine") as error:
        launch("vllm", "mine", survey)
    assert error.value.hint == "localllm doctor --for llama.cpp mine"


def test_no_more_context_than_the_model_has(empty_home: Path) -> None:
    """A longer one is refused at the start, whatever room the card has."""
    for name, tokens in (("qwen3-14b", 40_960), ("llama3.1-8b", 131_072), ("org/unknown", 32_768)):
        made = launch("vllm", model_kind(name), Survey(fake_machine("rtx5090"), fake_host("rtx5090")))
        (window,) = [piece for piece in made.flags if piece.text.startswith("--max-model-len")]
        assert window.text == f"--max-model-len {tokens}"
        assert ("the model's maximum" in window.why) is ("/" not in name)
    assert "not known" in made.notes[-1], "what cannot be checked is said"


def test_a_gguf_file_of_this_machine_says_what_it_is(empty_home: Path, smollm2_path: Path) -> None:
    folder = paths.models_dir() / "mine"
    folder.mkdir(parents=True)
    file = folder / "plain.gguf"
    file.symlink_to(smollm2_path.resolve())
    survey = Survey(fake_machine("cpu"), fake_host("cpu"))
    for name in ("mine", str(file)):
        made = launch("llama.cpp", name, survey)
        assert (made.model.known_from, made.model.context) == ("its file", 8192)
        assert made.model.kv_per_token == 23_040 and made.model.size_bytes > 90 << 20
        (window,) = [piece for piece in made.flags if piece.text.startswith("-c ")]
        assert window.text == "-c 8192" and "the model's maximum" in window.why
    (folder / "notes.txt").write_text("text")
    assert model_kind(str(folder / "notes.txt")).known_from == "its name"


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("hw", PROFILES)
def test_the_first_thing_to_try_is_for_that_engine_and_not_in_the_command(hw: str, engine: str) -> None:
    try:
        found = made(engine, hw)
    except DeviceError:  # it does not run there
        return
    command = " ".join(found.lines) + " "
    for rule, do in found.first_aid:
        fix = next(fix for fix in rule.fixes if fix.do == do)
        assert fix.engine in ("", engine) and not fix.unconfirmed and f"{do} " not in command
        if share := re.search(r"--(gpu-memory-utilization|mem-fraction-static) ([\d.]+)", do):
            taken = re.search(rf"--{share[1]} ([\d.]+)", command)
            assert taken is None or float(share[2]) < float(taken[1]), "memory ran out: less, not more"
