"""Images in a conversation: through every API, the prefix cache and preemption, and those that are refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from starlette.testclient import TestClient

from localllm import LLM, SamplingParams
from localllm.backend.over_http import RemoteBackend
from localllm.conversation.documents import read_document
from localllm.conversation.tree import Conversation
from localllm.errors import ContextTooLong, InvalidRequest
from localllm.interface import Turn
from localllm.llm.pictures import read_image
from localllm.models.architectures import open_model
from localllm.models.architectures.vision import VisionFacts
from localllm.server import AppOptions, Service, ServiceOptions, create_app
from localllm.server.pool import ModelPool

BEGIN, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS, SIZE = 36, 42
VISION = VisionFacts(2, 24, 40, 2, SIZE, 7, 1e-6, TOKENS, 1, 0, 2)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def pictured_folder(folder: Path) -> Path:
    """A tiny Gemma 3 with a tower, random weights and a tokenizer."""
    import tiny_models

    tokenizer = tiny_models.tokenizer_json()
    first = max(token["id"] for token in tokenizer["added_tokens"])
    first = max(first, *tokenizer["model"]["vocab"].values()) + 1
    for at, text in enumerate((BEGIN, SOFT, END)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": first + at, "content": text, "special": True, **flags})
    vocab, hidden, inner, heads, dim = first + 3, 32, 48, 2, 16
    vision = replace(VISION, image_token=first + 1, begin_token=first, end_token=first + 2)
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (vocab, hidden), "language_model.model.norm.weight": (hidden,)
    }  # fmt: skip
    for layer in range(2):
        start = f"language_model.model.layers.{layer}."
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{start}{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {f"{start}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        rows = {"q": (heads * dim, hidden), "k": (dim, hidden), "v": (dim, hidden), "o": (hidden, heads * dim)}
        shapes |= {f"{start}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        rows = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"{start}mlp.{name}_proj.weight": shape for name, shape in rows.items()}
    of_tower = vision.vectors(hidden) | {f"{name}.weight": shape for name, shape in vision.linears().items()}
    for name, shape in of_tower.items():
        name = name.replace("vision.", "vision_tower.vision_model.", 1).replace("projector.", "multi_modal_projector.")
        shapes[name] = shape
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    text = {"model_type": "gemma3_text", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner}
    text |= {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": dim}
    text |= {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"max_position_embeddings": 512, "query_pre_attn_scalar": 16}
    own = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": own | {"image_size": SIZE, "patch_size": 7}, "mm_tokens_per_image": TOKENS,
        "image_token_index": first + 1, "boi_token_index": first, "eoi_token_index": first + 2, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def picture(colour: str, form: str = "PNG", size: tuple[int, int] = (20, 30)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, form)
    return stream.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked(*colours: str, text: str = "what is the") -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url_of(picture(colour))}} for colour in colours]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def answer(llm: LLM, messages: Any) -> tuple[list[int], list[float], int]:
    output = llm.chat(messages, GREEDY)
    one = output.completions[0]
    return one.token_ids, [p.logprob for p in one.logprobs], output.usage.cached_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured_folder(tmp_path_factory.mktemp("models") / "pictured")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, device="cpu", ctx=512, debug_invariants=True) as made:
        yield made


def test_pages_of_an_image_belong_to_that_image(llm: LLM) -> None:
    red, blue = answer(llm, asked("red")), answer(llm, asked("blue"))
    assert red[2] == 0 and blue[2] < TOKENS  # what stands before the image, at most
    assert red[1] != blue[1]
    again = answer(llm, asked("red"))
    assert again[:2] == red[:2] and again[2] >= TOKENS
    both = answer(llm, asked("red", "blue"))
    assert both[2] >= 16 and answer(llm, asked("red", "blue"))[:2] == both[:2]
    assert answer(llm, asked("blue", "red"))[1] != both[1]


def test_chunks_and_preemption_change_nothing(llm: LLM, folder: Path) -> None:
    wanted = [answer(llm, asked("red", "green", "red")), answer(llm, asked("green", text="the sea and"))]
    with LLM(folder, device="cpu", ctx=512, prefill_budget=7, prefix_cache=False, debug_invariants=True) as small:
        assert answer(small, asked("red", "green", "red"))[:2] == wanted[0][:2]  # images larger than a chunk
        small.engine.scheduler.limits = replace(small.engine.scheduler.limits, preempt_every=3, prefill_budget=50)
        both = asked("red", "green", "red"), asked("green", text="the sea and")
        turns = [small.begin_chat(messages, replace(GREEDY, n=2)) for messages in both]  # the first may end before
        found = [[one.token_ids for one in turn.answer().completions] for turn in turns]  # the second begins
        assert small.stats().num_preemptions > 0
    assert found == [[ids, ids] for ids, _, _ in wanted]


def test_the_words_of_a_user_are_no_image(llm: LLM) -> None:
    ids = llm.encode_chat(asked("red", text=f"{BEGIN} {SOFT}"))
    assert ids.count(llm.facts.vision.image_token) == TOKENS and len(ids.images) == 1
    image = ids.images[0]
    assert ids[image.start - 1] == llm.facts.vision.begin_token and ids[image.end] == llm.facts.vision.end_token
    plain = llm.encode_chat([{"role": "user", "content": f"{BEGIN}{SOFT}"}])
    assert llm.facts.vision.begin_token not in plain and llm.facts.vision.image_token not in plain


def test_a_tower_that_is_not_computed_is_named(folder: Path, tmp_path: Path) -> None:
    with open_model(folder) as checkpoint:
        assert checkpoint.unread == ""
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"vision_config": None}))
    with LLM(tmp_path / "m", device="cpu", ctx=128) as made:
        assert any("vision_tower is not supported" in warning for warning in made.state().warnings)
        with pytest.raises(InvalidRequest, match="this model reads text"):
            made.chat(asked("red"), GREEDY)


def huge(width: int, height: int) -> bytes:
    """A PNG whose header states so many pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((13, head), (0, b"IDAT"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk)) for size, chunk in chunks
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (huge(10_000, 10_000), "10,000 x 10,000 pixels"),
        (huge(60_000, 60_000), "more than 50,000,000 pixels"),
        (picture("red", size=(300, 300))[:-60], "truncated"),
        (picture("red", "JPEG", size=(300, 300))[:300], "damaged"),
        (picture("red", "BMP"), "not in one of the formats PNG"),
        (b"", "not in one of the formats PNG"),
        (b"%PDF-1.7", "not in one of the formats PNG"),
    ],
    ids=["100-megapixels", "beyond-any", "png-cut", "jpeg-cut", "bmp", "empty", "pdf"],
)
def test_an_image_that_is_not_read_is_named(data: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_image(data, VISION, "messages[0]")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(form: str) -> None:
    pixels = read_image(picture("red", form), VISION)
    assert pixels.shape == (SIZE, SIZE, 3) and abs(pixels.reshape(-1, 3).mean(0) - [255, 0, 0]).max() < 4


def test_the_first_frame_of_a_gif_counts() -> None:
    stream = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert read_image(stream.getvalue(), VISION)[0, 0].tolist() == [255, 0, 0]


def test_more_images_than_the_context_holds_are_not_decoded(llm: LLM) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ContextTooLong, match="20 images take 720 tokens"):
        llm.encode_chat([{"role": "user", "content": [broken] * 20}])
    with pytest.raises(InvalidRequest, match="nothing is fetched") as error:
        llm.encode_chat([{"role": "user", "content": [broken | {"image_url": {"url": "http://x/y.png"}}]}])
    assert error.value.param == "messages[0].content[0]"
    with pytest.raises(InvalidRequest, match="role is not 'user'"):
        llm.encode_chat([{"role": "system", "content": [broken]}, *asked("red")])


@pytest.fixture(scope="module")
def pictured(llm: LLM) -> Any:
    pool = ModelPool.holding(llm, ("pictured",))
    service = Service(pool, ServiceOptions(parallel=8))
    with TestClient(create_app(service, AppOptions()), base_url="http://127.0.0.1:8000") as made:
        yield made
    service.close()
    pool.close()


def test_every_api_reads_the_same_image(pictured: Any, llm: LLM) -> None:
    data = base64.b64encode(picture("red")).decode()
    wanted = llm.chat(asked("red"), GREEDY)
    count = wanted.usage.prompt_tokens
    common = {"model": "pictured", "temperature": 0, "max_tokens": 6}
    chat = pictured.post("/v1/chat/completions", json=common | {"messages": asked("red"), "ignore_eos": True}).json()
    assert chat["usage"]["prompt_tokens"] == count > TOKENS
    assert chat["choices"][0]["message"]["content"] == wanted.text
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what is the"}]
    messages = [{"role": "user", "content": blocks}]
    theirs = pictured.post("/v1/messages", json=common | {"messages": messages}).json()
    assert theirs["usage"]["input_tokens"] + theirs["usage"]["cache_read_input_tokens"] == count
    counted = pictured.post("/v1/messages/count_tokens", json={"model": "pictured", "messages": messages})
    assert counted.json()["input_tokens"] == count
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
        {"type": "input_text", "text": "what is the"},
    ]
    asks = {
        "model": "pictured",
        "temperature": 0,
        "max_output_tokens": 16,
        "input": [{"role": "user", "content": parts}],
    }
    assert pictured.post("/v1/responses", json=asks).json()["usage"]["input_tokens"] == count
    options = {"model": "pictured", "stream": False, "options": {"temperature": 0, "num_predict": 6}}
    message = {"role": "user", "content": "what is the", "images": [data]}
    ollama = pictured.post("/api/chat", json=options | {"messages": [message]}).json()
    made = pictured.post("/api/generate", json=options | {"prompt": "what is the", "images": [data]}).json()
    assert ollama["prompt_eval_count"] == made["prompt_eval_count"] == count


def test_a_chat_sends_its_pictures_in_process_and_over_http(pictured: Any, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(picture("red"))
    talk = Conversation()
    messages = talk.messages(talk.ask("what is the", (read_document(tmp_path / "red.png"),)))
    assert llm.encode_chat(messages) == llm.encode_chat(asked("red"))
    body = RemoteBackend("http://127.0.0.1")._body(Turn(0, messages, None, {}))
    body |= {"model": "pictured", "stream": False, "stream_options": None, "temperature": 0, "max_tokens": 6}
    answered = pictured.post("/v1/chat/completions", json=body).json()
    assert answered["usage"]["prompt_tokens"] == len(llm.encode_chat(messages))
    assert pictured.get("/v1/models").json()["data"][0]["meta"]["image_tokens"] == TOKENS == llm.state().image_tokens


def test_what_is_refused_says_where(pictured: Any) -> None:
    cut = base64.b64encode(picture("red", size=(300, 300))[:-60]).decode()
    options = {"model": "pictured", "max_tokens": 4}
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{cut}"}}
    answer = pictured.post("/v1/chat/completions", json=options | {"messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[0]"
    assert "truncated" in answer.json()["error"]["message"]
    fetched = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    answer = pictured.post("/v1/messages", json=options | {"messages": [{"role": "user", "content": [fetched]}]})
    assert answer.status_code == 400 and "nothing is fetched" in answer.text
    for image in ({"file_id": "file-1"}, {"image_url": "http://127.0.0.1/x.png"}):
        item = {"role": "user", "content": [{"type": "input_image", **image}]}
        answer = pictured.post("/v1/responses", json={"model": "pictured", "input": [item]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "input[0].content[0]"
    asked_of_ollama = {"model": "pictured", "messages": [{"role": "user", "images": [cut]}]}
    answer = pictured.post("/api/chat", json=asked_of_ollama)
    assert answer.status_code == 400 and "messages[0].images" in answer.text and "truncated" in answer.text


def test_gguf_with_an_mmproj_file_answers_alike(llm: LLM, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from tests.models.mmproj_files import as_gguf
    from tests.models.test_images import Pictured

    config, tokenizer = json.loads((folder / "config.json").read_text()), (folder / "tokenizer.json").read_text()
    text = {"rms_norm_eps": 1e-6, "final_logit_softcapping": None, "rope_parameters": {"rope_theta": 1e6}}
    config["text_config"] |= text
    known = json.loads(tokenizer)
    tokens = sorted(known["model"]["vocab"], key=known["model"]["vocab"].get)
    tokens += [one["content"] for one in sorted(known["added_tokens"], key=lambda one: one["id"])][
        -config["text_config"]["vocab_size"] + len(tokens) :
    ]
    strings = {"tokenizer.huggingface.json": tokenizer, "tokenizer.chat_template": TEMPLATE}
    path = as_gguf(
        Pictured(None, config, load_file(folder / "model.safetensors")), tmp_path, strings=strings, tokens=tokens
    )
    with LLM(path, device="cpu", ctx=512) as ours:
        assert ours.image_tokens == TOKENS and ours.encode_chat(asked("red")) == llm.encode_chat(asked("red"))
        found, wanted = answer(ours, asked("red", "blue")), answer(llm, asked("red", "blue"))
        assert found[0] == wanted[0] and found[1] == pytest.approx(wanted[1], abs=1e-3)
        assert answer(ours, asked("red", "blue"))[2] >= TOKENS, "its pages are shared"
    with LLM(path, device="cpu", ctx=512, mmproj="off") as blind:
        with pytest.raises(InvalidRequest, match="this model reads text") as caught:
            blind.chat(asked("red"), GREEDY)
        assert "mmproj" in caught.value.hint
