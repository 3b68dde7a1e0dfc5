"""Other projects' kernels as configurations to compile, recorded from their own launch functions."""

import torch
from torch import Tensor

from kernels import Routing, build_routing
from tests.kernels.peers import Peer
from tests.kernels.sites import Model, Site, Step
from tests.kernels.static.configurations import Configuration
from tests.kernels.static.layer import LayerCost
from tests.kernels.static.recording import Recording, recorded


def even_routing(step: Step, rank: int) -> Routing:
    """A step whose rows are shared out evenly among as many adapters as it can have."""
    rows = step.num_rows // step.num_groups
    return build_routing(
        list(range(step.num_groups)),
        list(range(0, step.num_rows + 1, rows)),
        [rank] * step.num_groups,
        num_rows=step.num_rows,
        max_groups=step.num_groups,
        device=torch.device("cpu"),
    )


def record_site(peer: Peer, site: Site, routing: Routing, rank: int) -> Recording:
    """What a peer launches at a site in every step after the first."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    num_slots = len(routing.slot_ranks)
    with recorded():
        run = peer.bind(
            routing,
            empty(routing.num_rows, site.in_features),
            empty(num_slots, len(site.slices) * rank, site.in_features),
            empty(num_slots, site.out_features, rank),
            empty(routing.num_rows, site.out_features),
            site.slices,
        )
        # The first step fills the peer's caches: pointer tables, routes.
        run()
    with recorded() as recording:
        run()
    return recording


def peer_layer(peer: Peer, model: Model, step: Step, rank: int) -> tuple[LayerCost, list[Configuration]]:
    """What a peer's LoRA of one layer takes, and its launches."""
    routing = even_routing(step, rank)
    recordings = {site: record_site(peer, site, routing, rank) for site in model.layer}
    configurations = [
        Configuration(f"{peer.name} {launch.kernel.fn.__name__.strip('_')}", _shape(site, step, rank), launch)
        for site, recording in recordings.items()
        for launch in recording.launches
    ]
    cost = LayerCost(
        peer.name,
        launches=len(configurations) + sum(recording.num_torch_kernels for recording in recordings.values()),
        programs=sum(configuration.launch.programs for configuration in configurations),
    )
    return cost, configurations


def _shape(site: Site, step: Step, rank: int) -> str:
    return f"{site.model} {site.name} bf16 r={rank} {step}"
