"""Every setting of the engine, given by flag, variable, file or argument, reaches the plan and the running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm import LLM
from localllm.config import KEYS, EngineOptions, load_config
from localllm.device.fake import MACHINES
from localllm.errors import ConfigError
from localllm.models.architectures.facts import ModelFacts, repeated
from localllm.models.architectures.layers import Dense, Experts, LayerFacts
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.plan.plan import Plan
from localllm.plan.planner import Planner
from localllm.plan.profiles import MemoryProfile, Term

GIB = 1 << 30
SETTINGS = [key for key in KEYS.values() if key.section == "engine"]
CARD = MACHINES["rtx4090"]
FACTS = ModelFacts(
    architecture="llama",
    source_architecture="LlamaForCausalLM",
    name="m",
    hidden_size=4096,
    vocab_size=128256,
    max_context=32768,
    rms_norm_eps=1e-5,
    layers=repeated(LayerFacts(Attention(32, 8, 128, RopeFacts(5e5, 128)), Dense(14336)), (None,) * 32),
    stored_format="Q4_K_M",
    num_params=8_030_261_248,
    weight_bytes=5 * GIB,
)

MIXTURE = replace(FACTS, layers=(replace(FACTS.layers[0], ffn=Experts(8, 2, 1792, "silu")),) * 32, active_share=0.4)

GIVEN: dict[str, tuple[str, Any]] = {
    "device": ("cpu", "cpu"),
    "dtype": ("float32", "float32"),
    "activations": ("fp8", "fp8"),
    "ctx": ("2k", 2048),
    "kv": ("f32", "f32"),
    "gpu_mem": ("0.5", 0.5),
    "graphs": ("off", False),
    "threads": ("1", 1),
    "deterministic": ("off", False),
    "prefix_cache": ("off", False),
    "kv_store": ("4GiB", 4 * GIB),
    "packed_store": ("4GiB", 4 * GIB),
    "speculation": ("ngram", "ngram"),
    "mmproj": ("tower.gguf", "tower.gguf"),
    "draft": ("smollm2", "smollm2"),
    "adapters": ("poet=poet", ("poet=poet",)),
    "experts": ("host", "host"),
    "tensor_parallel": ("2", 2),
    "split": ("layers", "layers"),
    "max_parallel": ("3", 3),
    "ttl_s": ("90s", 90.0),
}
"""field -> a value other than the default as one types it, and what it means"""
PLANNED: dict[str, Callable[[Plan], Any]] = {
    "gpu_mem": lambda plan: round(plan.have_bytes / CARD.gpus[0].total_bytes, 3),
    "graphs": lambda plan: bool(plan.graph_buckets),
    "tensor_parallel": lambda plan: max(1, len(plan.ranks)),
    "experts": lambda plan: "host" if plan.host_experts == 8 else "auto",
}
"""where the plan shows what is not a field of the same name"""
RUNNING: dict[str, Callable[[LLM], Any]] = {
    "device": lambda llm: llm.state().device,
    "ctx": lambda llm: llm.engine.max_context,
    "kv": lambda llm: llm.state().kv,
    "threads": lambda llm: int(llm.run_summary.split(" × ")[1].split()[0]),
    "deterministic": lambda llm: "not batch-invariant" not in llm.run_summary,
    "prefix_cache": lambda llm: llm.engine.scheduler.pages.prefix_cache,
    "speculation": lambda llm: "ngram" if llm.engine.stepper.speculation.mode == "always" else "auto",
    "max_parallel": lambda llm: llm.engine.limits.max_parallel,
    "dtype": lambda llm: next(part for part in llm.run_summary.split(" · ") if "activations" in part).split()[0],
    "activations": lambda llm: "fp8" if any("quantized to fp8" in line for line in llm.state().warnings) else "",
}
"""where a running engine shows it; the rest needs a GPU, or belongs to the pool of models (`ttl_s`)"""


def by_flag(field: str, typed: str, folder: Path) -> EngineOptions:
    return load_config({path_of(field): typed}, environ={}).engine


def by_variable(field: str, typed: str, folder: Path) -> EngineOptions:
    return load_config(environ={"LOCALLLM_" + path_of(field).replace(".", "_").upper(): typed}).engine


def by_file(field: str, typed: str, folder: Path) -> EngineOptions:
    file = folder / "config.toml"
    value = typed if typed.replace(".", "").isdigit() else {"off": "false"}.get(typed, f'"{typed}"')
    file.write_text(f"[engine]\n{path_of(field).partition('.')[2]} = {value}\n")
    return load_config(path=file, environ={}).engine


def by_argument(field: str, typed: str, folder: Path) -> EngineOptions:
    return replace(EngineOptions(), **{field: GIVEN[field][1]})


def path_of(field: str) -> str:
    return next(key.path for key in SETTINGS if key.attribute == field)


def test_this_file_knows_every_setting() -> None:
    assert set(GIVEN) == {key.attribute for key in SETTINGS}
    for key in SETTINGS:
        typed, value = GIVEN[key.attribute]
        assert key.parse(typed, "test") == value != key.default


@pytest.mark.parametrize("door", [by_flag, by_variable, by_file, by_argument])
@pytest.mark.parametrize("field", [key.attribute for key in SETTINGS])
def test_a_setting_reaches_the_plan(field: str, door: Callable[..., EngineOptions], tmp_path: Path) -> None:
    options = door(field, GIVEN[field][0], tmp_path)
    assert options == replace(EngineOptions(), **{field: GIVEN[field][1]})
    if field in (
        "ttl_s",
        "kv_store",
        "packed_store",
        "mmproj",
        "draft",
        "adapters",
    ):  # the last three reach the plan with their files
        return
    shown = PLANNED.get(field, lambda plan: getattr(plan, field))
    if field == "deterministic":  # off is what a GPU has anyway
        options = replace(options, device="cpu")
    if field in ("tensor_parallel", "split"):  # this machine has one card
        options = replace(options, device="cpu", tensor_parallel=2)
    facts = MIXTURE if field == "experts" else FACTS
    assert shown(Planner(CARD, options).plan(facts)) == GIVEN[field][1]
    assert (
        shown(Planner(CARD, EngineOptions(device=options.device)).plan(facts)) != GIVEN[field][1] or field == "device"
    )


def test_no_graphs_take_no_memory() -> None:
    eager, captured = (Planner(CARD, EngineOptions(graphs=graphs)).plan(FACTS).terms() for graphs in (False, True))
    assert eager["graphs"] < 4 << 20 < captured["graphs"]


def test_all_settings_reach_a_running_engine(tiny_path: Path) -> None:
    changes = {"ctx": 256, "adapters": (), "tensor_parallel": 1, "mmproj": "off"}
    settings = {field: value for field, (_, value) in GIVEN.items()} | changes
    with LLM(tiny_path, **settings) as llm:
        assert llm.options == EngineOptions(**settings)
        assert {field: shown(llm) for field, shown in RUNNING.items()} == {field: settings[field] for field in RUNNING}
    with LLM(tiny_path, EngineOptions(**settings), threads=None, deterministic=None) as llm:  # None: the default
        assert (llm.options.threads, llm.options.deterministic) == ("auto", "auto")
        assert llm.plan.deterministic and llm.plan.threads == llm.machine.cpu.cores_usable


def test_chat_and_serve_hand_the_settings_on_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.commands.serve import new_pool
    from localllm.cli.frame.command import Env, Options
    from localllm.cli.session import Sampling, make_backend

    env, given = Env(Options()), []
    config = env.settings({path_of(field): typed for field, (typed, _) in GIVEN.items()})
    monkeypatch.setattr("localllm.backend.in_process.InProcessBackend", lambda *_, options, **__: given.append(options))
    monkeypatch.setattr("localllm.cli.served_models.HubLoader", lambda options, adapted: given.append(options))
    monkeypatch.setattr("localllm.server.pool.ModelPool", lambda offers, loader, machine, options: options)
    make_backend(env, config, Sampling())
    pool: Any = new_pool(env, config, list, (), None)
    assert given == [config.engine, config.engine] == [EngineOptions(**{f: v for f, (_, v) in GIVEN.items()})] * 2
    assert pool.ttl_s == 90.0, "after which a model is let go"


@pytest.mark.parametrize(("field", "value"), [("kv", "fp4"), ("threads", 0), ("gpu_mem", 2), ("graphs", "maybe")])
def test_a_value_that_is_not_taken_is_named_with_what_is(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{field} must be .*, not") as caught:
        EngineOptions(**{field: value})
    assert caught.value.hint.startswith(f"use {field}=")
    with pytest.raises(TypeError, match="ctxx"):
        LLM("m", ctxx=1)


def test_every_command_plans_a_model_alike(tiny_path: Path, empty_home: Path) -> None:
    """The memory that an earlier start took too much, and the quality that was measured, count everywhere."""
    planner = Planner.here(EngineOptions(ctx=256))
    with LLM(tiny_path, planner.options) as llm:
        profiles = planner.measured.profiles
        assert profiles is not None
        profiles.keep(llm.facts, llm.machine, llm.plan, MemoryProfile((Term("work", 0, 5 << 20),), "cpu", 1.0))
        made = Planner.here(planner.options).plan(llm.facts, tiny_path)
    assert made.terms()["learned"] == 5 << 20
    with LLM(tiny_path, planner.options) as llm:
        assert llm.plan.terms()["learned"] == 5 << 20
