"""What LoRA adds to one decoder layer: launches and programs, counted from the launch functions."""

from dataclasses import dataclass

from kernels.tuning import meta_device
from tests.kernels.sites import Model, Step
from tests.kernels.static.configurations import (
    Configuration,
    StepTensors,
    one_launch,
    one_launch_with_activation,
    two_launches,
    two_launches_with_activation,
)
from tests.kernels.static.targets import Target


@dataclass(frozen=True)
class LayerCost:
    """What the LoRA of one layer's four sites takes.

    Attributes:
        name: Whose kernels, and how they are launched.
        launches: Kernel launches beyond those of the base layer.
        programs: Programs of those launches.
    """

    name: str
    launches: int
    programs: int


def layer_costs(model: Model, step: Step, rank: int, target: Target) -> dict[str, LayerCost]:
    """Our ways to launch a layer's LoRA, by name; the gated activation is part of it."""
    with meta_device(target.device):
        tensors = StepTensors(step, rank)
        sites = [site for site in model.layer if site != model.gate_up]
        pairs = [c for site in sites for c in two_launches(site, tensors)]
        fused = [one_launch(site, tensors) for site in sites]
        gated_pair = list(two_launches_with_activation(model.gate_up, tensors))
        gated_fused = [one_launch_with_activation(model.gate_up, tensors)]
        return {
            "two": _cost("ours, two launches a site", [*pairs, *gated_pair]),
            "one": _cost("ours, one launch a site, two at gate_up", [*fused, *gated_pair]),
            "all": _cost("ours, one launch a site", [*fused, *gated_fused]),
        }


def _cost(name: str, configurations: list[Configuration]) -> LayerCost:
    # The base layer launches its activation by itself, which our gated kernels do for it.
    replaced = sum("swiglu" in configuration.kernel for configuration in configurations)
    return LayerCost(
        name,
        launches=len(configurations) - replaced,
        programs=sum(configuration.launch.programs for configuration in configurations),
    )
