"""Rotary positions from config.json: `rope_scaling` beside `rope_theta`, or transformers 5's `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .facts import RopeFacts
from .gguf_facts import unsupported
from .limits import MAX_CONTEXT, MAX_HEAD_DIM, Fields
from .mapped_file import shown

_GEMMA_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def full_and_local_rope(
    given: Fields, keys: Fields, architecture: str, head_dim: int
) -> tuple[RopeFacts, RopeFacts | None, int]:
    """The rope of full layers, that of windowed ones (Gemma 3, else None), and the context in tokens.

    given   the values that stand in the file      keys   the same over the family's defaults
    """
    context = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)
    parameters = _object(given, "rope_parameters")
    scaling = _object(given, "rope_scaling")
    theta = keys.number("rope_theta", 1.0, 1e15, 10_000.0)
    if architecture != "gemma3":
        merged = {"rope_theta": theta, **scaling, **parameters}
        rope, reach = _rope(given, merged, head_dim, context)
        return rope, None, reach
    nested = {kind: parameters.get(kind) for kind in _GEMMA_THETA}
    for kind, values in nested.items():
        if values is not None and not isinstance(values, dict):
            raise given.fail(f"rope_parameters.{kind}", "must be an object")
    flat = {} if any(nested.values()) else parameters
    full_theta = keys.number("rope_theta", 1.0, 1e15, _GEMMA_THETA["full_attention"])
    local_theta = keys.number("rope_local_base_freq", 1.0, 1e15, _GEMMA_THETA["sliding_attention"])
    full = {"rope_theta": full_theta, **scaling, **flat, **(nested["full_attention"] or {})}
    local = {"rope_theta": local_theta, **(nested["sliding_attention"] or {})}
    rope, reach = _rope(given, full, head_dim, context)
    return rope, _rope(given, local, head_dim, context)[0], reach


def _object(fields: Fields, key: str) -> dict[str, Any]:
    value = fields.raw(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.fail(key, f"is {shown(repr(value))}, an object is expected")
    return value


def _rope(given: Fields, values: Mapping[str, Any], head_dim: int, context: int) -> tuple[RopeFacts, int]:
    """One rope's facts and the context it reaches."""
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
        raise unsupported(given.path, f"rope scaling of type {shown(kind)}")
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
