"""What transformers and PEFT answer on the demo model in fp32: the truth that served tokens are compared with."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.demo.base_model import prepare

ADAPTERS = Path(__file__).parents[1] / "cluster" / "demo" / "adapters"
DEMO_ADAPTERS = ("pirate", "json", "telegram")
QUESTIONS = ("What is the capital of France?", "Why is the sky blue?")


class Reference:
    """The demo model under PEFT with adapters side by side; answers greedily, one request at a time."""

    def __init__(self, adapters: dict[str, Path] | None = None) -> None:
        folder = prepare()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._base = model
        self._eos = model.generation_config.eos_token_id
        self._model: Any = None
        for name, path in (adapters or {name: ADAPTERS / name for name in DEMO_ADAPTERS}).items():
            if self._model is None:
                self._model = PeftModel.from_pretrained(model, str(path), adapter_name=name)
            else:
                self._model.load_adapter(str(path), adapter_name=name)

    def prompt(self, question: str) -> list[int]:
        """The question as the chat template renders it."""
        messages = [{"role": "user", "content": question}]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(map(int, ids))

    @torch.inference_mode()
    def tokens(self, adapter: str | None, question: str, num_tokens: int) -> list[int]:
        """Greedy token ids, the end-of-text id included where it comes."""
        prompt = torch.tensor([self.prompt(question)])
        options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(prompt)
        if adapter is None:
            with self._model.disable_adapter():
                answer = self._model.generate(prompt, **options)
        else:
            self._model.set_adapter(adapter)
            answer = self._model.generate(prompt, **options)
        return [int(token) for token in answer[0, prompt.shape[1] :]]
