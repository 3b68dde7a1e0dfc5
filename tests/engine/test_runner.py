"""The runner with real adapters, against PEFT: mixed batches, chunks, and what base rows may notice of adapters."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels import Routing
from lora_core.engine.request import ScheduledBatch, ScheduledRow
from lora_core.errors import ConfigError
from lora_core.types import AdapterRef, LoRAStatus
from tests.engine.driver import PROMPT, Driver
from tests.factories import make_adapter, reference_tokens, tiny_llama


@pytest.fixture(scope="module")
def adapted(tiny_base: Path, tiny_adapters: dict[str, Path]) -> Driver:
    return Driver(tiny_base, tiny_adapters)


@pytest.mark.parametrize("chunk", [1000, 3], ids=["whole prompts", "prompts in chunks"])
@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_every_row_of_a_mixed_batch_equals_peft(
    chunk: int, pack: bool, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    driver = Driver(tiny_base, tiny_adapters, pack_weights=pack)
    work = [(name, PROMPT[: 3 + 2 * place]) for place, name in enumerate([None, *tiny_adapters, None])]
    requests = [driver.request(prompt, name) for name, prompt in work]
    driver.finish(requests, 20, chunk=chunk)
    for request, (name, prompt) in zip(requests, work, strict=True):
        adapter = None if name is None else tiny_adapters[name]
        assert request.token_ids[len(prompt) :] == reference_tokens(tiny_base, adapter, prompt, 20), name


def test_requests_that_join_and_leave_do_not_disturb_others(
    adapted: Driver, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    """Prompts start while others decode, so that a step has both, in slot order."""
    names = [*tiny_adapters, None] * 2
    requests = [adapted.request(PROMPT[place % 5 :], name) for place, name in enumerate(names)]
    for step in range(40):
        joined = [request for place, request in enumerate(requests) if 2 * place <= step]
        running = [request for request in joined if request.num_output_tokens < 12]
        if running:
            adapted.step([(request, min(4, request.num_uncomputed)) for request in running])
    for place, (request, name) in enumerate(zip(requests, names, strict=True)):
        prompt = PROMPT[place % 5 :]
        adapter = None if name is None else tiny_adapters[name]
        assert request.token_ids[len(prompt) :] == reference_tokens(tiny_base, adapter, prompt, 12), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_are_bit_identical_with_lora_on_and_off(
    dtype: str, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    on, off = Driver(tiny_base, tiny_adapters, dtype=dtype), Driver(tiny_base, dtype=dtype)
    pairs = [(on.request(PROMPT[:n]), off.request(PROMPT[:n])) for n in (4, 11)]
    for _ in range(6):
        logits_on = on.step([(request, request.num_uncomputed) for request, _ in pairs])
        logits_off = off.step([(request, request.num_uncomputed) for _, request in pairs])
        for request_on, request_off in pairs:
            assert torch.equal(logits_on[id(request_on)], logits_off[id(request_off)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_do_not_notice_the_adapters_in_their_batch(
    dtype: str, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    """The same batch, once with adapters on the rows before the base row and once without any."""
    with_adapters, without = Driver(tiny_base, tiny_adapters, dtype=dtype), Driver(tiny_base, dtype=dtype)
    neighbours = [with_adapters.request(PROMPT, name) for name in tiny_adapters]
    plain_neighbours = [without.request(PROMPT) for _ in tiny_adapters]
    request, plain_request = with_adapters.request(PROMPT[:6]), without.request(PROMPT[:6])
    for _ in range(6):
        # The neighbours' texts differ from here on: only their lengths must be equal.
        logits = with_adapters.step([(r, r.num_uncomputed) for r in (*neighbours, request)])
        plain = without.step([(r, r.num_uncomputed) for r in (*plain_neighbours, plain_request)])
        assert torch.equal(logits[id(request)], plain[id(plain_request)])
        assert not torch.equal(logits[id(neighbours[0])], plain[id(plain_neighbours[0])])


def test_a_row_samples_only_at_the_end_of_its_text(adapted: Driver) -> None:
    first, second = adapted.request(PROMPT), adapted.request(PROMPT[:4])
    assert adapted.step([(first, 5), (second, 2)]) == {}
    assert adapted.step([(first, 3), (second, 2)]).keys() == {id(second)}
    assert adapted.step([(first, 3), (second, 1)]).keys() == {id(first), id(second)}


def test_a_request_whose_blocks_were_poisoned_by_another_is_not_touched_by_it(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    driver = Driver(tiny_base, tiny_adapters, kv_cache_tokens=32)
    for layer in driver.runner.kv_cache.layers:
        layer.fill_(float("nan"))
    request = driver.request(PROMPT)
    driver.finish([request], 10)
    assert request.token_ids[len(PROMPT) :] == reference_tokens(tiny_base, None, PROMPT, 10)


def test_an_adapter_without_a_slot_is_an_error_that_names_it(adapted: Driver) -> None:
    request = adapted.request(PROMPT)
    request.adapter = AdapterRef("stranger", 99)
    request.block_table = adapted.blocks.allocate(3)
    with pytest.raises(KeyError, match="stranger"):
        adapted.runner.run(ScheduledBatch([ScheduledRow(request, len(PROMPT))]))


def test_with_lora_off_the_manager_refuses_adapters(tiny_base: Path, tiny_adapters: dict[str, Path]) -> None:
    manager = Driver(tiny_base).runner.manager
    response = manager.load_adapter(f"linear={tiny_adapters['linear-r4']}")
    assert response.status is LoRAStatus.LOAD_ERROR
    assert "enable_lora" in str(response.message)


def test_lengths_come_from_the_model_unless_a_shorter_one_is_set(tiny_base: Path) -> None:
    assert Driver(tiny_base).runner.config.max_model_len == 512
    assert Driver(tiny_base, max_model_len=100).runner.config.max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len is 513, and the model is made for 512 tokens"):
        Driver(tiny_base, max_model_len=513)


def test_the_last_position_of_the_model_is_served_exactly(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path, max_position_embeddings=24, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    driver = Driver(base)
    request = driver.request(PROMPT)
    driver.finish([request], 24 - len(PROMPT))
    assert request.token_ids[len(PROMPT) :] == reference_tokens(base, None, PROMPT, 24 - len(PROMPT))


def test_every_block_of_the_cache_can_be_used(tiny_base: Path) -> None:
    driver = Driver(tiny_base, kv_cache_tokens=30)
    assert driver.runner.num_blocks == 8
    request = driver.request(PROMPT)
    driver.finish([request], 32 - len(PROMPT) + 1)
    assert driver.blocks.num_free == 0
    assert request.token_ids[len(PROMPT) :] == reference_tokens(tiny_base, None, PROMPT, 32 - len(PROMPT) + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device this machine has")
def test_cuda_without_a_device_is_refused(tiny_base: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        Driver(tiny_base, device="cuda")


def test_the_head_has_a_routing_of_its_own_only_where_it_must(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        name: make_adapter(tiny_base, tmp_path / name, targets=targets)
        for name, targets in {"head": ("q_proj", "lm_head"), "layers": ("v_proj",)}.items()
    }
    driver = Driver(tiny_base, folders)
    selected: list[list[int]] = []
    plain_select = Routing.select

    def select(routing: Routing, rows: Sequence[int]) -> Routing:
        selected.append(list(rows))
        return plain_select(routing, rows)

    monkeypatch.setattr(Routing, "select", select)
    base, head, layers = (driver.request(PROMPT[:6], name) for name in (None, "head", "layers"))
    # Prompts: of 6 rows each, the last one samples; rows are sorted by slot, base rows last.
    driver.step([(base, 6), (head, 6), (layers, 6)])
    assert selected == [[5, 11, 17]]
    # A chunk, of which no row samples, before rows that do.
    other = driver.request(PROMPT[:6], "head")
    driver.step([(other, 3), (layers, 1), (base, 1)])
    assert selected[1:] == [[0, 4]]
    del selected[:]
    # Where every row samples the step's routing serves, and without a head to adapt there is none to make.
    driver.step([(head, 1), (layers, 1), (base, 1)])
    driver.step([(base, 1), (layers, 1)])
    third = driver.request(PROMPT[:6], "layers")
    driver.step([(third, 6), (base, 1)])
    assert selected == []
