"""The towers of Qwen3-VL and Qwen3.5, positions of three axes, and images as the processor resizes them."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from localllm.checkpoint.fields import Fields
from localllm.cli.commands.show import _images
from localllm.engine.batch import turned_positions
from localllm.errors import BadModelFile
from localllm.llm.pictures import read_image
from localllm.models.architectures import open_model
from localllm.models.architectures.hf import Described
from localllm.models.architectures.qwen_vision import DEEP_TOWER, GATED_TOWER, TOWER, grid_vision
from localllm.models.architectures.vision import MAX_IMAGE_TOKENS, GridFacts
from localllm.models.inputs import ImageRows
from localllm.models.loader import LoadOptions, load_model
from localllm.request import PromptImage, Request, SamplingParams

from .test_decode_graphs import answers, engine_of
from .test_images import Pictured, error
from .test_predictor import Checked

IMAGE = 90  # its token
GRIDS = ((3, 5), (4, 2), (1, 3))  # rows and columns of vectors
STARTS = (2, 22, 31)
PROMPT = [1, 5, *[IMAGE] * 15, 7, 8, 9, 11, 12, *[IMAGE] * 8, 13, *[IMAGE] * 3, 14, 15, 16, 17]
TEXT = {
    "vocab_size": 99, "hidden_size": 44, "intermediate_size": 70, "num_hidden_layers": 2, "head_dim": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "mrope_section": [3, 3, 3],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "hidden_size": 24,
    "intermediate_size": 50,
    "depth": 2,
    "num_heads": 3,
    "patch_size": 6,
    "out_hidden_size": 44,
}
VISION |= {"num_position_embeddings": 25, "deepstack_visual_indexes": []}
SIDE = 12  # pixels of a vector


# what layers of the tower give is added behind as many of the decoder's
DEEP = VISION | {"depth": 4, "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh"}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
OWN = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "bos_token_id")}
OWN |= {name: TEXT[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
OWN |= {"num_hidden_layers": 3, "eos_token_id": 2, "rope_parameters": ROPE, "tie_word_embeddings": False}
# layers of the tower see windows of two vectors a side, but for one
WINDOWED = {"hidden_size": 24, "intermediate_size": 50, "depth": 2, "num_heads": 3, "patch_size": 6, "window_size": 24}
WINDOWED |= {"out_hidden_size": 48, "fullatt_block_indexes": [1]}
WINDOWS = {"window_size", "fullatt_block_indexes"}
BARE = OWN | {"hidden_size": 48, "head_dim": 12, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 3]}}
del BARE["rope_parameters"]["mrope_interleaved"]
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5", TEXT, VISION),
    "qwen3-vl": ("Qwen3VL", OWN, DEEP),
    "qwen2.5-vl": ("Qwen2_5_VL", BARE, WINDOWED),
    "qwen3-vl-moe": ("Qwen3VLMoe", OWN | MOE | {"norm_topk_prob": True, "mlp_only_layers": []}, DEEP),
}


@cache
def made(family: str = "qwen3.5") -> Pictured:
    import transformers

    name, text, vision = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class(
        text_config=text, vision_config=vision, image_token_id=IMAGE, attn_implementation="eager"
    )
    torch.manual_seed(5)
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            base = (
                1.0
                if ("visual" in name or family != "qwen3.5")
                and ("norm" in name or "ln_q" in name)
                and "bias" not in name
                else 0.0
            )
            parameter.copy_(base + scale * torch.randn_like(parameter))
    described = json.loads(config.to_json_string(use_diff=False))
    described["architectures"] = [kind.__name__]
    return Pictured(model, described, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


@pytest.fixture(
    scope="module", params=["qwen3.5", "qwen3-vl", "qwen2.5-vl", pytest.param("qwen3-vl-moe", marks=pytest.mark.slow)]
)
def pictured(request: pytest.FixtureRequest) -> Pictured:
    return made(request.param)


@pytest.fixture(scope="module")
def model(pictured: Pictured, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_model(pictured.save(tmp_path_factory.mktemp("pictured"))) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True))


def pixels(grid: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(grid))
    size = (grid[0] * SIDE, grid[1] * SIDE, 3)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)


def windowed(pictured: Pictured) -> bool:
    return "window_size" in pictured.config["vision_config"]


def processor(clip: bool) -> Any:
    """With the colours of the family's own processor; CLIP's are what transformers takes where none are given."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = {} if clip else {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return Qwen2VLImageProcessorPil(patch_size=6, size={"shortest_edge": 1, "longest_edge": 1 << 24}, **half)


def theirs(images: list[Tensor], *, clip: bool = False) -> dict[str, Tensor]:
    return dict(processor(clip)([Image.fromarray(one.numpy()) for one in images], return_tensors="pt"))


def test_vectors_match_transformers(pictured: Pictured, model: Any) -> None:
    images = [pixels(grid) for grid in GRIDS]
    with torch.no_grad():
        reference = pictured.reference.model.get_image_features(
            **theirs(images, clip=windowed(pictured)), return_dict=True
        )
    deep = getattr(reference, "deepstack_features", [])
    for index, one in enumerate(images):
        wanted = torch.cat([part[index] for part in (reference.pooler_output, *deep)], -1)
        assert error(model.image_vectors(one), wanted) < 1e-4


def prompt_images() -> tuple[PromptImage, ...]:
    rows = zip(STARTS, GRIDS, strict=True)
    return tuple(PromptImage(at, at + grid[0] * grid[1], None, b"", grid, causal=True) for at, grid in rows)


@dataclass
class Part:
    """What `turned_positions` looks at of a scheduled part."""

    start: int
    num_tokens: int
    images: tuple[PromptImage, ...] = ()

    @property
    def sequence(self) -> Any:
        return self

    @property
    def request(self) -> Any:
        return self


def placed(batch: Any, parts: list[Part]) -> Any:
    """The batch with the positions that the engine would give it."""
    turned, of_images = turned_positions(parts, batch.positions.numpy())  # type: ignore[arg-type]
    found = None if of_images is None else torch.from_numpy(np.ascontiguousarray(of_images))
    return replace(batch, positions=torch.from_numpy(np.ascontiguousarray(turned)), image_positions=found)


def computed(driver: Any, vectors: list[Tensor], chunks: list[int]) -> Tensor:
    """Logits of every token of PROMPT; a chunk may begin and end in an image."""
    rows, start = [], 0
    for length in chunks:
        batch = placed(driver.batch({0: PROMPT[start : start + length]}), [Part(start, length, prompt_images())])
        images = []
        for image, found in zip(prompt_images(), vectors, strict=True):
            first, last = max(image.start, start), min(image.end, start + length)
            if first < last:
                images.append(ImageRows(0, first - start, first, found[first - image.start : last - image.start]))
        with torch.inference_mode():
            rows.append(driver.model.logits(driver.model.forward(replace(batch, images=tuple(images)), driver.cache)))
        start += length
    assert start == len(PROMPT)
    return torch.cat(rows)


def test_logits_with_images_match_transformers(pictured: Pictured, model: Any, paged: Any) -> None:
    images = [pixels(grid) for grid in GRIDS]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        kinds, given = (ids == IMAGE).int(), theirs(images, clip=windowed(pictured))
        reference = pictured.reference(ids, **given, mm_token_type_ids=kinds, use_cache=False).logits[0]
    vectors = [model.image_vectors(one) for one in images]
    whole = computed(paged(model), vectors, [len(PROMPT)])
    assert error(whole, reference) < 1e-4
    assert error(computed(paged(model), vectors, [5, 9, 1, 10, 11, 1, 1]), whole) < 1e-5
    batch = paged(model).batch({0: PROMPT})
    rows = tuple(ImageRows(0, at, at, found) for at, found in zip(STARTS, vectors, strict=True))
    driver = paged(model)
    with torch.inference_mode():
        as_text = driver.model.logits(
            driver.model.forward(replace(driver.batch({0: PROMPT}), images=rows), driver.cache)
        )
    assert error(as_text, reference) > 1e-3, "what the positions change shows"
    assert batch.image_positions is None


def test_positions_count_rows_and_columns(pictured: Pictured) -> None:
    ids = torch.tensor([PROMPT])
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in GRIDS])
    wanted, shift = pictured.reference.model.get_rope_index(ids, (ids == IMAGE).int(), grids)
    turned, rest = turned_positions([Part(0, len(PROMPT), prompt_images())], np.arange(len(PROMPT)))  # type: ignore[list-item]
    assert rest is not None and np.array_equal(np.concatenate([turned[None], rest]), wanted[:, 0].numpy())
    assert sum(image.shift for image in prompt_images()) == int(shift)
    parts = [Part(7, 4), Part(20, 9, prompt_images()), Part(36, 1, prompt_images())]
    at = np.concatenate([np.arange(part.start, part.start + part.num_tokens) for part in parts])
    turned, rest = turned_positions(parts, at)  # type: ignore[arg-type]
    assert rest is not None
    found, third = np.concatenate([turned[None], rest]), wanted[:, 0].numpy()
    assert np.array_equal(found, np.concatenate([np.stack([at[:4]] * 3), third[:, 20:29], third[:, 36:37]], 1))
    text = np.arange(9)
    assert turned_positions([Part(0, 9)], text) == (text, None)  # type: ignore[list-item]


# edited files have the old name of a limit beside the new one, and the old one counts
LIMITS = {"size": {"shortest_edge": 40_000, "longest_edge": 1 << 24}, "max_pixels": 90_000}
LIMITS |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


@pytest.fixture(scope="module")
def limited(pictured: Pictured, tmp_path_factory: pytest.TempPathFactory) -> GridFacts:
    folder = pictured.save(tmp_path_factory.mktemp("limited"))
    (folder / "preprocessor_config.json").write_text(json.dumps(LIMITS))
    with open_model(folder) as checkpoint:
        facts = checkpoint.facts.vision
    assert isinstance(facts, GridFacts) and (facts.min_pixels, facts.max_pixels) == (40_000, 90_000)
    return facts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [(20, 30), (301, 77), (77, 301), (64, 64), (5, 900), (1200, 900), (3, 2)])
def test_images_are_resized_as_by_the_processor(size: tuple[int, int], limited: GridFacts) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    generator = np.random.default_rng(3)
    picture = Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    found = read_image(stream.getvalue(), limited)
    theirs = Qwen2VLImageProcessorPil(patch_size=6, **LIMITS)(picture, return_tensors="pt")
    _, rows, columns = theirs["image_grid_thw"][0].tolist()
    assert found.shape == (rows * 6, columns * 6, 3)
    given = (torch.from_numpy(found).float() / 255 - torch.tensor(limited.mean)) / torch.tensor(limited.std)
    squares = given.view(rows // 2, 2, 6, columns // 2, 2, 6, 3).permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, 6, 6)
    assert (squares.expand(-1, 3, 2, 6, 6).flatten(1) - theirs["pixel_values"]).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_vl_moe"])
def test_a_tower_of_which_only_what_differs_is_stated(family: str) -> None:
    """Transformers 4 wrote the objects inside of a configuration so: Qwen2.5-VL's had the layers' size at most."""
    from transformers import CONFIG_MAPPING

    gated, usual = family == "qwen2_5_vl", {"qwen2_5_vl": GATED_TOWER, "qwen3_5": TOWER}.get(family, DEEP_TOWER)
    differs = {"hidden_size": 1280} if gated else {"hidden_act": "gelu_pytorch_tanh"}
    whole = CONFIG_MAPPING[family](vision_config=differs).to_dict()
    found = []
    for vision in (whole["vision_config"], differs):
        top = Fields(Path("config.json"), {"vision_config": vision, "image_token_id": 5})
        given = Described(top, Fields(Path("processor"), {}), 0, 3584, 10, None)
        found.append(grid_vision(given, (0, 1, 2), usual, gated=gated))
    assert found[0] == found[1] and found[0].outputs == 3584
    layers = (7, 15, 23, 31) if gated else (8, 16, 24) if "vl" in family else ()
    assert (found[0].whole or found[0].taps) == layers


def test_the_limits_of_an_image(pictured: Pictured, tmp_path: Path) -> None:
    with open_model(pictured.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts.vision
    assert isinstance(facts, GridFacts) and facts.tokens == MAX_IMAGE_TOKENS
    for size in ((10_000, 5_000), (7_000, 7_000), (50, 9_999)):
        width, height = facts.fitted(*size)
        assert facts.least_tokens <= width * height // SIDE**2 <= MAX_IMAGE_TOKENS
    with pytest.raises(ValueError, match="200:1 aspect ratio"):
        facts.fitted(9_000, 44)
    with open_model(tmp_path) as checkpoint:
        assert _images(checkpoint) == f"yes, {facts.least_tokens} to 2,048 tokens each"


def test_the_plan_counts_the_tower_and_the_largest_image(pictured: Pictured, tmp_path: Path) -> None:
    from localllm.device.fake import MACHINES
    from localllm.plan.planner import Planner

    with open_model(pictured.save(tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.vision is not None
    plan, without = (Planner(MACHINES["cpu"]).plan(one) for one in (facts, replace(facts, vision=None)))
    stored = sum(tensor.nbytes for name, tensor in pictured.tensors.items() if "visual" in name)
    assert plan.weight_bytes - without.weight_bytes == facts.vision.nbytes == stored
    assert dict(plan.work_terms)["image"] == facts.vision.work > 4 * MAX_IMAGE_TOKENS * 4 * 6 * 24


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_heads": 7}, "hidden_size"),
        ({"num_position_embeddings": 24}, "num_position_embeddings"),
        ({"out_hidden_size": 45}, "out_hidden_size"),
        ({"depth": 5}, r"blocks\.[24]"),
        ({"deepstack_visual_indexes": [0, 1, 2, 3], "depth": 4}, r"blocks.2|deepstack_merger_list\.[02]"),
        ({"deepstack_visual_indexes": [1, 0]}, "must list each layer once, in ascending order"),
        ({"deepstack_visual_indexes": [9]}, r"must list layer numbers from 0 to \d"),
        ({"patch_size": 7}, "patch_embed"),
        ({"window_size": 11}, "is smaller than one square of 12 x 12 pixels"),
        ({"fullatt_block_indexes": [2]}, r"must list layer numbers from 0 to \d"),
    ],
)
def test_a_tower_that_contradicts_its_tensors_is_refused(
    change: dict[str, int], key: str, pictured: Pictured, tmp_path: Path
) -> None:
    if change.keys() & ({"num_position_embeddings", "deepstack_visual_indexes"} if windowed(pictured) else WINDOWS):
        pytest.skip("has no such key")
    vision = pictured.config["vision_config"] | change
    with (
        open_model(pictured.save(tmp_path, vision_config=vision)) as checkpoint,
        pytest.raises(BadModelFile, match=key),
    ):
        _ = checkpoint.facts


@pytest.mark.parametrize("change", [{"hidden_act": "relu"}, None])
def test_the_text_part_of_another_tower_runs_and_says_so(change: Any, pictured: Pictured, tmp_path: Path) -> None:
    vision = None if change is None else pictured.config["vision_config"] | change
    with open_model(pictured.save(tmp_path, vision_config=vision)) as checkpoint:
        assert checkpoint.facts.vision is None
        assert checkpoint.unread == "visual is not supported: the model reads text only"


def asked() -> list[Request]:
    shown = [replace(one, pixels=pixels(one.grid).numpy(), digest=repr(one.grid).encode()) for one in prompt_images()]
    return [Request(PROMPT, SamplingParams(temperature=0, max_tokens=24), images=tuple(shown))]


def test_a_head_that_predicts_reads_images_along(pictured: Pictured, model: Any, tmp_path: Path) -> None:
    if pictured is not made("qwen3.5"):
        pytest.skip("has no such head")
    start, norms = "model.language_model.layers.1.", ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    layer = {name: tensor for name, tensor in pictured.tensors.items() if name.startswith(start)}
    head = {name.replace(start, "mtp.layers.0."): 0.7 * tensor for name, tensor in layer.items()}
    head |= {f"mtp.{name}.weight": torch.zeros(44) for name in norms} | {"mtp.fc.weight": torch.randn(44, 88) / 9}
    model_with_head = replace(pictured, tensors=pictured.tensors | head)
    with open_model(model_with_head.save(tmp_path)) as checkpoint:
        headed = load_model(checkpoint, LoadOptions(exact=True, predictor=True))
    wanted, seen = answers(engine_of(model), asked()), []
    for budget in (100, 24, 22):  # at once, in pieces that cut images, and one that ends where an image begins
        engine = engine_of(headed)
        engine.scheduler.limits = replace(engine.scheduler.limits, prefill_budget=budget)
        checked = Checked(engine, 3)
        assert answers(engine, asked()) == wanted
        assert engine.runner.listener is checked
        seen.append(checked.seen)
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 10


def test_captured_steps_turn_by_the_same_positions(model: Any) -> None:
    wanted = answers(engine_of(model), asked())
    assert len(wanted[0]) == 24
    for budget in (24, 1):  # the rest of a page can be one token, of an image
        engine = engine_of(model, sizes=(1, 2))
        engine.scheduler.limits = replace(engine.scheduler.limits, prefill_budget=budget)
        assert answers(engine, asked()) == wanted


@pytest.mark.slow
def test_a_mixture_has_the_same_tower(tmp_path: Path) -> None:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = TEXT | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 26}
    text |= {"shared_expert_intermediate_size": 30}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE, attn_implementation="eager")
    torch.manual_seed(6)
    reference = Qwen3_5MoeForConditionalGeneration(config).float().eval()
    described = json.loads(config.to_json_string(use_diff=False))
    described["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    with open_model(Pictured(reference, described, reference.state_dict()).save(tmp_path)) as checkpoint:
        ours = load_model(checkpoint, LoadOptions(exact=True))
    images = [pixels(grid) for grid in GRIDS[:2]]
    with torch.no_grad():
        wanted = reference.model.get_image_features(**theirs(images), return_dict=True).pooler_output
    assert all(error(ours.image_vectors(one), want) < 1e-4 for one, want in zip(images, wanted, strict=True))
