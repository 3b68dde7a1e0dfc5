"""Slot tensors of another rank: after any writes they hold what a rank's own would."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lora_core import slot_write
from lora_core.parallel.rank_messages import MarkLive, RankMessage, WriteSlot
from lora_core.parallel.remote_stacks import RemoteStacks, make_remote_moves
from lora_core.stacks import SlotStacks
from tests.unit.adapted_model import ALL_MODULES, LM_MODULES, LM_SITES, host_adapter, module_name

NUM_SLOTS, RANK = 2, 6
ADAPTERS = [
    host_adapter(0, 6),
    host_adapter(1, 3, ("embed_tokens", "lm_head", module_name(0, "k_proj"))),
    host_adapter(2, 5, LM_MODULES, gains=LM_MODULES),
    host_adapter(3, 1, ALL_MODULES, gains=(module_name(0, "v_proj"), module_name(1, "down_proj"))),
    host_adapter(4, 4, ()),
]


class OtherRank:
    """The other end: tensors of its own, which it changes as it is told."""

    def __init__(self) -> None:
        self.stacks = SlotStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32)
        self.tensors = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.stacks.specs]
        self.stacks.bind(self.tensors, are_zero=True)

    def tell(self, message: RankMessage, payload: Any = b"") -> None:
        heard = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=RankMessage)
        match heard:
            case WriteSlot():
                make_remote_moves(heard.moves, bytearray(payload), self.tensors)
            case MarkLive():
                self.stacks.mark(heard.slot, set(heard.sites), set(heard.gain_sites))
            case _:
                raise AssertionError(heard)


def contents(stacks: SlotStacks, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    return list(tensors), [(site.live_slots, site.gain_slots) for site in stacks.bound]


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20], ids=["tensors in pieces", "tensors together"])
@settings(deadline=None)
@given(data=st.data())
def test_another_rank_holds_what_a_rank_writes_to_its_own(data: st.DataObject, chunk_bytes: int) -> None:
    """Adapters take turns in the slots, and some writes are abandoned on the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_write, "_CHUNK_BYTES", chunk_bytes)
        other, own = OtherRank(), OtherRank()
        remote = RemoteStacks(LM_SITES, NUM_SLOTS, RANK, torch.float32, other)
        for _ in range(data.draw(st.integers(1, 6))):
            slot = data.draw(st.integers(0, NUM_SLOTS - 1))
            adapter = ADAPTERS[data.draw(st.integers(0, len(ADAPTERS) - 1))]
            num_chunks = data.draw(st.sampled_from([1000, 1000, 1, 3]))
            for stacks in (remote, own.stacks):
                write = stacks.begin_write(slot, adapter)
                for _ in range(num_chunks):
                    if write.advance(0.0):
                        break
        # What an abandoned write leaves is covered by the next.
        for slot in range(NUM_SLOTS):
            for stacks in (remote, own.stacks):
                stacks.write(slot, ADAPTERS[slot + 1])
    found, found_live = contents(other.stacks, other.tensors)
    expected, expected_live = contents(own.stacks, own.tensors)
    assert all(map(torch.equal, found, expected))
    assert found_live == expected_live
    assert any(bool(tensor.any()) for tensor in found)
