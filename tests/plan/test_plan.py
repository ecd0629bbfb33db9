"""The plan: arithmetic that adds up, choices with reasons, refusals with both numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.config import EngineOptions
from localllm.device import MachineFacts
from localllm.device.fake import MACHINES
from localllm.errors import ConfigError, DeviceError, DoesNotFit
from localllm.models.architectures.facts import ModelFacts, repeated
from localllm.models.architectures.layers import Dense, Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, LatentAttention, RopeFacts
from localllm.plan.memory import MIB, SPLIT_PART_BYTES, Memory
from localllm.plan.placement import Placement
from localllm.plan.plan import Plan
from localllm.plan.planner import Measured, Planner
from localllm.plan.profiles import MemoryProfile, MemoryProfiles, Term
from localllm.plan.speeds import LAUNCH_S, bytes_s_of, launches_of, rest_s_of, tps_of
from localllm.terminal import GIB


def plan(
    facts: ModelFacts, machine: MachineFacts, options: EngineOptions = EngineOptions(), measured: Measured = Measured()
) -> Plan:
    return Planner(machine, options, measured).plan(facts)


def model(
    *,
    windows: Sequence[int | None] = (None,) * 32,
    inner: int = 14336,
    heads: Sequence[int] = (32, 8, 128),
    **changes: Any,
) -> ModelFacts:
    """An 8B Llama in 4 bits: 4.6 GiB of weights, 128 KiB of KV a token in bf16. `heads`: num, num of KV, size."""
    facts = ModelFacts(
        architecture="llama",
        source_architecture="LlamaForCausalLM",
        name="Big",
        hidden_size=4096,
        vocab_size=128256,
        max_context=131072,
        rms_norm_eps=1e-5,
        layers=repeated(LayerFacts(Attention(*heads, RopeFacts(5e5, 128)), Dense(inner)), windows),
        stored_format="Q4_K_M",
        num_params=8_030_261_248,
        weight_bytes=int(4.6 * GIB),
    )
    return replace(facts, **changes)


SMALL: dict[str, Any] = {"windows": (None,) * 30, "hidden_size": 576, "inner": 1536, "heads": (9, 3, 64)}
SMALL |= {
    "vocab_size": 49152,
    "max_context": 8192,
    "num_params": 134_515_008,
    "weight_bytes": 96_576_768,
}
SMALL |= {"stored_format": "Q4_1", "tied_embeddings": True, "name": "small"}


def latents(heads: int = 20) -> LatentAttention:
    return LatentAttention(heads, 512, 192, 256, RopeFacts(1e6, 64), 256**-0.5, query_rank=768)


def memory(
    facts: ModelFacts, device: str = "cpu", has_compiler: bool = True, quant: str = "", kv: str = "bf16", **more: Any
) -> Memory:
    machine = MACHINES["cpu"] if has_compiler else replace(MACHINES["cpu"], compiler="")
    made = Memory(facts, machine, EngineOptions(), Placement(device, None), "float32", quant, kv, rows=512)
    return replace(made, **more)


def held_bytes(*what: Any) -> int:
    return memory(*what).weights_and_read[0]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", [{}, SMALL, {"stored_format": "bf16", "weight_bytes": 16 * 10**9}])
def test_the_terms_add_up(machine: str, shape: dict) -> None:
    made = plan(model(**shape), MACHINES[machine])
    assert made.need_bytes == sum(made.parts().values())
    assert made.fits == (made.need_bytes <= made.have_bytes)
    assert made.fits == (made.max_ctx >= made.ctx)
    assert made.ctx <= made.max_ctx or not made.fits
    assert made.num_pages[0] * made.page_size >= made.ctx
    assert len(made.reasons) >= 2
    groups = memory(model(**shape), kv=made.kv, rows=made.prefill_budget).groups(made.ctx)
    assert made.kv_bytes == sum(g.page_bytes * n for g, n in zip(groups, made.num_pages, strict=True))


def test_cpu_defaults() -> None:
    made = plan(model(), MACHINES["cpu"])
    assert (made.device, made.dtype, made.kv, made.ctx) == ("cpu", "float32", "bf16", 8192)
    assert made.fits
    assert any("8,192" in reason for reason in made.reasons)
    assert made.max_ctx == 131072
    assert plan(model(), MACHINES["cpu"], EngineOptions(ctx=65536)).ctx == 65536
    assert plan(model(**SMALL), MACHINES["cpu-small"]).fits


def test_gpu_is_taken_where_it_helps() -> None:
    facts = model(stored_format="bf16", weight_bytes=16 * 10**9)
    made = plan(facts, MACHINES["rtx4090"])
    assert (made.device, made.dtype, made.kv) == ("cuda:0", "bfloat16", "bf16")
    assert made.fits
    assert 30_000 < made.ctx < 60_000  # what 24 GB leave beside 15 GiB of weights
    assert made.decode_tps == pytest.approx(1008e9 * 0.75 / 15e9, rel=0.25)
    assert made.decode_tps_full < made.decode_tps
    turing = plan(model(**SMALL), MACHINES["rtx2070"])
    assert (turing.dtype, turing.kv) == ("float16", "fp16")


def test_auto_falls_back_to_the_cpu_and_says_so() -> None:
    facts = model(stored_format="bf16", weight_bytes=16 * 10**9)
    made = plan(facts, MACHINES["rtx4060"], EngineOptions(quant=""))
    assert made.device == "cpu"
    assert made.fits
    assert "4060" in made.reasons[0]
    cpu_torch = replace(MACHINES["rtx4090"], torch_cuda="", torch_version="2.13.0+cpu")
    made = plan(facts, cpu_torch)
    assert made.device == "cpu"
    assert "built without CUDA" in made.reasons[0]


BF16_8B = {"stored_format": "bf16", "weight_bytes": 16_060_522_496}


def test_plain_weights_that_do_not_fit_are_quantised_while_loading() -> None:
    """best quality first, by what the card computes well"""
    small, large = plan(model(**BF16_8B), MACHINES["rtx4060"]), plan(model(**BF16_8B), MACHINES["rtx4090"])
    assert (small.quant, large.quant) == ("int4", "")
    assert small.fits and small.device == "cuda:0"
    assert small.weight_bytes < 6.1 * GIB  # 7 billion values of 4.6 bits, 1 billion of 16
    assert "int4: bf16 does not fit" in " ".join(small.reasons)
    assert "error 8 to 9 %" in " ".join(small.warnings)
    card = MACHINES["rtx4060"].gpus[0]
    for capability, expected in ((120, "fp8"), (89, "fp8"), (86, "int8"), (75, "int8")):
        twelve = replace(card, capability=capability, total_bytes=12 * GIB, free_bytes=int(11.6 * GIB))
        made = plan(model(**BF16_8B), replace(MACHINES["rtx4060"], gpus=(twelve,)))
        assert (made.device, made.quant) == ("cuda:0", expected)
    assert plan(model(**BF16_8B), MACHINES["rtx4060"], EngineOptions(quant="nvfp4")).quant == "nvfp4"
    assert plan(model(), MACHINES["rtx4060"]).quant == ""  # quantised already
    ram = replace(MACHINES["cpu"], ram_available_bytes=14 * GIB, ram_total_bytes=16 * GIB)
    assert (plan(model(**BF16_8B), ram).quant, plan(model(**BF16_8B), ram).device) == ("int8", "cpu")


def test_the_kv_format_follows_the_memory() -> None:
    """16 bits while there is room for 32k tokens or all the model can hold; then 8 bits, on a GPU"""
    facts = model(**BF16_8B)
    assert plan(facts, MACHINES["rtx4090"]).kv == "bf16"
    tight = replace(MACHINES["rtx4090"].gpus[0], free_bytes=int(19.5 * GIB))
    machine = replace(MACHINES["rtx4090"], gpus=(tight,))
    made = plan(facts, machine)
    assert (made.kv, made.quant) == ("fp8", "")
    assert made.ctx > plan(facts, machine, EngineOptions(kv="bf16")).ctx * 1.8
    assert "16 bits would leave too little" in " ".join(made.reasons)
    measured = Measured(kl_by_kv={"int8": 0.0003, "fp8": 0.009})
    assert plan(facts, machine, measured=measured).kv == "int8"
    assert "0.0003 measured" in " ".join(plan(facts, machine, measured=measured).reasons)
    assert plan(facts, machine, measured=Measured(kl_by_kv={"int8": 0.02, "fp8": 0.009})).kv == "fp8"
    assert plan(facts, machine, EngineOptions(ctx=8192)).kv == "bf16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"driver": "565.57.01"}, "570 or later"),
        ({"torch_cuda": "12.4"}, "no code for NVIDIA GeForce RTX 5090 (sm_120): it needs CUDA 12.8"),
        ({"driver_cuda": "12.9"}, "supports CUDA up to 12.9, but torch is built with CUDA 13.0"),
        ({"torch_cuda": "", "torch_version": "2.13.0+cpu"}, "built without CUDA"),
    ],
)
def test_a_card_that_driver_or_torch_cannot_use_is_named_with_the_cause(change: dict, words: str) -> None:
    machine = replace(MACHINES["rtx5090"], **change)
    made = plan(model(), machine)
    assert made.device == "cpu" and words in made.reasons[0]
    with pytest.raises(DeviceError) as caught:
        plan(model(), machine, EngineOptions(device="cuda:0"))
    assert words in caught.value.message and caught.value.hint


def test_of_two_cards_one_is_used_and_the_other_named() -> None:
    cards = (MACHINES["rtx4060"].gpus[0], MACHINES["rtx4090"].gpus[0])
    machine = replace(MACHINES["rtx4090"], gpus=cards)
    made = plan(model(), machine)
    assert made.device == "cuda:1"
    assert "RTX 4060 (cuda:0, 7.6 GiB free) is idle" in made.idle and "--device cuda:0" in made.idle
    assert plan(model(), machine, EngineOptions(device="cuda:0")).idle.startswith("NVIDIA GeForce RTX 4090 (cuda:1")
    assert plan(model(), MACHINES["rtx4090"]).idle == ""
    twins = replace(machine, gpus=(cards[1],) * 2)
    assert "(cuda:1, " in plan(model(), twins, EngineOptions(device="cuda:0")).idle, "equal cards are two"


def test_a_busy_card_and_a_missing_compiler_are_warnings() -> None:
    from localllm.device import GpuProcess

    card = replace(MACHINES["rtx4090"].gpus[0], free_bytes=10 * GIB, processes=(GpuProcess(77, 13 * GIB, "blender"),))
    warnings = plan(model(), replace(MACHINES["rtx4090"], gpus=(card,), compiler="")).warnings
    assert any("blender (77) hold 13.0 GiB" in line for line in warnings)
    assert any("install gcc" in line for line in warnings)


def test_graph_buckets() -> None:
    for most, sizes in ((1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))):
        assert plan(model(), MACHINES["rtx4090"], EngineOptions(max_parallel=most)).graph_buckets == sizes


def test_no_step_is_captured_where_the_host_reads_results() -> None:
    usual = LayerFacts(Attention(20, 4, 128, RopeFacts(1e6, 64)), Dense(10_240))
    mixture = model(layers=(replace(usual, ffn=Experts(8, 2, 512)),) * 4)
    latent = model(layers=(replace(usual, mixer=latents()),) * 4)
    wide = model(layers=(replace(usual, mixer=replace(usual.mixer, head_dim=512)),) * 4)
    newer = MACHINES["rtx4090"]
    older = replace(newer, gpus=(replace(newer.gpus[0], capability=75),))
    exact, wide_kv = EngineOptions(deterministic=True), EngineOptions(kv="f32")
    for facts, machine, options, word in (
        (mixture, newer, exact, "deterministic"),
        *((mixture, older, EngineOptions(), "8.0"), (latent, older, EngineOptions(), "8.0")),
        *((latent, newer, wide_kv, "float32"), (wide, newer, wide_kv, "float32")),
    ):
        made = plan(facts, machine, options)
        (warning,) = (one for one in made.warnings if "no CUDA graphs" in one)
        assert not made.graph_buckets and not made.guess_buckets and word in warning
        assert "no CUDA graphs" not in str(plan(facts, machine, replace(options, graphs=False)).warnings)
    plain = model(layers=(usual,) * 4)
    for facts, machine, options in (
        *((mixture, newer, EngineOptions()), (mixture, newer, wide_kv), (latent, newer, exact), (wide, newer, exact)),
        *((plain, newer, exact), (plain, newer, wide_kv), (plain, older, EngineOptions())),
    ):
        assert plan(facts, machine, options).graph_buckets


def test_unified_memory_counts_the_process_and_leaves_room_for_the_system() -> None:
    card = replace(MACHINES["rtx5090"].gpus[0], name="NVIDIA GB10", capability=121, unified=True)
    card = replace(card, total_bytes=110 * GIB, free_bytes=110 * GIB, bandwidth=273e9)
    made = plan(model(**BF16_8B), replace(MACHINES["rtx5090"], gpus=(card,)))
    assert made.device == "cuda:0"
    assert made.have_bytes == int(110 * GIB * 0.85)
    assert dict(made.work_terms)["program"] > 350 * MIB


def test_every_term_of_a_card_is_there_and_what_a_profile_found_shrinks_the_plan(tmp_path: Path) -> None:
    made = plan(model(**BF16_8B), MACHINES["rtx4090"])
    assert sum(made.terms().values()) == made.need_bytes
    assert set(made.terms()) == {
        "weights", "kv", "context", "activations", "logits", "graphs", "tables", "margin"
    }  # fmt: skip
    assert made.graph_buckets == (1, 2, 4)
    assert plan(model(**BF16_8B), MACHINES["cpu"]).graph_buckets == ()
    # 2,048 tokens through the feed-forward layer: gate and up, their product, and what is alive beside them
    layer = 2048 * 2 * (3 * 14336 + 4 * 4096)
    assert dict(made.work_terms)["activations"] == pytest.approx(layer + SPLIT_PART_BYTES, rel=0.05)
    profiles = MemoryProfiles(tmp_path / "profiles.json")
    profiles.keep(model(**BF16_8B), MACHINES["rtx4090"], made, MemoryProfile((Term("work", 0, GIB),), "cuda", 1.0))
    taught = plan(model(**BF16_8B), MACHINES["rtx4090"], measured=Measured(profiles=profiles))
    assert taught.terms()["learned"] == GIB
    assert taught.ctx < made.ctx - 7000


def test_a_model_that_does_not_fit_names_both_numbers_and_a_way() -> None:
    made = plan(model(), MACHINES["cpu-small"])
    assert not made.fits
    assert made.max_ctx == 0
    error = made.error("big")
    assert isinstance(error, DoesNotFit)
    assert (error.code, error.exit_code) == ("E501", 5)
    assert f"{made.need_bytes / GIB:.1f} GiB" in error.message
    assert "2.5 GiB" in error.message
    assert error.context["need_bytes"] == made.need_bytes
    long = plan(model(), replace(MACHINES["cpu"], ram_available_bytes=8 * GIB), EngineOptions(ctx=131072))
    assert not long.fits
    assert 512 <= long.max_ctx < 131072
    command, _ = long.error("big").fixes[0]
    assert command == f"localllm chat big --ctx {long.max_ctx}"
    again = plan(model(), replace(MACHINES["cpu"], ram_available_bytes=8 * GIB), EngineOptions(ctx=long.max_ctx))
    assert again.fits


def test_an_instance_of_a_card_computes_its_share() -> None:
    """Its memory and bandwidth are the driver's own words, its arithmetic is in its name."""
    whole = MACHINES["h100"]
    part = replace(whole, gpus=(replace(whole.gpus[0], name=f"{whole.gpus[0].name} MIG 2g.20gb", mig=True),))
    paces = [Planner(machine).plan(model()).prefill_tps for machine in (whole, part)]
    assert paces[1] == pytest.approx(paces[0] * 2 / 7)


def test_a_ulimit_counts_address_space() -> None:
    facts = model(**SMALL)
    for limit, fits in [("cgroup", True), ("ulimit", False)]:
        machine = replace(MACHINES["cpu"], ram_total_bytes=GIB, ram_available_bytes=GIB, ram_limit=limit)
        assert plan(facts, machine).fits is fits


def test_auto_context_shrinks_to_what_fits() -> None:
    tight = replace(MACHINES["cpu"], ram_available_bytes=int(6.2 * GIB), ram_total_bytes=8 * GIB)
    made = plan(model(), tight)
    assert made.fits
    assert 512 <= made.ctx < 8192
    assert "largest that fits" in " ".join(made.reasons)


def test_windows_need_pages_for_the_window_only() -> None:
    windows = tuple(None if layer % 6 == 5 else 512 for layer in range(18))
    facts = model(windows=windows, heads=(32, 1, 256))
    full, window = memory(facts).groups(32768)
    assert (full.window, full.needed, full.page_bytes) == (None, 2049, 16 * 2 * 3 * 256 * 2)
    assert (window.window, window.needed, window.page_bytes) == (512, 65, 16 * 2 * 15 * 256 * 2)
    short = memory(facts).groups(256)
    assert [g.needed for g in short] == [17, 17]


def test_groups_are_in_the_order_of_the_cache() -> None:
    from localllm.models.kv_cache import cache_groups

    for windows in [(None,) * 4, (64, None, 32, 64), (512,) * 3, (None, 128)]:
        facts = model(windows=windows)
        ours = [g.window for g in memory(facts).groups(1024)]
        assert ours == [g.window for g in cache_groups(facts)]


def test_weights_without_a_compiler_are_larger() -> None:
    facts = model(**SMALL)
    held, read = memory(facts).weights_and_read
    assert (held, read) == (facts.weight_bytes, facts.weight_bytes)
    untied = replace(facts, tied_embeddings=False, num_params=facts.num_params + 49152 * 576)
    assert memory(untied).weights_and_read[1] < facts.weight_bytes * 0.8
    assert held < held_bytes(facts, "cpu", False) < 300 * MIB  # torch's int4 product
    other = replace(facts, stored_format="Q5_K_M")
    assert held_bytes(other, "cpu", False) > 500 * MIB
    bare = plan(other, replace(MACHINES["cpu"], compiler=""))
    assert "compiler" in " ".join(bare.warnings)
    assert not plan(other, MACHINES["cpu"]).warnings
    drafted = Planner(MACHINES["cpu"], draft=model()).plan(other)  # a draft that is larger than the model
    assert drafted.weight_bytes > 10 * other.weight_bytes and not drafted.warnings


def test_what_becomes_larger_while_loading_is_planned_for() -> None:
    """Codebooks become bfloat16; without a compiler int8 made while loading is float32 as well."""
    facts = replace(model(**SMALL), stored_format="IQ2_XXS", weight_bytes=40 * MIB, decoded_bytes=220 * MIB)
    for device in ("cpu", "cuda"):
        assert held_bytes(facts, device) == 260 * MIB
    warning = " ".join(plan(facts, MACHINES["cpu"]).warnings)
    assert "IQ2_XXS is decoded to bfloat16 while loading: 0.3 GiB instead of 0.0" in warning
    dense = replace(model(**SMALL), stored_format="bf16", weight_bytes=270 * MIB)
    bare = held_bytes(dense, "cpu", False, "int8")
    assert bare > 500 * MIB and held_bytes(dense, "cpu", True, "int8") < 200 * MIB
    assert held_bytes(dense, "cpu", False, "int4") < 300 * MIB  # torch's int4 product


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv": "nonsense"}, "must be auto"),
        ({"dtype": "int3"}, "must be auto"),
        ({"quant": "int5"}, "must be one of auto"),
        ({"ctx": 0}, "must be auto, max, or 16 to"),
        ({"ctx": "many"}, "must be auto, max, or 16 to"),
        ({"ctx": 200_000}, "131,072"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:x"}, "cuda:x"),
        ({"max_parallel": 0}, "must be a whole number from 1"),
        ({"prefill_budget": 0}, "at least 1"),
        *(({"page_size": size}, f"must be one of 16, 32, 64, 128 tokens, not {size}") for size in (0, 8, 24, 256)),
    ],
)
def test_wishes_that_cannot_be(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan(model(), MACHINES["cpu"], EngineOptions(**options))
    assert caught.value.hint


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        plan(model(), MACHINES["cpu"], EngineOptions(device="cuda"))
    with pytest.raises(DeviceError, match="cuda:1"):
        plan(model(), MACHINES["rtx4090"], EngineOptions(device="cuda:1"))
    old = replace(MACHINES["rtx4090"], gpus=(replace(MACHINES["rtx4090"].gpus[0], capability=61),))
    with pytest.raises(DeviceError, match=r"6\.1"):
        plan(model(), old, EngineOptions(device="cuda"))


def test_launches_of_latent_attention_take_time_on_a_card() -> None:
    """The same bytes are read in either case."""
    usual = LayerFacts(Attention(20, 1, 288, RopeFacts(1e6, 64)), Dense(10_240))
    facts = model(layers=(replace(usual, mixer=latents()),) * 47, max_context=32_768)
    plain = model(layers=(usual,) * 47, max_context=32_768)
    assert plan(facts, MACHINES["rtx4090"]).pace == plan(plain, MACHINES["rtx4090"]).pace, "a graph takes them along"
    without = EngineOptions(graphs=False)
    made, other = (plan(one, MACHINES["rtx4090"], without) for one in (facts, plain))
    assert 1 / made.pace - 1 / other.pace == pytest.approx(47 * 9 * LAUNCH_S["cuda"]), "our kernels"
    assert 1 / made.decode_tps_full - 1 / other.decode_tps_full == pytest.approx(47 * 9 * LAUNCH_S["cuda"], rel=0.01)
    without = EngineOptions(graphs=False, deterministic=True)
    made, other = (plan(one, MACHINES["rtx4090"], without) for one in (facts, plain))
    assert launches_of(facts, 0) == 47 * 130 and made.read_bytes == other.read_bytes
    assert 1 / made.pace - 1 / other.pace == pytest.approx(launches_of(facts, 0) * LAUNCH_S["cuda"])
    full = 1 / made.decode_tps_full - 1 / other.decode_tps_full
    assert full == pytest.approx(47 * (130 + 2 * 32_768 // 128) * LAUNCH_S["cuda"], rel=0.01)
    on_cpu = [plan(one, MACHINES["cpu"]).pace for one in (facts, model(layers=(usual,) * 47, max_context=32_768))]
    assert on_cpu[0] == on_cpu[1]
    rest_s = rest_s_of(47, launches_of(facts, 0), "cuda")
    assert bytes_s_of(tps_of(1e12, 3 * GIB, rest_s), 3 * GIB, rest_s) == pytest.approx(1e12)


@given(
    ram=st.integers(1, 256),
    parallel=st.integers(1, 32),
    page=st.sampled_from([16, 32, 64]),
    own=st.integers(600, 200_000),
    window=st.sampled_from([None, 128, 4096]),
    kv=st.sampled_from(["auto", "f32"]),
)
def test_any_machine_gives_a_plan_that_holds(
    ram: int, parallel: int, page: int, own: int, window: int | None, kv: str
) -> None:
    machine = replace(MACHINES["cpu"], ram_available_bytes=ram * GIB // 2, ram_total_bytes=ram * GIB)
    facts = model(max_context=own, windows=(None, window) * 16)
    options = EngineOptions(max_parallel=parallel, page_size=page, kv=kv)
    made = plan(facts, machine, options)
    assert made.fits == (made.max_ctx >= made.ctx)
    groups = memory(facts, kv=made.kv, rows=made.prefill_budget, options=options).groups(made.ctx)
    assert all(count >= group.needed for group, count in zip(groups, made.num_pages, strict=True))
    if made.fits and made.max_ctx + 256 <= own:
        bigger = plan(facts, machine, replace(options, ctx=made.max_ctx + 256))
        assert not bigger.fits
