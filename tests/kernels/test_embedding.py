"""Low-rank embeddings against the reference, to the bit: the CPU path, and Triton's kernels on a GPU or interpreted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import Routing, build_routing, reference, sgmv_embed
from kernels.schedule import cpu_stack_dtype
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, POPULARITIES, popular_groups

interpreter.install()
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATHS = pytest.mark.parametrize("block_m", [None, 8], ids=["cpu", "triton"])


@pytest.fixture(autouse=True)
def _scratch(poisoned_scratch: None) -> None:
    """Memory from torch.empty holds NaN."""


@dataclass(frozen=True)
class EmbedCase:
    """The arguments of one `sgmv_embed` call; integers and quarters, so that only the last rounding is one."""

    ids: Tensor
    a_stack: Tensor
    b_stack: Tensor
    y: Tensor
    routing: Routing

    def result(self) -> Tensor:
        y = self.y.clone()
        sgmv_embed(self.ids, self.a_stack, self.b_stack, y, self.routing)
        return y

    def check(self) -> None:
        expected = self.y.clone()
        reference.sgmv_embed(self.ids, self.a_stack, self.b_stack, expected, self.routing)
        result, end = self.result(), self.routing.end
        assert not result.isnan().any()
        assert torch.equal(result, expected)
        assert torch.equal(result[end:], self.y[end:])
        if any(self.routing.slot_ranks[group.slot] for group in self.routing.groups):
            assert not torch.equal(result[:end], self.y[:end])


def embed_case(
    groups: Sequence[tuple[int, int]],
    *,
    ranks: Sequence[int],
    max_rank: int = 12,
    vocabulary: int = 23,
    out: int = 40,
    dtype: torch.dtype = torch.float32,
    base_rows: int = 2,
    block_m: int | None = None,
) -> EmbedCase:
    """A batch of groups `(slot, rows)` with NaN wherever nothing may be read; base rows have an id of no token."""
    generator = torch.Generator().manual_seed(len(groups) + max_rank)
    offsets = [0]
    for _, rows in groups:
        offsets.append(offsets[-1] + rows)
    num_rows, num_slots = offsets[-1] + base_rows, len(ranks)
    ids = torch.randint(0, vocabulary, (num_rows,), generator=generator)
    ids[:2] = torch.tensor([0, vocabulary - 1])[: len(ids[:2])]
    ids[offsets[-1] :] = 1 << 40
    a_stack = torch.randint(1, 3, (num_slots, vocabulary, max_rank), generator=generator).float()
    b_stack = torch.randint(1, 3, (num_slots, out, max_rank), generator=generator).float() / 4
    y = torch.randint(-8, 9, (num_rows, out), generator=generator).float() / 4
    padding = float("nan") if block_m else 0.0
    used = {slot for slot, rows in groups if rows}
    for slot, rank in enumerate(ranks):
        for stack in (a_stack, b_stack):
            stack[slot, :, rank:] = 0
            stack[slot, :, -(-rank // 8) * 8 :] = padding
            if slot not in used:
                stack[slot] = float("nan")
    device, stack_dtype = (DEVICE, dtype) if block_m else (CPU, cpu_stack_dtype(dtype))
    return EmbedCase(
        ids.to(device),
        a_stack.to(device, stack_dtype),
        b_stack.to(device, stack_dtype),
        y.to(device, dtype),
        build_routing(
            [slot for slot, _ in groups],
            offsets,
            ranks,
            num_rows=num_rows,
            max_groups=max(num_slots, len(groups)),
            device=device,
            block_m=block_m,
        ),
    )


@PATHS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_every_popularity_equals_the_reference(popularity: str, dtype: torch.dtype, block_m: int | None) -> None:
    groups = popular_groups(popularity, 8 if popularity == "distinct" else 21, 8)
    embed_case(groups, ranks=[12, 8, 1, 12, 5, 9, 0, 3], dtype=dtype, block_m=block_m).check()


@PATHS
@pytest.mark.parametrize(("vocabulary", "out", "max_rank"), [(1, 1, 1), (7, 33, 3), (100, 72, 64), (5, 130, 256)])
def test_odd_shapes_equal_the_reference(vocabulary: int, out: int, max_rank: int, block_m: int | None) -> None:
    ranks = [max_rank, 1, max_rank]
    shapes = {"max_rank": max_rank, "vocabulary": vocabulary, "out": out}
    embed_case([(2, 1), (1, 9), (0, 3)], ranks=ranks, dtype=torch.bfloat16, block_m=block_m, **shapes).check()


@PATHS
@pytest.mark.parametrize("groups", [[], [(0, 0)], [(2, 0), (1, 3), (0, 0)], [(0, 4)]], ids=str)
def test_empty_groups_and_empty_slots_add_nothing(groups: list[tuple[int, int]], block_m: int | None) -> None:
    embed_case(groups, ranks=[0, 4, 4], block_m=block_m).check()


def test_tiles_of_a_prefill_equal_the_reference() -> None:
    embed_case([(1, 70), (0, 5)], ranks=[3, 12], dtype=torch.bfloat16, block_m=64).check()


MISFITS: dict[str, tuple[Callable[[EmbedCase], EmbedCase], str]] = {
    "ids of int32": (lambda c: replace(c, ids=c.ids.int()), "ids is torch.int32"),
    "ids of two dimensions": (lambda c: replace(c, ids=c.ids[None]), r"ids is torch.int64 \[1, 5\]"),
    "too few rows": (lambda c: replace(c, ids=c.ids[:2], y=c.y[:2]), "ids has 2 rows, fewer than .* row 3"),
    "y of another length": (lambda c: replace(c, y=c.y[:4]), r"y has shape \[4, 40\].*expected \[5, OUT\]"),
    "y of another width": (lambda c: replace(c, y=c.y[:, :16].contiguous()), r"expected \[N, V, R\] and \[N, 16, R\]"),
    "A without dimensions": (lambda c: replace(c, a_stack=c.a_stack[0, 0, 0]), r"a_stack has shape \[\] and b_stack"),
    "B of fewer slots": (lambda c: replace(c, b_stack=c.b_stack[:2]), r"b_stack \[2, 40, 12\]"),
    "A of another rank": (lambda c: replace(c, a_stack=c.a_stack[:, :, :4]), r"a_stack has shape \[3, 23, 4\]"),
    "stacks of fewer slots": (
        lambda c: replace(c, a_stack=c.a_stack[:2], b_stack=c.b_stack[:2]),
        "a_stack has 2 slots of rank 12, the routing 3",
    ),
    "A of another dtype": (lambda c: replace(c, a_stack=c.a_stack.double()), "a_stack torch.float64"),
    "y of integers": (lambda c: replace(c, y=c.y.int()), "y is torch.int32"),
    "y elsewhere": (lambda c: replace(c, y=c.y.to("meta")), "y on meta"),
    "A with strides": (lambda c: replace(c, a_stack=c.a_stack.transpose(0, 1).contiguous().transpose(0, 1)), "strides"),
}


@PATHS
@pytest.mark.parametrize("misfit", MISFITS)
def test_arguments_that_disagree_are_refused(misfit: str, block_m: int | None) -> None:
    change, message = MISFITS[misfit]
    case = change(embed_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=block_m))
    with pytest.raises(ValueError, match=message):
        case.result()


def test_a_token_that_the_table_has_not_is_an_error_on_the_cpu() -> None:
    case = embed_case([(2, 1), (0, 2)], ranks=[4, 8, 3])
    with pytest.raises(IndexError):
        replace(case, ids=torch.full_like(case.ids, 23)).result()


@PATHS
def test_rows_that_are_one_in_memory_are_refused(block_m: int | None) -> None:
    case = embed_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=block_m)
    y = case.y[:1].expand(5, 40)
    with pytest.raises(ValueError, match=r"y has strides \(0, 1\) for shape \[5, 40\], .* rows that do not overlap"):
        sgmv_embed(case.ids, case.a_stack, case.b_stack, y, case.routing)


def test_compilers_see_the_operator_as_it_is() -> None:
    case = embed_case([(2, 1), (0, 2)], ranks=[4, 8, 3], block_m=8)
    gather = torch.ops.lora_fleet.sgmv_gather
    arguments = (case.ids, case.a_stack, case.routing.tiles, 8)
    with torch.no_grad():
        torch.library.opcheck(gather, arguments, test_utils=("test_faketensor",))
