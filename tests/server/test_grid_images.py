"""Images of any size in a conversation with a hybrid model whose positions count rows and columns."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from localllm import LLM, SamplingParams
from localllm.errors import ContextTooLong, InvalidRequest
from localllm.models.architectures.layers import Dense
from localllm.models.architectures.mixers import Attention, GatedDelta, RopeFacts
from localllm.models.architectures.vision import GridFacts

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
HIDDEN, SIDE = 32, 12


ROPE, FULL = RopeFacts(10000.0, 12), RopeFacts(10000.0, 16)
GATED = Attention(2, 1, 16, ROPE, qk_norm=True, gate="queries")
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# model_type, the class, what mixes tokens, layers of the tower that add to the decoder's, and keys of their own
KINDS: dict[str, tuple[str, str, tuple[Any, ...], tuple[int, ...], dict[str, Any]]] = {
    "hybrid": ("qwen3_5", "Qwen3_5", (GatedDelta(2, 4, 8, 8, 4), GATED), (), HYBRID),
    "vl": ("qwen3_vl", "Qwen3VL", (Attention(2, 1, 16, FULL, qk_norm=True),) * 4, (0, 1), {}),
}


def grid_folder(folder: Path, kind: str = "hybrid") -> Path:
    """A tiny Qwen3.5 or Qwen3-VL with a tower, random weights and a tokenizer."""
    import tiny_models

    model_type, family, mixers, taps, more = KINDS[kind]
    tokenizer = tiny_models.tokenizer_json()
    first = max(token["id"] for token in tokenizer["added_tokens"])
    first = max(first, *tokenizer["model"]["vocab"].values()) + 1
    for at, text in enumerate(("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": first + at, "content": text, "special": True, **flags})
    vocab = first + 3
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, HIDDEN), "norm.weight": (HIDDEN,)}
    for index, layer in enumerate(mixers):
        start = f"layers.{index}."
        linears = layer.linears(HIDDEN) | Dense(48).linears(HIDDEN)
        shapes |= {f"{start}{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{start}{name}": shape for name, shape in layer.vectors(HIDDEN).items()}
        shapes |= {f"{start}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes = {f"model.language_model.{name}": shape for name, shape in shapes.items()}
    half = (0.5, 0.5, 0.5)
    vision = GridFacts(2, 24, 40, 3, 6, 2, 2, 4, HIDDEN, 1e4, 600, 9000, half, half, first + 1, (), taps=taps)
    of_tower = vision.vectors(HIDDEN) | {f"{name}.weight": shape for name, shape in vision.linears().items()}
    shapes |= {f"model.visual.{name.removeprefix('vision.')}": shape for name, shape in of_tower.items()}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for conv in (name for name in tensors if name.endswith("conv1d.weight")):
        tensors[conv] = tensors[conv][:, None]
    text = {"model_type": f"{model_type}_text", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 48}
    text |= {"num_hidden_layers": len(mixers), "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"max_position_embeddings": 512, "tie_word_embeddings": True} | more
    turned = {"rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    turned |= {"partial_rotary_factor": 0.75} if more else {"mrope_section": [3, 3, 2]}
    own = {"hidden_size": 24, "intermediate_size": 40, "depth": 2, "num_heads": 3, "patch_size": 6}
    own |= {"deepstack_visual_indexes": list(taps)}
    config = {
        "architectures": [f"{family}ForConditionalGeneration"], "model_type": model_type, "image_token_id": first + 1,
        "text_config": text | {"rope_parameters": turned}, "eos_token_id": 2,
        "vision_config": own | {"out_hidden_size": HIDDEN, "num_position_embeddings": 16},
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 600, "longest_edge": 9000}, "image_mean": half, "image_std": half})
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def asked(*images: tuple[str, int, int], text: str = "what is the") -> list[Any]:
    parts: list[dict[str, Any]] = []
    for colour, width, height in images:
        stream = io.BytesIO()
        Image.new("RGB", (width, height), colour).save(stream, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answer(llm: LLM, messages: Any) -> tuple[list[int], list[float], int]:
    output = llm.chat(messages, GREEDY)
    one = output.completions[0]
    return one.token_ids, [p.logprob for p in one.logprobs], output.usage.cached_tokens


WIDE, HIGH, OTHER = ("red", 96, 60), ("red", 60, 96), ("blue", 96, 60)  # 40 tokens each


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grid_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, device="cpu", ctx=512, debug_invariants=True) as made:
        yield made


def test_pages_of_an_image_belong_to_that_image_and_shape(llm: LLM) -> None:
    assert llm.image_tokens == 9000 // SIDE**2
    prompt = llm.encode_chat(asked(WIDE))
    [image] = prompt.images  # type: ignore[attr-defined]
    assert image.grid == (5, 8) and image.end - image.start == 40 and image.shift == -32
    wide, high, other = (answer(llm, asked(one)) for one in (WIDE, HIGH, OTHER))
    assert wide[1] != high[1] and wide[1] != other[1], "the same bytes in another shape are another image"
    assert all(one[2] < 16 for one in (wide, high, other))
    again = answer(llm, asked(WIDE))
    assert again[0] == wide[0] and again[1] == pytest.approx(wide[1], abs=1e-4) and again[2] >= 40


def check_pieces(llm: LLM, folder: Path) -> None:
    """Chunks, preemption and answers that are read again change nothing."""
    questions = asked(WIDE, OTHER, HIGH), asked(HIGH, text="the sea and")
    wanted = [answer(llm, one)[:2] for one in questions]
    with LLM(folder, device="cpu", ctx=512, prefill_budget=7, prefix_cache=False, debug_invariants=True) as small:
        for question, (ids, logprobs) in zip(questions, wanted, strict=True):  # a chunk ends inside of an image
            found = answer(small, question)
            assert found[0] == ids and found[1] == pytest.approx(logprobs, abs=1e-4)
        small.engine.scheduler.limits = replace(small.engine.scheduler.limits, preempt_every=3, prefill_budget=50)
        turns = [small.begin_chat(question, replace(GREEDY, n=2)) for question in questions]  # the first may end before
        found = [[one.token_ids for one in turn.answer().completions] for turn in turns]  # the second begins
        assert small.stats().num_preemptions > 0
    assert found == [[ids, ids] for ids, _ in wanted]


def test_chunks_preemption_and_answers_that_are_read_again_change_nothing(llm: LLM, folder: Path) -> None:
    check_pieces(llm, folder)


def test_what_does_not_fit_or_is_no_picture_for_it_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="13 images take 520 tokens"):
        llm.encode_chat(asked(*[WIDE] * 14))
    with pytest.raises(InvalidRequest, match="200:1 aspect ratio"):
        llm.encode_chat(asked(("red", 4000, 10)))
    words = llm.encode_chat([{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}])
    assert not getattr(words, "images", ()) and llm.facts.vision.image_token not in words  # type: ignore[union-attr]
