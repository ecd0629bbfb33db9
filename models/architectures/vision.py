"""What reads images, in numbers: as one square (SigLIP), or in their own proportions, with a tower or without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

MAX_IMAGE_TOKENS = 2048  # of an image: larger ones are made smaller, whatever the model could take
MAX_RATIO = 200  # of an image's sides
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
LAYER_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
Bidirectional = Literal["", "windowed", "all"]  # the layers in which an image's tokens see each other


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
    axes: ClassVar[tuple[int, ...]] = ()  # positions count on through an image
    bidirectional: ClassVar[Bidirectional] = "all"

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.begin_token

    @property
    def placed(self) -> tuple[int | str, ...]:
        """What takes the place of the mark: texts and tokens."""
        return "\n\n", self.begin_token, self.image_token, self.end_token, "\n\n"

    def num_tokens(self, width: int, height: int) -> int:
        """Of an image that was resized."""
        return self.tokens

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


class Proportional:
    """What keeps an image's proportions."""

    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one vector
    image_token: int  # stands for a vector, and what the template writes for an image
    resampling: ClassVar[str] = "BICUBIC"

    @property
    def factor(self) -> int:
        """Pixels of a side of what becomes one vector."""
        return self.patch_size * self.merge

    @property
    def mark(self) -> int:
        """The token that the template writes for an image."""
        return self.image_token

    def num_tokens(self, width: int, height: int) -> int:
        """Of an image that was resized."""
        return width // self.factor * (height // self.factor)


@dataclass(frozen=True)
class GridFacts(Proportional):
    """A tower that keeps an image's proportions (Qwen): patches with interpolated positions and rotary ones by row and
    column, layers that all see each other, then squares of `merge` patches a side made into one vector. In the decoder
    an image's tokens are as causal as text, and positions count its rows and columns.

    Qwen3-VL's makes vectors of what some of its layers give, too (DeepStack): those of the first are added behind the
    decoder's first layer, and so on. The vectors of a token lie one behind the other.

    Qwen2.5-VL's has rotary positions only, most of its layers see windows, their feed-forward layers are gated, and
    their norms take no mean off.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one vector
    frames: int  # frames of a video in one patch, of one tensor of it: an image stands for all of them
    side: int  # rows and columns of the table of positions; 0: there is none
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
    kernels: tuple[str, ...] = ("",)  # ends of the names of the tensors that make a patch of pixels
    taps: tuple[int, ...] = ()  # ascending: layers of the tower whose results decoder layers 0, 1, .. get
    gated: bool = False  # as Qwen2.5-VL's
    window: int = 0  # vectors a side of the windows that all layers see but those of `whole`; 0: they see all
    whole: tuple[int, ...] = ()
    apart: bool = False  # queries, keys and values are modules of their own
    bidirectional: ClassVar[Bidirectional] = ""

    @property
    def tokens(self) -> int:
        """Of the largest image."""
        return self.max_pixels // self.factor**2

    @property
    def least_tokens(self) -> int:
        """Of the smallest image."""
        return max(1, self.min_pixels // self.factor**2)

    @property
    def placed(self) -> tuple[int | str, ...]:
        """What takes the place of the mark: itself."""
        return (self.image_token,)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is resized to. Raises ValueError for one that is far too long."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(f"an image of {width:,} x {height:,} pixels exceeds the {MAX_RATIO}:1 aspect ratio limit")
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
        """The modules of a layer's that queries, keys and values come from, in this order."""
        return ("q", "k", "v") if self.apart else ("qkv",)

    @property
    def feed_forward(self) -> tuple[str, ...]:
        """The modules of a layer's, the last one that which gives the result."""
        return ("gate_proj", "up_proj", "down_proj") if self.gated else ("linear_fc1", "linear_fc2")

    @property
    def mergers(self) -> list[str]:
        """What makes vectors of squares: of the last layer's patches, then of each of `taps`."""
        return ["vision.merger", *(f"vision.deepstack_merger_list.{index}" for index in range(len(self.taps)))]

    @property
    def work(self) -> int:
        """Bytes that the largest image takes while it is computed: attention's inputs and their turned copies, or the
        feed-forward layer's, float32, the pixels, and vectors for more than one layer of the decoder.
        """
        patches, more = self.tokens * self.merge**2, 4 * len(self.taps) * self.tokens * self.outputs
        inner = (2 + self.gated) * self.inner
        return patches * 4 * (4 * self.hidden + max(6 * self.hidden, inner)) + 9 * self.max_pixels * 4 + more


@dataclass(frozen=True, kw_only=True)
class RowFacts(Proportional):
    """A tower that keeps an image's proportions (Pixtral): normed patches, gated layers that all see each other and
    rotary positions by row and column, then squares of `merge` patches a side projected. In a prompt a token stands
    between two rows of vectors, another one behind the last, and positions count on through an image.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one vector
    outputs: int  # elements of a vector: the decoder's hidden size
    theta: float  # of the rotary positions
    longest: int  # pixels of an image's longer side: a larger one is made smaller
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    eps: float  # of the projector's norm
    biased: bool  # the projector's last two layers have biases
    image_token: int  # stands for a vector, and what the template writes for an image
    break_token: int  # between two rows
    end_token: int
    nbytes: int = 0  # stored bytes of tower and projector
    paired: bool = False  # queries and keys turn by neighbouring pairs, not by dimensions half a head apart
    axes: ClassVar[tuple[int, ...]] = ()
    bidirectional: ClassVar[Bidirectional] = ""

    @property
    def tokens(self) -> int:
        """Of the largest image."""
        return self.num_tokens(*self.fitted(self.longest, self.longest))

    @property
    def least_tokens(self) -> int:
        """Of the smallest image."""
        return 1

    @property
    def placed(self) -> tuple[int | str, ...]:
        """What takes the place of the mark."""
        return self.image_token, self.end_token

    def num_tokens(self, width: int, height: int) -> int:
        """Of an image that was resized, those between rows among them."""
        rows, columns = height // self.factor, width // self.factor
        return rows * columns + rows - 1

    def ids(self, width: int, height: int) -> list[int]:
        """The tokens of an image that was resized."""
        columns = width // self.factor
        row = [*[self.image_token] * columns, self.break_token]
        return (row * (height // self.factor))[:-1]

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is resized to: whole squares, small images as they are. Raises ValueError for one that
        is far too long.
        """
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(f"an image of {width:,} x {height:,} pixels exceeds the {MAX_RATIO}:1 aspect ratio limit")
        ratio = max(1.0, max(width, height) / self.longest)
        across, down = (max(1, math.ceil(math.floor(side / ratio) / self.factor)) for side in (width, height))
        return across * self.factor, down * self.factor

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Positions do not know of rows and columns."""
        return None

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
        """Bytes that the largest image takes while it is computed: attention's inputs and their turned copies, or the
        feed-forward layer's, float32, and the pixels.
        """
        side, _ = self.fitted(self.longest, self.longest)
        patches = (side // self.patch_size) ** 2
        return patches * 4 * (4 * self.hidden + max(6 * self.hidden, 2 * self.inner)) + 9 * side**2 * 4


@dataclass(frozen=True, kw_only=True)
class BudgetFacts(Proportional):
    """What resizes an image of any proportions to as many tokens as a budget has room for (Gemma 4)."""

    hidden: int
    patch_size: int  # pixels of a side
    merge: int  # patches of a side that become one vector
    tokens: int  # the budget
    places: int  # rows, and columns, that the table of positions knows
    outputs: int  # elements of a vector: the decoder's hidden size
    eps: float
    image_token: int  # stands for a vector, and what the template writes for an image
    begin_token: int
    end_token: int
    bidirectional: Bidirectional
    nbytes: int = 0  # stored bytes of tower and projector
    axes: ClassVar[tuple[int, ...]] = ()

    @property
    def least_tokens(self) -> int:
        """Of the image that fills the budget worst: one nearly as high as two rows of vectors."""
        return max(1, self.tokens // 2)

    @property
    def placed(self) -> tuple[int | str, ...]:
        """What takes the place of the mark."""
        return self.begin_token, self.image_token, self.end_token

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size that an image is resized to, small ones are enlarged."""
        scale = math.sqrt(self.tokens * self.factor**2 / (width * height))
        across, down = (math.floor(scale * side / self.factor) for side in (width, height))
        if not down:
            across, down = min(width // height, self.tokens), 1
        elif not across:
            across, down = 1, min(height // width, self.tokens)
        return across * self.factor, down * self.factor

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Positions do not know of rows and columns."""
        return None

    @property
    def _pixel_work(self) -> int:
        """Bytes of the largest image's pixels and their copies, float32."""
        return 9 * self.tokens * self.factor**2 * 4


@dataclass(frozen=True, kw_only=True)
class PooledFacts(BudgetFacts):
    """A tower whose patches have a learned position by row and one by column, and rotary ones; layers with four norms
    that all see each other; squares of `merge` patches a side averaged, normed and projected.
    """

    num_layers: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float  # of the rotary positions
    clipped: bool  # inputs and outputs of the layers' products are held within stored bounds
    standardized: bool  # a stored mean and deviation are taken out of what was averaged
    planar: bool = False  # a patch's colours lie one after the other, not side by side

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
        """Bytes that the largest image takes while it is computed: attention's inputs and their turned copies, or the
        feed-forward layer's, float32, and the pixels.
        """
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        patches, copies = self.tokens * self.merge**2, 3 + self.clipped
        return patches * 4 * (3 * self.hidden + copies * max(heads, self.inner)) + self._pixel_work


@dataclass(frozen=True, kw_only=True)
class PatchFacts(BudgetFacts):
    """No tower: squares of pixels, each of `merge` patches a side, are normed, projected, told their row and column,
    and projected once more.
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
        """Bytes that the largest image takes while it is computed, float32."""
        return self.tokens * 4 * (4 * self.hidden + self.outputs) + self._pixel_work


ImageFacts = VisionFacts | GridFacts | RowFacts | PooledFacts | PatchFacts
