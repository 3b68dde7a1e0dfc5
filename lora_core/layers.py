"""Linear layers that add each row's adapter to their output, put in place of a model's own."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from kernels import Routing, sgmv
from lora_core.targets import LoRASite
from lora_core.types import LoRAType


class RoutingContext:
    """The routing of the step in progress, shared by all LoRA layers of a model; None outside a step."""

    __slots__ = ("routing",)

    def __init__(self) -> None:
        self.routing: Routing | None = None


class LoRALinear(nn.Module):
    """A linear layer, and the adapters in its slots.

    Semantics, for the routing's groups g of slot s and rows r, and each projection p of the layer:
        y = base(x);  y[r, slice p] += (x[r] @ A[s, block p].T) @ B[s, slice p].T
    Without a routing, or with one whose `end` is 0, the output is `base(x)`, bit for bit.

    The layer has the parameters and buffers of its base, under the base's names.
    """

    a_stack: Tensor | None
    b_stack: Tensor | None

    def __init__(self, base: Callable[[Tensor], Tensor], site: LoRASite, context: RoutingContext) -> None:
        """Wrap `base`.

        Args:
            base: Maps `[T, K]` to a new tensor `[T, OUT]`; an `nn.Linear`, or any callable that does the same.
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
        self.in_features = site.in_features
        self.out_features = sum(site.slices)
        self.a_stack = None
        self.b_stack = None
        self._check_base(base)

    def bind(self, a_stack: Tensor, b_stack: Tensor) -> None:
        """Use these slot tensors: A `[N, S*R, K]` and B `[N, OUT, R]`, as `lora_core.stacks` lays them out."""
        self.a_stack = a_stack
        self.b_stack = b_stack

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, K]`, rows in the routing's order, to `[T, OUT]`."""
        y = self.base(x)
        routing = self.context.routing
        if routing is not None and routing.end > 0:
            assert self.a_stack is not None, "bind_inputs comes before the first routed step"
            assert self.b_stack is not None
            sgmv(x, self.a_stack, self.b_stack, y, routing, self.slices)
        return y

    def extra_repr(self) -> str:
        """Shapes, for printing the model."""
        return f"{self.site.name}, in_features={self.in_features}, slices={self.slices}"

    def _check_base(self, base: object) -> None:
        found = (getattr(base, "in_features", self.in_features), getattr(base, "out_features", self.out_features))
        if found != (self.in_features, self.out_features):
            raise ValueError(
                f"{self.site.name} has (in_features, out_features) = {found}, "
                f"its projections {self.site.target.projections} have {(self.in_features, self.out_features)}"
            )


class LoRAModelWrapper(nn.Module):
    """A model whose targets are LoRA layers; it hands them the routing, so that the model's `forward` takes none."""

    def __init__(self, model: nn.Module, context: RoutingContext) -> None:
        super().__init__()
        self.model = model
        self.context = context

    def forward(self, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        """Call the model with the step's routing in force; every argument but `routing` is passed on."""
        self.context.routing = routing
        try:
            return self.model(*args, **kwargs)
        finally:
            self.context.routing = None


def lora_layers(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    """The LoRA layers with their names in the model: by decoder layer, then in the order of the targets."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    return sorted(found, key=lambda item: (item[1].site.layer, item[1].site.order))


def lora_parameters(model: nn.Module) -> list[tuple[str, LoRAType, LoRALinear]]:
    """The slot tensors a model needs, in the order they are bound: that of `lora_layers`, A before B."""
    return [(name, kind, layer) for name, layer in lora_layers(model) for kind in (LoRAType.A, LoRAType.B)]


def wrap_targets(model: nn.Module, sites: Sequence[LoRASite], context: RoutingContext) -> None:
    """Replace every site's linear layer by a `LoRALinear` around it; the model is changed only if all of them can be.

    Args:
        model: Has one `nn.ModuleList` named `layers`, its decoder layers.
        sites: Every target of every decoder layer.
        context: Where the layers find the step's routing.

    Raises:
        ValueError: the decoder layers are not found or not as many as declared, a target matches nothing, is not
            callable, has another shape, or is wrapped already.
    """
    layers = _decoder_layers(model)
    num_layers = len({site.layer for site in sites})
    if sites and len(layers) != num_layers:
        raise ValueError(f"the model has {len(layers)} decoder layers, num_layers says {num_layers}")
    replacements: list[tuple[nn.Module, str, LoRALinear]] = []
    for site in sites:
        parent, leaf, base = _find_target(layers[site.layer], site)
        replacements.append((parent, leaf, LoRALinear(base, site, context)))
    for parent, leaf, layer in replacements:
        setattr(parent, leaf, layer)


def _decoder_layers(model: nn.Module) -> nn.ModuleList:
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "layers" and isinstance(module, nn.ModuleList)
    }
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} module lists named `layers` ({', '.join(found) or 'none'}), "
            "expected one, with the decoder layers"
        )
    return next(iter(found.values()))


def _find_target(decoder_layer: nn.Module, site: LoRASite) -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    """The module that holds the target, the attribute it has there, and the target."""
    *parents, leaf = site.target.path.split(".")
    holder: Any = decoder_layer
    for name in parents:
        holder = getattr(holder, name, None)
    base = getattr(holder, leaf, None)
    if isinstance(base, LoRALinear):
        raise ValueError(f"LoRA target {site.name} is wrapped already; a model is wrapped once")
    if not isinstance(holder, nn.Module) or not callable(base):
        raise ValueError(f"LoRA target {site.target.path!r} matches no callable layer at {site.name}")
    return holder, leaf, base
