"""Checks of every operation against its reference: exact values where the only rounding is the last, then random ones.

Cases are those of the kernels' tests, with NaN wherever nothing may be read, scratch memory included.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels import (
    GATED_ACTIVATIONS,
    Routing,
    build_routing,
    reference,
    sgmv,
    sgmv_expand,
    sgmv_shrink,
    sgmv_swiglu,
)
from tests.kernels.cases import POPULARITIES, Case, make_case, popular_groups, with_random_values
from tests.kernels.paged_cases import make_paged_case
from tests.kernels.sites import LLAMA_3_8B, Site
from tests.kernels.test_embedding import embed_case
from tests.kernels.test_gain import gain_case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIXED_RANKS = [16, 8, 1, 16, 5, 12, 0, 3]
EIGHT_ROWS = [(slot, 1) for slot in range(8)]

Features = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """Something to be shown about an operation; `run` raises where it does not hold."""

    operation: str
    about: str
    run: Callable[[], None]


def name_of(dtype: torch.dtype) -> str:
    """bfloat16, float16, float32."""
    return str(dtype).removeprefix("torch.")


def require_close(result: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Equal up to roundings of the result's dtype; in fp32 up to sums in another order, far nearer than TF32's."""
    error = (result.float() - expected.float()).abs()
    allowed = 5e-5 if result.dtype == torch.float32 else roundings * torch.finfo(result.dtype).eps
    worst = (error - allowed * expected.float().abs().clamp_min(1)).max().item()
    # NaN compares as false.
    assert worst <= 0, f"largest error {error.max().item():.3g}, at most {allowed:.3g} of the value is allowed"


def sgmv_checks(is_small: bool) -> Iterator[Check]:
    """Exact values over popularities, ranks and row tiles; then random ones at the sites of a large model."""
    for dtype in DTYPES:
        for block_m, popularity in batches(is_small):
            about = f"{name_of(dtype)} {popularity} block_m={block_m}"
            yield Check("sgmv", about, partial(check_exact, dtype, block_m, popularity))
        yield Check("sgmv halves", name_of(dtype), partial(check_halves, dtype))
        for site in () if is_small else LLAMA_3_8B.layer:
            for groups in (EIGHT_ROWS, [(5, 40), (2, 1), (0, 300)]):
                about = f"{name_of(dtype)} {site.model} {site.name} T={1 + sum(rows for _, rows in groups)}"
                yield Check("sgmv", about, partial(check_random, site, groups, dtype))


def batches(is_small: bool) -> list[tuple[int, str]]:
    """Rows of a tile, and which adapters the rows use."""
    return list(itertools.product(row_tiles(is_small), ("zipf:1.5",) if is_small else POPULARITIES))


def row_tiles(is_small: bool) -> tuple[int, ...]:
    """Rows of a tile."""
    return (8,) if is_small else (8, 16, 64)


def check_exact(dtype: torch.dtype, block_m: int, popularity: str) -> None:
    """Equal to the reference to the bit, base rows untouched."""
    small_case(dtype, block_m, popularity).check()


def small_case(dtype: torch.dtype, block_m: int, popularity: str) -> Case:
    """A fused site of three slices and mixed ranks."""
    return make_case(
        popular_groups(popularity, 8 if popularity == "distinct" else 21, 8),
        ranks=MIXED_RANKS,
        max_rank=16,
        in_features=160,
        slices=(64, 32, 32),
        dtype=dtype,
        base_rows=3,
        block_m=block_m,
    )


def make_case_of(site: Site, groups: list[tuple[int, int]], dtype: torch.dtype) -> Case:
    """A site of a real model: 8 slots of rank 16 or less, and a base row."""
    return make_case(
        groups,
        ranks=[16, 16, 8, 16, 16, 13, 16, 16],
        max_rank=16,
        in_features=site.in_features,
        slices=site.slices,
        dtype=dtype,
        base_rows=1,
        block_m=8 if all(rows == 1 for _, rows in groups) else 64,
    )


def check_random(site: Site, groups: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Random values agree within a rounding, and base rows keep their bits."""
    case = with_random_values(make_case_of(site, groups, dtype))
    result, end = case.result(), case.routing.end
    require_close(result[:end], case.expected()[:end])
    assert torch.equal(result[end:], case.y[end:]), "base rows changed"


def check_halves(dtype: torch.dtype) -> None:
    """The two halves, called one by one: the planes add up to A's product, and give y."""
    case = small_case(dtype, 8, "uniform")
    planes = sgmv_shrink(case.x, case.a_stack, case.routing, len(case.slices))
    expected = reference.sgmv_shrink(case.x, case.a_stack, case.routing, len(case.slices))[0]
    rank = case.b_stack.shape[2]
    for slot, start, stop in case.routing.groups:
        for first in range(0, planes.shape[2], rank):
            live = slice(first, first + case.routing.slot_ranks[slot])
            assert torch.equal(planes[:, start:stop, live].sum(0), expected[start:stop, live]), "planes differ"
    y = case.y.clone()
    sgmv_expand(planes, case.b_stack, y, case.routing, case.slices)
    assert torch.equal(y, case.expected()), "y differs"


def row_checks(is_small: bool) -> Iterator[Check]:
    """Embeddings and gains."""
    for dtype, block_m in itertools.product(DTYPES, row_tiles(is_small)):
        about = f"{name_of(dtype)} block_m={block_m}"
        yield Check("sgmv_embed", about, partial(check_embed, dtype, block_m))
        for has_bias in (True,) if is_small else (True, False):
            yield Check("scale_rows", f"{about} bias={has_bias}", partial(check_gain, dtype, block_m, has_bias))


def check_embed(dtype: torch.dtype, block_m: int) -> None:
    """Equal to the reference to the bit; ids of no token read nothing."""
    embed_case([(2, 3), (1, 0), (0, 9)], ranks=[12, 0, 5], dtype=dtype, block_m=block_m).check()


def check_gain(dtype: torch.dtype, block_m: int, has_bias: bool) -> None:
    """Equal to the reference to the bit."""
    gain_case([(2, 3), (1, 0), (0, 9)], ranks=[3, 1, 2], dtype=dtype, has_bias=has_bias, block_m=block_m).check()


def swiglu_checks(is_small: bool) -> Iterator[Check]:
    """The gated activation: mixed ranks and base rows, then a large model's widths."""
    for dtype in DTYPES:
        for activation in GATED_ACTIVATIONS[:1] if is_small else GATED_ACTIVATIONS:
            for block_m in row_tiles(is_small):
                about = f"{name_of(dtype)} {activation} block_m={block_m}"
                yield Check("sgmv_swiglu", about, partial(check_mixed_gate, dtype, activation, block_m))
        if not is_small:
            yield Check("sgmv_swiglu", f"{name_of(dtype)} {LLAMA_3_8B.name} T=9", partial(check_large_gate, dtype))


def check_mixed_gate(dtype: torch.dtype, activation: str, block_m: int, one_launch: bool = False) -> None:
    """Groups of one row and of several, of mixed ranks, and base rows."""
    check_gate(mixed_gate_case(dtype, block_m), activation, one_launch)


def mixed_gate_case(dtype: torch.dtype, block_m: int) -> Case:
    """Groups of one row and of several, of mixed ranks, and base rows."""
    return gated_case([(3, 5), (7, 1), (1, 9)], 160, 48, dtype, block_m, base_rows=3)


def gate_of(dtype: torch.dtype, block_m: int, one_launch: bool) -> torch.Tensor:
    """What `sgmv_swiglu` gives."""
    case = mixed_gate_case(dtype, block_m)
    routing = with_counters(case) if one_launch else case.routing
    return sgmv_swiglu(case.x, case.a_stack, case.b_stack, case.y, routing, "silu")


def check_large_gate(dtype: torch.dtype) -> None:
    """A decode step of a large model."""
    site = LLAMA_3_8B.gate_up
    case = gated_case(EIGHT_ROWS, site.in_features, site.slices[0], dtype, 8, base_rows=1)
    check_gate(with_random_values(case), "silu")


def gated_case(
    groups: list[tuple[int, int]], in_features: int, width: int, dtype: torch.dtype, block_m: int, base_rows: int
) -> Case:
    """A fused gate and up projection of mixed ranks."""
    return make_case(
        groups,
        ranks=MIXED_RANKS,
        max_rank=16,
        in_features=in_features,
        slices=(width, width),
        dtype=dtype,
        base_rows=base_rows,
        block_m=block_m,
    )


def check_gate(case: Case, activation: str, one_launch: bool = False) -> None:
    """The gated activation agrees with the reference within a few roundings, in base rows too; y keeps its bits."""
    y = case.y.clone()
    routing = with_counters(case) if one_launch else case.routing
    act = sgmv_swiglu(case.x, case.a_stack, case.b_stack, y, routing, activation)
    expected = reference.sgmv_swiglu(case.x, case.a_stack, case.b_stack, case.y, case.routing, activation)
    # Gate, activation and product are rounded one after the other.
    require_close(act, expected, roundings=4)
    assert torch.equal(y, case.y), "y changed"


def one_launch_checks(is_small: bool) -> Iterator[Check]:
    """Shrink and expand in one launch, whose programs wait for each other."""
    repeats = 1 if is_small else 20
    for dtype in DTYPES:
        for block_m, popularity in batches(is_small):
            about = f"{name_of(dtype)} {popularity} block_m={block_m}"
            yield Check("one launch", about, partial(check_one_launch_exact, dtype, block_m, popularity, repeats))
        gate = partial(check_mixed_gate, dtype, "silu", 8, one_launch=True)
        yield Check("one launch", f"{name_of(dtype)} gated", gate)
        for site in () if is_small else LLAMA_3_8B.layer:
            about = f"{name_of(dtype)} {site.model} {site.name} T=9"
            yield Check("one launch", about, partial(check_one_launch_large, site, dtype, repeats))


def check_one_launch_exact(dtype: torch.dtype, block_m: int, popularity: str, repeats: int) -> None:
    """A fused site of mixed ranks."""
    check_one_launch(small_case(dtype, block_m, popularity), repeats)


def check_one_launch_large(site: Site, dtype: torch.dtype, repeats: int) -> None:
    """A large model's site: more programs than the device starts at once."""
    check_one_launch(make_case_of(site, EIGHT_ROWS, dtype), repeats)


def check_one_launch(case: Case, repeats: int) -> None:
    """Every repeat equals the reference to the bit and leaves the counters as it found them."""
    routing, expected = with_counters(case), case.expected()
    assert routing.counters is not None
    for repeat in range(repeats):
        y = case.y.clone()
        sgmv(case.x, case.a_stack, case.b_stack, y, routing, case.slices)
        assert torch.equal(y, expected), f"run {repeat}: largest error {(y.float() - expected.float()).abs().max()}"
        assert not routing.counters.any(), f"run {repeat}: counters are not zero afterwards"


def with_counters(case: Case) -> Routing:
    """The case's routing, with one launch an operation."""
    routing = case.routing
    return build_routing(
        [group.slot for group in routing.groups],
        [0, *(group.stop for group in routing.groups)],
        routing.slot_ranks,
        num_rows=routing.num_rows,
        max_groups=routing.max_groups,
        device=routing.buffer.device,
        block_m=routing.block_m,
        one_launch=True,
    )


def attention_checks(is_small: bool) -> Iterator[Check]:
    """Decoding rows and chunks with a past, over head sizes, windows and soft caps."""
    both: Features = {"window": 129, "softcap": 30.0}
    cases: list[tuple[int, Features]] = [
        *((head_dim, {}) for head_dim in (64, 80, 128, 256)),
        *((head_dim, both) for head_dim in (64, 128, 256)),
        (64, {"window": 129}),
        (64, {"softcap": 30.0}),
    ]
    for dtype, (head_dim, features) in itertools.product(DTYPES, [(64, both)] if is_small else cases):
        about = " ".join([name_of(dtype), f"head={head_dim}", *(f"{name}={value}" for name, value in features.items())])
        yield Check("paged_attention", about, partial(check_attention, dtype, head_dim, features, is_small))


def check_attention(dtype: torch.dtype, head_dim: int, features: Features, is_small: bool) -> None:
    """Decoding rows, chunks with a past and without, and rows of no sequence."""
    sequences = [(170, 1), (0, 9), (5, 1), (40, 3)] if is_small else [(1500, 1), (0, 150), (5, 1), (300, 40), (63, 1)]
    make_paged_case(sequences, group=4, head_dim=head_dim, dtype=dtype, unowned_rows=2, **features).check()


GROUPS: dict[str, Callable[[bool], Iterator[Check]]] = {
    "sgmv": sgmv_checks,
    "rows": row_checks,
    "swiglu": swiglu_checks,
    "one-launch": one_launch_checks,
    "attention": attention_checks,
}
"""Checks that share a process: an operation that hangs, or spoils the device for its process, spoils no other's."""
