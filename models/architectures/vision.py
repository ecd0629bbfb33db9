"""Facts of vision towers: for square images (SigLIP) or any aspect ratio, with transformer layers or without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

MAX_IMAGE_TOKENS = 2048  # per image; larger images are scaled down even if the model supports more
MAX_RATIO = 200  # limit of an image's aspect ratio
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
Bidirectional = Literal["", "windowed", "all"]  # the layers in which an image's tokens see each other


@dataclass(frozen=True)
class VisionFacts:
    """A tower that turns an image into vectors for the decoder (SigLIP): patches, layers of full attention, then
    squares of patches averaged, normed and projected. The vectors replace `image_token` in a prompt.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    image_size: int  # pixels of a side; images are resized to this square
    patch_size: int  # pixels of a side
    eps: float
    tokens: int  # vectors per image, a square number
    image_token: int  # placeholder for a vector
    begin_token: int
    end_token: int
    nbytes: int = 0  # stored bytes of tower and projector
    resampling: ClassVar[str] = "BILINEAR"  # Pillow's filter for resizing
    axes: ClassVar[tuple[int, ...]] = ()  # image tokens have ordinary sequential positions
    bidirectional: ClassVar[Bidirectional] = "all"

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.begin_token

    @property
    def placed(self) -> tuple[int | str, ...]:
        """The texts and tokens that replace the mark."""
        return "\n\n", self.begin_token, self.image_token, self.end_token, "\n\n"

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of a resized image."""
        return self.tokens

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest image."""
        return self.tokens

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is resized."""
        return self.image_size, self.image_size

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Token rows and columns of a resized image; None if positions do not depend on them."""
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
        """Work memory of one image in bytes: the inputs of attention or of the feed-forward layer, float32."""
        return self.side**2 * 4 * (4 * self.hidden + max(4 * self.hidden, 2 * self.inner)) + 9 * self.image_size**2 * 4


class Proportional:
    """Base of towers that keep an image's aspect ratio."""

    patch_size: int  # pixels of a side
    merge: int  # a square of merge x merge patches becomes one vector
    image_token: int  # placeholder for a vector, which the template also writes for an image
    resampling: ClassVar[str] = "BICUBIC"

    @property
    def factor(self) -> int:
        """Side in pixels of the square that becomes one vector."""
        return self.patch_size * self.merge

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.image_token

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of a resized image."""
        return width // self.factor * (height // self.factor)

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Token rows and columns of a resized image; None if positions do not depend on them."""
        return None


def _check_ratio(width: int, height: int) -> None:
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"an image of {width:,} x {height:,} pixels exceeds the {MAX_RATIO}:1 aspect ratio limit")


@dataclass(frozen=True)
class GridFacts(Proportional):
    """A tower that keeps an image's aspect ratio (Qwen): patches with interpolated position embeddings and 2D RoPE,
    layers of full attention, then one vector per square of merge x merge patches. In the decoder, image tokens are
    causal like text, and their positions count rows and columns.

    Qwen3-VL also makes vectors from the outputs of some of its layers (DeepStack): those of the first such layer are
    added after the decoder's first layer, and so on. The vectors of a token are concatenated.

    Qwen2.5-VL has only 2D RoPE, most of its layers use windowed attention, its feed-forward layers are gated, and its
    norms are RMSNorms.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int  # a square of merge x merge patches becomes one vector
    frames: int  # video frames per tensor of the patch embedding; an image is used for all of them
    side: int  # rows and columns of the position table; 0: there is none
    outputs: int  # elements of a vector: the decoder's hidden size
    theta: float  # of the RoPE
    min_pixels: int  # an image is resized to at least this many
    max_pixels: int  # and at most this many
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token: int  # placeholder for a vector, which the template also writes for an image
    # per rotated pair of the decoder: whether it rotates by time (0), row (1) or column (2)
    axes: tuple[int, ...]
    eps: float = 1e-6
    nbytes: int = 0  # stored bytes
    kernels: tuple[str, ...] = ("",)  # name suffixes of the patch embedding's tensors
    taps: tuple[int, ...] = ()  # ascending: tower layers whose outputs go to decoder layers 0, 1, ... (DeepStack)
    gated: bool = False  # Qwen2.5-VL's variant
    window: int = 0  # window side in vectors, for all layers except `whole`; 0: full attention
    whole: tuple[int, ...] = ()  # layers of full attention
    apart: bool = False  # queries, keys and values are separate modules
    bidirectional: ClassVar[Bidirectional] = ""

    @property
    def tokens(self) -> int:
        """Tokens of the largest image."""
        return self.max_pixels // self.factor**2

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest image."""
        return max(1, self.min_pixels // self.factor**2)

    @property
    def placed(self) -> tuple[int | str, ...]:
        """The tokens that replace the mark: the mark itself."""
        return (self.image_token,)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is resized. Raises ValueError above the aspect ratio limit."""
        _check_ratio(width, height)
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
        """Token rows and columns of a resized image."""
        return height // self.factor, width // self.factor

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        shapes: dict[str, tuple[int, int]] = {}
        for index in range(self.num_layers):
            start = f"vision.blocks.{index}."
            rows = 3 * self.hidden // len(self.attention)
            shapes |= {f"{start}attn.{name}": (rows, self.hidden) for name in self.attention}
            shapes[f"{start}attn.proj"] = (self.hidden, self.hidden)
            *inputs, output = self.feed_forward
            shapes |= {f"{start}mlp.{name}": (self.inner, self.hidden) for name in inputs}
            shapes[f"{start}mlp.{output}"] = (self.hidden, self.inner)
        merged = self.hidden * self.merge**2
        for merger in self.mergers:
            shapes |= {f"{merger}.linear_fc1": (merged, merged), f"{merger}.linear_fc2": (self.outputs, merged)}
        return shapes

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, biases included; `hidden` is the decoder's size."""
        own, patch = self.hidden, self.patch_size
        shapes: dict[str, tuple[int, ...]] = {
            f"vision.patch_embed.proj.weight{end}": (own, 3, self.frames, patch, patch) for end in self.kernels
        }
        if not self.gated:
            shapes |= {"vision.patch_embed.proj.bias": (own,), "vision.pos_embed.weight": (self.side**2, own)}
        for norm in (*(f"blocks.{index}.norm{n}" for index in range(self.num_layers) for n in (1, 2)), "merger.norm"):
            shapes |= {f"vision.{norm}.{end}": (own,) for end in ("weight", "bias")[: 2 - self.gated]}
        for merger in self.mergers[1:]:
            shapes[f"{merger}.norm.weight"] = shapes[f"{merger}.norm.bias"] = (own * self.merge**2,)
        return shapes | {f"{module}.bias": shape[:1] for module, shape in self.linears().items()}

    @property
    def attention(self) -> tuple[str, ...]:
        """The modules of a layer's queries, keys and values, in this order."""
        return ("q", "k", "v") if self.apart else ("qkv",)

    @property
    def feed_forward(self) -> tuple[str, ...]:
        """The modules of a feed-forward layer; the last one is the output projection."""
        return ("gate_proj", "up_proj", "down_proj") if self.gated else ("linear_fc1", "linear_fc2")

    @property
    def mergers(self) -> list[str]:
        """The modules that turn squares into vectors: after the last layer, then after each of `taps`."""
        return ["vision.merger", *(f"vision.deepstack_merger_list.{index}" for index in range(len(self.taps)))]

    @property
    def work(self) -> int:
        """Work memory of the largest image in bytes: attention's inputs and their rotated copies, or the feed-forward
        layer's inputs, float32; the pixels; and the DeepStack vectors.
        """
        patches, more = self.tokens * self.merge**2, 4 * len(self.taps) * self.tokens * self.outputs
        inner = (2 + self.gated) * self.inner
        return patches * 4 * (4 * self.hidden + max(6 * self.hidden, inner)) + 9 * self.max_pixels * 4 + more


@dataclass(frozen=True, kw_only=True)
class RowFacts(Proportional):
    """A tower that keeps an image's aspect ratio (Pixtral): normed patches, gated layers of full attention with 2D
    RoPE, then a projection of squares of merge x merge patches. In a prompt, a break token separates two rows of
    vectors, an end token follows the last one, and positions are sequential.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int  # a square of merge x merge patches becomes one vector
    outputs: int  # elements of a vector: the decoder's hidden size
    theta: float  # of the RoPE
    longest: int  # limit of an image's longer side in pixels; larger images are scaled down
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    eps: float  # of the projector's norm
    biased: bool  # the projector's last two layers have biases
    image_token: int  # placeholder for a vector, which the template also writes for an image
    break_token: int  # between two rows
    end_token: int
    nbytes: int = 0  # stored bytes of tower and projector
    paired: bool = False  # queries and keys rotate by adjacent pairs instead of pairs half a head apart
    axes: ClassVar[tuple[int, ...]] = ()
    bidirectional: ClassVar[Bidirectional] = ""

    @property
    def tokens(self) -> int:
        """Tokens of the largest image."""
        return self.num_tokens(*self.fitted(self.longest, self.longest))

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest image."""
        return 1

    @property
    def placed(self) -> tuple[int | str, ...]:
        """The tokens that replace the mark."""
        return self.image_token, self.end_token

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of a resized image, including break tokens."""
        rows, columns = height // self.factor, width // self.factor
        return rows * columns + rows - 1

    def ids(self, width: int, height: int) -> list[int]:
        """The token ids of a resized image."""
        columns = width // self.factor
        row = [*[self.image_token] * columns, self.break_token]
        return (row * (height // self.factor))[:-1]

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is resized: whole squares, without enlarging small images. Raises ValueError above
        the aspect ratio limit.
        """
        _check_ratio(width, height)
        ratio = max(1.0, max(width, height) / self.longest)
        across, down = (max(1, math.ceil(math.floor(side / ratio) / self.factor)) for side in (width, height))
        return across * self.factor, down * self.factor

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        shapes: dict[str, tuple[int, int]] = {}
        for index in range(self.num_layers):
            start = f"vision.transformer.layers.{index}."
            shapes |= {f"{start}attention.{name}_proj": (self.hidden, self.hidden) for name in "qkvo"}
            shapes |= {f"{start}feed_forward.{name}_proj": (self.inner, self.hidden) for name in ("gate", "up")}
            shapes[f"{start}feed_forward.down_proj"] = (self.hidden, self.inner)
        return shapes | {
            "projector.patch_merger.merging_layer": (self.hidden, self.hidden * self.merge**2),
            "projector.linear_1": (self.outputs, self.hidden),
            "projector.linear_2": (self.outputs, self.outputs),
        }

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors; `hidden` is the decoder's size."""
        layers = (f"vision.transformer.layers.{index}." for index in range(self.num_layers))
        norms = (*(f"{layer}{name}_norm" for layer in layers for name in ("attention", "ffn")), "vision.ln_pre")
        shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (self.hidden,) for norm in (*norms, "projector.norm")}
        shapes["vision.patch_conv.weight"] = (self.hidden, 3, self.patch_size, self.patch_size)
        return shapes | {f"projector.linear_{n}.bias": (hidden,) for n in (1, 2) if self.biased}

    @property
    def work(self) -> int:
        """Work memory of the largest image in bytes: attention's inputs and their rotated copies, or the feed-forward
        layer's inputs, float32; and the pixels.
        """
        side, _ = self.fitted(self.longest, self.longest)
        patches = (side // self.patch_size) ** 2
        return patches * 4 * (4 * self.hidden + max(6 * self.hidden, 2 * self.inner)) + 9 * side**2 * 4


@dataclass(frozen=True, kw_only=True)
class BudgetFacts(Proportional):
    """Base of towers that resize an image to fill a token budget, keeping its aspect ratio (Gemma 4)."""

    hidden: int
    patch_size: int  # pixels of a side
    merge: int  # a square of merge x merge patches becomes one vector
    tokens: int  # the budget
    places: int  # rows, and also columns, in the position table
    outputs: int  # elements of a vector: the decoder's hidden size
    eps: float
    image_token: int  # placeholder for a vector, which the template also writes for an image
    begin_token: int
    end_token: int
    bidirectional: Bidirectional
    nbytes: int = 0  # stored bytes of tower and projector
    axes: ClassVar[tuple[int, ...]] = ()

    @property
    def least_tokens(self) -> int:
        """Tokens of the image that fills the budget worst, just short of two rows of vectors."""
        return max(1, self.tokens // 2)

    @property
    def placed(self) -> tuple[int | str, ...]:
        """The tokens that replace the mark."""
        return self.begin_token, self.image_token, self.end_token

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size to which an image is resized; small ones are enlarged."""
        scale = math.sqrt(self.tokens * self.factor**2 / (width * height))
        across, down = (math.floor(scale * side / self.factor) for side in (width, height))
        if not down:
            across, down = min(width // height, self.tokens), 1
        elif not across:
            across, down = 1, min(height // width, self.tokens)
        return across * self.factor, down * self.factor

    @property
    def _pixel_work(self) -> int:
        """Bytes of the largest image's pixels and their copies, float32."""
        return 9 * self.tokens * self.factor**2 * 4


@dataclass(frozen=True, kw_only=True)
class PooledFacts(BudgetFacts):
    """A tower with learned row and column position embeddings and 2D RoPE, layers of full attention with four norms
    each, and squares of merge x merge patches averaged, normed and projected.
    """

    num_layers: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float  # of the RoPE
    clipped: bool  # inputs and outputs of the linear layers are clamped to stored bounds
    standardized: bool  # averaged vectors are standardized with a stored mean and deviation
    planar: bool = False  # a patch is stored as colour planes instead of interleaved colours

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        shapes = {"vision.patch_embedder.input_proj": (self.hidden, 3 * self.patch_size**2)}
        for index in range(self.num_layers):
            shapes |= {f"{name}.linear": shape for name, shape in self._of_layer(index).items()}
        return shapes | {"projector.embedding_projection": (self.outputs, self.hidden)}

    def _of_layer(self, index: int) -> dict[str, tuple[int, int]]:
        start = f"vision.encoder.layers.{index}."
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            f"{start}self_attn.q_proj": (q, self.hidden),
            f"{start}self_attn.k_proj": (kv, self.hidden),
            f"{start}self_attn.v_proj": (kv, self.hidden),
            f"{start}self_attn.o_proj": (self.hidden, q),
            f"{start}mlp.gate_proj": (self.inner, self.hidden),
            f"{start}mlp.up_proj": (self.inner, self.hidden),
            f"{start}mlp.down_proj": (self.hidden, self.inner),
        }

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors; `hidden` is the decoder's size."""
        own = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"vision.patch_embedder.position_embedding_table": (2, self.places, own)}
        for index in range(self.num_layers):
            start = f"vision.encoder.layers.{index}."
            shapes |= {f"{start}{name}.weight": (own,) for name in LAYER_NORMS}
            shapes |= {f"{start}self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
            if self.clipped:
                shapes |= {f"{name}.{bound}": () for name in self._of_layer(index) for bound in BOUNDS}
        if self.standardized:
            shapes |= {"vision.std_bias": (own,), "vision.std_scale": (own,)}
        return shapes

    @property
    def work(self) -> int:
        """Work memory of the largest image in bytes: attention's inputs and their rotated copies, or the feed-forward
        layer's inputs, float32; and the pixels.
        """
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        patches, copies = self.tokens * self.merge**2, 3 + self.clipped
        return patches * 4 * (3 * self.hidden + copies * max(heads, self.inner)) + self._pixel_work


@dataclass(frozen=True, kw_only=True)
class PatchFacts(BudgetFacts):
    """No transformer layers: squares of merge x merge patches are normed, projected, given row and column position
    embeddings, and projected again.
    """

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linear modules, by canonical name."""
        return {
            "vision.patch_dense": (self.hidden, 3 * self.factor**2),
            "projector.embedding_projection": (self.outputs, self.hidden),
        }

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the other tensors, biases included; `hidden` is the decoder's size."""
        norms = {"patch_ln1": 3 * self.factor**2, "patch_ln2": self.hidden, "pos_norm": self.hidden}
        shapes = {f"vision.{name}.{end}": (size,) for name, size in norms.items() for end in ("weight", "bias")}
        return shapes | {
            "vision.patch_dense.bias": (self.hidden,), "vision.pos_embedding": (self.places, 2, self.hidden)
        }  # fmt: skip

    @property
    def work(self) -> int:
        """Work memory of the largest image in bytes, float32."""
        return self.tokens * 4 * (4 * self.hidden + self.outputs) + self._pixel_work


ImageFacts = VisionFacts | GridFacts | RowFacts | PooledFacts | PatchFacts
