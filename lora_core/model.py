"""One adapter in host memory: a PEFT folder turned into checked, scaled, padded tensors."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_core.adapter_layout import BaseShapes, ModulePlan, plan_modules
from lora_core.adapter_weights import AdapterWeights
from lora_core.errors import InvalidAdapter
from lora_core.peft_config import PeftConfig, read_peft_config
from lora_core.types import LoRAType


class LoRAModel:
    """A PEFT adapter, ready to be copied into a slot.

    Semantics, for every adapted module m with the rank r and scale c that PEFT gives it:
        lora_A[m + ".lora_A.weight"][:r] = A            (rows past r are zero)
        lora_B[m + ".lora_B.weight"][:, :r] = c * B     (columns past r are zero; multiplied in fp32, rounded once)
    so that `lora_B @ lora_A` is PEFT's delta weight of m. Modules are named `layers.<n>.<path>`, e.g.
    `layers.0.self_attn.q_proj`. All tensors are private copies in the base dtype: nothing refers to the folder.

    An adapter whose files hold tensors of modules that its config does not target, or excludes, is refused: PEFT drops
    them with a warning.

    Attributes:
        name: The adapter's name.
        path: The folder it was read from.
        dtype: Data type of the tensors.
        rank: Largest true rank of its modules.
        ranks: True rank by module.
        target_modules: Projections it changes, sorted, e.g. `("k_proj", "q_proj")`.
        adapter_config: Its `adapter_config.json` as parsed.
        lora_A: `[max_lora_rank, in_features]` by key.
        lora_B: `[out_features, max_lora_rank]` by key.
        lora_bias: Empty: biases are refused.
        content_hash: SHA-256, in hex, of the config's and the weight files' bytes.
        num_bytes: Host memory the tensors take.
    """

    def __init__(
        self,
        name: str,
        path: str | Path,
        base_dtype: torch.dtype,
        max_lora_rank: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        strict: bool = True,
        *,
        projections: Mapping[str, tuple[int, int]],
        num_layers: int,
        embeddings: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Read, check and convert the adapter.

        Args:
            name: What requests call it.
            path: Folder with `adapter_config.json` and safetensors files.
            base_dtype: Data type of the base weights; float8 bases get bfloat16 adapters.
            max_lora_rank: Rank R that tensors are padded to; a larger true rank is refused.
            n_heads: Query heads of the base model.
            n_kv_heads: Key and value heads of the base model.
            head_dim: Width of one head.
            strict: Refuse tensors of modules the server does not adapt; False leaves those out.
            projections: `(out_features, in_features)` by PEFT projection name.
            num_layers: Decoder layers of the base model.
            embeddings: Shapes of `embed_tokens` and `lm_head`, which copies in the adapter must have.

        Raises:
            InvalidAdapterPath: no adapter folder can be read at the path.
            InvalidAdapter: the adapter cannot be served exactly; the message names the file, field or key.
            ValueError: the base model's own numbers disagree.
        """
        _check_heads(projections, n_heads, n_kv_heads, head_dim)
        self.name = name
        self.path = Path(path)
        self.dtype = _adapter_dtype(base_dtype)
        self.lora_A: dict[str, Tensor] = {}
        self.lora_B: dict[str, Tensor] = {}
        self.lora_bias: dict[str, Tensor] = {}
        self._max_lora_rank = max_lora_rank
        self._strict = strict

        config = read_peft_config(self.path)
        plans = self._load(config, BaseShapes(projections, num_layers, embeddings or {}))

        self.adapter_config: dict[str, Any] = config.raw
        self.ranks = {plan.module: plan.rank for plan in plans}
        self.rank = max(self.ranks.values())
        self.target_modules = tuple(sorted({plan.projection for plan in plans}))
        self.num_bytes = sum(tensor.nbytes for tensor in (*self.lora_A.values(), *self.lora_B.values()))

    def get(self, key: str) -> Tensor | None:
        """The tensor at a key such as `layers.0.self_attn.q_proj.lora_A.weight`; None if the adapter has none."""
        return self.lora_A.get(key, self.lora_B.get(key))

    def _load(self, config: PeftConfig, base: BaseShapes) -> list[ModulePlan]:
        digest = hashlib.sha256(config.content)
        with AdapterWeights(self.path) as weights:
            # Everything that keys and shapes can tell is checked before any tensor is read.
            plans = plan_modules(weights.tensors, config, base, self._max_lora_rank, strict=self._strict)
            tensors = weights.read({key for plan in plans for key in (plan.a_key, plan.b_key)}, digest.update)
        self.content_hash = digest.hexdigest()
        for plan in plans:
            self._add(plan, tensors.pop(plan.a_key), tensors.pop(plan.b_key))
        return plans

    def _add(self, plan: ModulePlan, a: Tensor, b: Tensor) -> None:
        for key, tensor in ((plan.a_key, a), (plan.b_key, b)):
            if not _is_finite(tensor):
                raise InvalidAdapter(f"{key}: {_count_non_finite(tensor)} NaN or infinite values, expected none")
        padded_a = torch.zeros(self._max_lora_rank, a.shape[1], dtype=self.dtype)
        padded_a[: plan.rank].copy_(a)
        padded_b = torch.zeros(b.shape[0], self._max_lora_rank, dtype=self.dtype)
        padded_b[:, : plan.rank].copy_(b.float() * plan.scale)
        for key, tensor in ((plan.a_key, padded_a), (plan.b_key, padded_b)):
            if not _is_finite(tensor):
                raise InvalidAdapter(
                    f"{key}: {_count_non_finite(tensor)} values overflow {self.dtype} at scale {plan.scale:g}; "
                    "serve the base model in a wider dtype"
                )
        self.lora_A[f"{plan.module}.{LoRAType.A.value}.weight"] = padded_a
        self.lora_B[f"{plan.module}.{LoRAType.B.value}.weight"] = padded_b


def _is_finite(tensor: Tensor) -> bool:
    # A sum is finite only if all its terms are, and costs a fraction of looking at each.
    return math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(torch.isfinite(tensor).all())


def _count_non_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def _adapter_dtype(base_dtype: torch.dtype) -> torch.dtype:
    if not base_dtype.is_floating_point:
        raise ValueError(f"base_dtype is {base_dtype}, expected a floating-point type")
    return torch.bfloat16 if base_dtype.itemsize == 1 else base_dtype


def _check_heads(projections: Mapping[str, tuple[int, int]], n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    for name, heads in (("q_proj", n_heads), ("k_proj", n_kv_heads), ("v_proj", n_kv_heads)):
        if name in projections and projections[name][0] != heads * head_dim:
            raise ValueError(f"{name} has {projections[name][0]} outputs, but {heads} heads of {head_dim} were given")
