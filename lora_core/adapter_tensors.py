"""An adapter's tensors on their way from files to host memory: checked, scaled, rounded once."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_core import dora
from lora_core.adapter_layout import ModulePlan, twin_conflict
from lora_core.adapter_weights import AdapterWeights, BlockBuffer, Destination
from lora_core.arena import HostArena, aligned_bytes
from lora_core.errors import InvalidAdapter
from lora_core.lap_clock import LapClock
from lora_core.module_weights import BaseModules, ModuleWeights


def take_modules(
    plans: Sequence[ModulePlan], dtype: torch.dtype, *, pin_memory: bool
) -> tuple[HostArena, dict[str, ModuleWeights]]:
    """Allocate one arena, and take every module's tensors from it, of the largest rank, their values unspecified."""
    rank = max(plan.rank for plan in plans)
    shapes = [_shapes(plan, rank, dtype) for plan in plans]
    arena = HostArena(sum(aligned_bytes(*one) for of_module in shapes for one in of_module), pin_memory=pin_memory)
    modules = {}
    for plan, of_module in zip(plans, shapes, strict=True):
        a, b, *gain = (arena.take(*one) for one in of_module)
        modules[plan.module] = ModuleWeights(a, b, gain[0] if gain else None)
    return arena, modules


def _shapes(plan: ModulePlan, rank: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    out_features, in_features = plan.shape
    a_shape = (in_features, rank) if plan.is_embedding else (rank, in_features)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [(a_shape, dtype), ((out_features, rank), dtype)]
    return shapes if plan.magnitude_key is None else [*shapes, ((out_features,), torch.float32)]


class TensorLoader:
    """Fills modules from the open files of an adapter; for one thread.

    Attributes:
        clock: Time spent on the phases read, check, convert and canary; the last is the caller's.
    """

    def __init__(self, weights: AdapterWeights, base: BaseModules | None) -> None:
        """Load from `weights`; DoRA and copies of base weights are about the weights of `base`."""
        self._weights = weights
        self._base = base
        self._buffer = BlockBuffer()
        self.clock = LapClock("read", "check", "convert", "canary")

    def fill(self, plan: ModulePlan, module: ModuleWeights) -> None:
        """Read a module's tensors into `module`, and fill what is past their rank with zeros.

        Raises:
            InvalidAdapter: a value is not finite, or not in the base dtype once scaled; the file changed meanwhile.
        """
        a, b = module.a.T if plan.is_embedding else module.a, module.b
        if plan.rank < b.shape[1]:
            a[plan.rank :].zero_()
            b[:, plan.rank :].zero_()
            a, b = a[: plan.rank], b[:, : plan.rank]
        if module.gain is not None:
            self._fill_dora(plan, a, b, module.gain)
            return
        # A part of an embedding's columns, written transposed, would touch all of its rows.
        self._convert(plan.a_key, a, 1.0, whole=plan.is_embedding)
        self._convert(plan.b_key, b, plan.scale)

    def check_copy(self, key: str, module: str, dtype: torch.dtype) -> None:
        """Refuse a copy of a base weight that is not the base's, which PEFT would put in the base's place.

        The copy may be rounded to another data type than the base's.

        Raises:
            InvalidAdapter: values differ; the file changed meanwhile.
        """
        if self._base is None:
            return
        with self._base.open_weight(module) as weight:
            for start, rows in self._weights.blocks(key, self._buffer):
                self.clock.lap("read")
                expected = weight.rows(start, start + len(rows))
                if not torch.equal(rows.to(dtype).float(), expected) and not torch.equal(rows, expected.to(rows.dtype)):
                    raise InvalidAdapter(
                        f"{key}: a copy of {module}'s weight whose values are not this base model's, expected the same "
                        "(PEFT would replace the base's weight): serve the base model it was trained on, or leave it "
                        "out"
                    )
                self.clock.lap("check")

    def check_twins(self, first: str, second: str) -> None:
        """Refuse two tensors for one place that are not the same, of which PEFT would load either.

        Raises:
            InvalidAdapter: values differ; the file changed meanwhile.
        """
        self.clock.lap("check")
        if not torch.equal(self._weights.whole(first), self._weights.whole(second)):
            raise twin_conflict(first, second)
        self.clock.lap("check")

    def check_tied(self, embedding: ModulePlan, head: ModulePlan) -> bool:
        """Whether the head's pair is the embedding's, transposed, as in a tied model."""
        self.clock.lap("check")
        read = self._weights.whole
        is_tied = torch.equal(read(embedding.a_key), read(head.b_key).T) and torch.equal(
            read(embedding.b_key), read(head.a_key).T
        )
        self.clock.lap("check")
        return is_tied

    def _convert(self, key: str, destination: Tensor, factor: float, *, whole: bool = False) -> None:
        """Write `factor` times a tensor to `destination`, block by block, or in one block."""
        self.clock.lap("convert")
        info = self._weights.tensors[key]
        buffer: BlockBuffer | Destination = self._buffer
        if is_in_place := info.torch_dtype is destination.dtype and destination.is_contiguous():
            buffer = Destination(destination)
        elif whole:
            buffer = BlockBuffer(info.num_bytes)
        for start, rows in self._weights.blocks(key, buffer):
            self.clock.lap("read")
            part = rows if is_in_place else destination[start : start + rows.shape[0]]
            _round_scaled(rows, factor, part)
            self.clock.lap("convert")
            if not _is_finite(part):
                self._refuse_values(key, factor, destination.dtype)
            self.clock.lap("check")

    def _fill_dora(self, plan: ModulePlan, a: Tensor, b: Tensor, gain: Tensor) -> None:
        assert self._base is not None
        assert plan.magnitude_key is not None
        keys = (plan.a_key, plan.b_key, plan.magnitude_key)
        exact_a, exact_b, magnitude = (self._read_fp32(key) for key in keys)
        norms = dora.column_norms if plan.is_embedding else dora.row_norms
        with self._base.open_weight(plan.module) as weight:
            lengths = norms(weight, exact_a, exact_b, plan.scale)
        if num_zero := int((lengths == 0).sum()):
            raise InvalidAdapter(
                f"{plan.magnitude_key}: {num_zero} of {len(lengths)} output rows of {plan.module}'s adapted weight are "
                "zero and have no direction for DoRA to scale, expected none"
            )
        factor = magnitude / lengths
        torch.sub(factor, 1, out=gain)
        a.copy_(exact_a)
        b.copy_(exact_b.mul_((factor * plan.scale)[:, None]))
        self.clock.lap("convert")
        for key, tensor in zip(keys, (a, b, gain), strict=True):
            if not _is_finite(tensor):
                raise _overflow(key, tensor, f"scale {plan.scale:g} times DoRA's factor")
        self.clock.lap("check")

    def _read_fp32(self, key: str) -> Tensor:
        self.clock.lap("convert")
        tensor = self._weights.whole(key).float()
        self.clock.lap("read")
        if not _is_finite(tensor):
            raise _non_finite(key, tensor)
        self.clock.lap("check")
        return tensor

    def _refuse_values(self, key: str, factor: float, dtype: torch.dtype) -> None:
        tensor = self._weights.whole(key)
        if not _is_finite(tensor):
            raise _non_finite(key, tensor)
        raise _overflow(key, (tensor.float() * factor).to(dtype), f"scale {factor:g}")


def _round_scaled(rows: Tensor, factor: float, destination: Tensor) -> None:
    """`destination[:] = rows * factor`, multiplied in fp32 and rounded once; both may be one tensor."""
    if destination.dtype is torch.float32:
        if rows is not destination:
            destination.copy_(rows)
        if factor != 1:
            destination.mul_(factor)
        return
    # Torch multiplies half-precision values in fp32, but rounds the product to their type before any other.
    exact = rows if rows.dtype is destination.dtype else rows.float()
    if factor != 1:
        torch.mul(exact, factor, out=destination)
    elif exact is not destination:
        destination.copy_(exact)


def _is_finite(tensor: Tensor) -> bool:
    # A sum is finite only if all its terms are, and costs a fraction of looking at each. Sums of fp16 overflow soon.
    total = tensor.sum(dtype=torch.float32) if tensor.dtype is torch.float16 else tensor.sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def _count_non_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def _non_finite(key: str, tensor: Tensor) -> InvalidAdapter:
    return InvalidAdapter(f"{key}: {_count_non_finite(tensor)} NaN or infinite values, expected none")


def _overflow(key: str, tensor: Tensor, scale: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"{key}: {_count_non_finite(tensor)} values overflow {tensor.dtype} at {scale}; "
        "serve the base model in a wider dtype"
    )
