"""Every row of the table as a test."""

from collections.abc import Iterator

import pytest

from tests.cases.every import CASES
from tests.cases.registry import Case, run_case
from tests.cases.world import World, new_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_world(tmp_path_factory.mktemp("cases")) as made:
        yield made


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_case(case: Case, world: World) -> None:
    got = run_case(case, world).got
    assert got.right, f"expected {case.expected}; got {got.text}"
