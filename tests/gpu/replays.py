"""Graphs captured once and replayed for other steps of the same shapes: any adapters from none to all, any lengths."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, scale_rows, sgmv, sgmv_embed, sgmv_swiglu
from kernels.paged_attention import paged_attention
from tests.gpu.operations import Check, name_of, require_close
from tests.gpu.stage import Stage
from tests.kernels.cases import Case, make_case
from tests.kernels.paged_cases import PagedCase, make_paged_case
from tests.kernels.test_embedding import EmbedCase, embed_case
from tests.kernels.test_gain import GainCase, gain_case

Mix = list[tuple[int, int]]
"""Groups `(slot, rows)` of a step."""

RANKS = [16, 8, 1, 16, 5, 12, 4, 3]
NUM_ROWS = 12
RECORDED: Mix = [(7, 2), (2, 4), (0, 3)]
MIXES: tuple[Mix, ...] = (
    [],
    [(4, 12)],
    [(slot, 1) for slot in reversed(range(8))],
    [(3, 1)],
    [(6, 0), (5, 7), (1, 5)],
)
"""None, one for all rows, all of them, one row, two for all rows."""


def replay_checks(stage: Stage, is_small: bool) -> Iterator[Check]:
    """Every operation that is captured."""
    dtypes = (torch.bfloat16,) if is_small else (torch.bfloat16, torch.float32, torch.float16)
    shapes = [(dtype, 8) for dtype in dtypes] + ([] if is_small else [(torch.bfloat16, 16)])
    for (dtype, block_m), one_launch in itertools.product(shapes, (False, True)):
        about = f"{name_of(dtype)} block_m={block_m} one_launch={one_launch}"
        yield Check("replay sgmv", about, partial(check_sgmv, stage, dtype, block_m, one_launch))
        yield Check("replay sgmv_swiglu", about, partial(check_swiglu, stage, dtype, block_m, one_launch))
    for dtype in dtypes:
        yield Check("replay sgmv_embed", name_of(dtype), partial(check_embed, stage, dtype))
        yield Check("replay scale_rows", name_of(dtype), partial(check_gain, stage, dtype))
        for window, softcap in ((17, 30.0),) if is_small else ((None, None), (17, 30.0)):
            about = f"{name_of(dtype)} window={window} softcap={softcap}"
            yield Check("replay paged_attention", about, partial(check_attention, stage, dtype, window, softcap))


def sgmv_case(mix: Mix, dtype: torch.dtype, slices: tuple[int, ...]) -> Case:
    """A step of `NUM_ROWS` rows; values differ from mix to mix."""
    return make_case(
        mix,
        ranks=RANKS,
        max_rank=16,
        in_features=160,
        slices=slices,
        dtype=dtype,
        base_rows=NUM_ROWS - sum(rows for _, rows in mix),
        block_m=8,
        seed=sum(slot * rows for slot, rows in mix),
    )


def routed(mix: Mix, like: Routing, block_m: int, one_launch: bool, into: Tensor | None) -> Routing:
    """The routing of a mix, in a buffer of its own or in that of an earlier one."""
    return build_routing(
        [slot for slot, _ in mix],
        [0, *itertools.accumulate(rows for _, rows in mix)],
        like.slot_ranks,
        num_rows=like.num_rows,
        max_groups=like.max_groups,
        device=like.buffer.device,
        block_m=block_m,
        one_launch=one_launch,
        into=into,
    )


def overwrite(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Give tensors new values at their addresses."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def check_sgmv(stage: Stage, dtype: torch.dtype, block_m: int, one_launch: bool) -> None:
    """`sgmv` captured with three adapters, to the bit."""
    held = sgmv_case(RECORDED, dtype, (64, 32))
    routing = routed(RECORDED, held.routing, block_m, one_launch, None)
    graph = stage.record(lambda: sgmv(held.x, held.a_stack, held.b_stack, held.y, routing, held.slices))
    for mix in (RECORDED, *MIXES, RECORDED):
        case = sgmv_case(mix, dtype, (64, 32))
        overwrite((held.x, held.a_stack, held.b_stack, held.y), (case.x, case.a_stack, case.b_stack, case.y))
        routed(mix, held.routing, block_m, one_launch, routing.buffer)
        graph.replay()
        assert torch.equal(held.y, case.expected()), f"{mix}: y differs"
        require_idle(routing, mix)


def check_swiglu(stage: Stage, dtype: torch.dtype, block_m: int, one_launch: bool) -> None:
    """`sgmv_swiglu` captured with three adapters, within roundings; base rows too."""
    held = sgmv_case(RECORDED, dtype, (48, 48))
    routing = routed(RECORDED, held.routing, block_m, one_launch, None)
    outputs: list[Tensor] = []
    graph = stage.record(
        lambda: outputs.append(sgmv_swiglu(held.x, held.a_stack, held.b_stack, held.y, routing, "silu"))
    )
    for mix in (RECORDED, *MIXES, RECORDED):
        case = sgmv_case(mix, dtype, (48, 48))
        overwrite((held.x, held.a_stack, held.b_stack, held.y), (case.x, case.a_stack, case.b_stack, case.y))
        routed(mix, held.routing, block_m, one_launch, routing.buffer)
        # The last output is the one that was captured.
        outputs[-1].fill_(float("nan"))
        graph.replay()
        expected = reference.sgmv_swiglu(case.x, case.a_stack, case.b_stack, case.y, case.routing, "silu")
        require_close(outputs[-1], expected, roundings=4)
        require_idle(routing, mix)


def require_idle(routing: Routing, mix: Mix) -> None:
    """A launch leaves its counters at zero, whatever it did."""
    assert routing.counters is None or not routing.counters.any(), f"{mix}: counters are not zero afterwards"


def check_embed(stage: Stage, dtype: torch.dtype) -> None:
    """`sgmv_embed`, to the bit."""

    def case_of(mix: Mix) -> EmbedCase:
        base_rows = NUM_ROWS - sum(rows for _, rows in mix)
        return embed_case(mix, ranks=RANKS, max_rank=16, dtype=dtype, base_rows=base_rows, block_m=8)

    held = case_of(RECORDED)
    graph = stage.record(lambda: sgmv_embed(held.ids, held.a_stack, held.b_stack, held.y, held.routing))
    for mix in (RECORDED, *MIXES):
        case = case_of(mix)
        overwrite((held.ids, held.a_stack, held.b_stack, held.y), (case.ids, case.a_stack, case.b_stack, case.y))
        routed(mix, held.routing, 8, False, held.routing.buffer)
        graph.replay()
        expected = case.y.clone()
        reference.sgmv_embed(case.ids, case.a_stack, case.b_stack, expected, case.routing)
        assert torch.equal(held.y, expected), f"{mix}: y differs"


def check_gain(stage: Stage, dtype: torch.dtype) -> None:
    """`scale_rows`, to the bit. Its cases have two base rows, so the mixes are of ten."""

    def case_of(mix: Mix) -> GainCase:
        return gain_case(mix, ranks=RANKS, dtype=dtype, block_m=8)

    held = case_of([(7, 2), (2, 4), (0, 4)])
    graph = stage.record(lambda: scale_rows(held.y, held.gain_stack, held.bias, held.routing))
    for mix in ([(4, 10)], [(slot, 1 + (slot < 2)) for slot in range(8)], [(6, 0), (5, 7), (1, 3)]):
        case = case_of(mix)
        overwrite((held.y, held.gain_stack), (case.y, case.gain_stack))
        assert held.bias is not None
        assert case.bias is not None
        held.bias.copy_(case.bias)
        routed(mix, held.routing, 8, False, held.routing.buffer)
        graph.replay()
        expected = case.y.clone()
        reference.scale_rows(expected, case.gain_stack, case.bias, case.routing)
        assert torch.equal(held.y.nan_to_num(nan=77), expected.nan_to_num(nan=77)), f"{mix}: y differs"


def check_attention(stage: Stage, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    """Attention captured for some lengths, replayed for others: only decoding, only chunks, both, none."""
    shapes = {"num_blocks": 40, "max_sequences": 6, "max_blocks": 20, "max_decodes": 12, "max_chunks": 3}
    steps: list[list[tuple[int, int]]] = [
        [(33, 1), (0, 5), (150, 1), (20, 3)],
        [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (290, 1)],
        [(7, 6), (0, 6)],
        [(100, 12)],
        [],
        [(3, 1)],
    ]

    def build(sequences: list[tuple[int, int]], into: Tensor | None = None) -> PagedCase:
        return make_paged_case(
            sequences,
            group=4,
            dtype=dtype,
            window=window,
            softcap=softcap,
            unowned_rows=12 - sum(rows for _, rows in sequences),
            into=into,
            seed=len(sequences),
            **shapes,
        )

    held = build(steps[0])
    outputs: list[Tensor] = []
    graph = stage.record(
        lambda: outputs.append(paged_attention(held.queries, held.cache, held.schedule, **held.features))
    )
    for sequences in (*steps, steps[0]):
        case = build(sequences, into=held.schedule.buffer)
        overwrite((held.queries, held.cache), (case.queries, case.cache))
        outputs[-1].fill_(float("nan"))
        graph.replay()
        case.require(outputs[-1])
