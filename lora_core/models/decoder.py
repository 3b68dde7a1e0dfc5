"""One decoder for the llama-like families: what they differ in is a field of `DecoderConfig`.

A step is flat: T token rows of several sequences, no batch dimension and no padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear_cpu import PackedLinear
from lora_core.engine.attention import AttentionMetadata, attend, write_kv
from lora_core.targets import LoRATargetModule

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
"""Functions of the gate, by the names transformers gives them."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides what a decoder computes, besides its weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    """A key of `ACTIVATIONS`."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    tied_head: bool
    """The head's weight is the embedding's."""
    rotary_frequencies: tuple[float, ...]
    """Radians per position of each pair of channels, `head_dim / 2` of them."""
    rotary_scale: float
    """Factor on the rotation's cosine and sine."""
    max_model_len: int
    """Longest text, in tokens; the frequencies hold up to there."""
    targets: tuple[LoRATargetModule, ...]
    """The linear layers that adapters may change, and how checkpoints store them."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """`(out_features, in_features)` of each projection, by its PEFT name."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (query_size, self.hidden_size),
            "k_proj": (kv_size, self.hidden_size),
            "v_proj": (kv_size, self.hidden_size),
            "o_proj": (self.hidden_size, query_size),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }


class Linear(nn.Linear):
    """A linear layer that can reorder its weight for the CPU's matrix kernels."""

    _packed: PackedLinear | None = None

    def pack(self) -> None:
        """Replace the weight by a reordered copy; the layer has no `weight` parameter from now on."""
        self._packed = PackedLinear(self.weight.detach(), None if self.bias is None else self.bias.detach())
        self.register_parameter("weight", None)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[T, in_features]` to a new tensor `[T, out_features]`."""
        if self._packed is not None:
            return self._packed(input)
        return F.linear(input, self.weight, self.bias)


class Rotary(nn.Module):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split order of transformers."""

    frequencies: Tensor

    def __init__(self, config: DecoderConfig, *, device: torch.device) -> None:
        super().__init__()
        self._scale = config.rotary_scale
        frequencies = torch.tensor(config.rotary_frequencies, dtype=torch.float32, device=device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `rotate_`, each `[T, 1, head_dim]`, from int64 positions `[T]`."""
        # In fp32 whatever the model's data type: bf16 cannot tell position 257 from 256.
        angles = positions.float()[:, None, None] * self.frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `heads` `[T, heads, head_dim]` in place, channel i together with channel i + head_dim / 2."""
    partners = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(partners, sin)


class Attention(nn.Module):
    """Self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._num_heads = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        query_size = config.num_heads * config.head_dim
        fused_size = query_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, fused_size, bias=config.qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Map `[T, hidden_size]` to the same, and add the step's keys and values to the layer's cache."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        rotate_(heads[:, : self._num_rotated], *rotation)
        queries, key_values = heads[:, : self._num_heads], heads[:, self._num_heads :]
        write_kv(cache, key_values, attention)
        out: Tensor = self.o_proj(attend(queries, key_values, cache, attention, scale=self._scale))
        return out


class GatedMLP(nn.Module):
    """Feed-forward block with one fused projection for gate and up."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._intermediate_size = config.intermediate_size
        self._activation = ACTIVATIONS[config.activation]
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, hidden_size]` to the same."""
        gate, up = self.gate_up_proj(x).split(self._intermediate_size, -1)
        out: Tensor = self.down_proj(self._activation(gate).mul_(up))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """Map the residual stream `[T, hidden_size]` to the next layer's."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStack(nn.Module):
    """Embedding, layers and final norm; named as in transformers' checkpoints."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self, input_ids: Tensor, rotation: tuple[Tensor, Tensor], attention: AttentionMetadata, kv_cache: list[Tensor]
    ) -> Tensor:
        """Map int64 token ids `[T]` to normalised hidden states `[T, hidden_size]`."""
        x = self.embed_tokens(input_ids)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x = layer(x, rotation, attention, cache)
        hidden: Tensor = self.norm(x)
        return hidden


class Decoder(nn.Module):
    """A decoder-only language model whose parameters have the names of transformers' checkpoints, projections fused.

    Args:
        config: What it computes.
        dtype: Of parameters, activations and KV cache.
        device: Where the parameters are, with values of no meaning until they are loaded; may be "meta".
    """

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        with torch.device(device):
            self.model = DecoderStack(config).to(dtype)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False).to(dtype)
        self.rotary = Rotary(config, device=device)
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
            attention: The step's metadata, for the same T rows.
            kv_cache: One tensor for each layer (`KVLayout.shape`), changed in place.

        Returns:
            Normalised hidden states `[T, hidden_size]`; `logits` maps the rows that are needed.
        """
        rotation = self.rotary(positions, self.dtype)
        hidden: Tensor = self.model(input_ids, rotation, attention, kv_cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 `[rows, vocab_size]` from contiguous hidden states `[rows, hidden_size]`."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()

    def pack(self) -> None:
        """Reorder the weights of all linear layers for the CPU's matrix kernels, one after the other."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
