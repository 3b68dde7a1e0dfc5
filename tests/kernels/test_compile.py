"""What compilers see of the operations on a device: opaque operators that do as they say."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels import Routing, scale_rows, sgmv, sgmv_embed, sgmv_expand, sgmv_shrink, sgmv_swiglu
from tests.kernels import interpreter
from tests.kernels.cases import Case, make_case

interpreter.install()

ONE_LAUNCH = pytest.mark.parametrize("one_launch", [False, True], ids=["two launches", "one launch"])


def small_case(one_launch: bool, rows: int = 3) -> Case:
    case = make_case(
        [(2, 1), (0, rows)],
        ranks=[5, 0, 12],
        max_rank=12,
        in_features=40,
        slices=(24, 24),
        dtype=torch.bfloat16,
        base_rows=3,
        block_m=8,
        one_launch=one_launch,
    )
    case.x.nan_to_num_()
    return case


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@ONE_LAUNCH
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_computes_what_it_did(backend: str, one_launch: bool) -> None:
    case = small_case(one_launch)
    ids = torch.arange(7, device=case.x.device)
    table = torch.ones(3, 7, 12, dtype=torch.bfloat16, device=case.x.device)
    gain = torch.full((3, 48), 0.5, device=case.x.device)

    def layer(x: Tensor, y: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        scale_rows(y, gain, None, routing)
        sgmv(x, case.a_stack, case.b_stack, y, routing, (24, 24))
        embedded = y * 2
        sgmv_embed(ids, table, case.b_stack, embedded, routing)
        return sgmv_swiglu(x, case.a_stack, case.b_stack, y, routing), embedded

    compiled: Callable[[Tensor, Tensor, Routing], tuple[Tensor, Tensor]]
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    expected_y, y = case.y.clone(), case.y.clone()
    with torch.no_grad():
        expected = layer(case.x, expected_y, case.routing)
        found = compiled(case.x, y, case.routing)
    assert torch.equal(y, expected_y)
    assert not torch.equal(y, case.y)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [None, True], ids=["rows become dynamic", "all is dynamic"])
def test_a_compiled_layer_serves_steps_of_other_lengths(dynamic: bool | None) -> None:
    cases = [small_case(one_launch=False, rows=rows) for rows in (3, 9, 30)]
    a_stack, b_stack = cases[0].a_stack, cases[0].b_stack

    def layer(x: Tensor, y: Tensor, routing: Routing) -> Tensor:
        sgmv(x, a_stack, b_stack, y, routing, (24, 24))
        sgmv_expand(sgmv_shrink(x, a_stack, routing, 2), b_stack, y, routing, (24, 24))
        return sgmv_swiglu(x, a_stack, b_stack, y, routing)

    compiled: Callable[[Tensor, Tensor, Routing], Tensor]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for case in cases:
        with torch.no_grad():
            expected_y, y = case.y.clone(), case.y.clone()
            expected = layer(case.x, expected_y, case.routing)
            assert torch.equal(compiled(case.x, y, case.routing), expected)
        assert torch.equal(y, expected_y)


@ONE_LAUNCH
def test_compilers_see_the_operators_as_they_are(one_launch: bool) -> None:
    case = small_case(one_launch)
    routing = case.routing
    step = (routing.tiles, routing.counters, routing.block_m, routing.max_groups)
    tests = ("test_schema", "test_faketensor")
    # The stacks' padding and unused slots hold NaN, which never equals itself.
    a_stack, b_stack = case.a_stack.nan_to_num(), case.b_stack.nan_to_num()
    with torch.no_grad():
        arguments = (case.x, a_stack, b_stack, case.y.clone(), *step, [24, 24])
        torch.library.opcheck(torch.ops.lora_fleet.sgmv, arguments, test_utils=tests)
        gated = (case.x, a_stack, b_stack, case.y, *step, "silu")
        torch.library.opcheck(torch.ops.lora_fleet.sgmv_swiglu, gated, test_utils=tests)
