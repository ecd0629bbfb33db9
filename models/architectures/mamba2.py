"""Shared code of the hybrids with Mamba-2 layers: keys of both containers, tensor names, checks."""

from __future__ import annotations

import math
from typing import Any

from localllm.checkpoint.fields import MAX_CONV, MAX_HEAD_DIM, MAX_HEADS, Fields
from localllm.checkpoint.mapped_file import bad

from .config import Config
from .gguf import GgufConfig
from .mixers import Mamba2, RopeFacts

GGUF_MAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
}
MAMBA, ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")  # names of the layer kinds in files


def mamba_of_hf(config: Config, names: dict[str, str], inner: int | None = None, **changes: Any) -> Mamba2:
    """Read the facts; `names` are the family's keys of num_heads, head_dim, num_groups, state_size and conv_width.

    inner   expected num_heads * head_dim, if the file states it
    """
    keys = config.keys
    limits = {"conv_width": (2, MAX_CONV), "num_heads": (1, MAX_HEADS), "num_groups": (1, MAX_HEADS)}
    sizes = {name: keys.integer(key, *limits.get(name, (1, MAX_HEAD_DIM))) for name, key in names.items()}
    rest: dict[str, Any] = {**sizes, **changes}
    found = Mamba2(eps=_eps(config), steps=_steps(keys), **rest)
    if inner is not None and found.inner != inner:
        what = f"{found.num_heads} heads of {found.head_dim} make {found.inner:,} values, but the file states {inner:,}"
        raise bad(keys.path, what, key=names["head_dim"])
    return _checked(found, keys, names["num_groups"])


def mamba_of_gguf(config: GgufConfig) -> Mamba2:
    """Read the facts from the keys that all of llama.cpp's recurrent models share."""
    keys = config.keys
    heads = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
    inner = keys.integer("ssm.inner_size", 1, MAX_HEADS * MAX_HEAD_DIM)
    if inner % heads:
        raise keys.fail("ssm.inner_size", f"is {inner:,}, not a multiple of {heads} heads")
    found = Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=keys.integer("ssm.group_count", 1, MAX_HEADS),
        state_size=keys.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        conv_width=keys.integer("ssm.conv_kernel", 2, MAX_CONV),
        eps=_eps(config),
        conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in config.checkpoint.tensors),
        log_decay=False,
        split_norm=True,
    )
    return _checked(found, keys, "ssm.group_count")


def no_rope(config: Config) -> RopeFacts:
    """No RoPE, even if the file describes one."""
    return RopeFacts(10_000.0, config.head_dim, "off")


def _eps(config: Config) -> float:
    return config.keys.number(config.KEYS["eps"], 1e-12, 0.1, config.DEFAULT_EPS)


def _checked(found: Mamba2, keys: Fields, key: str) -> Mamba2:
    if found.num_heads % found.num_groups:
        what = f"{found.num_heads} heads cannot be split evenly into {found.num_groups} groups"
        raise bad(keys.path, what, key=key)
    return found


def _steps(keys: Fields) -> tuple[float, float] | None:
    """`time_step_limit`; None if it has no effect. transformers 5 writes infinity as an object."""
    stated = keys.raw("time_step_limit")
    if stated is None:
        return None
    ends = [math.inf if end == {"__float__": "Infinity"} else end for end in stated] if isinstance(stated, list) else []
    numbers = [float(end) for end in ends if type(end) in (int, float)]
    if len(ends) != 2 or len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise keys.fail("time_step_limit", "must be a lower limit of at least 0 and a higher upper limit")
    return None if numbers == [0.0, math.inf] else (numbers[0], numbers[1])
