"""Which kernel variants there are to compile before the first request, and the compiling of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.schedule import MAX_ONE_LAUNCH_TILE
from kernels.tuning import StepShape, meta_device, row_tile, shrink_tile
from lora_core.engine.kernel_variants import AdapterKernels, distinct
from lora_core.engine.warm_up import logged_progress, warm_up_requests
from lora_core.messages import EngineReady
from lora_core.targets import LLAMA_TARGETS, lora_sites
from tests.engine.compile_ahead import PROJECTIONS

pytest.importorskip("triton")

DEVICE = "NVIDIA H200"


def adapter_kernels(*, one_launch: bool = False) -> AdapterKernels:
    return AdapterKernels(
        sites=lora_sites(LLAMA_TARGETS, PROJECTIONS, 3),
        num_slots=8,
        max_groups=8,
        rank=16,
        activation="silu",
        biases=frozenset({"self_attn.qkv_proj"}),
        one_launch=one_launch,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
    )


def test_layers_of_equal_shapes_share_their_variants_and_every_row_count_has_its_own() -> None:
    with meta_device(DEVICE):
        launches = distinct(adapter_kernels().launches(2048))
        shrinks = [launch for launch in launches if launch.kernel.fn.__name__ == "shrink_kernel"]
        found = {
            (
                launch.constants["IN"],
                launch.constants["PROJECTIONS"],
                launch.constants["BLOCK_M"],
                launch.constants["SPLITS"],
            )
            for launch in shrinks
        }
        for num_rows in range(1, 2049):
            block_m = row_tile(num_rows, 8, DEVICE)
            tile = shrink_tile(StepShape(DEVICE, num_rows, 8, block_m), 16, 3, 64, 2)
            assert (64, 3, block_m, tile.splits) in found
    names = {launch.kernel.fn.__name__ for launch in launches}
    assert names == {"shrink_kernel", "expand_kernel", "swiglu_kernel", "gather_kernel", "scale_kernel"}
    assert {launch.constants["HAS_BIAS"] for launch in launches if "HAS_BIAS" in launch.constants} == {True, False}
    # Hundreds of thousands of steps, few of which are compiled for.
    assert len(launches) < 80


def test_one_launch_is_for_small_tiles() -> None:
    with meta_device(DEVICE):
        launches = distinct(adapter_kernels(one_launch=True).launches(2048))
    pairs = [launch for launch in launches if launch.kernel.fn.__name__ == "pair_kernel"]
    assert pairs
    assert all(launch.constants["BLOCK_M"] <= MAX_ONE_LAUNCH_TILE for launch in pairs)
    assert any(launch.kernel.fn.__name__ == "shrink_kernel" for launch in launches)


def test_variants_are_compiled_side_by_side_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.engine.compile_ahead"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["cubins"]) == found["launches"] == 4
    assert all(found["cubins"])
    assert found["told"][0] == ["compiling kernels", 0, 4]
    assert found["told"][-1] == ["compiling kernels", 4, 4]


def test_progress_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    now_s = 0.0
    progress = logged_progress(logging.getLogger("warm-up"), clock=lambda: now_s)
    with caplog.at_level(logging.INFO):
        for done in range(21):
            progress("capturing graphs", done, 20)
            now_s += 1.0
        progress("compiling kernels", 0, 3)
    assert [record.getMessage() for record in caplog.records] == [
        *(f"capturing graphs: {done} of 20" for done in (0, 5, 10, 15, 20)),
        "compiling kernels: 0 of 3",
    ]


def test_warm_up_requests_fit_the_engine() -> None:
    ready = EngineReady(
        max_model_len=20, num_slots=1, vocab_size=9, eos_token_ids=[], kv_cache_tokens=20, max_num_seqs=1
    )
    found = list(warm_up_requests(ready, (16, 512), (None, "a")))
    assert len({request.request_id for request in found}) == 8
    assert {len(request.prompt_token_ids) for request in found} == {16, 18}
    assert all(len(request.prompt_token_ids) + request.sampling.max_tokens <= 20 for request in found)
    assert {(request.lora_name, request.sampling.temperature) for request in found} == {
        (None, 0.0), (None, 1.0), ("a", 0.0), ("a", 1.0),
    }  # fmt: skip
