"""What an adapter holds for one module, in the layout of a slot."""

from typing import NamedTuple, Protocol

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


class BaseModules(Protocol):
    """The base model's layers by PEFT module, as checking an adapter needs them. Any thread may ask."""

    def weight(self, module: str) -> Tensor:
        """fp32 weight on the CPU in the checkpoint's layout: `[out, in]`, of the embedding `[vocab, hidden]`."""
        ...

    def canary(self, module: str) -> tuple[Tensor, Tensor]:
        """A fixed input and the base's output for it, kept after the first call.

        Returns:
            fp32 `[in]` (of the embedding: int64 token ids `[n]`), and `[out]` (`[n, hidden]`) in the base dtype, on the
            CPU.
        """
        ...
