"""Towers of mmproj files: the same vectors and logits as from safetensors, and files that are not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from localllm.errors import BadModelFile, LocalLLMError
from localllm.models.architectures import open_model
from localllm.models.architectures.vision import GridFacts
from localllm.models.loader import LoadOptions, load_model

from . import test_gemma4_images, test_grid_images, test_images, test_row_images
from .mmproj_files import TOKENS, as_gguf, rounded, write_mmproj
from .test_images import Pictured, error

MODELS: dict[str, Any] = {"gemma3": test_images, "qwen3.5": test_grid_images, "gemma4-e2b": test_gemma4_images}
MODELS |= {"gemma4-31b": test_gemma4_images, "qwen3-vl": test_grid_images, "mistral": test_row_images}
MODELS |= {"qwen2.5-vl": test_grid_images, "mistral4": test_row_images}


def model_of(name: str) -> Pictured:
    made: Pictured = MODELS[name].made(*(name.split("-")[1:] if "gemma" in name else [name]))
    return made


def images_of(name: str) -> list[torch.Tensor]:
    if name == "gemma3":
        return [test_images.pixels(number) for number in (1, 2, 1)]
    return [MODELS[name].pixels(grid) for grid in MODELS[name].GRIDS]


def loaded(path: Path, mmproj: str = "auto") -> Any:
    with open_model(path, mmproj) as checkpoint:
        return load_model(checkpoint, LoadOptions(exact=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_vectors_and_logits_equal_those_of_safetensors(name: str, paged: Any, tmp_path: Path) -> None:
    made, family = model_of(name), MODELS[name]
    # the text models are as near to each other as in test_gguf_models
    save: Any = getattr(family, "saved", Pictured.save)
    plain, ours = loaded(save(made, tmp_path / "plain")), loaded(as_gguf(made, tmp_path / "gguf"))
    images = images_of(name)
    wanted, found = ([one.image_vectors(image) for image in images] for one in (plain, ours))
    assert all(error(own, theirs) < 1e-5 for own, theirs in zip(found, wanted, strict=True))
    whole = [len(family.PROMPT)]
    assert error(family.computed(paged(ours), found, whole), family.computed(paged(plain), wanted, whole)) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_towers_in_other_types(kind: str, tmp_path: Path) -> None:
    """What is left of the tower's matrices is what counts."""
    made, stored = model_of("qwen3.5"), gguf.GGMLQuantizationType[kind]
    left = {name: tensor for name, tensor in made.tensors.items() if "visual." in name and "embed" not in name}
    plain = loaded(replace(made, tensors=made.tensors | rounded(left, stored)).save(tmp_path / "plain"))
    ours = loaded(as_gguf(made, tmp_path / "gguf", kind=stored, name=f"mmproj-{kind}.gguf"))
    for image in images_of("qwen3.5"):
        assert error(ours.image_vectors(image), plain.image_vectors(image)) < 1e-5


def test_gemma_3_as_it_was_written_first(tmp_path: Path) -> None:
    """Up and down are swapped, and the vocabulary lacks the token that stands for a vector."""
    made = model_of("gemma3")
    swapped = {name.replace("fc1", "-").replace("fc2", "fc1").replace("-", "fc2"): made.tensors[name]
               for name in made.tensors if "vision_tower" in name}  # fmt: skip
    texts = ["<mask>", *(f"t{index}" for index in range(1, 99))]
    path = as_gguf(replace(made, tensors=made.tensors | swapped), tmp_path, tokens=texts)
    ours = loaded(path)
    assert error(ours.image_vectors(images_of("gemma3")[0]), loaded(made.save(tmp_path / "plain")).image_vectors(
        images_of("gemma3")[0])) < 1e-5  # fmt: skip
    TOKENS["gemma3"].pop("image_token_index")
    try:
        path = as_gguf(made, tmp_path / "old", tokens=["<mask>", *(f"t{index}" for index in range(1, 99))])
    finally:
        TOKENS["gemma3"]["image_token_index"] = "<image_soft_token>"
    with open_model(path) as checkpoint:
        assert checkpoint.facts.vision is not None and checkpoint.facts.vision.image_token == 0


FLAWS = {
    "another width": ({"projection_dim": 48}, "hidden size 48, but this model's hidden size is 44"),
    "another kind": ({"projector_type": "resampler"}, "the projector type resampler is not supported"),
    "no kind": ({"projector_type": None}, r"the projector type \(none\) is not supported"),
    "deepstack": ({"is_deepstack_layers": [False, True]}, r"deepstack_merger_list\.0.*is missing"),
    "a missing tensor": ({"drop": "v.blk.1.ln1"}, r"vision\.blocks\.1\.norm1\.weight: the tensor is missing"),
    "a missing number": ({"block_count": None}, r"clip\.vision\.block_count: is missing"),
    "heads": ({"attention.head_count": 7}, "not a multiple of 4 for each of 7 heads"),
    "another patch": ({"patch_size": 5}, "expected"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_file_that_is_not_read_leaves_the_text_model(flaw: str, tmp_path: Path) -> None:
    keys, said = FLAWS[flaw]
    path = as_gguf(model_of("qwen3.5"), tmp_path, **keys)  # type: ignore[arg-type]
    with open_model(path) as checkpoint:
        assert checkpoint.facts.vision is None and checkpoint.facts.num_layers == 2
        assert "mmproj-F32.gguf" in checkpoint.unread and checkpoint.unread.endswith("the model reads text only")
        assert not any(name.startswith("vision.") for name in checkpoint.tensors)
    with open_model(path, str(tmp_path / "mmproj-F32.gguf")) as checkpoint, pytest.raises(BadModelFile, match=said):
        _ = checkpoint.facts
    with open_model(path, "off") as checkpoint:
        assert checkpoint.facts.vision is None and checkpoint.unread == ""


def test_layers_that_the_file_does_not_list(tmp_path: Path) -> None:
    path = as_gguf(model_of("qwen3-vl"), tmp_path, is_deepstack_layers=[True, False, False, False])
    with open_model(path) as checkpoint:
        assert checkpoint.facts.vision is None
        assert "v.deepstack.2." in checkpoint.unread and "image encoder that is not supported" in checkpoint.unread


def test_which_file_is_taken(tmp_path: Path) -> None:
    made = model_of("qwen3.5")
    path = as_gguf(made, tmp_path, name="mmproj-F32.gguf")

    def taken(mmproj: str = "auto") -> str:
        with open_model(path, mmproj) as checkpoint:
            facts = checkpoint.facts
            assert facts.vision_flaw == "" and isinstance(facts.vision, GridFacts)
            assert checkpoint.projector is not None and facts.vision.nbytes < checkpoint.nbytes
            assert checkpoint.projector in checkpoint.files
            return checkpoint.projector.name

    assert taken() == "mmproj-F32.gguf"
    write_mmproj(tmp_path / "mmproj-BF16.gguf", made)
    assert taken() == "mmproj-BF16.gguf"
    write_mmproj(tmp_path / "model.mmproj-f32.gguf", made)
    assert taken() == "model.mmproj-f32.gguf", "the name that is nearest to the model's"
    write_mmproj(tmp_path / "model.mmproj-0.gguf", model_of("gemma3"))
    assert taken() == "model.mmproj-f32.gguf", "what is for another family is passed over"
    assert taken(str(tmp_path / "mmproj-BF16.gguf")) == "mmproj-BF16.gguf"
    whole = (tmp_path / "mmproj-BF16.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    for file, said in (("cut.gguf", "truncated"), ("none.gguf", "no such mmproj"), ("model.gguf", "not an mmproj"),
                       ("model.mmproj-0.gguf", "is for gemma3, not for qwen35")):  # fmt: skip
        with open_model(path, str(tmp_path / file)) as checkpoint, pytest.raises(LocalLLMError, match=said) as caught:
            _ = checkpoint.facts
        assert caught.value.hint


def test_the_plan_counts_the_tower(tmp_path: Path) -> None:
    from localllm.device.fake import MACHINES
    from localllm.plan.planner import Planner

    made = model_of("qwen3.5")
    with open_model(as_gguf(made, tmp_path)) as checkpoint:
        facts = checkpoint.facts
    assert facts.vision is not None
    plan, without = (Planner(MACHINES["cpu"]).plan(one) for one in (facts, replace(facts, vision=None)))
    stored = sum(tensor.nbytes for name, tensor in made.tensors.items() if "visual" in name)
    assert plan.weight_bytes - without.weight_bytes == facts.vision.nbytes == stored
