"""What transformers and PEFT compute in fp32: the truth that served tokens and logits are compared with."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM


class Difference(NamedTuple):
    """How far an answer is from the truth.

    Attributes:
        token: The first place where the greedy token is another one, or None.
        logits: Largest error of a logit, relative to the largest true one; None if no logits were compared.
        margin: Smallest distance of the true greedy token to the second, over the answer.
    """

    token: int | None
    logits: float | None
    margin: float


class Truth:
    """Answers for any base and adapter folder; what it has read stays in memory, so that folders may change later."""

    def __init__(self) -> None:
        self._models: dict[tuple[Path, Path | None], Any] = {}

    def logits(self, base: Path, adapter: Path | None, ids: Sequence[int], *, merged: bool = False) -> Tensor:
        """fp32 logits `[len(ids), vocab]` after each token; `merged`: with the adapter added into the weights."""
        model = self._read(base, adapter) if merged else self.model(base, adapter)
        if merged:
            model = model.merge_and_unload()
        with torch.inference_mode():
            logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits.float()

    def model(self, base: Path, adapter: Path | None) -> Any:
        """The model in evaluation mode, read once."""
        key = (base, adapter)
        if key not in self._models:
            self._models[key] = self._read(base, adapter)
        return self._models[key]

    def compare(
        self,
        base: Path,
        adapter: Path | None,
        prompt: Sequence[int],
        tokens: Sequence[int],
        logits: Tensor | None = None,
        **how: Any,
    ) -> Difference:
        """Compare greedy tokens and, where given, the logits `[len(tokens), vocab]` they were chosen from.

        Every token is compared with the true choice after the tokens before it, which is the same as comparing two
        answers up to their first difference, in one pass.
        """
        assert tokens, "an empty answer compares with everything"
        true = self.logits(base, adapter, [*prompt, *tokens[:-1]], **how)[-len(tokens) :]
        best = true.topk(2).values
        wrong = (true.argmax(-1) != torch.tensor(list(tokens))).nonzero()
        error = None if logits is None else float((logits - true).abs().max() / true.abs().max())
        return Difference(int(wrong[0]) if len(wrong) else None, error, float((best[:, 0] - best[:, 1]).min()))

    def _read(self, base: Path, adapter: Path | None) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT's advice on tied heads
                model = PeftModel.from_pretrained(model, str(adapter))
        return model.eval()
