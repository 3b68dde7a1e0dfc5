"""How adapters are divided among ranks, and how a slot is written on all of them.

As S-LoRA has it (arXiv 2311.03285), an adapter's products are divided as those of the layers they are added to. Where a
layer is divided along its outputs, each rank has all of A, and the rows of B and the gains of its own outputs. Where it
is divided along its inputs, each has the columns of A of its own inputs, and all of B and the gains: what a rank adds
to its part of the layer's sum, `(x_r @ A_r.T) @ B.T`, adds up over the ranks with it, as does a part that is scaled.
"""

import time
from collections.abc import Mapping, Sequence

import torch

from lora_core.models.decoder import DecoderConfig
from lora_core.models.split import linear_splits, share_of
from lora_core.module_weights import AdapterTensors, BaseModules, ModuleWeights
from lora_core.parallel.rank_process import RankProcess
from lora_core.parallel.remote_stacks import RemoteStacks
from lora_core.parallel.shard import LinearSplit, Shard
from lora_core.slot_write import SlotWrite
from lora_core.stacks import SlotStacks
from lora_core.targets import lora_sites


class AdapterShare:
    """A rank's part of an adapter, in views of the adapter's own tensors where they are in one piece."""

    def __init__(self, adapter: AdapterTensors, splits: Mapping[str, LinearSplit], shard: Shard) -> None:
        """Divide an adapter.

        Args:
            adapter: Of the whole model.
            splits: Of the model's layers, by the last part of their names.
            shard: The rank.
        """
        self._adapter = adapter
        self._splits = splits
        self._shard = shard

    @property
    def rank(self) -> int:
        """Largest true rank (of the matrices) of its modules."""
        return self._adapter.rank

    def module(self, name: str) -> ModuleWeights | None:
        """The rank's part of a module's tensors; None if the adapter does not change it."""
        weights, split = self._adapter.module(name), self._splits.get(name.rpartition(".")[2])
        if weights is None or split is None:
            return weights
        a, b, gain = weights
        if split.along == "inputs":
            return ModuleWeights(split.part(a, 1, self._shard), b, gain)
        gain = None if gain is None else split.part(gain, 0, self._shard)
        return ModuleWeights(a, split.part(b, 0, self._shard), gain)


class JointWrite:
    """The writes of one slot on all ranks; it is complete when all of them are."""

    def __init__(self, writes: Sequence[SlotWrite]) -> None:
        self._writes = writes

    @property
    def num_bytes_left(self) -> int:
        """What is not written yet, on all ranks."""
        return sum(write.num_bytes_left for write in self._writes)

    def advance(self, budget_s: float | None) -> bool:
        """Write on for about so long, None: to the end; whether all is written. See `SlotWrite.advance`."""
        end_s = None if budget_s is None else time.perf_counter() + budget_s
        for write in self._writes:
            left_s = None if end_s is None else end_s - time.perf_counter()
            if (left_s is not None and left_s <= 0) or not write.advance(left_s):
                return False
        return True


class SlotSplit:
    """Divides the slots of one manager: the first rank's own, and those of the others, which it writes as well.

    Attributes:
        sites: The first rank's share of every place that adapters may change.
        base: The whole base model's layers, that adapters are checked against.
    """

    def __init__(self, whole: DecoderConfig, followers: Sequence[RankProcess], base: BaseModules) -> None:
        """Divide nothing yet.

        Args:
            whole: The model.
            followers: The other ranks.
            base: Its layers.
        """
        self.base = base
        self._splits = linear_splits(whole)
        self._shards = [Shard(rank, 1 + len(followers)) for rank in range(1 + len(followers))]
        shares = [share_of(whole, shard) for shard in self._shards]
        self.sites, *self._other_sites = (
            lora_sites(share.targets, share.projections, share.num_layers) for share in shares
        )
        self._followers = followers
        self._others: list[RemoteStacks] = []

    def open(self, num_slots: int, rank: int, dtype: torch.dtype) -> None:
        """Take the shape of the slots: how many, of which largest rank, in which data type."""
        self._others = [
            RemoteStacks(sites, num_slots, rank, dtype, follower)
            for sites, follower in zip(self._other_sites, self._followers, strict=True)
        ]

    def begin_write(self, slot: int, adapter: AdapterTensors, own: SlotStacks) -> JointWrite:
        """Start to make a slot hold exactly this adapter on all ranks, see `SlotStacks.begin_write`.

        Args:
            slot: Which one.
            adapter: Of the whole model.
            own: The first rank's slots.

        Raises:
            ValueError: a tensor of the adapter does not fit its place.
        """
        shares = [AdapterShare(adapter, self._splits, shard) for shard in self._shards]
        stacks = [own, *self._others]
        writes = [one.begin_write(slot, share) for one, share in zip(stacks, shares, strict=True)]
        # The others' are on their way while the first rank's is written.
        return JointWrite([*writes[1:], writes[0]])
