"""Mixtures that a card has no room for: which experts stay in host memory, what that costs, and when it is not done."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from localllm.device.fake import MACHINES
from localllm.models.architectures.facts import ModelFacts, expert_share
from localllm.models.architectures.layers import Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.plan import speeds
from localllm.plan.memory import Memory
from localllm.plan.placement import Placement
from localllm.plan.planner import SPLIT_CTX, Planner
from localllm.terminal import GIB

NUM, TOP_K, LAYERS, HIDDEN, INNER = 128, 8, 48, 2048, 768
CARD = MACHINES["rtx3060"]


def mixture(weight_bytes: int = int(17.3 * GIB), **changes: object) -> ModelFacts:
    """A 30B-A3B in 4 bits."""
    layer = LayerFacts(Attention(32, 4, 128, RopeFacts(1e6, 128)), Experts(NUM, TOP_K, INNER, "silu"))
    layers, params = (layer,) * LAYERS, 30_500_000_000
    share = 3 * INNER * HIDDEN * NUM * LAYERS / params
    facts = ModelFacts(
        "qwen3_moe", "Qwen3MoeForCausalLM", "mixture", HIDDEN, 151_936, 40_960, 1e-6, layers, num_params=params,
        weight_bytes=weight_bytes, stored_format="Q4_K_M", active_share=1 - share * (NUM - TOP_K) / NUM,
    )  # fmt: skip
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_as_many_as_the_card_has_no_room_for() -> None:
    made, facts = Planner(CARD).plan(mixture()), mixture()
    assert made.fits and made.device == "cuda:0" and 0 < made.host_experts < NUM
    assert made.ctx >= SPLIT_CTX and made.graph_buckets == ()
    assert made.host_bytes == pytest.approx(facts.weight_bytes * expert_share(facts) * made.host_experts / NUM, abs=2)
    assert made.weight_bytes + made.host_bytes == pytest.approx(facts.weight_bytes, abs=2)
    assert made.host_read_bytes == pytest.approx(made.host_bytes * TOP_K / NUM, abs=2)
    assert sum(made.parts().values()) == made.need_bytes <= made.have_bytes
    (reason,) = (line for line in made.reasons if line.startswith("experts:"))
    assert f"{made.host_experts} of {NUM} per layer stay in host memory" in reason and "transfers" in reason
    fewer = Planner(CARD).plan(facts, host_experts=made.host_experts - 1)
    assert not fewer.fits or fewer.ctx < SPLIT_CTX, "no more than must be"


@pytest.mark.parametrize(("stored", "bytes_per_weight"), [("Q4_K_M", 4), ("bf16", 4), ("awq", 0.75)])
def test_without_a_c_compiler_experts_take_more_host_memory(stored: str, bytes_per_weight: float) -> None:
    """PyTorch multiplies them in float32, or int4 in a layout of its own; the card keeps its format."""
    facts = mixture(stored_format=stored)
    with_c = Planner(CARD).plan(facts, host_experts=64)
    bare = Planner(replace(CARD, compiler="")).plan(facts, host_experts=64)
    assert bare.weight_bytes == with_c.weight_bytes
    expanded = 3 * INNER * HIDDEN * 64 * LAYERS * bytes_per_weight
    assert bare.host_bytes == pytest.approx(expanded, rel=1e-6)


def test_the_most_context_is_what_a_wish_for_it_gets() -> None:
    """With more experts in host memory there is room for more of it, whatever the plan at hand has there."""
    facts, planner = mixture(max_context=1 << 20), Planner(CARD).having(device="cuda:0")
    made = planner.plan(facts)
    assert made.ctx < made.max_ctx < facts.max_context
    assert f"--ctx allows up to {made.max_ctx:,}" in " ".join(made.reasons)
    full = planner.having(ctx=made.max_ctx).plan(facts)
    assert full.fits and (full.max_ctx, full.host_experts) == (made.max_ctx, NUM)
    refused = planner.having(ctx=made.max_ctx + 1024).plan(facts)
    assert not refused.fits
    assert refused.error("a mix.gguf").hint == f"localllm chat 'a mix.gguf' --ctx {made.max_ctx}"


def test_the_pace_lies_between_all_on_the_card_and_all_on_the_cpu() -> None:
    facts, planner = mixture(), Planner(CARD)
    made, whole = planner.plan(facts), planner.plan(facts, host_experts=0)
    on_cpu = planner.having(device="cpu").plan(facts)
    assert whole.decode_tps > made.decode_tps > on_cpu.decode_tps
    assert whole.prefill_tps > made.prefill_tps > on_cpu.prefill_tps
    reading = made.host_read_bytes / (speeds.ETA["cpu"] * CARD.cpu.bandwidth)
    assert 1 / made.decode_tps > reading + LAYERS * speeds.CROSSING_S


def test_experts_are_streamed_where_that_takes_less_time() -> None:
    """From the rows on for which the CPU takes longer than the lanes; a card with fewer lanes streams less."""
    facts, planner = mixture(), Planner(CARD)
    made = planner.plan(facts)
    each = made.host_bytes / (made.host_experts * LAYERS)
    row_s = 2 * 3 * INNER * HIDDEN / (CARD.cpu.cores_usable * speeds.CORE_FLOPS[CARD.cpu.isa])

    def with_lanes(lanes: int, **options: object) -> Planner:
        card = replace(CARD.gpus[0], pcie_width=lanes, pcie_gen_max=4)
        return Planner(replace(CARD, gpus=(card,))).having(**options)

    wide, narrow = (with_lanes(lanes).plan(facts) for lanes in (16, 1))
    assert 2 <= wide.stream_rows < narrow.stream_rows
    way_s = each / (speeds.LINK_ETA * 1.969e9) + speeds.STREAM_S
    assert (narrow.stream_rows - 1) * row_s < way_s <= narrow.stream_rows * row_s * 1.02
    assert wide.prefill_tps > narrow.prefill_tps
    pace, prompts = (next(line for line in wide.reasons if line.startswith(word)) for word in ("pace:", "prompts:"))
    assert f"{100 * (NUM - wide.host_experts) // NUM} % of the experts on the GPU" in pace
    assert f"with at least {wide.stream_rows} rows" in prompts and "is streamed to the GPU" in prompts
    assert with_lanes(16, deterministic=True).plan(facts).stream_rows == 0
    assert planner.having(device="cpu").plan(facts).stream_rows == 0


def test_bytes_that_move_are_what_random_choices_move() -> None:
    memory = Memory(
        mixture(), CARD, Planner(CARD).options, Placement("cuda:0", CARD.gpus[0]), "bfloat16", "", "bf16", 512,
        host_experts=20,
    )  # fmt: skip
    draw, to_host, back = random.Random(3), 0, 0
    for _ in range(4000):
        away = sum(expert >= NUM - 20 for expert in draw.sample(range(NUM), TOP_K))
        to_host += 2 * HIDDEN * bool(away)
        back += 4 * HIDDEN * away
    there, here = memory.moved_per_token
    assert there == pytest.approx(LAYERS * to_host / 4000, rel=0.03)
    assert here == pytest.approx(LAYERS * back / 4000, rel=0.03)


def test_the_setting_is_kept() -> None:
    small, facts = Planner(CARD), mixture()
    assert small.having(experts="device").plan(facts).device == "cpu"
    assert not small.having(experts="device", device="cuda:0").plan(facts).fits
    large = Planner(MACHINES["rtx4090"])
    assert large.plan(facts).host_experts == 0 and large.plan(facts).graph_buckets
    forced = large.having(experts="host").plan(facts)
    assert forced.host_experts == NUM and forced.weight_bytes < 2 * GIB and forced.graph_buckets == ()


def test_host_memory_is_a_limit_and_one_memory_is_not_split() -> None:
    poor = replace(CARD, ram_available_bytes=8 * GIB)
    refused = Planner(poor).plan(mixture())
    assert not refused.fits and refused.host_experts == 0
    shared = replace(MACHINES["gb10"].gpus[0], free_bytes=16 * GIB)
    unified = replace(MACHINES["gb10"], gpus=(shared,))
    assert Planner(unified).having(device="cuda:0").plan(mixture()).host_experts == 0
    dense = replace(mixture().layers[0], ffn=Experts(8, 8, 10, "silu"))
    assert expert_share(replace(mixture(), layers=(dense,), active_share=1.0)) == 0.0


def test_benches_of_a_divided_model_calibrate_no_other() -> None:
    planner = Planner(CARD)
    made = planner.plan(mixture())
    what = speeds.subject(mixture(), made, CARD)
    assert what["device"] not in {gpu.name for gpu in CARD.gpus}
    assert speeds.subject(mixture(), replace(made, host_experts=0), CARD)["device"] == CARD.gpus[0].name
    reached = speeds.Measurement(speeds.model_key(mixture()), CARD.gpus[0].name, 99.0, 1e9)
    known = replace(planner, measured=replace(planner.measured, speeds=speeds.Speeds((reached,))))
    assert known.plan(mixture()).basis == "estimate"
    assert known.plan(mixture(), host_experts=0).basis == "measured"
