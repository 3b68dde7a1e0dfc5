"""EleutherAI's evaluation harness, as its users run it: its own command, its `local-completions`, unchanged.

It has an environment of its own (`make lm-eval`).
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.demo.base_model import prepare
from deployments.launcher import Served
from tests.serve.app.conftest import BASE

HARNESS = Path(__file__).parents[3] / ".make" / "lm-eval" / "bin" / "lm-eval"

QUESTIONS: list[dict[str, Any]] = [
    {"text": "The capital of France is", "choices": [" Paris", " Rome", " a banana"]},
    {"text": "One, two, three,", "choices": [" four", " seventeen, eighteen"]},
    {"text": "The opposite of hot is", "choices": [" cold", " Grüße an 世界"]},
]

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""

GOES_ON = """
task: goes_on
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def run_harness(served: Served, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Each task's samples, in the order of the questions."""
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in (("choices", CHOICES), ("goes_on", GOES_ON)):
        (folder / f"{name}.yaml").write_text(task.replace("QUESTIONS", str(questions)))
    arguments = {
        "model": BASE, "base_url": f"{served.url}/v1/completions", "tokenizer": prepare(),
        "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1,
    }  # fmt: skip
    options = {
        "model": "local-completions", "tasks": "choices,goes_on", "batch_size": 4, "output_path": folder / "out",
        "include_path": folder, "model_args": ",".join(f"{name}={value}" for name, value in arguments.items()),
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [HARNESS, *words, "--log_samples"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for file in folder.glob("out/**/samples_*.jsonl"):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        task = "choices" if "samples_choices" in file.name else "goes_on"
        found[task] = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    return found


@torch.inference_mode()
def loglikelihood(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """What transformers says of tokens after others: their log-probability, and whether each is the likeliest."""
    logits = model(torch.tensor([context + continuation])).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    chosen = torch.tensor(continuation)
    total = logits.gather(-1, chosen[:, None]).sum()
    return float(total), bool((logits.argmax(-1) == chosen).all())


def test_its_loglikelihoods_are_transformers(served: Served, tmp_path: Path) -> None:
    if not HARNESS.exists():
        assert os.environ.get("CI") != "true", "`make lm-eval` has not installed it"
        pytest.skip("the harness is not here; `make lm-eval` installs it")
    samples = run_harness(served, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(prepare())
    model = AutoModelForCausalLM.from_pretrained(prepare(), dtype=torch.float32)
    assert [len(samples[task]) for task in ("choices", "goes_on")] == [3, 3]
    for question, sample in zip(QUESTIONS, samples["choices"], strict=True):
        for choice, ((value, is_greedy),) in zip(question["choices"], sample["resps"], strict=True):
            context = tokenizer.encode(question["text"])
            whole = tokenizer.encode(question["text"] + choice)
            expected, is_likeliest = loglikelihood(model, context, whole[len(context) :])
            assert float(value) == pytest.approx(expected, abs=2e-3), choice
            assert str(is_greedy) == str(is_likeliest), choice
    assert samples["choices"][0]["acc"] == 1.0
    for question, sample in zip(QUESTIONS, samples["goes_on"], strict=True):
        context = torch.tensor([tokenizer.encode(question["text"])])
        tokens = model.generate(context, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, context.shape[1] :]
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        assert sample["resps"][0][0] == text.partition("\n")[0].partition(".")[0]
