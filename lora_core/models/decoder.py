"""One decoder for the llama-like families: what they differ in is a field of `DecoderConfig`.

A step is flat: T token rows of several sequences, no batch dimension and no padding.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lora_core.engine.attention import AttentionMetadata, attend, write_kv
from lora_core.models.between import COMPILED_ROWS, Between, NormShape
from lora_core.models.linear import Linear
from lora_core.models.norm import RMSNorm
from lora_core.models.rotary import Rotary, RotaryTable, Rotation
from lora_core.parallel.group import RankGroup
from lora_core.parallel.shard import WHOLE, Shard
from lora_core.targets import LoRATargetModule


@dataclass(frozen=True)
class LayerConfig:
    """In what the layers of one model differ.

    Attributes:
        window: Tokens a token attends to, itself included; None: all before it.
        rotary: Index of the layer's table in `rotary_tables`; None: queries and keys carry no position.
    """

    window: int | None = None
    rotary: int | None = 0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides what a decoder computes, besides its weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    """One for each decoder layer."""
    rotary_tables: tuple[RotaryTable, ...]
    max_model_len: int
    """Longest text, in tokens; the rotary frequencies hold up to there."""
    norm_eps: float
    activation: str
    """A key of `lora_core.models.activations.ACTIVATIONS`."""
    attention_scale: float
    """Factor on the scores."""
    tied_head: bool
    """The head's weight is the embedding's."""
    targets: tuple[LoRATargetModule, ...]
    """The layers that adapters may change, and how checkpoints store them."""

    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    norm_offset: bool = False
    """The weights of all norms are stored less 1."""
    qk_norm: bool = False
    """Each head's queries and keys are normalised before they are rotated."""
    sandwich_norms: bool = False
    """Attention and MLP are normalised behind as well as in front, before they join the residual stream."""
    score_softcap: float | None = None
    """Bound c on the attention's scores s, which become c * tanh(s / c)."""
    logit_softcap: float | None = None
    """The same for the logits."""
    embedding_scale: float = 1.0
    """Factor on the token embeddings."""
    embedding_scale_rounded: bool = False
    """The factor is first rounded to the model's data type."""
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logit_divisor: float = 1.0
    shard: Shard = WHOLE
    """The rank whose share of a model this is: its heads, its feed-forward width, its rows of the head."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_widths(self) -> tuple[int, ...]:
        """Logits that each rank's share of the head gives."""
        ranks = range(self.shard.size)
        return tuple(Shard(rank, self.shard.size).width(self.vocab_size) for rank in ranks)

    @property
    def num_head_rows(self) -> int:
        """Logits that this rank's share of the head gives."""
        return self.shard.width(self.vocab_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers, as `build_attention` takes them."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of each projection the targets cover, by its PEFT name."""
        hidden, intermediate = self.hidden_size, self.intermediate_size
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = {
            "embed_tokens": (hidden, self.vocab_size),
            "q_proj": (query_size, hidden),
            "k_proj": (kv_size, hidden),
            "v_proj": (kv_size, hidden),
            "qkv_proj": (query_size + 2 * kv_size, hidden),
            "o_proj": (hidden, query_size),
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "gate_up_proj": (2 * intermediate, hidden),
            "down_proj": (hidden, intermediate),
            "lm_head": (self.num_head_rows, hidden),
        }
        return {projection: shapes[projection] for target in self.targets for projection in target.projections}


def norm_shape(config: DecoderConfig) -> NormShape:
    """What the model's norms have in common."""
    return NormShape(config.norm_eps, 1.0 if config.norm_offset else 0.0)


def make_norm(config: DecoderConfig, size: int) -> RMSNorm:
    """The model's norm over the last `size` channels."""
    return RMSNorm(size, *norm_shape(config))


class Attention(nn.Module):
    """Self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, group: RankGroup | None) -> None:
        super().__init__()
        self.between = Between()
        self._norm = norm_shape(config)
        self._group = group
        self._rotary = layer.rotary
        self._window = layer.window
        self._softcap = config.score_softcap
        self._scale = config.attention_scale
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        query_size = config.num_heads * config.head_dim
        fused_size = query_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, fused_size, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias and config.shard.rank == 0)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attention: AttentionMetadata, cache: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same, and add the step's keys and values to the layer's cache."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        self.turn_heads_(heads, rotations)
        queries, key_values = heads[:, : self._num_heads], heads[:, self._num_heads :]
        write_kv(cache, key_values, attention)
        attended = attend(
            queries, key_values, cache, attention, scale=self._scale, window=self._window, softcap=self._softcap
        )
        return sum_over_ranks(self.o_proj(attended), self._group)

    def turn_heads_(self, heads: Tensor, rotations: Sequence[Rotation]) -> None:
        """Normalise and rotate the queries and keys of `[T, heads, head_dim]`, in place, as the model does."""
        weights = None
        if self.q_norm is not None and self.k_norm is not None:
            weights = (self.q_norm.weight, self.k_norm.weight)
        rotation = None if self._rotary is None else rotations[self._rotary]
        if weights is not None or rotation is not None:
            self.between.turn_heads_(heads, self._num_heads, self._num_rotated, weights, self._norm, rotation)


class GatedMLP(nn.Module):
    """Feed-forward block with one fused projection for gate and up."""

    def __init__(self, config: DecoderConfig, group: RankGroup | None) -> None:
        super().__init__()
        self._group = group
        self._activation = config.activation
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        has_bias = config.mlp_bias and config.shard.rank == 0
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same."""
        return sum_over_ranks(self.down_proj(self.gate_up_proj.gated(x, self._activation)), self._group)


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, group: RankGroup | None) -> None:
        super().__init__()
        self.between = Between()
        self._norm = norm_shape(config)
        self._residual_scale = config.residual_scale
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = Attention(config, layer, group)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = GatedMLP(config, group)

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attention: AttentionMetadata, cache: Tensor) -> Tensor:
        """Map the residual stream `[T, hidden_size]` to the next layer's."""
        attended = self.self_attn(self.input_layernorm(x), rotations, attention, cache)
        x, normed = self.join(x, attended)
        return torch.add(x, self.mlp(normed), alpha=self._residual_scale)

    def join(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind the attention, and what the MLP reads of it."""
        return self.between.join(x, attended, self._residual_scale, self.post_attention_layernorm.weight, self._norm)


class SandwichLayer(DecoderLayer):
    """A decoder layer whose attention and MLP stand between two norms each.

    As checkpoints name them: `post_attention_layernorm` is behind the attention here, not in front of the MLP.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig, group: RankGroup | None) -> None:
        super().__init__(config, layer, group)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size)

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attention: AttentionMetadata, cache: Tensor) -> Tensor:
        """Map the residual stream `[T, hidden_size]` to the next layer's."""
        attended = self.self_attn(self.input_layernorm(x), rotations, attention, cache)
        x, normed = self.join(x, attended)
        return torch.add(x, self.post_feedforward_layernorm(self.mlp(normed)), alpha=self._residual_scale)

    def join(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind the attention, and what the MLP reads of it."""
        weights = (self.post_attention_layernorm.weight, self.pre_feedforward_layernorm.weight)
        return self.between.join_normed(x, attended, self._residual_scale, *weights, self._norm)


class DecoderStack(nn.Module):
    """Embedding, layers and final norm; named as in transformers' checkpoints."""

    def __init__(self, config: DecoderConfig, group: RankGroup | None) -> None:
        super().__init__()
        self._embedding_scale = config.embedding_scale
        self._scale_rounded = config.embedding_scale_rounded
        layer_class = SandwichLayer if config.sandwich_norms else DecoderLayer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer_class(config, layer, group) for layer in config.layers)
        self.norm = make_norm(config, config.hidden_size)

    def forward(
        self, input_ids: Tensor, rotations: Sequence[Rotation], attention: AttentionMetadata, kv_cache: list[Tensor]
    ) -> Tensor:
        """Map int64 token ids `[T]` to normalised hidden states `[T, hidden_size]`."""
        x = self.embed_tokens(input_ids)
        if self._embedding_scale != 1:
            x = x * self._scale_in(x.dtype)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x = layer(x, rotations, attention, cache)
        hidden: Tensor = self.norm(x)
        return hidden

    def _scale_in(self, dtype: torch.dtype) -> float:
        scale = self._embedding_scale
        return float(torch.tensor(scale, dtype=dtype)) if self._scale_rounded else scale


class Decoder(nn.Module):
    """A decoder-only language model whose parameters have the names of transformers' checkpoints, projections fused.

    Args:
        config: What it computes.
        dtype: Of parameters, activations and KV cache.
        device: Where the parameters are, with values of no meaning until they are loaded; may be "meta".
        group: The ranks that have the other shares of the model; None where there are none.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, group: RankGroup | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self._group = group
        with torch.device(device):
            self.model = DecoderStack(config, group).to(dtype)
            self.lm_head = Linear(config.hidden_size, config.num_head_rows, bias=False).to(dtype)
        self.rotary = Rotary(config.rotary_tables, device=device)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.norm.weight.dtype
        return dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv_cache: list[Tensor]
    ) -> Tensor:
        """Run one step.

        Args:
            input_ids: int64 `[T]`.
            positions: int64 `[T]`, of each token in its own sequence.
            attention: The step's metadata, for the same T rows and the windows of `config`.
            kv_cache: One tensor for each layer (`KVLayout.shape`), changed in place.

        Returns:
            Normalised hidden states `[T, hidden_size]`; `logits` maps the rows that are needed.
        """
        rotations = self.rotary(positions, self.dtype)
        hidden: Tensor = self.model(input_ids, rotations, attention, kv_cache)
        return hidden

    def compile_between(self, backend: str = "inductor") -> None:
        """Compile what layers compute between products and attention, now and for steps of any number of rows.

        Args:
            backend: As `torch.compile` takes it.
        """
        between = Between.compiled(backend)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.between = layer.self_attn.between = between
        for num_rows in COMPILED_ROWS:
            self.run_between(num_rows)

    @torch.inference_mode()
    def run_between(self, num_rows: int) -> None:
        """Run what layers compute between products and attention, in every layer, on rows of zeros.

        If that compiles it, it is for any number of rows from two on, or for one.
        """
        config, device = self.config, self.model.norm.weight.device
        num_heads = config.num_heads + 2 * config.num_kv_heads
        x = torch.zeros(num_rows, config.hidden_size, dtype=self.dtype, device=device)
        part = torch.zeros_like(x)
        heads = torch.zeros(num_rows, num_heads, config.head_dim, dtype=self.dtype, device=device)
        rotations = self.rotary(torch.arange(num_rows, device=device), self.dtype)
        if num_rows > 1:
            for tensor in (x, part, heads, *itertools.chain(*rotations)):
                torch._dynamo.mark_dynamic(tensor, 0)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.join(x, part)
            layer.self_attn.turn_heads_(heads, rotations)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 `[rows, vocab_size]` from contiguous hidden states `[rows, hidden_size]`; on other ranks, no rows."""
        logits: Tensor = self.lm_head(hidden)
        if self._group is not None:
            logits = self._all_columns(logits, self._group)
        logits = logits.float()
        # In place: the head's output is nobody else's, and as wide as the vocabulary.
        if self.config.logit_divisor != 1:
            logits.div_(self.config.logit_divisor)
        if (softcap := self.config.logit_softcap) is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def _all_columns(self, columns: Tensor, group: RankGroup) -> Tensor:
        """All ranks' logits side by side, on the first one; on the others, no rows."""
        logits = group.gather_columns(columns, self.config.head_widths) if len(columns) else None
        return columns.new_empty(0, self.config.vocab_size) if logits is None else logits


def sum_over_ranks(part: Tensor, group: RankGroup | None) -> Tensor:
    """Add up the ranks' parts of a layer's output, in place; where one rank has all of it, it is that."""
    if group is not None:
        group.all_reduce_(part)
    return part
