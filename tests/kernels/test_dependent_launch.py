"""Launches that overlap: only where they were measured to pay, only on GPUs that can, and with the same results."""

import sys
from collections.abc import Callable

import pytest
import torch

from kernels.launch import Launch
from kernels.tuning import device_name, launches_dependently
from kernels.tuning_table import Entry, step_point, trial
from tests.kernels import interpreter
from tests.kernels.cases import DEVICE, Case, make_case

interpreter.install()

MEASURED = {step_point("launch", 12, 2): Entry({"dependent": 1}, 1.0, 2.0)}


def small_case() -> Case:
    return make_case(
        [(1, 9), (0, 1)],
        ranks=[5, 12],
        max_rank=12,
        in_features=300,
        slices=(24, 24),
        dtype=torch.bfloat16,
        base_rows=2,
        block_m=8,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that take place."""
    launches: list[Launch] = []
    plain_run: Callable[[Launch], None] = Launch.run

    def run(launch: Launch) -> None:
        launches.append(launch)
        plain_run(launch)

    monkeypatch.setattr(Launch, "run", run)
    return launches


def options(launches: list[Launch]) -> list[tuple[bool, bool]]:
    return [(launch.options["PDL"], launch.options.get("launch_pdl", False)) for launch in launches]


def test_launches_overlap_where_it_was_measured_to_pay(
    launched: list[Launch], poisoned_scratch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreter.is_active():
        monkeypatch.setattr(sys.modules["kernels.tuning"], "can_launch_dependently", lambda device: True)
    case = small_case()
    with trial(device_name(DEVICE), MEASURED):
        dependent = launches_dependently(DEVICE, 12, 2)
        case.check()
        case.check_gated("silu")
    assert dependent or not interpreter.is_active()
    assert options(launched) == [(dependent, dependent)] * 4


def test_they_do_not_by_default(launched: list[Launch]) -> None:
    case = small_case()
    case.check()
    case.check_gated("silu")
    assert options(launched) == [(False, False)] * 4


@pytest.mark.skipif(not interpreter.is_active(), reason="the GPU here may be one that can")
def test_they_do_not_where_the_device_cannot(launched: list[Launch]) -> None:
    with trial(device_name(DEVICE), MEASURED):
        small_case().check()
    assert options(launched) == [(False, False)] * 2
