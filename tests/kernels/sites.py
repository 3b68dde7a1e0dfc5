"""Where LoRA meets a model, and the steps it meets it in: the shapes kernels are compiled, tested and timed at."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Site:
    """A fused projection of a model: its input width and the widths of its outputs."""

    model: str
    name: str
    in_features: int
    slices: tuple[int, ...]

    @property
    def out_features(self) -> int:
        """Columns of the site's output, all slices together."""
        return sum(self.slices)


@dataclass(frozen=True)
class Model:
    """The widths of a decoder.

    Attributes:
        name: The model's usual name.
        hidden: Width of the residual stream.
        num_heads: Query heads of a layer.
        num_kv_heads: Key and value heads of a layer.
        head_size: Width of one head.
        intermediate: Width of the gate, of up and of the activation between them and down.
        vocabulary: Rows of the embedding and of lm_head.
        window: Positions a sliding-window layer sees; None where every layer sees all.
        soft_cap: Bound of the attention scores; None where there is none.
    """

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    window: int | None = None
    soft_cap: float | None = None

    @property
    def qkv(self) -> Site:
        """Query, key and value in one site."""
        query, key = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return Site(self.name, "qkv", self.hidden, (query, key, key))

    @property
    def o(self) -> Site:
        """The attention's output projection."""
        return Site(self.name, "o", self.num_heads * self.head_size, (self.hidden,))

    @property
    def gate_up(self) -> Site:
        """Gate and up in one site."""
        return Site(self.name, "gate_up", self.hidden, (self.intermediate, self.intermediate))

    @property
    def down(self) -> Site:
        """The MLP's output projection."""
        return Site(self.name, "down", self.intermediate, (self.hidden,))

    @property
    def lm_head(self) -> Site:
        """From the last hidden states to logits."""
        return Site(self.name, "lm_head", self.hidden, (self.vocabulary,))

    @property
    def layer(self) -> tuple[Site, ...]:
        """The four sites of one decoder layer, in the order they run."""
        return (self.qkv, self.o, self.gate_up, self.down)


LLAMA_3_8B = Model("llama-3-8b", 4096, 32, 8, 128, 14336, 128256)
LLAMA_3_70B = Model("llama-3-70b", 8192, 64, 8, 128, 28672, 128256)
LLAMA_3_405B = Model("llama-3-405b", 16384, 128, 8, 128, 53248, 128256)
SMOLLM2_135M = Model("smollm2-135m", 576, 9, 3, 64, 1536, 49152)
GEMMA_2_2B = Model("gemma-2-2b", 2304, 8, 4, 256, 9216, 256000, window=4096, soft_cap=50.0)
GEMMA_3_4B = Model("gemma-3-4b", 2560, 8, 4, 256, 10240, 262144, window=1024)


class Step(NamedTuple):
    """The shapes of one step: its rows, and how many adapters (groups, and slots) share them at most."""

    num_rows: int
    num_groups: int

    def __str__(self) -> str:
        return f"T={self.num_rows} G={self.num_groups}"


DECODE_ONE = Step(1, 1)
DECODE_FEW = Step(8, 8)
DECODE_MANY = Step(64, 64)
"""The step at which programs and launches a layer are compared with other projects' kernels."""

DECODE_SHARED = Step(64, 8)
MIXED = Step(512, 8)
PREFILL = Step(2048, 8)

TIMED_STEPS = (DECODE_ONE, DECODE_FEW, Step(64, 1), DECODE_SHARED, DECODE_MANY, Step(256, 64), PREFILL)
"""Rows and adapters at which a GPU's times are taken."""

RANKS = (8, 16, 64, 256)
"""Padded ranks of an adapter slot that kernels are shipped for."""
