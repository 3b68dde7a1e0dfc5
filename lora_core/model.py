"""One adapter in host memory: a PEFT folder turned into checked, scaled tensors, padded to its own largest rank."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_core.adapter_layout import AdapterPlan, plan_modules
from lora_core.adapter_tensors import TensorLoader, take_modules
from lora_core.adapter_weights import AdapterWeights
from lora_core.base_shapes import BaseShapes
from lora_core.lap_clock import LapClock
from lora_core.module_loader import load_modules
from lora_core.module_patterns import invalid_config
from lora_core.module_weights import BaseModules, ModuleWeights
from lora_core.peft_config import PeftConfig, read_peft_config
from lora_core.single_thread import single_threaded
from lora_core.tensor_keys import EMBEDDING_MODULE, HEAD_MODULE
from lora_core.types import LoRAType

_COMPARED_ROWS = 1024


class LoRAModel:
    """A PEFT adapter, ready to be copied into a slot.

    Semantics, for every adapted module m with base weight W, and with the rank r, scale c and, with DoRA, the
    magnitudes v that the adapter gives it:
        g = v / ||W + c * B @ A||, row by row      (1 without DoRA)
        module(m) = (A, g * c * B, g - 1)          (multiplied in fp32, rounded once; padded with zeros past r)
    so that PEFT's output of m is `g * base(x) + module(m).b @ module(m).a @ x`, the base's bias kept out of the factor.
    Modules are named `layers.<n>.<path>`, e.g. `layers.0.self_attn.q_proj`, `embed_tokens` and `lm_head`. All tensors
    are private copies in one piece of memory: nothing refers to the folder.

    An adapter whose files hold tensors of modules that its config does not target, or excludes, is refused: PEFT drops
    them with a warning.

    Attributes:
        name: The adapter's name.
        path: The folder it was read from.
        dtype: Data type of A and B.
        rank: Largest true rank of its modules, which all are padded to.
        ranks: True rank by module.
        target_modules: Projections it changes, sorted, e.g. `("k_proj", "q_proj")`.
        adapter_config: Its `adapter_config.json` as parsed.
        has_gain: It is a DoRA adapter.
        lora_A: `[max_lora_rank, in_features]` by key, e.g. `layers.0.self_attn.q_proj.lora_A.weight`; made when asked.
        lora_B: `[out_features, max_lora_rank]` by key; made when asked.
        lora_bias: Empty: biases are refused.
        content_hash: BLAKE3, in hex, of the config's bytes and of every tensor's name, dtype, shape and bytes, however
            they are spread over files.
        num_bytes: Host memory the tensors take.
        noop_modules: Modules whose output on a fixed input is the base's; without a base, those whose delta is zero.
        phases_s: Seconds of work on "read" (hashing included), "check", "convert" and "canary", added up over threads.
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
        base: BaseModules | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Read, check and convert the adapter.

        Args:
            name: What requests call it.
            path: Folder with `adapter_config.json` and safetensors files.
            base_dtype: Data type of the base weights; float8 bases get bfloat16 adapters.
            max_lora_rank: Largest true rank accepted.
            n_heads: Query heads of the base model.
            n_kv_heads: Key and value heads of the base model.
            head_dim: Width of one head.
            strict: Refuse tensors of modules the server does not adapt; False leaves those out.
            projections: `(out_features, in_features)` of all that adapters may change, by PEFT projection name
                (`q_proj`; the place is the one the decoder has it in) or by path inside a decoder layer
                (`self_attn.q_proj`): `embed_tokens` is `(hidden, vocabulary)`, `lm_head` `(vocabulary, hidden)`.
            num_layers: Decoder layers of the base model.
            base: The base model's layers. Without them DoRA is refused, copies of base weights are told by their
                shapes alone, and only a delta of zero is known to change nothing.
            pin_memory: Page-lock the tensors, for copies to a GPU.

        Raises:
            InvalidAdapterPath: no adapter folder can be read at the path.
            InvalidAdapter: the adapter cannot be served exactly; the message names the file, field or key.
            ValueError: the base model's own numbers disagree.
        """
        _check_heads(projections, n_heads, n_kv_heads, head_dim)
        self.name = name
        self.path = Path(path)
        self.dtype = _adapter_dtype(base_dtype)
        self.lora_bias: dict[str, Tensor] = {}

        clock = LapClock("check")
        config = read_peft_config(self.path)
        if config.use_dora and base is None:
            raise invalid_config("use_dora is true, which needs the base model's weights, and none were given")
        shapes = BaseShapes.of(projections, num_layers, knows_weights=base is not None)
        # Tensors made in inference mode could not be written to by the threads that fill them.
        with AdapterWeights(self.path) as weights, torch.inference_mode(False), torch.no_grad(), single_threaded():
            # Everything that keys and shapes can tell is checked before any tensor is read.
            plan = plan_modules(weights.tensors, config, shapes, max_lora_rank, strict=strict)
            clock.lap("check")
            self._load(weights, config, plan, base, pin_memory)
        self.phases_s["check"] += clock.phases_s["check"]

        self.adapter_config: dict[str, Any] = config.raw
        self.has_gain = config.use_dora
        self.ranks = {module.module: module.rank for module in plan.modules}
        self.rank = max(self.ranks.values())
        self.target_modules = tuple(sorted({module.projection for module in plan.modules}))
        self.lora_A: Mapping[str, Tensor] = _PaddedTensors(self._modules, LoRAType.A, max_lora_rank)
        self.lora_B: Mapping[str, Tensor] = _PaddedTensors(self._modules, LoRAType.B, max_lora_rank)

    def module(self, name: str) -> ModuleWeights | None:
        """The tensors of a module such as `layers.0.self_attn.q_proj`; None if the adapter does not change it."""
        return self._modules.get(name)

    def get(self, key: str) -> Tensor | None:
        """The tensor at a key such as `layers.0.self_attn.q_proj.lora_A.weight`, padded to `max_lora_rank`; or None."""
        return self.lora_A.get(key, self.lora_B.get(key))

    def _load(
        self, weights: AdapterWeights, config: PeftConfig, plan: AdapterPlan, base: BaseModules | None, pin_memory: bool
    ) -> None:
        arena, self._modules = take_modules(plan.modules, self.dtype, pin_memory=pin_memory)
        self.num_bytes = arena.num_bytes
        loaded = load_modules(weights, plan.modules, self._modules, base)
        self.noop_modules = loaded.noop_modules
        loader = TensorLoader(weights, base)
        for key, name in plan.copies.items():
            loader.check_copy(key, name, self.dtype)
        for first, second in plan.twins:
            loader.check_twins(first, second)
        if config.ensure_weight_tying:
            _check_tying(plan, config, loader, base)
        loader.clock.lap("check")
        self.content_hash = weights.content_hash(config.content)
        loader.clock.lap("read")
        self.phases_s = {phase: spent + loaded.phases_s[phase] for phase, spent in loader.clock.phases_s.items()}


class _PaddedTensors(Mapping[str, Tensor]):
    """One kind of tensor of all modules, in the shapes of PEFT's files, padded to a server's largest rank."""

    def __init__(self, modules: Mapping[str, ModuleWeights], kind: LoRAType, rank: int) -> None:
        self._modules = {f"{name}.{kind.value}.weight": (name, tensors) for name, tensors in modules.items()}
        self._kind = kind
        self._rank = rank

    def __getitem__(self, key: str) -> Tensor:
        name, tensors = self._modules[key]
        rank = tensors.b.shape[1]
        if self._kind is LoRAType.B:
            padded = tensors.b.new_zeros(tensors.b.shape[0], self._rank)
            padded[:, :rank] = tensors.b
            return padded
        a = tensors.a.T if name == EMBEDDING_MODULE else tensors.a
        padded = a.new_zeros(self._rank, a.shape[1])
        padded[:rank] = a
        return padded

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _check_tying(plan: AdapterPlan, config: PeftConfig, loader: TensorLoader, base: BaseModules | None) -> None:
    """Refuse an adapter whose head PEFT would change by making its pair the embedding's, or by not doing so.

    It does on a tied base, and only there.
    """
    modules = {module.module: module for module in plan.modules}
    embedding, head = modules.get(EMBEDDING_MODULE), modules.get(HEAD_MODULE)
    if embedding is None and head is None:
        return
    is_pair_tied = not config.ties_pairs or (
        embedding is not None and head is not None and loader.check_tied(embedding, head)
    )
    if is_pair_tied and not plan.needs_tied_base:
        return
    is_base_tied = base is None or _is_tied(base)
    if (is_base_tied and is_pair_tied) or not (is_base_tied or plan.needs_tied_base):
        return
    if not is_base_tied:
        raise invalid_config(
            "ensure_weight_tying is true, and the head is adapted only because the embedding is, as PEFT does it on a "
            "base with tied weights; this base's are not tied: serve the base model the adapter was trained on"
        )
    raise invalid_config(
        "ensure_weight_tying is true, and the files do not hold the pair of embed_tokens and its transpose as that of "
        "lm_head, which PEFT would make of them; save the adapter again, or set ensure_weight_tying to false if its "
        "pairs were trained apart"
    )


def _is_tied(base: BaseModules) -> bool:
    """Whether the head's weight is the embedding's, however they are stored."""
    with base.open_weight(EMBEDDING_MODULE) as embedding, base.open_weight(HEAD_MODULE) as head:
        num_rows = len(embedding.stored)
        return all(
            torch.equal(embedding.rows(start, start + _COMPARED_ROWS), head.rows(start, start + _COMPARED_ROWS))
            for start in range(0, num_rows, _COMPARED_ROWS)
        )


def _adapter_dtype(base_dtype: torch.dtype) -> torch.dtype:
    if not base_dtype.is_floating_point:
        raise ValueError(f"base_dtype is {base_dtype}, expected a floating-point type")
    return torch.bfloat16 if base_dtype.itemsize == 1 else base_dtype


def _check_heads(projections: Mapping[str, tuple[int, int]], n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    num_heads = {"q_proj": n_heads, "k_proj": n_kv_heads, "v_proj": n_kv_heads}
    for name, (out_features, _) in projections.items():
        heads = num_heads.get(name.rpartition(".")[2])
        if heads is not None and out_features != heads * head_dim:
            raise ValueError(f"{name} has {out_features} outputs, but {heads} heads of {head_dim} were given")
