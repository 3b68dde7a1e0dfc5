"""Adapters of every kind in one engine, against PEFT: DoRA, embedding, head, patterns, parts of fused groups."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import PROMPT, Driver
from tests.factories import LINEAR_TARGETS, make_adapter, reference_tokens, tiny_llama

pytestmark = pytest.mark.filterwarnings(
    # Of a head adapted apart from the embedding it is tied to.
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:Model has `tie_word_embeddings=True`",
)

KINDS: Mapping[str, Mapping[str, Any]] = {
    "dora": {"targets": LINEAR_TARGETS, "use_dora": True},
    "dora-part": {"targets": ("k_proj", "up_proj"), "use_dora": True, "use_rslora": True, "r": 2},
    "dora-ends": {"targets": ("embed_tokens", "lm_head"), "use_dora": True, "rank_pattern": {"lm_head": 3}},
    "ends": {"targets": ("embed_tokens", "lm_head", "v_proj"), "alpha_pattern": {"lm_head": 4}},
    "head": {"targets": ("lm_head",), "r": 1},
    "patterns": {"targets": LINEAR_TARGETS, "rank_pattern": {"q_proj": 1, r"1\.mlp\..*": 6}, "use_rslora": True},
    "layer": {"targets": ("q_proj", "gate_proj"), "layers_to_transform": [1]},
}


@pytest.mark.parametrize("kind", ["tied", "untied", "biases"])
def test_a_mixed_batch_of_all_kinds_equals_peft(tmp_path: Path, kind: str) -> None:
    settings = {"tied": {}, "untied": {"tied": False}, "biases": {"attention_bias": True, "mlp_bias": True}}[kind]
    base = tiny_llama(tmp_path / "base", seed=7, **settings)
    folders = {name: make_adapter(base, tmp_path / name, seed=9, **made) for name, made in KINDS.items()}
    driver = Driver(base, folders)
    work = [(name, PROMPT[: 3 + place]) for place, name in enumerate([None, *folders, None])]
    requests = [driver.request(prompt, name) for name, prompt in work]
    driver.finish(requests, 16, chunk=1000)
    for request, (name, prompt) in zip(requests, work, strict=True):
        expected = reference_tokens(base, None if name is None else folders[name], prompt, 16)
        assert request.token_ids[len(prompt) :] == expected, name
