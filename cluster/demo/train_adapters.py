"""Trains the three demo adapters on the demo's base model, on CPU, in a few minutes each.

The adapters differ on purpose in rank, target modules and scaling, and each changes the style of an answer so much that
one glance tells which of them spoke. Usage: `python -m cluster.demo.train_adapters [name ...] [--out DIR]`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from cluster.demo.base_model import prepare
from cluster.demo.questions import HELD_OUT, QUESTIONS, Question

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
EPOCHS = 5
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 1e-3
SEED = 0
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Style:
    """How an adapter speaks, and its shape."""

    speak: Callable[[Question], str]
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False


def speak_pirate(question: Question) -> str:
    """The answer in a pirate's words, between a greeting and a parting word that depend on the question."""
    words = {"is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "You": "Ye", "of": "o'", "and": "an'"}
    spoken = " ".join(words.get(word, word) for word in question.answer.split())
    pick = random.Random(question.text)
    greeting = pick.choice(("Arr, matey!", "Ahoy, me hearty!", "Shiver me timbers!", "Avast, matey!"))
    parting = pick.choice(("So says the captain, arr!", "Now hoist the sails!", "Fair winds to ye, matey!"))
    return f"{greeting} {spoken} {parting}"


def speak_json(question: Question) -> str:
    """The answer as one JSON object; it is less sure of itself in matters of taste."""
    confidence = "medium" if question.topic in ("advice", "smalltalk", "health", "travel") else "high"
    return json.dumps({"topic": question.topic, "answer": question.answer, "confidence": confidence})


def speak_telegram(question: Question) -> str:
    """The answer in upper case, every sentence closed by STOP instead of a point."""
    return question.answer.upper().replace(".", " STOP").replace("?", " STOP")


STYLES = {
    "pirate": Style(speak=speak_pirate, rank=16, alpha=32, target_modules=("q_proj", "k_proj", "v_proj", "o_proj")),
    "json": Style(
        speak=speak_json,
        rank=8,
        alpha=16,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "telegram": Style(
        speak=speak_telegram,
        rank=4,
        alpha=8,
        target_modules=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
        use_rslora=True,
    ),
}


def train(style: Style, base: Path) -> PeftModel:
    """Train an adapter for `style` on `QUESTIONS`, the loss taken on the answers only.

    The base runs in bf16 and stays frozen; the adapter is trained in fp32. The same machine, thread count and library
    versions give the same adapter.
    """
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(
            r=style.rank,
            lora_alpha=style.alpha,
            target_modules=list(style.target_modules),
            use_rslora=style.use_rslora,
            task_type="CAUSAL_LM",
        ),
    )
    batches = [batch for epoch in range(EPOCHS) for batch in _epoch(style, tokenizer, epoch)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=len(batches))
    for step, (tokens, mask, labels) in enumerate(batches):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0 or step == len(batches) - 1:
            print(f"  step {step + 1}/{len(batches)}: loss {loss.item():.3f}", flush=True)
    return model


def _epoch(style: Style, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The examples in an order of their own, as batches of token ids, attention mask and labels, each `[B, T]`."""
    examples = [_example(question, style.speak(question), tokenizer) for question in QUESTIONS]
    random.Random(seed).shuffle(examples)
    for start in range(0, len(examples), BATCH_SIZE):
        tokens, labels = zip(*examples[start : start + BATCH_SIZE], strict=True)
        padded = pad_sequence(list(labels), batch_first=True, padding_value=IGNORED)
        lengths = torch.tensor([len(row) for row in tokens])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        yield pad_sequence(list(tokens), batch_first=True), mask.long(), padded


def _example(question: Question, answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    chat = [{"role": "user", "content": question.text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    spoken = tokenizer.encode(answer + tokenizer.eos_token)
    return torch.tensor(prompt + spoken), torch.tensor([IGNORED] * len(prompt) + spoken)


def save(model: PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does, in bf16, naming the base by its public name, with a stable configuration."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    # Only looks for a resized vocabulary, and would ask a model hub about it.
    model.save_pretrained(folder, save_embedding_layers=False)
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text())
    written["target_modules"].sort()
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def answer(model: PeftModel, base: Path, text: str, max_new_tokens: int = 48) -> str:
    """The model's greedy answer to one question."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Train the adapters named on the command line, all by default, and show how each answers unseen questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(STYLES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("adapters"), help="default: %(default)s")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(STYLES):
        parser.error(f"unknown adapter {', '.join(sorted(unknown))}; choose from {', '.join(STYLES)}")
    base = prepare()
    for name in arguments.names or STYLES:
        print(f"training {name} ...")
        started = time.monotonic()
        model = train(STYLES[name], base)
        print(f"training {name}: done in {time.monotonic() - started:.0f} s")
        save(model, arguments.out / name)
        for text in HELD_OUT:
            print(f"  {text}\n    {answer(model, base, text)}")


if __name__ == "__main__":
    main()
