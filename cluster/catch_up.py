"""What brings a replica that registers to where the fleet is, whatever it holds."""

from collections.abc import Collection, Mapping

from cluster.changes import Change
from cluster.entry import AdapterEntry
from lora_core.types import LoRAOperation, LoRARequest


def catch_up(
    entries: Mapping[str, AdapterEntry], epoch: int, holding: Mapping[str, int], pinned: Collection[str]
) -> list[Change]:
    """What turns a replica that holds these generations (by name) into one that has applied every change.

    Unloads come first, then loads, which take the place of other generations at once, then the ends of pins, then pins.
    Adapters still loading are included, those unloading are not. Who holds an adapter whose content is not known yet is
    asked for it, too, so that it says what it found.

    Args:
        entries: The desired adapters, whatever their state.
        epoch: Of the last change.
        holding: name -> generation of what the replica has loaded.
        pinned: Names of what it has pinned.
    """
    wanted = {name: entry for name, entry in entries.items() if entry.state != "unloading"}
    missing = sorted(
        (
            entry
            for name, entry in wanted.items()
            if holding.get(name) != entry.generation or entry.content_hash is None
        ),
        key=lambda entry: entry.generation,
    )
    # When these adapters were unloaded may be forgotten; what counts is that epochs rise along the list.
    before = missing[0].generation - 1 if missing else epoch
    unloads = [
        Change(epoch=before, request=LoRARequest(LoRAOperation.UNLOAD, name, generation=generation))
        for name, generation in holding.items()
        if name not in wanted
    ]
    lost = {entry.name for entry in missing if entry.name not in holding}
    pins = [
        Change(epoch=epoch, request=entry.pin_request())
        # A pin that ends makes room for another.
        for name, entry in sorted(wanted.items(), key=lambda item: item[1].pinned)
        if entry.pinned != (name in pinned and name not in lost)
    ]
    loads = [
        Change(epoch=entry.generation, request=entry.load_request(replace=entry.name in holding), static=entry.static)
        for entry in missing
    ]
    return unloads + loads + pins
