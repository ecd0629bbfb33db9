"""Images in a conversation: decoded within limits and placed in the prompt where the template marks them.

Images arrive as data: URLs; nothing is fetched. The header is checked before anything is decoded.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from localllm.chat.template import RenderedPrompt, encode_chat
from localllm.errors import ContextTooLong, InvalidRequest
from localllm.models.architectures.vision import ImageFacts, RowFacts
from localllm.request import PromptImage, PromptTokens, open_image

if TYPE_CHECKING:
    import numpy as np

    from localllm.tokenizer.tokenizer import Tokenizer

MAX_BYTES = 20 << 20  # per file
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,")


def take_images(
    messages: Sequence[Mapping[str, Any]], vision: ImageFacts | None, max_context: int
) -> tuple[Sequence[Mapping[str, Any]], list[np.ndarray]]:
    """Return the messages in the form templates expect, and the pixels of their images in order.

    Raises InvalidRequest, with the content part as `param`, if the model does not take images or an image is invalid.
    """
    found = [
        (number, at, part)
        for number, message in enumerate(messages)
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for at, part in enumerate(message["content"])
        if isinstance(part, Mapping) and part.get("type") == "image_url"
    ]
    if not found:
        return messages, []
    if vision is None:
        number, at, _ = found[0]
        raise InvalidRequest(
            "Content of type 'image_url' is not supported: this model reads text only",
            "use Gemma 3 or 4, Qwen2.5-VL, Qwen3-VL, Qwen3.5, or Mistral 3 or 4: safetensors with the image encoder, or"
            " a GGUF with an mmproj file next to it (`localllm show MODEL` reports problems with an mmproj file)",
            param=f"messages[{number}].content[{at}]",
        )
    _check_room(len(found), len(found) * vision.least_tokens, max_context)
    pixels: list[np.ndarray] = []
    total = 0
    for number, at, part in found:
        where = f"messages[{number}].content[{at}]"
        if messages[number].get("role") != "user":
            what = "an image is in a message whose role is not 'user'"
            raise InvalidRequest(what, "move it to a user message", param=where)
        url = part["image_url"].get("url") if isinstance(part.get("image_url"), Mapping) else part.get("image_url")
        pixels.append(read_image(decoded(url, where), vision, where))
        height, width, _ = pixels[-1].shape
        total += vision.num_tokens(width, height)
        _check_room(len(pixels), total, max_context)
    shaped = [dict(message) for message in messages]
    for number, at, _ in found:
        content = list(shaped[number]["content"])
        content[at] = {"type": "image"}
        shaped[number]["content"] = content
    return shaped, pixels


def _check_room(count: int, tokens: int, max_context: int) -> None:
    if tokens > max_context:
        raise ContextTooLong(
            f"{count} images take {tokens:,} tokens; the context window holds {max_context:,}",
            "send fewer images, or start with a larger --ctx",
            context={"prompt_tokens": tokens, "max_context": max_context},
            param="messages",
        )


def decoded(url: Any, where: str) -> bytes:
    """Decode the file in a data: URL. Raises InvalidRequest."""
    match = _DATA.match(url) if isinstance(url, str) else None
    if match is None:
        raise InvalidRequest(
            "an image must be a data: URL (data:image/png;base64,...); nothing is fetched",
            "put the image into the request", param=where,
        )  # fmt: skip
    if (len(url) - match.end()) * 3 // 4 > MAX_BYTES:
        raise InvalidRequest(f"an image is larger than {MAX_BYTES >> 20} MiB", "send a smaller file", param=where)
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("an image is not valid base64", "encode the whole file", param=where) from error


def read_image(data: bytes, vision: ImageFacts, where: str = "image") -> np.ndarray:
    """Read a file's first image as uint8 [height, width, 3], resized for the vision tower.

    Raises the errors of `open_image`, and InvalidRequest for an image the tower cannot take.
    """
    _, upright = open_image(data, where)
    try:
        size = vision.fitted(*upright.size)
    except ValueError as error:
        raise InvalidRequest(str(error), "split the image into parts", param=where) from None
    import numpy as np
    from PIL import Image

    return np.array(upright.resize(size, Image.Resampling[vision.resampling]))


def encode_with_images(
    tokenizer: Tokenizer, rendered: RenderedPrompt, vision: ImageFacts, pixels: Sequence[np.ndarray]
) -> PromptTokens:
    """Like `encode_chat`, with each image's tokens in place of the template's marker."""
    ids = encode_chat(tokenizer, _with_image_tokens(tokenizer, rendered, vision, len(pixels)))
    made = PromptTokens()
    images: list[PromptImage] = []
    for token in ids:
        if token != vision.image_token:
            made.append(token)
            continue
        one = pixels[len(images)]
        height, width, _ = one.shape
        digest = blake2b(repr((height, width)).encode() + one.tobytes(), digest_size=16).digest()
        count, grid = vision.num_tokens(width, height), vision.grid(width, height)
        images.append(PromptImage(len(made), len(made) + count, one, digest, grid, not vision.bidirectional))
        made += vision.ids(width, height) if isinstance(vision, RowFacts) else [token] * count
    made.images = tuple(images)
    return made


def _with_image_tokens(
    tokenizer: Tokenizer, rendered: RenderedPrompt, vision: ImageFacts, count: int
) -> RenderedPrompt:
    """Replace each of the template's image markers with one image token and the tokens around it.

    A marker inside message text is left as text.
    """
    mark = tokenizer.decode([vision.mark], skip_special=False)
    places = [
        match.span()
        for match in re.finditer(re.escape(mark), rendered)
        if not any(match.start() < last and first < match.end() for first, last in rendered.as_text)
    ]
    if len(places) != count:
        raise InvalidRequest(
            f"the model's template places {len(places)} of {count} images", "use a chat template that supports images"
        )
    placed = (one if isinstance(one, str) else tokenizer.decode([one], skip_special=False) for one in vision.placed)
    full, pieces, at = "".join(placed), [], 0
    for first, last in places:
        pieces += [rendered[at:first], full]
        at = last
    grown = len(full) - len(mark)
    moved = [(a + grown * before, b + grown * before) for a, b in rendered.as_text
             for before in [sum(last <= a for _, last in places)]]  # fmt: skip
    return RenderedPrompt.of("".join([*pieces, rendered[at:]]), moved)
