"""Environment and shared fixtures of every test."""

import os
import shutil
from pathlib import Path

from tests.run_end import pytest_sessionfinish as pytest_sessionfinish

# Triton reads this when its modules are first imported, which torch may do: it must come before torch.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# No test may reach the network through a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from deployments.local_cluster import ENVIRONMENT

# Ray reads these when it is first imported.
os.environ.update(ENVIRONMENT)

import pytest
import torch

# Tests of several workers share few cores, and one thread makes sums repeatable.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer random Llama: tied head, four query heads on two KV heads."""
    # Importing PEFT takes seconds, which tests without a model need not wait for.
    from tests import factories

    return factories.tiny_llama(tmp_path_factory.mktemp("tiny-base"))


@pytest.fixture(scope="session")
def tiny_adapters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of `tiny_base` by name: ranks 2 to 8, attention only, every linear layer, rank-stabilised scale."""
    from tests.factories import ATTENTION_TARGETS, LINEAR_TARGETS, make_adapter

    folder = tmp_path_factory.mktemp("tiny-adapters")
    return {
        "attention-r2": make_adapter(tiny_base, folder / "attention-r2", r=2, targets=ATTENTION_TARGETS, seed=1),
        "linear-r4": make_adapter(tiny_base, folder / "linear-r4", r=4, targets=LINEAR_TARGETS, seed=2),
        "query-value-r8": make_adapter(tiny_base, folder / "query-value-r8", r=8, targets=("q_proj", "v_proj"), seed=3),
        "rslora-r8": make_adapter(tiny_base, folder / "rslora-r8", r=8, use_rslora=True, seed=4),
    }


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """Folder of the demo's real model, prepared once on this machine."""
    from cluster.demo import base_model

    return base_model.prepare()
