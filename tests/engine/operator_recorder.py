"""What a CUDA graph does, on the CPU: operators are recorded with their tensors, and run again without their Python.

A recording has the addresses, shapes and numbers of the moment it was made, as a graph has. So what depends on the step
by another way than through the recorded tensors, such as a length that Python reads, shows as a wrong answer.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_core.engine.recorder import Run


@dataclass(frozen=True)
class _Call:
    """One operator call, and those of its results that are new memory, with their places among all."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[tuple[Tensor, int], ...]

    def replay(self) -> None:
        again = tree_leaves(self.function(*self.arguments, **self.options))
        for result, place in self.results:
            result.copy_(again[place])


def _memory(tensor: Tensor) -> int:
    # Weights that are reordered for the CPU have no storage to ask for.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _is_new(leaf: Any, held: set[int]) -> bool:
    return isinstance(leaf, Tensor) and _memory(leaf) not in held


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        # Views, and what is written in place, lie in memory of the arguments; an operator may do either.
        held = {_memory(leaf) for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)}
        results = tuple((leaf, place) for place, leaf in enumerate(tree_leaves(out)) if _is_new(leaf, held))
        self.calls.append(_Call(func, args, options, results))
        return out


class OperatorRecorder:
    """Implements `lora_core.engine.recorder.Recorder` on the CPU.

    Attributes:
        num_recordings: Recordings made.
    """

    def __init__(self) -> None:
        self.num_recordings = 0

    def record(self, run: Run) -> Run:
        """As `Recorder`. Between replays the memory of results holds NaN, so that what is not computed anew shows."""
        run()
        with _Recording() as recording:
            run()
        calls = list(recording.calls)
        self.num_recordings += 1

        def replay() -> None:
            for call in calls:
                for result, _ in call.results:
                    if result.is_floating_point():
                        result.fill_(float("nan"))
            for call in calls:
                call.replay()

        return replay
