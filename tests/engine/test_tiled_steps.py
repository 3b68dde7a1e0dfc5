"""Steps with a tile table, as a device has them: the engine's LoRA kernels, under the interpreter without a GPU."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kernels import build_routing
from kernels.launch import Launch
from tests.engine.answers import Names, ask, finish, make_engine, peft_answers
from tests.kernels import interpreter

interpreter.install()

NUM_TOKENS = 3


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every step has a tile table; the kernels that are launched, by name."""
    monkeypatch.setattr(sys.modules["lora_core.inputs"], "build_routing", partial(build_routing, block_m=8))
    names: Counter[str] = Counter()
    plain_run: Callable[[Launch], None] = Launch.run

    def run(launch: Launch) -> None:
        names[launch.kernel.__name__] += 1
        plain_run(launch)

    monkeypatch.setattr(Launch, "run", run)
    return names


@pytest.mark.parametrize(
    ("one_launch", "per_layer"),
    [
        # qkv, o and down shrink and expand, gate_up shrinks and gates.
        (False, {"shrink_kernel": 4, "expand_kernel": 3, "swiglu_kernel": 1}),
        (True, {"pair_kernel": 4}),
    ],
    ids=["two launches", "one launch"],
)
def test_a_mixed_batch_answers_as_peft_does(
    one_launch: bool, per_layer: dict[str, int], launched: Counter[str], tiny_base: Path, tiny_adapters: Names
) -> None:
    adapters = {name: tiny_adapters[name] for name in ("linear-r4", "rslora-r8")}
    reference = peft_answers(tiny_base, adapters)
    engine = make_engine(tiny_base, adapters, lora_settings={"one_launch": one_launch})
    requests = {"a": ("linear-r4", 3), "b": ("rslora-r8", 7), "c": (None, 3)}
    for request_id, (name, size) in requests.items():
        ask(engine, request_id, name, size, max_tokens=NUM_TOKENS)
    answers = finish(engine)
    for request_id, (name, size) in requests.items():
        assert answers[request_id].tokens == reference(name, size)[:NUM_TOKENS]
    layer_steps = sum(launched.values()) // sum(per_layer.values())
    assert layer_steps > 0
    assert launched == {kernel: count * layer_steps for kernel, count in per_layer.items()}


def test_a_step_of_base_requests_launches_no_lora_kernel(
    launched: Counter[str], tiny_base: Path, tiny_adapters: Names
) -> None:
    engine = make_engine(tiny_base, tiny_adapters)
    ask(engine, "a", None, 7, max_tokens=NUM_TOKENS)
    answers = finish(engine)
    assert len(answers["a"].tokens) == NUM_TOKENS
    assert not launched
