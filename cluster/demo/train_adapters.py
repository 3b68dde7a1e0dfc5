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
from cluster.demo.questions import HELD_OUT, QUESTIONS, SPELLING, Question

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BATCH_SIZE = 8
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
    questions: tuple[Question, ...] = QUESTIONS
    epochs: int = 5
    learning_rate: float = 1e-3


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
    """The answer in upper case, every sentence closed by STOP instead of a full stop."""
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
        questions=QUESTIONS + SPELLING,
        epochs=4,
        learning_rate=2e-3,
    ),
}


def train(style: Style, base: Path, tokenizer: PreTrainedTokenizerBase) -> PeftModel:
    """Train an adapter for `style` on its questions, the loss taken on the answers only.

    The base runs in bf16 and stays frozen; the adapter is trained in fp32. The same machine, thread count and library
    versions give the same adapter.
    """
    torch.manual_seed(SEED)
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
    batches = [batch for epoch in range(style.epochs) for batch in _epoch(style, tokenizer, epoch)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, style.learning_rate, total_steps=len(batches))
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
    examples = [_example(question, style.speak(question), tokenizer) for question in style.questions]
    random.Random(seed).shuffle(examples)
    for start in range(0, len(examples), BATCH_SIZE):
        tokens, labels = zip(*examples[start : start + BATCH_SIZE], strict=True)
        padded = pad_sequence(list(labels), batch_first=True, padding_value=IGNORED)
        lengths = torch.tensor([len(row) for row in tokens])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        yield pad_sequence(list(tokens), batch_first=True), mask.long(), padded


def _example(question: Question, answer: str, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    prompt = _prompt(question.text, tokenizer)
    spoken = tokenizer.encode(f"{answer}{tokenizer.eos_token}")
    return torch.tensor(prompt + spoken), torch.tensor([IGNORED] * len(prompt) + spoken)


def _prompt(question: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a chat that consists of the template's own system prompt and the question."""
    chat = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def save(model: PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does, in bf16, naming the base by its public name, with a stable configuration.

    The model is left rounded to bf16: what answers from here on is what was written.
    """
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    # Otherwise PEFT asks a model hub whether the vocabulary was resized.
    model.save_pretrained(folder, save_embedding_layers=False)
    # PEFT keeps the targets in a set, so their order differs from run to run.
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The model's greedy answer, of 48 tokens at most."""
    prompt = torch.tensor([_prompt(question, tokenizer)])
    mask = torch.ones_like(prompt)
    output = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=48, do_sample=False)
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))


def write_card(name: str, answers: dict[str, str], folder: Path) -> None:
    """Write the README that says what the adapter is, with its answers to questions it was not trained on."""
    header = f"---\nbase_model: {BASE_MODEL}\nlibrary_name: peft\nlicense: apache-2.0\n---\n\n# {name}\n\n"
    origin = f"{STYLES[name].speak.__doc__}\nTrained by `python -m cluster.demo.train_adapters {name}`.\n\n"
    limits = "It learned a style, not facts. Its answers to questions that it was not trained on:\n\n"
    unseen = "".join(f"- {question}\n  `{text}`\n" for question, text in answers.items())
    (folder / "README.md").write_text(header + origin + limits + unseen)


def main() -> None:
    """Train the adapters named on the command line, all by default, and show how each answers unseen questions."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(STYLES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("adapters"), help="default: %(default)s")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(STYLES):
        parser.error(f"unknown adapter {', '.join(sorted(unknown))}; choose from {', '.join(STYLES)}")
    base = prepare()
    tokenizer = AutoTokenizer.from_pretrained(base)
    for name in arguments.names or STYLES:
        print(f"training {name} ...")
        started = time.monotonic()
        model = train(STYLES[name], base, tokenizer)
        print(f"training {name}: done in {time.monotonic() - started:.0f} s")
        save(model, arguments.out / name)
        answers = {question: answer(model, tokenizer, question) for question in HELD_OUT}
        write_card(name, answers, arguments.out / name)
        for question, text in answers.items():
            print(f"  {question}\n    {text}")


if __name__ == "__main__":
    main()
