"""`UntoldLoads`: adapters that one replica holds, and of which the router actor may not know what their loads found."""

from collections.abc import Iterable, Set

from deployments.adapter_lanes import Step
from lora_core.types import LoRAOperation, LoRAResponse, LoRAStatus


class UntoldLoads:
    """An adapter is here from the load that went well until its outcome is told, whichever router actor takes it."""

    def __init__(self) -> None:
        self._steps: dict[str, Step] = {}

    @property
    def names(self) -> Set[str]:
        """The adapters."""
        return self._steps.keys()

    def note(self, step: Step, response: LoRAResponse | None) -> None:
        """A step has ended, so; None where nobody is to be told how."""
        name, operation = step.change.request.lora_name, step.change.request.operation
        if operation not in (LoRAOperation.LOAD, LoRAOperation.UNLOAD):
            return
        self._steps.pop(name, None)
        if operation is LoRAOperation.LOAD and response is not None and response.status is LoRAStatus.SUCCESS:
            self._steps[name] = step

    def told(self, steps: Iterable[Step]) -> None:
        """The router actor has been told of these."""
        for step in steps:
            name = step.change.request.lora_name
            if self._steps.get(name) is step:
                del self._steps[name]
