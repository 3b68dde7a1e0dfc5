"""Makes Triton's interpreter exact in bfloat16, for tests.

The interpreter keeps bf16 as uint16 and lets numpy work on the bit patterns: sums and products are garbage and rounding
truncates (triton-lang/triton#11584, closed as unsupported). Here operands are widened to fp32 and results rounded to
nearest even, which is what the hardware does. Holds for triton 3.6 to 3.9; on 3.6 it also repairs loops with a run-time
bound, which numpy 2.4 refuses.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_CASTS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")


def is_active() -> bool:
    """Whether kernels run under the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def install() -> None:
    """Patch the interpreter; a second call does nothing. Call it before a kernel runs, after triton is imported."""
    from triton.runtime import interpreter

    if not is_active() or getattr(interpreter.InterpreterBuilder, "is_exact_in_bf16", False):
        return
    interpreter.InterpreterBuilder.is_exact_in_bf16 = True
    _patch_arithmetic(interpreter)
    _patch_casts(interpreter)
    _patch_index(interpreter)
    _drop_dependent_launch()


def widen(bits: Array) -> Array:
    """fp32 values of bf16 bit patterns (uint16)."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def narrow(values: Array) -> Array:
    """bf16 bit patterns (uint16) of fp32 values, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    patterns: Array = np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return patterns


def _is_bf16(handle: Any) -> bool:
    import triton.language as tl

    return bool(handle.dtype.scalar == tl.bfloat16)


def _patch_arithmetic(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_dot, plain_binary, plain_unary = builder.create_dot, builder.binary_op, builder.unary_op
    plain_fma = builder.create_fma

    def to_fp32(handle: Any) -> Any:
        return handle_of(widen(handle.data), tl.float32) if _is_bf16(handle) else handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain_dot(self, to_fp32(a), to_fp32(b), d, *rest)

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Array]) -> Any:
        if not (_is_bf16(left) and _is_bf16(right)):
            return plain_binary(self, left, right, op)
        result = op(widen(left.data), widen(right.data))
        if result.dtype == np.bool_:
            return handle_of(result, tl.int1)
        return handle_of(narrow(result), tl.bfloat16)

    def unary_op(self: Any, value: Any, op: Callable[..., Array]) -> Any:
        if not _is_bf16(value):
            return plain_unary(self, value, op)
        return handle_of(narrow(op(widen(value.data))), tl.bfloat16)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(x):
            return plain_fma(self, x, y, z)
        return handle_of(narrow(widen(x.data) * widen(y.data) + widen(z.data)), tl.bfloat16)

    builder.create_dot, builder.create_fma = create_dot, create_fma
    builder.binary_op, builder.unary_op = binary_op, unary_op


def _patch_casts(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        was, is_now = source.dtype.scalar, to.scalar
        if was == tl.bfloat16 != is_now:
            wide = handle_of(widen(source.data), tl.float32)
            return wide if is_now == tl.float32 else plain_cast(self, wide, to)
        if is_now == tl.bfloat16 != was:
            return handle_of(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return plain_cast(self, source, to)

    def create_cast(self: Any, source: Any, to: Any) -> Any:
        return self.cast_impl(source, to)

    builder.cast_impl = cast_impl
    for name in _CASTS:
        setattr(builder, f"create_{name}", create_cast)


def _patch_index(interpreter: Any) -> None:
    """numpy from 2.4 on refuses `int(array([n]))`, which triton 3.6 does for the bound of a loop."""
    plain_patch = interpreter._patch_lang_tensor

    def index(tensor: Any) -> int:
        return int(tensor.handle.data.reshape(-1)[0])

    def patch(tensor: Any, *scope: Any) -> None:
        plain_patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", index)

    interpreter._patch_lang_tensor = patch


def _drop_dependent_launch() -> None:
    """Programmatic dependent launch is inline assembly; on one thread of control there is nothing to wait for."""
    from triton.language.extra import cuda

    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda *args, **options: None)
