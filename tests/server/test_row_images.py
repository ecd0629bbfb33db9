"""Images for Mistral 3's tower: tokens between rows, caching, chunks, ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localllm import LLM
from localllm.models.architectures.layers import Dense
from localllm.models.architectures.mixers import Attention, RopeFacts
from localllm.models.architectures.vision import RowFacts

from .test_grid_images import HIDDEN, HIGH, OTHER, SIDE, WIDE, answer, asked, check_pieces

TEMPLATE = (
    "{% for m in messages %}[INST]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}[/INST]{% endfor %}"
)


def row_folder(folder: Path) -> Path:
    """A tiny Mistral with a tower, random weights and a tokenizer."""
    import tiny_models

    tokenizer = tiny_models.tokenizer_json()
    first = max(*(token["id"] for token in tokenizer["added_tokens"]), *tokenizer["model"]["vocab"].values()) + 1
    for at, text in enumerate(("[IMG]", "[IMG_BREAK]", "[IMG_END]")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": first + at, "content": text, "special": True, **flags})
    vocab, half = first + 3, (0.5, 0.5, 0.5)
    vision = RowFacts(
        num_layers=2, hidden=24, inner=40, num_heads=3, patch_size=6, merge=2, outputs=HIDDEN, theta=1e4, longest=96,
        mean=half, std=half, eps=1e-6, biased=False, image_token=first, break_token=first + 1, end_token=first + 2,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, HIDDEN), "norm.weight": (HIDDEN,)}
    for index in range(2):
        start, mixer = f"layers.{index}.", Attention(2, 1, 16, RopeFacts(10000.0, 16))
        linears = mixer.linears(HIDDEN) | Dense(48).linears(HIDDEN)
        shapes |= {f"{start}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{start}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes = {f"model.language_model.{name}": shape for name, shape in shapes.items()}
    of_tower = vision.vectors(HIDDEN) | {f"{name}.weight": shape for name, shape in vision.linears().items()}
    starts = {"vision.": "model.vision_tower.", "projector.": "model.multi_modal_projector."}
    shapes |= {starts[part] + name.removeprefix(part): shape for name, shape in of_tower.items() for part in starts
               if name.startswith(part)}  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    text = {"model_type": "mistral", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"max_position_embeddings": 512, "tie_word_embeddings": True, "sliding_window": None}
    own = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": first,
        "image_break_token_id": first + 1, "image_end_token_id": first + 2, "text_config": text, "eos_token_id": 2,
        "vision_config": own | {"patch_size": 6, "image_size": 96, "hidden_act": "silu"}, "spatial_merge_size": 2,
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": half, "image_std": half}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return row_folder(tmp_path_factory.mktemp("models") / "rows")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, device="cpu", ctx=512, debug_invariants=True) as made:
        yield made


def test_a_token_stands_between_rows_and_one_behind_them(llm: LLM) -> None:
    vision = llm.facts.vision
    assert isinstance(vision, RowFacts) and llm.image_tokens == 8 * 9 - 1
    prompt = llm.encode_chat(asked(WIDE))
    [image] = prompt.images  # type: ignore[attr-defined]
    assert image.grid is None and image.end - image.start == 5 * 8 + 4 == vision.num_tokens(8 * SIDE, 5 * SIDE)
    assert prompt[image.start : image.end].count(vision.break_token) == 4
    assert prompt[image.end] == vision.end_token and vision.end_token not in prompt[: image.end]
    wide, high, other = (answer(llm, asked(one)) for one in (WIDE, HIGH, OTHER))
    assert wide[1] != high[1] and wide[1] != other[1], "the same bytes in another shape are another image"
    again = answer(llm, asked(WIDE))
    assert again[0] == wide[0] and again[1] == pytest.approx(wide[1], abs=1e-4) and again[2] >= 32


def test_chunks_and_preemption_change_nothing(llm: LLM, folder: Path) -> None:
    check_pieces(llm, folder)
