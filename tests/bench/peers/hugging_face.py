"""transformers and PEFT, as processes that `tests.bench.peers.process` asks; PEFT in fp32 is the reference.

`kind` in the settings chooses: `generate` (a padded batch, SDPA), `continuous` (transformers' continuous batching) or
`peft` (one `generate` with an adapter name for each row).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.bench.peers.protocol import Generated, Names, System, serve

PAGE_TOKENS = 32


class Generate:
    """`generate` of transformers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._model = _base(settings)

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> Generated:
        """Greedy answers of exactly `num_tokens` tokens."""
        ids = torch.tensor(list(prompts))
        answers = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0, **self._options(names),
        )  # fmt: skip
        return answers[:, ids.shape[1] :].tolist(), None

    @torch.no_grad()
    def margin(self, prompt: list[int], name: str | None) -> float:
        """How far apart the two likeliest next tokens are, in logits."""
        logits = self._model(torch.tensor([prompt]), **self._options([name])).logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        return float(best - second)

    def _options(self, names: Names) -> dict[str, Any]:
        assert not any(names), "a base model has no adapters"
        return {}


class Peft(Generate):
    """PEFT's mixed batch."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from peft import PeftModel

        base, self._model = _base(settings), None
        for name, path in settings["adapters"].items():
            # As large as the base's weights: by default they are fp32, and slower.
            options = {"adapter_name": name, "autocast_adapter_dtype": False}
            if self._model is None:
                self._model = PeftModel.from_pretrained(base, path, **options)
            else:
                self._model.load_adapter(path, **options)
        self._model.to(base.dtype).eval()
        # With frozen weights the head of a non-contiguous slice becomes a bmm that copies the weight for each row.
        self._model.base_model.model.lm_head.weight.requires_grad_(True)

    def _options(self, names: Names) -> dict[str, Any]:
        return {"adapter_names": [name or "__base__" for name in names]}


class Continuous:
    """Continuous batching of transformers, for the base model: it knows nothing of adapters."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from transformers import ContinuousBatchingConfig

        self._model = _base(settings)
        generation = self._model.generation_config
        generation.do_sample, generation.eos_token_id = False, -1
        config = ContinuousBatchingConfig(
            # Blocks are shared by their text alone, and the same prompts are to be computed each time.
            page_size=PAGE_TOKENS, num_blocks=settings["kv_cache_tokens"] // PAGE_TOKENS, allow_block_sharing=False,
            max_batch_tokens=settings["step_tokens"], max_requests_per_batch=settings["batch"],
        )  # fmt: skip
        self._manager = self._model.init_continuous_batching(generation, config)
        self._manager.start()

    def generate(self, prompts: Sequence[list[int]], names: Names, num_tokens: int) -> Generated:
        """Greedy answers of exactly `num_tokens` tokens."""
        assert not any(names), "a base model has no adapters"
        asked = self._manager.add_requests(inputs=list(prompts), max_new_tokens=num_tokens)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(asked):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("its thread has ended")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                answers[result.request_id] = result.generated_tokens
        return [answers[name] for name in asked], None

    def margin(self, prompt: list[int], name: str | None) -> float:
        """Not asked of what is compared with the reference."""
        raise NotImplementedError("the reference tells margins")


def _base(settings: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"]))
    # Answers go on past an end of text, as `ignore_eos` has them do elsewhere.
    model.generation_config.eos_token_id = None
    return model.eval()


KINDS: Mapping[str, type[Generate] | type[Continuous]] = {
    "generate": Generate,
    "continuous": Continuous,
    "peft": Peft,
}


def start(settings: Mapping[str, Any]) -> System:
    """The system of the settings' `kind`."""
    return KINDS[settings["kind"]](settings)


if __name__ == "__main__":
    sys.exit(serve(start, ["torch", "transformers", "peft"]))
