"""What the plan knows of kernels and formats without importing them: equal to what stands there."""

from __future__ import annotations

from localllm.boot.boot import ROUNDING
from localllm.config import KEYS
from localllm.kernels import compressed, rope, sampling, token_index
from localllm.kernels.cpu.layers import LARGEST_HEAD
from localllm.kernels.kv_pages import KV_DTYPES
from localllm.models.architectures.facts import KV_BYTES
from localllm.plan import memory
from localllm.plan.planner import KV_COST, ON_LOAD_COST
from localllm.quant.encode import GROUP_SIZES


def test_numbers_of_the_plan_are_those_of_the_kernels() -> None:
    assert memory.ROPE_BLOCK == rope.BLOCK and memory.LARGEST_HEAD == LARGEST_HEAD
    assert memory.SCORE_BYTES == token_index.SCORE_BYTES
    assert memory.GATHERED_BYTES == compressed.GATHERED_BYTES
    assert memory.SAMPLER_ROW_BYTES == sampling.MAX_BIAS * (4 + 4)


def test_formats_of_settings_and_plan_are_those_that_are_computed() -> None:
    assert set(KEYS["engine.kv"].kind.names()) == {"auto", *KV_DTYPES}
    assert set(KV_BYTES) >= set(KV_DTYPES) > set(KV_COST)
    assert set(KEYS["engine.activations"].kind.names()) == {"auto", *ROUNDING}
    assert set(memory.TARGET_BYTES) == set(GROUP_SIZES) > set(ON_LOAD_COST)
