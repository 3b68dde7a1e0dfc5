"""A Hugging Face checkpoint to a decoder: safetensors read, every tensor accounted for, projections fused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lora_core.errors import ConfigError
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import Decoder, DecoderConfig, Rotary
from lora_core.targets import stack_weights

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")


def load_decoder(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device, pack: bool
) -> tuple[Decoder, DecoderConfig]:
    """Build the decoder of a checkpoint folder and load its weights.

    Args:
        folder: Has config.json and model.safetensors, or shards with their index.
        dtype: Data type of the decoder, to which each tensor is cast once; unset: the checkpoint's.
        device: Where the decoder runs.
        pack: Reorder the weights for the CPU's matrix kernels; needs `device` to be a CPU.

    Raises:
        UnsupportedModel: the architecture, or something its configuration asks for, is not served.
        ConfigError: files are missing or damaged, or the tensors are not those the configuration describes.
    """
    hf_config = read_hf_config(folder)
    config = decoder_config(hf_config)
    checkpoint = read_checkpoint(folder)
    if dtype is None:
        dtype = _checkpoint_dtype(hf_config.dtype, checkpoint)
    # The structure alone: parameters become the loaded tensors, without a copy.
    decoder = Decoder(config, dtype=dtype, device=torch.device("meta"))
    state = _decoder_state(checkpoint, config, dtype, device)
    checkpoint.clear()
    _check_state(state, decoder, folder)
    decoder.load_state_dict(state, assign=True)
    state.clear()
    decoder.rotary = Rotary(config, device=device)
    if pack:
        decoder.pack()
    return decoder.eval(), config


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder by name, on the CPU, as they were saved.

    Raises:
        ConfigError: there are no safetensors, a shard is missing, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors.update(_read_file(path))
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download the base model again") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX_FILE
    if not index.is_file():
        if (folder / WEIGHTS_FILE).is_file():
            return [folder / WEIGHTS_FILE]
        found = ", ".join(sorted(path.name for path in folder.glob("*.*"))) or "no files"
        raise ConfigError(
            f"{folder} has neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE} (found: {found}); "
            "weights are read from safetensors only: set model to a folder that has them"
        )
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of shards; download the base model again") from error
    paths = [folder / Path(shard).name for shard in shards]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(paths)} shards its index names: {', '.join(missing)}; "
            "download the base model again"
        )
    return paths


def _checkpoint_dtype(declared: object, checkpoint: Mapping[str, Tensor]) -> torch.dtype:
    if isinstance(declared, torch.dtype):
        return declared
    return next((tensor.dtype for tensor in checkpoint.values() if tensor.is_floating_point()), torch.float32)


def _decoder_state(
    checkpoint: Mapping[str, Tensor], config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The decoder's parameters by name: cast, moved and fused."""
    kept = {name: tensor for name, tensor in checkpoint.items() if not _DERIVED.search(name)}
    try:
        stacked = stack_weights(kept, config.targets)
    except ValueError as error:
        raise ConfigError(f"{error}; download the base model again") from error
    state: dict[str, Tensor] = {}
    for name in list(stacked):
        # What is read from a file is mapped, not copied. A server's weights must outlive the file, and one tensor in
        # use would keep all of the file in memory.
        state[name] = stacked.pop(name).to(device=device, dtype=dtype, copy=name in kept)
    # As transformers has it: a checkpoint that says tied, and has a head of its own that differs, is not tied.
    is_same = HEAD in state and EMBEDDING in state and torch.equal(state[HEAD], state[EMBEDDING])
    if config.tied_head and EMBEDDING in state and (HEAD not in state or is_same):
        state[HEAD] = state[EMBEDDING]
    return state


def _check_state(state: Mapping[str, Tensor], decoder: Decoder, folder: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    faults = {
        "it lacks": sorted(expected.keys() - state.keys()),
        "it has tensors the model does not": sorted(state.keys() - expected.keys()),
        "shapes differ": [
            f"{name} {tuple(state[name].shape)} instead of {shape}"
            for name, shape in expected.items()
            if name in state and tuple(state[name].shape) != shape
        ],
    }
    found = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
    if found:
        raise ConfigError(
            f"the weights in {folder} are not those its config.json describes: {found}; download the base model again"
        )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
