"""What a tower that reads images is, in numbers: one square for every image (SigLIP), or an image's own size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

MAX_IMAGE_TOKENS = 2048  # of an image: larger ones are made smaller, whatever the model could take
MAX_RATIO = 200  # of an image's sides


@dataclass(frozen=True)
class VisionFacts:
    """A tower that turns an image into vectors for the decoder (SigLIP): patches, layers that all see each other, then
    squares of patches averaged, normed and projected. Its vectors take the places of `image_token` in a prompt.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    image_size: int  # pixels of a side: an image is resized to that square
    patch_size: int  # pixels of a side
    eps: float
    tokens: int  # vectors that an image becomes, a square number
    image_token: int  # stands for a vector
    begin_token: int
    end_token: int
    nbytes: int = 0  # stored bytes of tower and projector
    resampling: ClassVar[str] = "BILINEAR"  # how Pillow resizes an image for it
    axes: ClassVar[tuple[int, ...]] = ()  # positions count on through an image, whose tokens see each other

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.begin_token

    @property
    def least_tokens(self) -> int:
        """Of the smallest image."""
        return self.tokens

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is resized to."""
        return self.image_size, self.image_size

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Rows and columns of the tokens of an image that was resized; None where positions do not know of them."""
        return None

    @property
    def side(self) -> int:
        """Patches along a side."""
        return self.image_size // self.patch_size

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        shapes: dict[str, tuple[int, int]] = {}
        for index in range(self.num_layers):
            start = f"vision.encoder.layers.{index}."
            for name in ("q", "k", "v", "out"):
                shapes[f"{start}self_attn.{name}_proj"] = (self.hidden, self.hidden)
            shapes[f"{start}mlp.fc1"] = (self.inner, self.hidden)
            shapes[f"{start}mlp.fc2"] = (self.hidden, self.inner)
        return shapes

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, biases included; `hidden` is the decoder's size."""
        own, patch = self.hidden, self.patch_size
        shapes: dict[str, tuple[int, ...]] = {
            "vision.embeddings.patch_embedding.weight": (own, 3, patch, patch),
            "vision.embeddings.patch_embedding.bias": (own,),
            "vision.embeddings.position_embedding.weight": (self.side**2, own),
            "projector.mm_soft_emb_norm.weight": (own,),
            "projector.mm_input_projection_weight": (own, hidden),
        }
        norms = [f"encoder.layers.{index}.layer_norm{n}" for index in range(self.num_layers) for n in (1, 2)]
        for norm in (*norms, "post_layernorm"):
            shapes[f"vision.{norm}.weight"] = shapes[f"vision.{norm}.bias"] = (own,)
        return shapes | {f"{module}.bias": shape[:1] for module, shape in self.linears().items()}

    @property
    def work(self) -> int:
        """Bytes that one image takes while it is computed: attention's inputs, or the feed-forward layer's, float32."""
        return self.side**2 * 4 * (4 * self.hidden + max(4 * self.hidden, 2 * self.inner)) + 9 * self.image_size**2 * 4


@dataclass(frozen=True)
class GridFacts:
    """A tower that keeps an image's proportions (Qwen): patches with interpolated positions and rotary ones by row and
    column, layers that all see each other, then squares of `merge` patches a side made into one vector. In the decoder
    an image's tokens are as causal as text, and positions count its rows and columns.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one vector
    frames: int  # frames of a video in one patch: an image stands for all of them
    side: int  # rows and columns of the table of positions
    outputs: int  # elements of a vector: the decoder's hidden size
    theta: float  # of the rotary positions
    min_pixels: int  # an image is resized to so many, or more
    max_pixels: int  # and no more
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: int  # stands for a vector, and what the template writes for an image
    # of each pair that the decoder turns: whether by the position in time (0), by row (1) or by column (2)
    axes: tuple[int, ...]
    eps: float = 1e-6
    nbytes: int = 0  # stored bytes
    resampling: ClassVar[str] = "BICUBIC"

    @property
    def factor(self) -> int:
        """Pixels of a side of what becomes one vector."""
        return self.patch_size * self.merge

    @property
    def tokens(self) -> int:
        """Of the largest image."""
        return self.max_pixels // self.factor**2

    @property
    def least_tokens(self) -> int:
        """Of the smallest image."""
        return max(1, self.min_pixels // self.factor**2)

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.image_token

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is resized to. Raises ValueError for one that is far too long."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(f"an image of {width:,} x {height:,} pixels is longer than {MAX_RATIO} times its width")
        factor, sides = self.factor, (width, height)
        near = [round(side / factor) * factor for side in sides]
        if near[0] * near[1] > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            near = [max(factor, math.floor(side / shrink / factor) * factor) for side in sides]
        elif near[0] * near[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            near = [math.ceil(side * grow / factor) * factor for side in sides]
        return near[0], near[1]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image that was resized."""
        return height // self.factor, width // self.factor

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        shapes: dict[str, tuple[int, int]] = {}
        for index in range(self.num_layers):
            start = f"vision.blocks.{index}."
            shapes[f"{start}attn.qkv"] = (3 * self.hidden, self.hidden)
            shapes[f"{start}attn.proj"] = (self.hidden, self.hidden)
            shapes[f"{start}mlp.linear_fc1"] = (self.inner, self.hidden)
            shapes[f"{start}mlp.linear_fc2"] = (self.hidden, self.inner)
        merged = self.hidden * self.merge**2
        return shapes | {
            "vision.merger.linear_fc1": (merged, merged), "vision.merger.linear_fc2": (self.outputs, merged)
        }  # fmt: skip

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, biases included; `hidden` is the decoder's size."""
        own, patch = self.hidden, self.patch_size
        shapes: dict[str, tuple[int, ...]] = {
            "vision.patch_embed.proj.weight": (own, 3, self.frames, patch, patch),
            "vision.patch_embed.proj.bias": (own,),
            "vision.pos_embed.weight": (self.side**2, own),
        }
        for norm in (*(f"blocks.{index}.norm{n}" for index in range(self.num_layers) for n in (1, 2)), "merger.norm"):
            shapes[f"vision.{norm}.weight"] = shapes[f"vision.{norm}.bias"] = (own,)
        return shapes | {f"{module}.bias": shape[:1] for module, shape in self.linears().items()}

    @property
    def work(self) -> int:
        """Bytes that the largest image takes while it is computed: attention's inputs and their turned copies, or the
        feed-forward layer's, float32, and the pixels.
        """
        patches = self.tokens * self.merge**2
        return patches * 4 * (4 * self.hidden + max(6 * self.hidden, 2 * self.inner)) + 9 * self.max_pixels * 4
