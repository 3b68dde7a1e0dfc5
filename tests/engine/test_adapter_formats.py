"""Every format of adapter the engine serves, token for token as PEFT computes it, alone and all in one batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_core.types import LoRAStatus
from tests.engine.driver import PROMPT, Driver
from tests.factories import LINEAR_TARGETS, make_adapter, reference_tokens, tiny_llama

NUM_TOKENS = 16
EVERYTHING = (*LINEAR_TARGETS, "embed_tokens", "lm_head")

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"targets": ("q_proj", "v_proj"), "r": 8},
    "embedding": {"targets": ("embed_tokens",), "r": 4, "alpha": 16},
    "head": {"targets": ("lm_head",), "r": 2, "alpha": 8},
    "everything": {"targets": EVERYTHING, "r": 8},
    "rslora with patterns": {
        "targets": EVERYTHING,
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {"embed_tokens": 2, "q_proj": 7},
        "alpha_pattern": {"lm_head": 3},
    },
    "dora of layers": {"targets": LINEAR_TARGETS, "r": 4, "use_dora": True},
    "dora of everything": {"targets": EVERYTHING, "r": 3, "use_dora": True},
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A base with biases in attention and MLP, and an adapter of each format."""
    root = tmp_path_factory.mktemp("formats")
    base = tiny_llama(root / "base", tied=request.param == "tied", attention_bias=True, mlp_bias=True)
    return base, {
        name: make_adapter(base, root / name.replace(" ", "-"), seed=seed, **settings)
        for seed, (name, settings) in enumerate(FORMATS.items())
    }


@pytest.fixture(scope="module")
def truth(served: tuple[Path, dict[str, Path]]) -> dict[str | None, list[int]]:
    """PEFT's tokens by adapter; the prompts differ."""
    base, folders = served
    return {
        name: reference_tokens(base, folders.get(name or ""), prompt_of(name), NUM_TOKENS) for name in (None, *folders)
    }


def prompt_of(name: str | None) -> list[int]:
    return PROMPT[: 3 + len(name or "") % 7]


def test_the_formats_tell_apart(truth: dict[str | None, list[int]], served: tuple[Path, dict[str, Path]]) -> None:
    base, _ = served
    for name, tokens in truth.items():
        if name is not None:
            assert tokens != reference_tokens(base, None, prompt_of(name), NUM_TOKENS), name


@pytest.mark.parametrize("chunk", [1000, 3], ids=["whole prompts", "prompts in chunks"])
@pytest.mark.parametrize("pack", [False, True], ids=["plain", "packed"])
def test_all_formats_in_one_batch_equal_peft(
    chunk: int, pack: bool, served: tuple[Path, dict[str, Path]], truth: dict[str | None, list[int]]
) -> None:
    base, folders = served
    driver = Driver(base, folders, pack_weights=pack)
    work = [None, *folders, None, *reversed(folders)]
    requests = [driver.request(prompt_of(name), name) for name in work]
    driver.finish(requests, NUM_TOKENS, chunk=chunk)
    for name, request in zip(work, requests, strict=True):
        assert request.token_ids[len(prompt_of(name)) :] == truth[name], name


def test_each_format_alone_equals_peft(
    served: tuple[Path, dict[str, Path]], truth: dict[str | None, list[int]]
) -> None:
    base, folders = served
    driver = Driver(base, folders)
    for name in folders:
        request = driver.request(prompt_of(name), name)
        driver.finish([request], NUM_TOKENS)
        assert request.token_ids[len(prompt_of(name)) :] == truth[name], name


def test_base_rows_keep_their_bits_beside_every_format(served: tuple[Path, dict[str, Path]]) -> None:
    base, folders = served
    on, off = Driver(base, folders), Driver(base)
    neighbours = [on.request(PROMPT, name) for name in folders]
    plain_neighbours = [off.request(PROMPT) for _ in folders]
    request, plain_request = on.request(PROMPT[:6]), off.request(PROMPT[:6])
    for _ in range(5):
        # The neighbours' texts differ from here on: only their lengths must be equal.
        logits = on.step([(r, r.num_uncomputed) for r in (*neighbours, request)])
        plain = off.step([(r, r.num_uncomputed) for r in (*plain_neighbours, plain_request)])
        assert torch.equal(logits[id(request)], plain[id(plain_request)])


def test_without_embeddings_their_adapters_are_refused_and_others_served(
    served: tuple[Path, dict[str, Path]], truth: dict[str | None, list[int]]
) -> None:
    base, folders = served
    driver = Driver(base, {"attention": folders["attention"]}, adapt_embeddings=False)
    manager = driver.runner.manager
    assert not {"embed_tokens", "lm_head"} & {target.path for target in manager.targets}
    assert not any("lm_head" in spec.name or "embed_tokens" in spec.name for spec in manager.symbolic_inputs())
    for name in ("embedding", "head", "everything"):
        response = manager.load_adapter(f"{name}={folders[name]}")
        assert response.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert "embed_tokens" in str(response.message) or "lm_head" in str(response.message)
    request = driver.request(prompt_of("attention"), "attention")
    driver.finish([request], NUM_TOKENS)
    assert request.token_ids[len(prompt_of("attention")) :] == truth["attention"]
