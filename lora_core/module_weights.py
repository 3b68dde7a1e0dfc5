"""What an adapter holds for one module, in the layout of a slot."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ModuleWeights(NamedTuple):
    """One module's tensors in host memory, contiguous, all of one adapter padded to that adapter's largest true rank r.

    Attributes:
        a: `[r, in]` in the base dtype; of the embedding `[vocab, r]`, so that a token's row lies together.
        b: `[out, r]` in the base dtype, the scale (and DoRA's factor) multiplied in.
        gain: fp32 `[out]`, DoRA's factor on the base's output less one; None for plain LoRA.
    """

    a: Tensor
    b: Tensor
    gain: Tensor | None


class AdapterTensors(Protocol):
    """The tensors of one adapter."""

    @property
    def rank(self) -> int:
        """Largest true rank of its modules, which all of its tensors are padded to."""
        ...

    def module(self, name: str) -> ModuleWeights | None:
        """Tensors of a module such as `layers.0.self_attn.q_proj`, `embed_tokens` or `lm_head`; None if it has none."""
        ...


class BaseWeight(NamedTuple):
    """A base layer's weight, taken in parts: in fp32 a large model's head is gigabytes.

    Attributes:
        stored: The checkpoint's layout, `[out, in]`, of the embedding `[vocab, hidden]`, in the base dtype, on the
            model's device. It may be the model's own: not to be changed.
        stream: Where a device copies.
    """

    stored: Tensor
    stream: torch.cuda.Stream | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows in fp32 on the CPU, not to be changed."""
        with torch.no_grad(), torch.cuda.stream(self.stream):
            return self.stored[start:stop].detach().float().cpu()


class BaseModules(Protocol):
    """The base model's layers by PEFT module, as checking an adapter needs them. Any thread may ask."""

    def open_weight(self, module: str) -> AbstractContextManager[BaseWeight]:
        """The weight of a module, until the block ends."""
        ...

    def canary(self, module: str) -> tuple[Tensor, Tensor]:
        """A fixed input and the base's output for it, kept after the first call.

        Returns:
            fp32 `[in]` (of the embedding: int64 token ids `[n]`), and `[out]` (`[n, hidden]`) in the base dtype, on the
            CPU.
        """
        ...
