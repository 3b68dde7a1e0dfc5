"""Layers that add each row's adapter to their output, put in place of a model's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from kernels import GATED_ACTIVATIONS, Routing, scale_rows, sgmv, sgmv_embed, sgmv_swiglu
from lora_core.models.activations import gated
from lora_core.stacks import SiteStacks
from lora_core.targets import LoRASite
from lora_core.types import LoRAType


class Adapted(Enum):
    """Which of a model's layers apply adapters, whichever adapters a step has.

    What is launched is then the same for every step, as captured graphs need it: in layers that an adapter does not
    change its slot is zero. The head is not part of it, it goes by the step's adapters.
    """

    NOTHING = "nothing"
    LAYERS = "layers"
    """Products of the decoder layers."""
    EVERYTHING = "everything"
    """These, their gains (DoRA), and the embedding."""


class RoutingContext:
    """The routing of the step in progress, shared by all LoRA layers of a model; None outside a step.

    Attributes:
        routing: Of the step.
        adapted: Which layers apply adapters; None: those that an adapter of the step changes.
    """

    __slots__ = ("adapted", "routing")

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.adapted: Adapted | None = None


class LoRALayer(nn.Module):
    """A layer of the model, and the adapters in its slots.

    Semantics, for the routing's groups g of slot s and rows r, and each projection p of the layer:
        y = base(x);  y[r] += gain[s] * (y[r] - bias);  y[r, slice p] += down(x[r], A[s, block p]) @ B[s, slice p].T
    Without a routing, or where none of its slots is live in this layer, the output is `base(x)`, bit for bit, and
    nothing else runs. So are base rows in any case, and rows of slots without gain before their pair is added.

    The layer has the parameters and buffers of its base, under the base's names.
    """

    def __init__(self, base: Callable[[Tensor], Tensor], site: LoRASite, context: RoutingContext) -> None:
        """Wrap `base`.

        Args:
            base: Maps the layer's input to a new contiguous tensor `[..., OUT]`.
            site: Which layer this is, and its shapes.
            context: Where the step's routing is found.

        Raises:
            ValueError: the base's shape is not the site's.
        """
        super().__init__()
        if isinstance(base, nn.Module):
            # The base's own dictionaries, not copies: whatever moves, casts or reloads its tensors is seen by both.
            self._parameters = base._parameters
            self._buffers = base._buffers
            self._modules = base._modules
            self._non_persistent_buffers_set = base._non_persistent_buffers_set
        # Past nn.Module's registration, which would rename `weight` to `base.weight`.
        self.__dict__["base"] = base
        self.base: Callable[[Tensor], Tensor]
        self.site = site
        self.context = context
        self.slices = site.slices
        self.stacks: SiteStacks | None = None
        """The layer's slot tensors, and which slots are live; set before the first routed step."""
        self._passed: dict[str, SiteStacks] = {}
        """The stacks with which an operation's arguments were last found to fit each other."""

    @property
    def live_slots(self) -> frozenset[int]:
        """Slots whose adapter changes this layer."""
        return frozenset() if self.stacks is None else self.stacks.live_slots

    def is_live(self, routing: Routing) -> bool:
        """Whether the layer adds to any row of this routing."""
        return not routing.slots.isdisjoint(self.live_slots)

    def forward(self, x: Tensor) -> Tensor:
        """Map the layer's input, rows in the routing's order, to `[..., OUT]`."""
        y = self.base(x)
        routing = self._live_routing()
        if routing is not None:
            self._adapt(x, y if y.dim() == 2 else y.view(-1, y.shape[-1]), routing)
        return y

    def extra_repr(self) -> str:
        """Shapes, for printing the model."""
        return f"{self.site.name}, in_features={self.site.in_features}, slices={self.slices}"

    def _live_routing(self) -> Routing | None:
        """The part of the step that uses live slots of this layer; None where no row does."""
        routing, adapted = self.context.routing, self.context.adapted
        if routing is None or routing.end == 0:
            return None
        assert self.stacks is not None, "bind_inputs comes before the first routed step"
        if adapted is None or self.site.kind == "head":
            return routing.among(self.stacks.live_slots)
        is_adapted = adapted is Adapted.EVERYTHING or (adapted is Adapted.LAYERS and self.site.kind == "layer")
        return routing if is_adapted else None

    def _scaled(self, stacks: SiteStacks, routing: Routing) -> Routing | None:
        """The part of the step whose adapters scale this layer's output; None where none does."""
        if self.context.adapted is None or self.site.kind == "head":
            return routing.among(stacks.gain_slots)
        return routing if self.context.adapted is Adapted.EVERYTHING else None

    def _adapt(self, x: Tensor, y: Tensor, routing: Routing) -> None:
        """Apply the gains to y `[T, OUT]`, then add the adapters' products."""
        stacks = self.stacks
        assert stacks is not None
        scaled = self._scaled(stacks, routing)
        if scaled is not None:
            check = self._needs_check("gain", y, scaled)
            scale_rows(y, stacks.gain, getattr(self.base, "bias", None), scaled, check=check)
            self._passed["gain"] = stacks
        self._add_pair(x, y, stacks, routing, check=self._needs_check("pair", y, routing))
        self._passed["pair"] = stacks

    def _needs_check(self, operation: str, y: Tensor, routing: Routing) -> bool:
        """Whether an operation's arguments were not compared yet, since the stacks were bound, for as many rows.

        The rest of a step's routing is compared once a step, by `LoRAModelWrapper.routed`.
        """
        return self._passed.get(operation) is not self.stacks or y.shape[0] != routing.num_rows

    def _add_pair(self, x: Tensor, y: Tensor, stacks: SiteStacks, routing: Routing, *, check: bool) -> None:
        """Add the adapters' products to y `[T, OUT]`."""
        raise NotImplementedError

    def _check_base(self, in_name: str, out_name: str) -> None:
        """Raise ValueError unless the base's sizes, as far as it names them, are the site's."""
        expected = (self.site.in_features, self.site.out_features)
        found = (getattr(self.base, in_name, expected[0]), getattr(self.base, out_name, expected[1]))
        if found != expected:
            raise ValueError(
                f"{self.site.name} has ({in_name}, {out_name}) = {found}, "
                f"its projections {self.site.target.projections} have {expected}"
            )


class LoRALinear(LoRALayer):
    """A linear layer and its adapters: `down(x, A) = x @ A.T`.

    The base is an `nn.Linear` or any callable that does the same; a bias it adds must be its attribute `bias`.
    """

    def __init__(self, base: Callable[[Tensor], Tensor], site: LoRASite, context: RoutingContext) -> None:
        super().__init__(base, site, context)
        self.in_features = site.in_features
        self.out_features = site.out_features
        self._check_base("in_features", "out_features")

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Map rows `[T, K]` to the gated activation `[T, OUT / 2]` of gate and up, the halves of the layer's output.

        Where a step has a tile table, the adapters' products and the activation are one operation, unless gate and up
        are one projection to adapters.
        """
        y = self.base(x)
        routing, stacks = self._live_routing(), self.stacks
        if routing is None or stacks is None:
            return gated(y, activation)
        has_gain = self._scaled(stacks, routing) is not None
        is_one = len(self.slices) == 2 and activation in GATED_ACTIVATIONS
        if routing.tiles is None or has_gain or not is_one:
            self._adapt(x, y, routing)
            return gated(y, activation)
        check = self._needs_check("gated", y, routing)
        act = sgmv_swiglu(x, stacks.a, stacks.b, y, routing, activation, check=check)
        self._passed["gated"] = stacks
        return act

    def _add_pair(self, x: Tensor, y: Tensor, stacks: SiteStacks, routing: Routing, *, check: bool) -> None:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        sgmv(rows, stacks.a, stacks.b, y, routing, self.slices, check=check)


class LoRAEmbedding(LoRALayer):
    """A token embedding and its adapters: `down(ids, A) = A[ids]`.

    Where the base multiplies its output by a factor `embed_scale` (Gemma), so is the adapters' product, as in PEFT.
    """

    def __init__(self, base: Callable[[Tensor], Tensor], site: LoRASite, context: RoutingContext) -> None:
        super().__init__(base, site, context)
        self.num_embeddings = site.in_features
        self.embedding_dim = site.out_features
        self._check_base("num_embeddings", "embedding_dim")

    def _add_pair(self, x: Tensor, y: Tensor, stacks: SiteStacks, routing: Routing, *, check: bool) -> None:
        ids = x.reshape(-1)
        scale = getattr(self.base, "embed_scale", None)
        if scale is None:
            sgmv_embed(ids, stacks.a, stacks.b, y, routing, check=check)
            return
        # Adding minus zero keeps all bits, those of zeros too. So base rows need not be left out, and what is launched
        # does not depend on where they begin.
        delta = torch.full_like(y, -0.0)
        sgmv_embed(ids, stacks.a, stacks.b, delta, routing, check=check)
        y.add_(delta.mul_(scale))


class LoRAModelWrapper(nn.Module):
    """A model whose targets are LoRA layers; it hands them the routing, so that the model's `forward` takes none."""

    def __init__(self, model: nn.Module, context: RoutingContext) -> None:
        super().__init__()
        self.model = model
        self.context = context
        # In a tuple, which does not make them modules of the wrapper as well.
        self._layers = tuple(layer for _, layer in lora_layers(model))

    def forward(self, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        """Call the model with the step's routing in force; every argument but `routing` is passed on."""
        with self.routed(routing):
            return self.model(*args, **kwargs)

    @contextmanager
    def routed(self, routing: Routing | None, adapted: Adapted | None = None) -> Iterator[None]:
        """Put a routing in force for calls other than `forward`, such as the head's on some of the step's rows.

        Args:
            routing: Of the rows that are computed.
            adapted: Which layers apply adapters; None: those that an adapter of the step changes.

        Raises:
            ValueError: the routing is for another device, another number of slots, or a larger rank.
        """
        if routing is not None:
            self._check(routing)
        self.context.routing, self.context.adapted = routing, adapted
        try:
            yield
        finally:
            self.context.routing = self.context.adapted = None

    def needs(self, slots: frozenset[int]) -> Adapted:
        """The least of `Adapted` that is right for a step whose adapters are in these slots, the head left out."""
        if not slots:
            return Adapted.NOTHING
        for layer in self._layers:
            stacks = layer.stacks
            if stacks is None or layer.site.kind == "head":
                continue
            is_embedding = layer.site.kind == "embedding"
            if not slots.isdisjoint(stacks.gain_slots) or (is_embedding and not slots.isdisjoint(stacks.live_slots)):
                return Adapted.EVERYTHING
        return Adapted.LAYERS

    def _check(self, routing: Routing) -> None:
        """Compare a step's routing with the slot tensors: once, for they are alike in all layers."""
        stacks = self._layers[0].stacks if self._layers else None
        if stacks is None:
            return
        num_slots, _, rank = stacks.b.shape
        if len(routing.slot_ranks) != num_slots or routing.max_rank > rank:
            raise ValueError(
                f"the routing has {len(routing.slot_ranks)} slots of ranks up to {routing.max_rank}, "
                f"the model's LoRA layers {num_slots} slots of rank {rank}"
            )
        if routing.buffer.device != stacks.b.device:
            raise ValueError(f"the routing is on {routing.buffer.device}, the LoRA layers' slots on {stacks.b.device}")


def lora_layers(model: nn.Module) -> list[tuple[str, LoRALayer]]:
    """The LoRA layers with their names in the model: the embedding, by decoder layer and target, the head."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, LoRALayer)]
    return sorted(found, key=lambda item: item[1].site.index)


def lora_parameters(model: nn.Module) -> list[tuple[str, LoRAType, LoRALayer]]:
    """The slot tensors a model needs, in the order they are bound: that of `lora_layers`, and A, B, GAIN in each."""
    kinds = (LoRAType.A, LoRAType.B, LoRAType.GAIN)
    return [(name, kind, layer) for name, layer in lora_layers(model) for kind in kinds]
