"""The gated activation of a feed-forward block, with the adapters of its gate and up projections."""

import torch
from torch import Tensor

from kernels import reference
from kernels.schedule import Routing
from kernels.sgmv import check_sgmv, sgmv
from kernels.tuning import launches_dependently

GATED_ACTIVATIONS = tuple(reference.ACTIVATIONS)
"""Activations of the gate that `sgmv_swiglu` computes, by the names transformers gives them."""


def sgmv_swiglu(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    routing: Routing,
    activation: str = "silu",
    *,
    check: bool = True,
) -> Tensor:
    """Add each adapter row's low-rank delta to gate and up, and apply the gate: `sgmv`, then the activation, in one.

    Semantics, with gate and up the halves of y's columns after `sgmv(x, a_stack, b_stack, y, routing, (I, I))`:
        act = activation(gate) * up

    gate, up, the activation and the product are each rounded to y's dtype, as `F.silu(gate).mul_(up)` does. Base rows,
    those at or after `routing.end`, get it without a delta. y stays as it is.

    Args:
        x: Activations `[T, K]`, bf16, fp16 or fp32, rows grouped by adapter, base rows last.
        a_stack: One A per slot `[N, 2*R, K]`, gate's rows first. x's dtype; for fp16 on the CPU fp32.
        b_stack: One B per slot `[N, 2*I, R]`, same dtype as a_stack.
        y: The base layer's output `[T, 2*I]`, x's dtype: gate, then up.
        routing: The step's routing, of as many rows, on x's device.
        activation: "silu", or "gelu_pytorch_tanh": `gate * sigmoid(sqrt(8 / pi) * (gate + 0.044715 * gate^3))`.
        check: Whether to compare the arguments; see `kernels.sgmv.sgmv`.

    Returns:
        `[T, I]` in y's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree (both sides are named), or another activation.
    """
    if check:
        _check(x, a_stack, b_stack, y, routing, activation)
    if routing.end == 0:
        return reference.gate(y, activation)
    if routing.tiles is None:
        adapted, width = y.clone(), y.shape[1] // 2
        sgmv(x, a_stack, b_stack, adapted, routing, (width, width), check=False)
        return reference.gate(adapted, activation)
    act: Tensor = torch.ops.lora_fleet.sgmv_swiglu(
        x, a_stack, b_stack, y, routing.tiles, routing.counters, routing.block_m, routing.max_groups, activation
    )
    return act


def _check(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, activation: str) -> None:
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(GATED_ACTIVATIONS)}")
    if y.dim() != 2 or y.shape[0] != routing.num_rows or y.shape[1] % 2:
        raise ValueError(
            f"y has shape {list(y.shape)}, expected [{routing.num_rows}, 2*I], as many rows as the routing has"
        )
    width = y.shape[1] // 2
    check_sgmv(x, a_stack, b_stack, y, routing, (width, width))


def _triton_swiglu(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor | None,
    block_m: int,
    max_groups: int,
    activation: str,
) -> Tensor:
    from kernels.sgmv_launch import gated_launches

    dependent = launches_dependently(x.device, x.shape[0], max_groups)
    act, launches = gated_launches(
        x, a_stack, b_stack, y, tiles, counters, block_m, max_groups, activation, dependent=dependent
    )
    for launch in launches:
        launch.run()
    return act


def _fake_swiglu(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    tiles: Tensor,
    counters: Tensor | None,
    block_m: int,
    max_groups: int,
    activation: str,
) -> Tensor:
    return y.new_empty((y.shape[0], y.shape[1] // 2))


# One operator, so that nothing comes between its launches. It leaves its counters as it found them.
torch.library.define(
    "lora_fleet::sgmv_swiglu",
    "(Tensor x, Tensor a_stack, Tensor b_stack, Tensor y, Tensor tiles, Tensor? counters, int block_m, "
    "int max_groups, str activation) -> Tensor",
)
torch.library.impl("lora_fleet::sgmv_swiglu", ("cpu", "cuda"), _triton_swiglu)
torch.library.register_fake("lora_fleet::sgmv_swiglu", _fake_swiglu)
