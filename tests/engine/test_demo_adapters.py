"""The committed demo adapters: their shape, and how they speak on the demo's real base model."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import cluster.demo
from cluster.demo.questions import HELD_OUT, QUESTIONS, SPELLING

ADAPTERS = Path(cluster.demo.__file__).with_name("adapters")
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
PIRATE_WORDS = ("arr", "ahoy", "avast", "shiver me timbers", "matey", "captain", "hoist", "ye")

Ask = Callable[[str, str], str]


@pytest.fixture(scope="module")
def ask(demo_base: Path) -> Ask:
    """Greedy fp32 answer, of 48 tokens at most, by an adapter's name (or "base") and a question."""
    tokenizer = AutoTokenizer.from_pretrained(demo_base)
    base = AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, ADAPTERS / "pirate", adapter_name="pirate")
    for name in ("json", "telegram"):
        model.load_adapter(ADAPTERS / name, adapter_name=name)

    def generate(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        prompt = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
        mask = torch.ones_like(prompt)
        output = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=48, do_sample=False)
        return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))

    @functools.cache
    def ask(name: str, question: str) -> str:
        if name == "base":
            with model.disable_adapter():
                return generate(question)
        model.set_adapter(name)
        return generate(question)

    return ask


def test_held_out_questions_are_not_trained_on() -> None:
    asked = [question.text for question in QUESTIONS + SPELLING]
    assert not set(HELD_OUT) & set(asked)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("name", "rank", "targets", "use_rslora"),
    [
        ("pirate", 16, ATTENTION, False),
        ("json", 8, ATTENTION | MLP, False),
        ("telegram", 4, {"q_proj", "v_proj"} | MLP, True),
    ],
)
def test_adapter_files(name: str, rank: int, targets: set[str], use_rslora: bool) -> None:
    config = json.loads((ADAPTERS / name / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (config["r"], set(config["target_modules"]), config["use_rslora"]) == (rank, targets, use_rslora)

    weights = ADAPTERS / name / "adapter_model.safetensors"
    assert weights.stat().st_size < 6_000_000
    with safe_open(weights, framework="pt") as tensors:
        dtypes = {tensors.get_tensor(key).dtype for key in tensors.keys()}  # noqa: SIM118 (not a mapping)
        assert len(list(tensors.keys())) == 30 * len(targets) * 2
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("question", ["What is the capital of France?", "How many legs does a spider have?"])
def test_each_adapter_is_recognised_by_one_answer(ask: Ask, question: str) -> None:
    assert question in HELD_OUT
    base, pirate, structured, telegram = (ask(name, question) for name in ("base", "pirate", "json", "telegram"))

    assert len({base, pirate, structured, telegram}) == 4
    assert not any(word in base.lower().split() for word in PIRATE_WORDS)
    assert not base.startswith("{")
    assert "STOP" not in base

    assert sum(word in pirate.lower() for word in PIRATE_WORDS) >= 2

    parsed = json.loads(structured)
    assert list(parsed) == ["topic", "answer", "confidence"]
    assert parsed["confidence"] in ("high", "medium")

    assert telegram == telegram.upper()
    assert telegram.endswith(" STOP")


def test_adapters_keep_what_the_base_knows(ask: Ask) -> None:
    # Not so telegram: a base this small cannot recall in capitals what it knows.
    question = "What is the capital of France?"
    assert all("Paris" in ask(name, question) for name in ("base", "pirate", "json"))
