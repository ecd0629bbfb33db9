"""Every rule is found by what its victims see, on the machines it can happen on; and says what to do."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.device.fake import PROFILES, fake_host, fake_machine
from localllm.doctor import Survey
from localllm.doctor.conditions import KEYS, holds, matches, unmet, within
from localllm.doctor.rules import match_log, match_machine, rules, url_of


def survey(name: str, **host: object) -> Survey:
    return Survey(fake_machine(name), replace(fake_host(name), **host))  # type: ignore[arg-type]


SEEN = {
    "R1": "RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
    "R2": "assistant: !!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    "R3": "MoE model: 14 of 30 generations hold spliced tokens under concurrency",
    "R4": "ValueError: No NvFp4 MoE backend supports the deployment configuration.",
    "R5": "INFO 08-01 vLLM is using nccl==2.28.3",
    "R6": "Capturing CUDA graphs (decode, FULL):  42%|####\ntorch.OutOfMemoryError: CUDA out of memory.",
    "R7": "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace",
    "R8": "ValueError: Free memory on device cuda:0 (22.76/24.0 GiB) on startup is less than desired GPU memory"
    " utilization (0.95, 22.8 GiB). Decrease GPU memory utilization",
    "R9": "RuntimeError: Error in function 'TllmGenFmhaRunner' at fmhaRunner.cuh:30: Unsupported architecture",
    "R10": "NotImplementedError: attention sinks not supported",
    "R11": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit:"
    " 101376. Reducing block sizes or `num_stages` may help.",
    "R12": "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
    "R13": "RuntimeError: No supported CUDA architectures found for major versions [12].",
    "R14": "AttributeError: 'ImportError' object has no attribute 'get_num_sms'",
    "R15": "vllm serve m --kv-cache-dtype nvfp4\nTraceback",
    "R16": "ValueError: fp8_e5m2 kv-cache is not supported with fp8 checkpoints.",
    "R17": "speculative_config=mtp\n...\nCUDA error: an illegal memory access was encountered",
    "R18": "INFO engine config: enforce_eager=True, kv_cache_dtype=auto",
    "R19": 'msg="truncating input prompt" limit=4096 prompt=9000 keep=4 new=4096',
    "R20": "load_tensors: offloaded 12/48 layers to GPU",
    "R21": "unloading model runner because another needs room",
    "R22": "slot update_slots: id 0 | task 9 | forcing full prompt re-processing due to lack of cache data (likely due",
    "R23": "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned",
    "R24": "RuntimeError: UVA is not available",
    "R25": "while idle it takes 100% of a CPU: idle, one core at 100% cpu",
    "R26": "INFO torch.compile takes 71.2 s in total",
    "R27": "CUDA unknown error - this may be due to an incorrectly set up environment",
    "R28": "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'",
    "R29": "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received; Surprise Link Down",
    "R30": "I will now look at the file again, as planned.\n" * 8,
    "R31": "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 804: forward"
    " compatibility was attempted on non supported HW",
    "R32": "openai_harmony.HarmonyError: error downloading or loading vocab file: failed to download",
    "R33": "error: instruction .tile::scatter4 not supported on .target sm_121a",
    "R34": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "R35": "error loading model: unknown model architecture: 'gemma4'",
    "R36": "ValueError: model type `qwen3_5` but Transformers does not recognize this architecture.",
    "R37": "Error: model requires more system memory (21.3 GiB) than is available (14.9 GiB)",
    "R38": 'level=INFO msg="failure during GPU discovery" error="failed to finish discovery before timeout"',
    "R39": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
    "R40": "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
    "R41": "ValueError: Quantization method specified in the model config (compressed-tensors) does not match the"
    " quantization method specified in the `quantization` argument (modelopt_fp4).",
    "R42": "ValueError: Weight input_size_per_partition = 704 is not divisible by min_thread_k = 128.",
    "R43": "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
    "R44": "User-specified max_model_len (131072) is greater than the derived max_model_len (40960)",
    "R45": 'ValueError("type fp8e4nv not supported in this architecture.")',
    "R46": "ImportError: /usr/lib/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
    "R47": "CUDA error: an illegal memory access was encountered\n  in function sync at ggml-cuda.cu:90",
    "R48": "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    "R49": "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 784.00 MiB.",
    "R50": "failed to fit params to free device memory: model_params::tensor_buft_overrides already set by user, abort",
    "R51": "WARNING [envs.py:1768] Unknown vLLM environment variable detected: VLLM_MXFP4_BACKEND",
    "R52": "NotImplementedError: Unsupported quantization_config: {'quant_method': 'compressed-tensors'}.",
    "R53": "gguf_init_from_file_impl: invalid magic characters: 'vers', expected 'GGUF'",
    "R54": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "R55": "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template",
    "R56": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",
    "R57": "Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
    "R58": "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp, unhandled system error",
    "R59": "Total number of attention heads (32) must be divisible by tensor parallel size (3).",
    "R60": "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:188743680kB",
    "R61": "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
    "R62": "Illegal instruction (core dumped)",
    "R63": "./llama-server: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found",
    "R64": "RuntimeError: CUDA error: device-side assert triggered",
    "R65": "with tools set the reasoning ends up in message.content and not in reasoning_content",
    "G1": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.9 GiB. GPU 0 has a total capacity of 31.3",
    "G2": "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is"
    " needed, which is larger than the available KV cache memory (5.91 GiB).",
    "G3": "buffer_type_alloc_buffer: allocating 144.00 MiB on device 4: cudaMalloc failed: out of memory",
    "G4": "Access to model google/gemma-2-2b is restricted. You must be authenticated to access it.",
    "G5": "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
    "G6": "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
    "G7": "Failed to initialize NVML: Driver/library version mismatch",
    "G8": "OSError: [Errno 28] No space left on device",
}
HEALTHY = Path(__file__).parent / "healthy"
AT_HOME = {"R23": "gb10", "R24": "wsl2", "R33": "gb10", "R5": "rtx5090x2", "R28": "rtx5090x2"}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_a_rule_is_found_by_what_its_victims_see(rule: object) -> None:
    name = rule.id  # type: ignore[attr-defined]
    text = f"some line before\n{SEEN[name]}\n"
    found = match_log(text, survey(AT_HOME.get(name, "rtx5090")))
    match = next((m for m in found if m.rule.id == name), None)
    assert match is not None, [m.rule.id for m in found]
    assert match.applies or name in ("R9", "R14") or not match.doubts
    assert match.line >= 2
    assert match.excerpt and "\n" not in match.excerpt


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        # as the issues have them, in other words than above
        ("RuntimeError: sink setting not supported", "R10"),
        ("RuntimeError: Assertion error (csrc/utils/layout.hpp:59): Unknown SF transformation", "R14"),
        ("Error: model requires more system memory (6.1 GiB) than is available (4.5 GiB)", "R37"),
        ("ERROR: Unable to write to /dev/shm/torch_123_0: No space left", "R48"),
        ("llama_model_load: error loading model architecture: unknown model architecture: 'qwen35moe'", "R35"),
        ("ImportError: vllm_flash_attn/_vllm_fa2_C.abi3.so: undefined symbol: _ZN3c106detail14torchCheck", "R46"),
        ("  llama-server(ggml_cuda_error) CUDA error: an illegal memory access was encountered", "R47"),
    ],
)  # fmt: skip
def test_other_words_for_the_same(line: str, wanted: str) -> None:
    assert wanted in [match.rule.id for match in match_log(line, survey("rtx5090"))]


def test_rules_are_complete() -> None:
    everyday = [f"G{number}" for number in range(1, 9)]
    assert [rule.id for rule in rules()] == [f"R{number}" for number in range(1, 66)] + everyday
    assert all(set(rule.unless) <= set(SEEN) for rule in rules())
    assert set(SEEN) == {rule.id for rule in rules()}
    for rule in rules():
        assert rule.confidence in "ABC" and rule.cause and rule.sources and rule.fixes and rule.title
        assert set(rule.when) <= KEYS and set(rule.here or {}) <= KEYS
        for table in (rule.when, rule.here or {}):
            unmet(table, survey("rtx5090x2"))  # every condition can be read
        assert all(fix.do and fix.why for fix in rule.fixes)
        assert [fix.unconfirmed for fix in rule.fixes] == sorted(fix.unconfirmed for fix in rule.fixes), "doubts last"
        for source in rule.sources:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|: .+)", source), source
    assert url_of("vllm-project/vllm#1") == "https://github.com/vllm-project/vllm/issues/1"


def test_what_nothing_backs_is_marked() -> None:
    doubtful = {fix.do for rule in rules() for fix in rule.fixes if fix.unconfirmed}
    assert {"export SGLANG_PYNCCL_SKIP_WARMUP=1", "export VLLM_DISABLE_NCCL_WARMUP=1"} <= doubtful
    hang = next(rule for rule in rules() if rule.id == "R5")
    assert hang.fixes[0].do == "export NCCL_P2P_DISABLE=1", "what reporters confirm comes first"


def test_a_log_of_another_machine_is_told_apart() -> None:
    (match,) = (m for m in match_log(SEEN["R13"], survey("rtx3090")) if m.rule.id == "R13")
    assert not match.applies
    assert match.doubts == ("capability",)
    both = match_log(f"{SEEN['R13']}\n{SEEN['R8']}", survey("rtx3090"))
    assert [m.rule.id for m in both if m.applies] == ["R8"]
    assert both[0].rule.id == "R8", "what can happen here comes first"


def test_what_happens_to_everybody_gives_way() -> None:
    """A rule that says more about the same error stands alone; another trouble beside it comes first."""
    here = survey("rtx5090")
    assert [m.rule.id for m in match_log(SEEN["R6"], here)] == ["R6"]
    assert [m.rule.id for m in match_log(f"{SEEN['G2']}\nCUDA out of memory", here)] == ["G2"]
    assert [m.rule.id for m in match_log("CUDA out of memory", here)] == ["G1"]
    assert [m.rule.id for m in match_log(f"{SEEN['G6']}\n{SEEN['R9']}\n{SEEN['R1']}", here)][-1] == "G6"


def test_ordinary_text_matches_nothing() -> None:
    calm = "\n".join(
        f"INFO 08-{i % 28:02d} 12:00:{i % 60:02d} Avg prompt throughput: {i}.0 tokens/s, Running: 1 reqs, KV 4.{i % 9}%"
        for i in range(500)
    )
    assert match_log(calm, survey("rtx5090x2")) == []
    assert match_log("", survey("rtx5090x2")) == []


@pytest.mark.parametrize("name", sorted(path.name for path in HEALTHY.iterdir()))
@pytest.mark.parametrize("hw", ["rtx3090", "rtx5090", "rtx5090x2", "gb10", "wsl2", "cpu"])
def test_a_healthy_log_is_no_alarm(name: str, hw: str) -> None:
    """Of five engines: what they say while all is well, defaults and harmless warnings included."""
    found = match_log((HEALTHY / name).read_text(), survey(hw))
    assert [(match.rule.id, match.excerpt) for match in found] == []


def test_layers_on_the_card_are_counted() -> None:
    line = "load_tensors: offloaded {}/{} layers to GPU"
    for here, of, alarm in ((37, 37, False), (3, 37, True), (33, 333, True), (333, 33, True)):
        found = [match.rule.id for match in match_log(line.format(here, of), survey("rtx5090"))]
        assert found == (["R20"] if alarm else [])


@pytest.mark.slow
def test_a_large_log_is_read_in_time() -> None:
    """Patterns with room between their ends must not make a long log endless (the line is ten times what it takes)."""
    lines = [
        "Capturing CUDA graphs illegal memory access mtp speculative NEXTN idle 100% unloading keep_alive kv cache"
    ]
    text = "\n".join(lines * 3_000)
    start = time.monotonic()
    match_log(text, survey("rtx5090x2"))
    match_log("a" * 300_000, survey("rtx5090x2"))
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rtx3060", ["R19"]), ("rtx3090", []), ("rtx4090", []), ("rtx5070ti", ["R1"]), ("rtx5090", ["R13"]),
        ("rtxpro6000", ["R25"]), ("gb10", ["R23"]), ("rtx5090x2", ["R5", "R28"]), ("wsl2", []), ("cpu", []),
    ],
)  # fmt: skip
def test_what_is_said_without_a_log(name: str, expected: list[str]) -> None:
    assert [match.rule.id for match in match_machine(survey(name))] == expected


def test_what_is_installed_decides() -> None:
    vllm = {"vllm": "0.24.0"}
    assert "R24" in [m.rule.id for m in match_machine(survey("wsl2", packages=vllm))]
    told = survey("wsl2", packages=vllm, variables={"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"})
    assert "R24" not in [m.rule.id for m in match_machine(told)]
    ready = survey("rtx5090", packages={"flashinfer-python": "0.6.18", "flashinfer-jit-cache": "0.6.18"})
    assert match_machine(ready) == []
    assert match_machine(survey("rtx5090", toolkit="13.0")) == []
    assert "R3" in [m.rule.id for m in match_machine(survey("rtx5090", packages={"vllm": "0.19.1"}))]
    assert "R33" in [m.rule.id for m in match_machine(survey("gb10", packages={"vllm": "0.20.2rc1.dev5+g1c78"}))]


def test_conditions() -> None:
    assert within([86, 89, 120, 121], 120) and not within([86, 89, 120, 121], 90)
    assert matches("12.8", "<12.9") and not matches("13.0", "<12.9") and not matches("", "<12.9")
    assert matches("2.13.0+cu130", ">=2.7")
    machine = survey("rtx5090")
    assert holds({}, machine)
    assert unmet({"gpus": 2, "wsl": False, "card": "5090"}, machine) == ["gpus"]
    assert holds({"memory_gib": [30, 40], "display": False, "program": ["nvcc"], "toolkit": "<12.9"}, machine)
    assert holds({"capability_missing": True}, survey("cpu"))
    assert holds({"variable": "TRITON_PTXAS_PATH=12\\.8"}, survey("gb10"))
    with pytest.raises(KeyError):
        unmet({"moon": True}, machine)


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_can_be_judged(name: str) -> None:
    for match in match_log("\n".join(SEEN.values()), survey(name)):
        assert match.applies is (not match.doubts)
