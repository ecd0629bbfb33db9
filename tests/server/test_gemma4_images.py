"""Images in a conversation with Gemma 4: what stands around them, their pages, every API, and refusals."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from starlette.testclient import TestClient

from localllm import LLM, SamplingParams
from localllm.conversation.documents import read_document
from localllm.conversation.tree import Conversation
from localllm.errors import ContextTooLong, InvalidRequest
from localllm.llm.pictures import read_image
from localllm.models.architectures.vision import PooledFacts
from localllm.server import AppOptions, Service, ServiceOptions, create_app
from localllm.server.pool import ModelPool

from .test_grid_images import grid_folder
from .test_images import huge, pictured_folder
from .test_row_images import row_folder

BEGIN, SOFT, END = "<|image>", "<|image|>", "<image|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUDGET = 40
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
VISION = PooledFacts(
    hidden=24, patch_size=5, merge=2, tokens=BUDGET, places=80, outputs=32, eps=1e-6, image_token=1, begin_token=0,
    end_token=2, bidirectional="windowed", num_layers=2, inner=40, num_heads=3, num_kv_heads=3, head_dim=8, theta=100.0,
    clipped=True, standardized=True,
)  # fmt: skip


def gemma4_folder(folder: Path, **text: Any) -> Path:
    """A tiny Gemma 4 with a tower, random weights and a tokenizer; `text` changes its configuration."""
    import tiny_models

    tokenizer = tiny_models.tokenizer_json()
    first = max(token["id"] for token in tokenizer["added_tokens"])
    first = max(first, *tokenizer["model"]["vocab"].values()) + 1
    for at, written in enumerate((BEGIN, SOFT, END)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": first + at, "content": written, "special": True, **flags})
    vocab, hidden, inner, heads, dim, wide, size = first + 3, 32, 48, 2, 16, 20, 6
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,),
        "embed_tokens_per_layer.weight": (vocab, 2 * size), "per_layer_projection_norm.weight": (size,),
        "per_layer_model_projection.weight": (2 * size, hidden),
    }  # fmt: skip
    for layer, head in enumerate((dim, wide)):
        start = f"layers.{layer}."
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{start}{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"{start}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        rows = {"q": (heads * head, hidden), "k": (head, hidden), "v": (head, hidden), "o": (hidden, heads * head)}
        shapes |= {f"{start}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        rows = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"{start}mlp.{name}_proj.weight": shape for name, shape in rows.items()}
        shapes |= {f"{start}per_layer_input_gate.weight": (size, hidden), f"{start}layer_scalar": (1,)}
        shapes |= {f"{start}per_layer_projection.weight": (hidden, size)}
        shapes |= {f"{start}post_per_layer_input_norm.weight": (hidden,)}
    shapes = {f"model.language_model.{name}": shape for name, shape in shapes.items()}
    of_tower = VISION.vectors(hidden) | {f"{name}.weight": shape for name, shape in VISION.linears().items()}
    for name, shape in of_tower.items():
        shapes[name.replace("vision.", "model.vision_tower.").replace("projector.", "model.embed_vision.")] = shape
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name.endswith(("_min", "_max")):
            tensor.fill_(3.0 if name.endswith("max") else -3.0)
        elif "norm" in name or "scal" in name:
            tensor += 1
    given = {"model_type": "gemma4_text", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner}
    given |= {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": dim}
    given |= {"global_head_dim": wide, "sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
    given |= {"max_position_embeddings": 512, "vocab_size_per_layer_input": vocab, "hidden_size_per_layer_input": size}
    own = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "head_dim": 8}
    own |= {"num_key_value_heads": 3, "patch_size": 5, "pooling_kernel_size": 2, "position_embedding_size": 80}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "eos_token_id": 2,
        "text_config": given | {"use_bidirectional_attention": "vision"} | text, "image_token_id": first + 1,
        "boi_token_id": first, "eoi_token_id": first + 2,
        "vision_config": own | {"use_clipped_linears": True, "standardize": True},
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"max_soft_tokens": BUDGET}}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def file_of(shade: int, width: int, height: int) -> bytes:
    stream = io.BytesIO()
    ramp = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    ramp.point(lambda value: value // shade).save(stream, "PNG")
    return stream.getvalue()


def part_of(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def asked(*images: tuple[int, int, int], text: str = "what is the") -> list[Any]:
    return [{"role": "user", "content": [*(part_of(file_of(*one)) for one in images), {"type": "text", "text": text}]}]


def answer(llm: LLM, messages: Any) -> tuple[list[int], list[float], int]:
    output = llm.chat(messages, GREEDY)
    one = output.completions[0]
    return one.token_ids, [p.logprob for p in one.logprobs], output.usage.cached_tokens


WIDE, HIGH, OTHER = (1, 96, 60), (1, 60, 96), (2, 96, 60)  # 40 tokens each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4_folder(tmp_path_factory.mktemp("models") / "gemma4")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, device="cpu", ctx=512, debug_invariants=True) as made:
        yield made


def test_an_image_has_tokens_around_it_and_pages_of_its_own(llm: LLM) -> None:
    vision = llm.facts.vision
    assert isinstance(vision, PooledFacts) and llm.image_tokens == BUDGET and vision.bidirectional == "windowed"
    prompt = llm.encode_chat(asked(WIDE, (1, 30, 31), text=f"{BEGIN}{SOFT}"))
    sizes = []
    for image in prompt.images:  # type: ignore[attr-defined]
        assert prompt[image.start - 1] == vision.begin_token and prompt[image.end] == vision.end_token
        assert set(prompt[image.start : image.end]) == {vision.image_token} and image.shift == 0
        sizes.append(image.end - image.start)
    assert sizes == [40, 36] and prompt.count(vision.image_token) == 76, "the words of a user are no image"
    wide, high, other = (answer(llm, asked(one)) for one in (WIDE, HIGH, OTHER))
    assert wide[1] != high[1] and wide[1] != other[1] and all(one[2] < 16 for one in (wide, high, other))
    again = answer(llm, asked(WIDE))
    assert again[0] == wide[0] and again[1] == pytest.approx(wide[1], abs=1e-4) and again[2] >= 40


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", ["vision", None])
def test_chunks_preemption_and_answers_that_are_read_again_change_nothing(
    both_ways: str | None, tmp_path: Path
) -> None:
    folder = gemma4_folder(tmp_path / "m", use_bidirectional_attention=both_ways)
    questions = asked(WIDE, OTHER, HIGH), asked(HIGH, text="the sea and")
    with LLM(folder, device="cpu", ctx=512, debug_invariants=True) as large:
        wanted = [answer(large, one)[:2] for one in questions]
        for question, (ids, logprobs) in zip(questions, wanted, strict=True):  # from the cache
            found = answer(large, question)
            assert found[0] == ids and found[1] == pytest.approx(logprobs, abs=1e-4) and found[2] >= 32
    with LLM(folder, device="cpu", ctx=512, prefill_budget=7, prefix_cache=False, debug_invariants=True) as small:
        for question, (ids, logprobs) in zip(questions, wanted, strict=True):
            found = answer(small, question)
            assert found[0] == ids and found[1] == pytest.approx(logprobs, abs=1e-4)
        small.engine.scheduler.limits = replace(small.engine.scheduler.limits, preempt_every=3, prefill_budget=50)
        turns = [small.begin_chat(question, replace(GREEDY, n=2)) for question in questions]
        found = [[one.token_ids for one in turn.answer().completions] for turn in turns]
        assert small.stats().num_preemptions > 0
    assert found == [[ids, ids] for ids, _ in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("gemma4", "tensor"),
        ("gemma3", "tensor"),
        ("gemma3", "layers"),
        ("hybrid", "layers"),
        ("vl", "tensor"),
        ("vl", "layers"),
        ("rows", "tensor"),
    ],
)
def test_ranks_read_the_same_image(kind: str, split: str, tmp_path: Path) -> None:
    folder = {
        "gemma4": gemma4_folder,
        "gemma3": pictured_folder,
        "hybrid": grid_folder,
        "vl": partial(grid_folder, kind="vl"),
        "rows": row_folder,
    }[kind](tmp_path / "m")
    how: dict[str, Any] = {"device": "cpu", "ctx": 512, "dtype": "float32"}
    with LLM(folder, **how) as alone, LLM(folder, tensor_parallel=2, split=split, **how) as divided:
        ids, logprobs, _ = answer(alone, asked(WIDE, OTHER))
        found = answer(divided, asked(WIDE, OTHER))
    assert found[0] == ids and found[1] == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Any:
    pool = ModelPool.holding(llm, ("gemma4",))
    service = Service(pool, ServiceOptions(parallel=8))
    with TestClient(create_app(service, AppOptions()), base_url="http://127.0.0.1:8000") as made:
        yield made
    service.close()
    pool.close()


@pytest.mark.slow
def test_every_way_in_reads_the_same_image(client: Any, llm: LLM, tmp_path: Path) -> None:
    data = file_of(*WIDE)
    encoded = base64.b64encode(data).decode()
    (tmp_path / "red.png").write_bytes(data)
    talk = Conversation()
    attached = talk.messages(talk.ask("what is the", (read_document(tmp_path / "red.png"),)))
    assert llm.encode_chat(attached) == llm.encode_chat(asked(WIDE))
    wanted = llm.chat(asked(WIDE), replace(GREEDY, ignore_eos=False))
    count = wanted.usage.prompt_tokens
    common = {"model": "gemma4", "temperature": 0, "max_tokens": 8}
    chat = client.post("/v1/chat/completions", json=common | {"messages": asked(WIDE)}).json()
    assert chat["usage"]["prompt_tokens"] == count > BUDGET
    assert chat["choices"][0]["message"]["content"] == wanted.text
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is the"}]
    theirs = client.post("/v1/messages", json=common | {"messages": [{"role": "user", "content": blocks}]}).json()
    assert theirs["usage"]["input_tokens"] + theirs["usage"]["cache_read_input_tokens"] == count
    options = {"model": "gemma4", "stream": False, "options": {"temperature": 0, "num_predict": 8}}
    message = {"role": "user", "content": "what is the", "images": [encoded]}
    ollama = client.post("/api/chat", json=options | {"messages": [message]}).json()
    assert ollama["prompt_eval_count"] == count and ollama["message"]["content"] == wanted.text
    assert client.get("/v1/models").json()["data"][0]["meta"]["image_tokens"] == BUDGET


def test_what_is_refused_says_where(client: Any, llm: LLM) -> None:
    def said(part: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": "what is"}, part]}]
        answer = client.post("/v1/chat/completions", json={"model": "gemma4", "messages": messages})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[1]"
        return answer.json()["error"]["message"]

    assert "truncated" in said(part_of(file_of(1, 300, 300)[:-60]))
    assert "10,000 x 10,000 pixels" in said(part_of(huge(10_000, 10_000)))
    assert "'input_audio' is not supported" in said(
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    )
    with pytest.raises(ContextTooLong, match="13 images take 520 tokens"):
        llm.encode_chat(asked(*[WIDE] * 14))
    with pytest.raises(InvalidRequest, match="more than 50,000,000 pixels"):
        read_image(huge(60_000, 60_000), VISION)
    assert answer(llm, asked(WIDE)), "what was refused leaves nothing behind"
