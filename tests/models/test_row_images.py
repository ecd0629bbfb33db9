"""The tower of Mistral 3's files, an image's tokens row by row, and its size as the processor has it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.models.architectures import open_model
from localllm.models.architectures.vision import MAX_IMAGE_TOKENS, RowFacts
from localllm.models.loader import LoadOptions, load_model

from .test_grid_images import SIDE, pixels
from .test_images import Pictured, computed_of, error

IMAGE, BREAK, END = 10, 12, 13
OTHERS = ("ministral3", "mistral4")
GRIDS = ((3, 5), (4, 2), (1, 3))  # rows and columns of vectors
TEXT = {
    "vocab_size": 99, "hidden_size": 44, "intermediate_size": 70, "num_hidden_layers": 2, "head_dim": 20,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "rms_norm_eps": 1e-4, "sliding_window": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 22, "kv_lora_rank": 34, "qk_nope_head_dim": 10, "qk_rope_head_dim": 10,
    "head_dim": 20, "v_head_dim": 18, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 6,
    "image_size": 120, "hidden_act": "silu", "head_dim": 8,
}  # fmt: skip


def row(rows: int, columns: int) -> list[int]:
    """The tokens of an image."""
    return ([*[IMAGE] * columns, BREAK] * rows)[:-1]


PROMPT = [1, 5, *row(3, 5), END, 7, 8, 9, *row(4, 2), END, 11, *row(1, 3), END, 14, 15]
STARTS = (2, 23, 36)


@cache
def made(family: str = "mistral") -> Pictured:
    from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

    text = AutoConfig.for_model(family, **TEXT | (LATENT if family == "mistral4" else {}))
    config = Mistral3Config(
        text_config=text, vision_config=AutoConfig.for_model("pixtral", **VISION), image_token_index=IMAGE,
        multimodal_projector_bias=family != "mistral", spatial_merge_size=2, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = Mistral3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            norm = parameter.dim() == 1 and "bias" not in name
            parameter.copy_(float(norm) + scale * torch.randn_like(parameter))
    described = json.loads(config.to_json_string(use_diff=False))
    described["architectures"] = ["Mistral3ForConditionalGeneration"]
    return Pictured(model, described, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


@pytest.fixture(scope="module", params=["mistral", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def pictured(request: pytest.FixtureRequest) -> Pictured:
    return made(request.param)


@pytest.fixture(scope="module")
def model(pictured: Pictured, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_model(pictured.save(tmp_path_factory.mktemp("pictured"))) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True))


def processor(longest: int = 120) -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(patch_size={"height": SIDE, "width": SIDE}, size={"longest_edge": longest})


def theirs(images: list[Tensor]) -> dict[str, Tensor]:
    given = processor()([Image.fromarray(one.numpy()) for one in images], return_tensors="pt")
    return {"pixel_values": given["pixel_values"], "image_sizes": given["image_sizes"]}


computed = partial(computed_of, PROMPT, STARTS)


def test_logits_with_images_match_transformers(pictured: Pictured, model: Any, paged: Any) -> None:
    images = [pixels(grid) for grid in GRIDS]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        reference = pictured.reference(ids, **theirs(images), use_cache=False).logits[0]
        features = pictured.reference.model.get_image_features(**theirs(images), return_dict=True).pooler_output
    vectors = [model.image_vectors(one) for one in images]
    for one, grid, wanted in zip(vectors, GRIDS, features, strict=True):
        assert len(one) == len(row(*grid)), "a token between two rows, which text has, too"
        assert error(one[torch.tensor(row(*grid)) == IMAGE], wanted) < 1e-4
    whole = computed(paged(model), vectors, [len(PROMPT)])
    assert error(whole, reference) < 1e-4
    assert error(computed(paged(model), vectors, [5, 9, 1, 10, 11, len(PROMPT) - 36]), whole) < 1e-5


@pytest.mark.parametrize("size", [(20, 30), (301, 77), (77, 301), (64, 64), (7, 900), (1200, 900), (3, 2), (120, 120)])
def test_images_are_resized_as_by_the_processor(size: tuple[int, int], pictured: Pictured, tmp_path: Path) -> None:
    folder = pictured.save(tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 150}}))
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts.vision
    assert isinstance(facts, RowFacts)
    picture = Image.fromarray(np.zeros((size[1], size[0], 3), dtype=np.uint8))
    height, width = processor(150)(picture, return_tensors="pt")["image_sizes"][0].tolist()
    assert facts.fitted(*size) == (width, height)
    assert facts.ids(width, height) == row(height // SIDE, width // SIDE)
    assert facts.num_tokens(width, height) == len(row(height // SIDE, width // SIDE)) <= facts.tokens


def test_the_limits_of_an_image(pictured: Pictured, tmp_path: Path) -> None:
    with open_model(
        pictured.save(tmp_path, vision_config=pictured.config["vision_config"] | {"image_size": 4000})
    ) as one:
        facts = one.facts.vision
    assert isinstance(facts, RowFacts) and facts.longest == 44 * SIDE
    assert 44 * 45 - 1 == facts.tokens <= MAX_IMAGE_TOKENS < 45 * 46 - 1
    with pytest.raises(ValueError, match="200:1 aspect ratio"):
        facts.fitted(9_000, 44)


def test_the_plan_counts_the_tower_and_the_largest_image(pictured: Pictured, tmp_path: Path) -> None:
    from localllm.device.fake import MACHINES
    from localllm.plan.planner import Planner

    with open_model(pictured.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.vision is not None
    plan, without = (Planner(MACHINES["cpu"]).plan(one) for one in (facts, replace(facts, vision=None)))
    stored = sum(t.nbytes for name, t in pictured.tensors.items() if "vision" in name or "projector" in name)
    assert plan.weight_bytes - without.weight_bytes == facts.vision.nbytes == stored
    assert dict(plan.work_terms)["image"] == facts.vision.work > 20 * 20 * 4 * 10 * 24


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 7}, "hidden_size"),
        ({"head_dim": 4}, "hidden_size"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"patch_size": 7}, "patch_conv"),
    ],
)
def test_a_tower_that_contradicts_its_tensors_is_refused(
    change: Any, key: str, pictured: Pictured, tmp_path: Path
) -> None:
    vision = pictured.config["vision_config"] | change
    with open_model(pictured.save(tmp_path, vision_config=vision)) as one, pytest.raises(BadModelFile, match=key):
        _ = one.facts


@pytest.mark.parametrize(
    "change",
    [{"vision_config": {"hidden_act": "gelu"}}, {"vision_feature_layer": [-2]}, {"projector_hidden_act": "relu"}],
)
def test_the_text_part_of_another_tower_runs_and_says_so(change: Any, pictured: Pictured, tmp_path: Path) -> None:
    if "vision_config" in change:
        change = {"vision_config": pictured.config["vision_config"] | change["vision_config"]}
    with open_model(pictured.save(tmp_path, **change)) as checkpoint:
        assert checkpoint.facts.vision is None
        assert checkpoint.unread == "vision_tower is not supported: the model reads text only"
