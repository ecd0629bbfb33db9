"""Rotary positions from config.json: `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from localllm.checkpoint.fields import MAX_CONTEXT, MAX_HEAD_DIM, Fields
from localllm.checkpoint.mapped_file import shown
from localllm.errors import UnsupportedModel

from .facts import RopeFacts


def object_of(fields: Fields, key: str) -> dict[str, Any]:
    """The object under `key`; {} where there is none."""
    value = fields.raw(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(key, f"is {shown(repr(value))}, an object is expected")
    return value


def rope_of(
    given: Fields,
    values: Mapping[str, Any],
    head_dim: int,
    context: int,
    unsupported: Callable[[str], UnsupportedModel],
) -> tuple[RopeFacts, int]:
    """One rope's facts, and the context it reaches in tokens.

    given   what stands in the file: some keys lie outside of the rope's own object      values   theta and scaling
    """
    fields = Fields(given.path, values)
    partial = given.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    dim = int(head_dim * fields.number("partial_rotary_factor", 1e-3, 1.0, partial))
    if not 2 <= dim <= MAX_HEAD_DIM:
        raise fields.fail("partial_rotary_factor", f"leaves {dim} rotated elements of a head of {head_dim}")
    theta = fields.number("rope_theta", 1.0, 1e15)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind in ("default", "none", "dynamic"):
        # dynamic changes frequencies only beyond the trained context, which is not offered.
        return RopeFacts(theta, dim), context
    factor = fields.number("factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeFacts(theta, dim, "linear", factor), context
    if kind not in ("llama3", "yarn"):
        raise unsupported(f"rope scaling of type {shown(kind)}")
    stated = given.integer("original_max_position_embeddings", 1, MAX_CONTEXT, context)
    original = fields.integer("original_max_position_embeddings", 1, MAX_CONTEXT, stated)
    if kind == "llama3":
        low = fields.number("low_freq_factor", 1e-6, 1e6)
        high = fields.number("high_freq_factor", 1e-6, 1e6)
        if low >= high:
            raise fields.fail("high_freq_factor", f"is {high:g}, it must be over low_freq_factor {low:g}")
        return RopeFacts(theta, dim, "llama3", factor, low, high, original), context
    rope = RopeFacts(
        theta,
        dim,
        "yarn",
        factor,
        original_context=original,
        attention_factor=_yarn_attention(fields, factor),
        beta_fast=fields.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=fields.number("beta_slow", 1e-3, 1e6, 1.0),
        truncate=fields.flag("truncate", True),
    )
    return rope, max(context, min(int(original * factor), MAX_CONTEXT))


def _yarn_attention(fields: Fields, factor: float) -> float:
    """What multiplies cos and sin: as stated, or from the factor as in the paper."""
    stated = fields.optional_number("attention_factor", 1e-3, 1e3)
    if stated is not None:
        return stated

    def grown(strength: float) -> float:
        return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale = fields.optional_number("mscale", 0.0, 1e3)
    over = fields.optional_number("mscale_all_dim", 0.0, 1e3)
    return grown(mscale) / grown(over) if mscale and over else grown(1.0)
