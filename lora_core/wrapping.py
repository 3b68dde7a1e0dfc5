"""Finds a model's targets and puts LoRA layers in their place."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lora_core.layers import LoRAEmbedding, LoRALayer, LoRALinear, RoutingContext
from lora_core.targets import LoRASite


def wrap_targets(model: nn.Module, sites: Sequence[LoRASite], context: RoutingContext) -> None:
    """Replace every site's layer by a LoRA layer around it; the model is changed only if all of them can be.

    Args:
        model: Has one `nn.ModuleList` named `layers`, its decoder layers, with the embedding beside it; the head is
            the model's own attribute.
        sites: Every place of every target.
        context: Where the layers find the step's routing.

    Raises:
        ValueError: the decoder layers are not found or not as many as declared, a target matches nothing, is not
            callable, has another shape, or is wrapped already.
    """
    if not sites:
        return
    body, layers = _decoder_layers(model)
    num_layers = len({site.layer for site in sites if site.layer is not None})
    if num_layers and len(layers) != num_layers:
        raise ValueError(f"the model has {len(layers)} decoder layers, num_layers says {num_layers}")
    replacements: list[tuple[nn.Module, str, LoRALayer]] = []
    for site in sites:
        root = {"embedding": body, "head": model}.get(site.kind) if site.layer is None else layers[site.layer]
        parent, leaf, base = _find_target(root, site)
        kind = LoRAEmbedding if site.kind == "embedding" else LoRALinear
        replacements.append((parent, leaf, kind(base, site, context)))
    for parent, leaf, layer in replacements:
        setattr(parent, leaf, layer)


def _decoder_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the list of decoder layers, and the list."""
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
    name, layers = next(iter(found.items()))
    return model.get_submodule(name.rpartition(".")[0]), layers


def _find_target(root: nn.Module | None, site: LoRASite) -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    """The module that holds the target, the attribute it has there, and the target."""
    *parents, leaf = site.target.path.split(".")
    holder: Any = root
    for name in parents:
        holder = getattr(holder, name, None)
    base = getattr(holder, leaf, None)
    if isinstance(base, LoRALayer):
        raise ValueError(f"LoRA target {site.name} is wrapped already; a model is wrapped once")
    if not isinstance(holder, nn.Module) or not callable(base):
        raise ValueError(f"LoRA target {site.target.path!r} matches no callable layer at {site.name}")
    return holder, leaf, base
