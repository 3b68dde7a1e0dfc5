"""Layers compiled between products and attention: the same tokens, and one compilation for steps of all sizes."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from lora_core.engine.runner import ModelRunner
from lora_core.errors import ConfigError
from lora_core.models.decoder import Decoder
from tests.engine.answers import PROMPTS, Answer, ask, assert_nothing_left, finish, make_engine
from tests.engine.device_stand_in import device_stand_in
from tests.engine.driver import PROMPT, Driver
from tests.factories import make_adapter, reference_tokens, tiny_llama, tiny_model
from tests.kernels import interpreter

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM")
"""Plain; with norms of queries and keys; with norms behind the blocks, and two rotations; with half heads turned."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def through_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are traced and made functional as for any compiler, and then run as torch's operators."""
    plain = Decoder.compile_between
    monkeypatch.setattr(Decoder, "compile_between", lambda decoder: plain(decoder, "aot_eager"))


@pytest.mark.usefixtures("through_autograd")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_of_all_sizes_run_what_was_compiled_at_start(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that found no code would run as it is, and nobody would notice: here it fails."""
    base = tiny_model(tmp_path, architecture)
    driver = Driver(base, compile=True)
    driver.runner.compile_kernels()
    compiled = counters["stats"]["unique_graphs"]
    assert compiled >= 4, "each of two functions is compiled for one row and for more"
    set_stance = torch.compiler.set_stance
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: set_stance("fail_on_recompile"))
    prompts = [PROMPT, PROMPT[:1], [*PROMPT, *PROMPT[::-1], 9]]
    requests = [driver.request(prompt) for prompt in prompts]
    driver.finish(requests, 6, chunk=4)
    driver.finish([driver.request(PROMPT[:1])], 2)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.token_ids[len(prompt) :] == reference_tokens(base, None, prompt, 6)
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_the_default_compiler_gives_the_same_tokens_with_adapters(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    base = tiny_llama(tmp_path / "base", layers=1)
    names = {"adapter": make_adapter(base, tmp_path / "adapter")}
    engine = make_engine(base, names, compile=True)
    engine.warm_up()
    ask(engine, "adapter", "adapter", 20)
    ask(engine, "base", None, 3)
    answers = finish(engine)
    assert answers["adapter"] == Answer(reference_tokens(base, names["adapter"], PROMPTS[20], 14), "length")
    assert answers["base"] == Answer(reference_tokens(base, None, PROMPTS[3], 14), "length")
    assert_nothing_left(engine)


@pytest.mark.usefixtures("through_autograd")
def test_graphs_hold_what_was_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    interpreter.install()
    base = tiny_llama(tmp_path / "base", layers=1)
    names = {"adapter": make_adapter(base, tmp_path / "adapter")}
    with device_stand_in():
        engine = make_engine(base, names, compile=True, block_size=4, max_num_seqs=2)
        engine.runner.compile_kernels()
        engine.runner.capture_graphs()
        ask(engine, "adapter", "adapter", 3, max_tokens=4)
        ask(engine, "base", None, 7, max_tokens=4)
        answers = finish(engine)
    assert engine.runner.num_replays == 3
    assert answers["adapter"].tokens == reference_tokens(base, names["adapter"], PROMPTS[3], 4)
    assert answers["base"].tokens == reference_tokens(base, None, PROMPTS[7], 4)


def test_a_compiler_that_fails_is_a_fault_of_the_configuration(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler was found")

    plain = Decoder.compile_between
    monkeypatch.setattr(Decoder, "compile_between", lambda decoder: plain(decoder, refuse))  # type: ignore[arg-type]
    runner: ModelRunner = Driver(tiny_base, compile=True).runner
    with pytest.raises(ConfigError, match=r"torch.compile failed \(RuntimeError: no compiler was found"):
        runner.compile_kernels()
