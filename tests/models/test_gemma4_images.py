"""What reads images in Gemma 4's three kinds, and how their tokens see each other, against transformers in float32."""

from __future__ import annotations

import copy
import functools
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from localllm.cli.commands.show import _images
from localllm.config import EngineOptions
from localllm.device.fake import MACHINES
from localllm.errors import BadModelFile
from localllm.llm.pictures import read_image
from localllm.models.architectures import open_model
from localllm.models.architectures.vision import PatchFacts, PooledFacts
from localllm.models.loader import LoadOptions, load_model
from localllm.plan.planner import Planner
from localllm.request import PromptImage, Request, SamplingParams

from .conftest import GEMMA4_ROPE
from .test_decode_graphs import answers, engine_of
from .test_images import Pictured, computed_of, error

IMAGE = 90  # its token
GRIDS = ((2, 4), (3, 2), (1, 3))  # rows and columns of vectors
STARTS = (2, 15, 22)
PROMPT = [1, 5, *[IMAGE] * 8, 7, 8, 9, 11, 12, *[IMAGE] * 6, 13, *[IMAGE] * 3, 14, 15, 16, 17]
PATCH, MERGE = 5, 3
TEXT = {
    "vocab_size": 99, "hidden_size": 44, "intermediate_size": 70, "num_attention_heads": 4, "head_dim": 20,
    "sliding_window": 11, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    "global_head_dim": 28, "rope_parameters": GEMMA4_ROPE, "final_logit_softcapping": 8.0,
}  # fmt: skip
SHARED = {"num_key_value_heads": 1, "num_kv_shared_layers": 2, "num_hidden_layers": 4, "use_double_wide_mlp": True}
SHARED |= {"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 99}
K_IS_V = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
K_IS_V |= {"use_bidirectional_attention": "vision"}
ALONE = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 22}
TOWER = {
    "hidden_size": 30, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12,
    "num_key_value_heads": 2, "patch_size": PATCH, "pooling_kernel_size": MERGE, "position_embedding_size": 211,
}  # fmt: skip
SQUARES = {"patch_size": PATCH, "pooling_kernel_size": MERGE, "mm_embed_dim": 34, "output_proj_dims": 34}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "e2b": ("Gemma4", TEXT | SHARED, TOWER | {"use_clipped_linears": True}),
    "31b": ("Gemma4", TEXT | K_IS_V | ALONE, TOWER | {"standardize": True, "num_key_value_heads": 4}),
    "26b-a4b": ("Gemma4", TEXT | K_IS_V | ALONE | EXPERTS, TOWER),
    "12b": ("Gemma4Unified", TEXT | K_IS_V | {"num_hidden_layers": 2}, SQUARES | {"mm_posemb_size": 70}),
}  # fmt: skip


@functools.cache
def made(kind: str) -> Pictured:
    import transformers

    family, text, vision = KINDS[kind]
    text = text | {"layer_types": ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, boi_token_id=91,
        eoi_token_id=92, video_token_id=93, audio_token_id=94, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("input_min", "output_min", "input_max", "output_max")):
                tensor.fill_((0.7 if "in" in name.rpartition(".")[2][:2] else 0.9) * (1 if "max" in name else -1))
            elif "inv_freq" not in name and "embed_scale" not in name and tensor.is_floating_point():
                scale = 0.2 if tensor.dim() < 2 else tensor[0].numel() ** -0.5
                about = 1.0 if "norm" in name or "scal" in name or "_ln" in name else 0.0
                tensor.copy_(about * ("bias" not in name) + scale * torch.randn_like(tensor))
    stored = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if "lm_head" not in name}
    described = json.loads(config.to_json_string(use_diff=False))
    return Pictured(model, described | {"architectures": [f"{family}ForConditionalGeneration"]}, stored)


@pytest.fixture(scope="module")
def pictured() -> Any:
    return made


def saved(model: Pictured, folder: Path, **config: Any) -> Path:
    model.save(folder, **config)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": 70}}))
    return folder


@pytest.fixture(scope="module")
def loaded_kind(pictured: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def load(kind: str) -> Any:
        with open_model(saved(pictured(kind), tmp_path_factory.mktemp("pictured"))) as checkpoint:
            return load_model(checkpoint, LoadOptions(exact=True))

    return load


def pixels(grid: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(grid))
    size = (grid[0] * PATCH * MERGE, grid[1] * PATCH * MERGE, 3)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)


def theirs(kind: str, images: list[Tensor]) -> dict[str, Tensor]:
    """As their processor gives images that have their size, padded to 70 vectors."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    side, merge = (PATCH * MERGE, 1) if kind == "12b" else (PATCH, MERGE)  # the unified one merges patches itself
    how = {"patch_size": side, "pooling_kernel_size": merge, "max_soft_tokens": 70, "do_resize": False}
    found = Gemma4ImageProcessorPil(**how)([Image.fromarray(one.numpy()) for one in images], return_tensors="pt")
    return {name: torch.as_tensor(found[name]) for name in ("pixel_values", "image_position_ids")}


def kinds(*quick: str) -> list[Any]:
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds("e2b", "12b"))
def test_vectors_match_transformers(kind: str, pictured: Any, loaded_kind: Any) -> None:
    images = [pixels(grid) for grid in GRIDS]
    with torch.no_grad():
        found = pictured(kind).reference.model.get_image_features(**theirs(kind, images), return_dict=True)
    for one, wanted in zip(images, found.pooler_output, strict=True):
        assert error(loaded_kind(kind).image_vectors(one), wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["e2b", "31b", "12b"])
def test_vectors_in_half_precision_are_as_near_as_theirs(
    kind: str, dtype: str, pictured: Any, loaded_kind: Any, tmp_path: Path
) -> None:
    with open_model(saved(pictured(kind), tmp_path)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True, dtype=dtype))
    model = copy.deepcopy(pictured(kind).reference.model).to(getattr(torch, dtype))
    with torch.no_grad():
        given = theirs(kind, [pixels((3, 2))])
        reference = model.get_image_features(**given, return_dict=True).pooler_output[0]
    wanted = loaded_kind(kind).image_vectors(pixels((3, 2)))
    found = ours.image_vectors(pixels((3, 2)))
    off, allowed = (float((one.float() - wanted).norm() / wanted.norm()) for one in (found, reference))
    assert found.dtype == reference.dtype and 0 < off < 1.2 * allowed


computed = partial(computed_of, PROMPT, STARTS)


@pytest.mark.parametrize("kind", kinds("31b", "12b"))
def test_logits_with_images_match_transformers(kind: str, pictured: Any, loaded_kind: Any, paged: Any) -> None:
    images, model = [pixels(grid) for grid in GRIDS], loaded_kind(kind)
    ids = torch.tensor([PROMPT])
    given = theirs(kind, images)
    with torch.no_grad():
        reference = (
            pictured(kind).reference(ids, **given, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False).logits[0]
        )
        causal = pictured(kind).reference(ids, **given, use_cache=False).logits[0]
    vectors = [model.image_vectors(one) for one in images]
    whole = computed(paged(model), vectors, [len(PROMPT)])
    assert error(whole, reference) < 1e-4
    bidirectional = model.facts.vision.bidirectional
    assert bidirectional == {"12b": "all", "e2b": ""}.get(kind, "windowed")
    assert (error(whole, causal) > 1e-3) == bool(bidirectional)  # what the mask changes shows
    chunks = [2, 8, 5, 12, 1, 1] if bidirectional else [3, 5, 1, 7, 11, 1, 1]  # the others cut images
    assert error(computed(paged(model), vectors, chunks), whole) < 1e-5


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, pictured: Any) -> Any:
    """The facts of a tower in the sizes of E2B."""
    with open_model(saved(pictured("e2b"), tmp_path_factory.mktemp("published"))) as checkpoint:
        facts = checkpoint.facts.vision
    assert isinstance(facts, PooledFacts)
    return replace(facts, patch_size=16, tokens=280)


@pytest.mark.parametrize("size", [(20, 30), (301, 77), (77, 301), (64, 64), (5, 900), (1200, 900), (4000, 3), (1, 1)])
def test_images_are_resized_as_by_the_processor(size: tuple[int, int], published: PooledFacts) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    generator = np.random.default_rng(3)
    picture = Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    found = torch.from_numpy(read_image(stream.getvalue(), published))
    reference = Gemma4ImageProcessorPil()(picture, return_tensors="pt")
    count = int(reference["num_soft_tokens_per_image"][0])
    assert published.num_tokens(found.shape[1], found.shape[0]) == count <= published.tokens
    rows, columns = found.shape[0] // 16, found.shape[1] // 16
    patches = found.view(rows, 16, columns, 16, 3).transpose(1, 2).reshape(rows * columns, -1)
    wanted = torch.as_tensor(reference["pixel_values"])[0, : rows * columns]
    assert (patches / 255 - wanted).abs().max() < 1e-6
    places = torch.as_tensor(reference["image_position_ids"])[0]
    assert torch.equal(places[: rows * columns, 0], torch.arange(columns).repeat(rows))
    assert (places[rows * columns :] == -1).all()


def test_an_image_has_no_fewer_tokens_than_stated(published: PooledFacts) -> None:
    generator = np.random.default_rng(4)
    sides = np.exp(generator.uniform(0, np.log(9000), (4000, 2))).astype(int)
    for tokens in (1, 2, 7, 70, 280, 1120):
        facts = replace(published, tokens=tokens)
        counts = [facts.num_tokens(*facts.fitted(int(width), int(height))) for width, height in sides]
        assert facts.least_tokens <= min(counts) and max(counts) <= tokens
        assert min(counts) <= facts.least_tokens + tokens // 40 + 1, "the bound is near"


def test_the_plan_has_room_for_a_whole_image(pictured: Any, tmp_path: Path) -> None:
    """An image whose tokens see each other is computed in one step, whatever the budget; its pages are planned."""
    asked = EngineOptions(prefill_budget=4)
    with open_model(saved(pictured("12b"), tmp_path)) as checkpoint:
        made = Planner(MACHINES["cpu"], asked).plan(checkpoint.facts)
    assert made.prefill_budget == 11
    assert "11 prompt tokens per step, not 4: an image is computed in one step" in made.reasons
    with open_model(saved(pictured("e2b"), tmp_path / "e2b")) as checkpoint:  # here they do not
        assert Planner(MACHINES["cpu"], asked).plan(checkpoint.facts).prefill_budget == 4


def test_the_processor_decides_how_many_tokens(pictured: Any, tmp_path: Path) -> None:
    folder = saved(pictured("12b"), tmp_path)
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts.vision
    assert isinstance(facts, PatchFacts) and facts.tokens == 11, "no window may cut an image"
    with open_model(saved(pictured("e2b"), tmp_path / "e2b")) as checkpoint:
        assert checkpoint.facts.vision is not None and checkpoint.facts.vision.tokens == 70
        assert _images(checkpoint) == "yes, 35 to 70 tokens each"
    (folder / "processor_config.json").write_text(json.dumps({"do_normalize": True, "image_mean": [0.5] * 3}))
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.vision is None
        assert checkpoint.unread == "embed_vision is not supported: the model reads text only"


@pytest.mark.slow
def test_names_of_the_published_files(pictured: Any, loaded_kind: Any, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        inner = "embed_vision.multimodal_embedder."
        if inner in name:
            return name.replace(inner, "embed_vision.")
        return name.replace("embed_vision.", "vision_embedder.")

    with open_model(pictured("12b").save(tmp_path / "m", rename)) as checkpoint:
        facts = checkpoint.facts
        ours = load_model(checkpoint, LoadOptions(exact=True))
    wanted = loaded_kind("12b")
    assert facts.vision is not None and facts.vision.nbytes == wanted.facts.vision.nbytes
    assert facts.weight_bytes == wanted.facts.weight_bytes
    assert torch.equal(ours.image_vectors(pixels((2, 4))), wanted.image_vectors(pixels((2, 4))))


@pytest.mark.parametrize("kind", kinds("e2b"))
def test_the_plan_counts_the_tower_and_the_largest_image(kind: str, pictured: Any, tmp_path: Path) -> None:
    from localllm.device.fake import MACHINES
    from localllm.plan.planner import Planner

    model = pictured(kind)
    with open_model(saved(model, tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.vision is not None
    plan, without = (Planner(MACHINES["cpu"]).plan(one) for one in (facts, replace(facts, vision=None)))
    stored = sum(tensor.nbytes for name, tensor in model.tensors.items() if "vision" in name)
    assert plan.weight_bytes - without.weight_bytes == facts.vision.nbytes == stored
    assert dict(plan.work_terms)["image"] == facts.vision.work > facts.vision.tokens * facts.vision.factor**2 * 12


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("e2b", {"head_dim": 10}, "head_dim"),
        ("e2b", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("e2b", {"position_embedding_size": 209}, "an image may have 210 patches in a row"),
        ("e2b", {"position_embedding_size": 212}, "position_embedding_table"),
        ("e2b", {"num_hidden_layers": 3}, r"layers\.2"),
        ("e2b", {"standardize": True}, "std_bias"),
        ("31b", {"use_clipped_linears": True}, "input_min"),
        ("12b", {"patch_size": 4}, "patch_dense"),
        ("12b", {"mm_posemb_size": 10}, "an image may have 11 patches in a row"),
    ],
)
def test_a_tower_that_contradicts_its_tensors_is_refused(
    kind: str, change: dict[str, Any], key: str, pictured: Any, tmp_path: Path
) -> None:
    vision = pictured(kind).config["vision_config"] | change
    with (
        open_model(saved(pictured(kind), tmp_path, vision_config=vision)) as checkpoint,
        pytest.raises(BadModelFile, match=key),
    ):
        _ = checkpoint.facts


def test_sounds_are_not_heard_and_another_tower_is_not_computed(pictured: Any, tmp_path: Path) -> None:
    model = pictured("e2b")
    ears = {"model.embed_audio.embedding_projection.weight": torch.ones(4, 4), "model.audio_tower.x": torch.ones(2)}
    with open_model(saved(replace(model, tensors=model.tensors | ears), tmp_path)) as checkpoint:
        assert checkpoint.facts.vision is not None
        assert "is not supported: the model reads text and images" in checkpoint.unread
    vision = model.config["vision_config"] | {"hidden_activation": "silu"}
    with open_model(saved(model, tmp_path / "silu", vision_config=vision)) as checkpoint:
        assert checkpoint.facts.vision is None and checkpoint.unread.endswith("the model reads text only")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_captured_steps_change_nothing(kind: str, loaded_kind: Any) -> None:
    model = loaded_kind(kind)
    causal = not model.facts.vision.bidirectional
    ends = [at + grid[0] * grid[1] for at, grid in zip(STARTS, GRIDS, strict=True)]

    def asked() -> list[Request]:
        shown = [
            PromptImage(at, end, pixels(grid).numpy(), repr(grid).encode(), causal=causal)
            for at, end, grid in zip(STARTS, ends, GRIDS, strict=True)
        ]
        return [Request(PROMPT, SamplingParams(temperature=0, max_tokens=24), images=tuple(shown))]

    wanted = answers(engine_of(model), asked())
    assert len(wanted[0]) == 24
    for budget in (5, 9):
        engine = engine_of(model)
        engine.scheduler.limits = replace(engine.scheduler.limits, prefill_budget=budget)
        assert answers(engine, asked()) == wanted
    assert answers(engine_of(model, sizes=(1, 2)), asked()) == wanted
