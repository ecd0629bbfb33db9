"""Gemma 3's tower, projector and what attends among the tokens of an image, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from localllm.errors import BadModelFile
from localllm.models.architectures import open_model
from localllm.models.inputs import ImageRows
from localllm.models.loader import LoadOptions, load_model

IMAGE = 90  # its token
TOKENS = 9
# an image in the middle, one that crosses a page and more, two side by side but for one token
PROMPT = [1, 5, *[IMAGE] * TOKENS, 7, 8, 9, 11, 12, *[IMAGE] * TOKENS, 13, *[IMAGE] * TOKENS, 14, 15, 16, 17]
STARTS = (2, 16, 26)


@dataclass
class Pictured:
    """A tiny model with a tower: transformers' and ours."""

    reference: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, folder: Path, rename: Callable[[str], str] = lambda name: name, **config: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | config))
        named = {rename(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(named, folder / "model.safetensors")
        return folder


@cache
def made() -> Pictured:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 99, "hidden_size": 44, "intermediate_size": 70, "num_hidden_layers": 2, "head_dim": 20}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 12, "max_position_embeddings": 512}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 30, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 42, "patch_size": 7, "vision_use_head": False},
        mm_tokens_per_image=TOKENS, image_token_index=IMAGE, boi_token_index=91, eoi_token_index=92,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = Gemma3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            base = 1.0 if "layer_norm" in name or "layernorm" in name and "vision" in name else 0.0
            parameter.copy_(base * ("bias" not in name) + scale * torch.randn_like(parameter))
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if "lm_head" not in name}
    described = json.loads(config.to_json_string(use_diff=False))
    described["architectures"] = ["Gemma3ForConditionalGeneration"]
    return Pictured(model, described, tensors)


@pytest.fixture(scope="module")
def pictured() -> Pictured:
    return made()


def computed_of(
    prompt: Sequence[int], starts: Sequence[int], driver: Any, vectors: list[Tensor], chunks: list[int]
) -> Tensor:
    """Logits of every token of a prompt with images at these places; a chunk may begin and end in one."""
    rows, start = [], 0
    for length in chunks:
        batch = driver.batch({0: prompt[start : start + length]})
        images = []
        for at, found in zip(starts, vectors, strict=True):
            first, last = max(at, start), min(at + found.shape[0], start + length)
            if first < last:
                images.append(ImageRows(0, first - start, first, found[first - at : last - at]))
        with torch.inference_mode():
            rows.append(driver.model.logits(driver.model.forward(replace(batch, images=tuple(images)), driver.cache)))
        start += length
    assert start == len(prompt)
    return torch.cat(rows)


def pixels(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (42, 42, 3), generator=generator, dtype=torch.uint8)


def as_theirs(images: list[Tensor]) -> Tensor:
    return torch.stack([(one.permute(2, 0, 1).float() / 255 - 0.5) / 0.5 for one in images])


def error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


@pytest.fixture(scope="module")
def model(pictured: Pictured, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_model(pictured.save(tmp_path_factory.mktemp("pictured"))) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True))


def test_vectors_match_transformers(pictured: Pictured, model: Any) -> None:
    images = [pixels(1), pixels(2)]
    with torch.no_grad():
        reference = pictured.reference.get_image_features(as_theirs(images), return_dict=True).pooler_output
    ours = torch.stack([model.image_vectors(one) for one in images])
    assert ours.shape == (2, TOKENS, 44)
    assert error(ours, reference) < 1e-4


computed = partial(computed_of, PROMPT, STARTS)


def test_logits_with_images_match_transformers(pictured: Pictured, model: Any, paged: Any) -> None:
    images = [pixels(1), pixels(2), pixels(1)]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        kinds = (ids == IMAGE).long()
        given = {"pixel_values": as_theirs(images), "token_type_ids": kinds}
        reference = pictured.reference(ids, **given, use_cache=False).logits[0]
        causal = pictured.reference(ids, pixel_values=given["pixel_values"], use_cache=False).logits[0]
    vectors = [model.image_vectors(one) for one in images]
    whole = computed(paged(model), vectors, [len(PROMPT)])
    assert error(whole, reference) < 1e-4
    assert error(whole, causal) > 1e-3  # what the mask changes shows
    assert torch.equal(computed(paged(model), vectors, [2, 9, 5, 19, 1, 1, 2]), whole)
    again = paged(model)  # a cached prefix may end in an image: what is left of it comes in one piece
    computed_once = computed(again, vectors, [len(PROMPT)])
    again.tokens[1] = PROMPT[:20]
    for group, table in enumerate(again.tables[0]):
        again.tables.setdefault(1, [[] for _ in model.groups])[group].extend(table)
    batch = again.batch({1: PROMPT[20:]})
    images_left = (ImageRows(0, 0, 20, vectors[1][4:]), ImageRows(0, 6, 26, vectors[2]))
    with torch.inference_mode():
        rest = model.logits(model.forward(replace(batch, images=images_left), again.cache))
    assert torch.equal(rest, computed_once[20:])


@pytest.mark.parametrize("kind", ["published", "saved"])
def test_names_of_older_files(kind: str, pictured: Pictured, model: Any, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        inner = "vision_tower.vision_model." if kind == "published" else "vision_tower."
        name = name.replace("model.vision_tower.", inner).replace("model.multi_modal", "multi_modal")
        return name.replace("model.language_model.", "language_model.model.")

    with open_model(pictured.save(tmp_path / "m", rename)) as checkpoint:
        facts = checkpoint.facts
        older = load_model(checkpoint, LoadOptions(exact=True))
    assert facts.vision is not None and facts.vision.nbytes == model.facts.vision.nbytes > 0
    assert facts.weight_bytes == model.facts.weight_bytes
    assert torch.equal(older.image_vectors(pixels(1)), model.image_vectors(pixels(1)))


@pytest.mark.parametrize("tower", ["vision_tower", "visual", "audio_tower", "embed_vision"])
def test_a_tower_that_is_not_computed_is_named(tower: str, pictured: Pictured, tmp_path: Path) -> None:
    folder = pictured.save(tmp_path / "m", lambda name: name.replace("vision_tower", tower), vision_config=None)
    with open_model(folder) as checkpoint:
        assert checkpoint.facts.vision is None
        assert checkpoint.unread == f"{tower} is not supported: the model reads text only"


@pytest.mark.parametrize("change", [{"image_size": 43}, {"num_attention_heads": 7}, {"hidden_size": 27}])
def test_a_tower_that_contradicts_its_tensors_is_refused(
    change: dict[str, int], pictured: Pictured, tmp_path: Path
) -> None:
    vision = pictured.config["vision_config"] | change
    with open_model(pictured.save(tmp_path / "m", vision_config=vision)) as checkpoint, pytest.raises(BadModelFile):
        _ = checkpoint.facts
