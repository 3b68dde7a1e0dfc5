"""Shapes of the base model's weights that adapters may change, by the names that adapters give them."""

from collections.abc import Mapping
from dataclasses import dataclass

from lora_core.adapter_weights import list_keys
from lora_core.targets import DECODER_PATHS
from lora_core.tensor_keys import EMBEDDING_MODULE, HEAD_MODULE, ModuleName

EMBEDDINGS = (EMBEDDING_MODULE, HEAD_MODULE)
"""The modules outside the decoder layers."""


@dataclass(frozen=True)
class BaseShapes:
    """Shapes of the base model's weights that adapters may change.

    Attributes:
        modules: `(out_features, in_features)` by normalised name; the embedding's are `(hidden, vocabulary)`.
        num_layers: Decoder layers.
        knows_weights: Copies of base weights will be compared with the base's values, not only with its shapes.
    """

    modules: Mapping[str, tuple[int, int]]
    num_layers: int
    knows_weights: bool

    @classmethod
    def of(
        cls, projections: Mapping[str, tuple[int, int]], num_layers: int, *, knows_weights: bool = False
    ) -> "BaseShapes":
        """The shapes of a base model whose layers are alike.

        Args:
            projections: Shapes as in `modules`, by path inside a decoder layer, or by the PEFT name of a projection
                that the decoder has (`lora_core.targets.DECODER_PATHS`); of embedding and head by their names.
            num_layers: As the attribute.
            knows_weights: As the attribute.
        """
        modules: dict[str, tuple[int, int]] = {}
        for name, shape in projections.items():
            path = DECODER_PATHS.get(name, name)
            places = [path] if path in EMBEDDINGS else [f"layers.{layer}.{path}" for layer in range(num_layers)]
            modules.update(dict.fromkeys(places, shape))
        return cls(modules, num_layers, knows_weights)

    def weight_shape(self, module: ModuleName) -> tuple[int, int] | None:
        """Shape of a module's weight in the checkpoint, if adapters may change the module."""
        shape = self.modules.get(module.name)
        return shape[::-1] if shape is not None and module.name == EMBEDDING_MODULE else shape

    def accepts_copy(self, module: ModuleName, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be a copy of the base weight of `module`."""
        expected = self.weight_shape(module)
        if expected is None and module.path in EMBEDDINGS:
            # The hidden size is known from any projection that reads the residual stream.
            return len(shape) == 2 and any(shape[1] == width for _, width in self.modules.values())
        return shape == expected

    def describe(self) -> str:
        """The modules adapters may change, for an error message."""
        first = "layers.0."
        paths = [name.removeprefix(first) for name in self.modules if name.startswith(first)]
        outside = [name for name in EMBEDDINGS if name in self.modules]
        inside = f"{list_keys(paths, limit=10) or 'nothing'} in each layer"
        return f"{inside}, and {' and '.join(outside)}" if outside else inside
