"""One class is all that a new architecture takes: nothing else of the program is touched, and it plans and decodes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localllm.checkpoint import Checkpoint
from localllm.device.fake import MACHINES
from localllm.errors import UnsupportedModel
from localllm.models.architectures import Attention, Dense, LayerFacts, ModelFacts, open_model, registry
from localllm.models.architectures.architecture import Architecture
from localllm.models.architectures.gguf import GgufConfig
from localllm.models.architectures.hf import HfConfig
from localllm.models.architectures.names import NameMap
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner

INNER = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    **{f"self_attn.{name}_proj": f"attn.w{name}" for name in "qkvo"},
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
}


class Fifth(Architecture):
    """Llama's arithmetic under other names; every second layer sees a window only."""

    name = "fifth"
    label = "Fifth"
    hf_types = {"fifth": {"window": 8}}
    hf_classes = ("FifthForCausalLM",)

    def from_hf(self, config: HfConfig) -> ModelFacts:
        rope, context = config.rope()
        wide: Attention = config.attention(rope)
        narrow = dataclasses.replace(wide, window=config.keys.integer("window", 1, 1024))
        ffn: Dense = config.dense()
        kinds = (LayerFacts(wide, ffn), LayerFacts(narrow, ffn))
        return config.facts(tuple(kinds[layer % 2] for layer in range(config.num_layers)), context)

    def from_gguf(self, config: GgufConfig) -> ModelFacts:
        raise NotImplementedError

    def names(self, checkpoint: Checkpoint) -> NameMap:
        top = {"model.embed_tokens": "decoder.tokens", "model.norm": "decoder.norm", "lm_head": "head"}
        return NameMap(top, "decoder.blocks.{}.", INNER)


def test_a_fifth_architecture_loads_plans_and_decodes(
    tiny: Callable, paged: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    names = Fifth().names(Checkpoint(tmp_path, "safetensors", {}, {}))
    renamed: dict[str, torch.Tensor | None] = {}
    for tensor, values in model.tensors.items():
        module, _, last = tensor.rpartition(".")
        renamed |= {tensor: None, f"{names.source(module)}.{last}": values}
    folder = model.save(tmp_path / "m", renamed, model_type="fifth", architectures=["FifthForCausalLM"])
    with pytest.raises(UnsupportedModel, match="fifth"):
        _ = open_model(folder).facts

    monkeypatch.setattr(registry, "ARCHITECTURES", (*registry.ARCHITECTURES, Fifth()))
    assert registry.canonical("FifthForCausalLM") == "fifth" and "fifth" in registry.names()
    with open_model(folder) as opened:
        facts = opened.facts
        ours = load_model(opened, LoadOptions(exact=True))
    assert (facts.architecture, facts.windows) == ("fifth", (None, 8, None))
    assert facts.num_params == sum(values.numel() for values in model.tensors.values())
    made = Planner(MACHINES["cpu"]).plan(facts)
    assert made.fits and len(made.num_pages) == len(ours.groups) == 2

    ids = list(range(1, 9))  # no longer than the window: the result is Llama's
    assert torch.allclose(paged(ours).all_logits(ids, [5]), model.logits(ids), atol=1e-4)


def test_the_readme_lists_what_the_registry_has() -> None:
    labels = ", ".join(architecture.label for architecture in registry.ARCHITECTURES)
    wanted = textwrap.fill(f"Architectures: {labels}.", 120, break_long_words=False, break_on_hyphens=False)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert wanted in readme, f"README.md must say:\n{wanted}"
