"""A Hugging Face checkpoint to a decoder: safetensors read, every tensor accounted for, projections fused."""

import ctypes
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lora_core.config import Quantization
from lora_core.errors import ConfigError
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import Decoder, DecoderConfig
from lora_core.models.linear import Linear
from lora_core.models.quantization import WeightQuantizer, plan_quantization
from lora_core.models.rotary import Rotary
from lora_core.models.split import linear_splits, share_of
from lora_core.parallel.group import RankGroup
from lora_core.parallel.shard import WHOLE, shard_parameters
from lora_core.targets import stack_weights

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device,
    pack: bool,
    quantization: Quantization = "none",
    group: RankGroup | None = None,
) -> tuple[Decoder, DecoderConfig]:
    """Build the decoder of a checkpoint folder and load its weights.

    One decoder layer after the other is read, cast, fused, moved, and quantised or packed: beside the finished layers
    and the mapped files, memory holds one layer.

    Args:
        folder: Has config.json and model.safetensors, or shards with their index.
        dtype: Data type of the decoder, to which each tensor is cast once; unset: the checkpoint's.
        device: Where the decoder runs.
        pack: Reorder the weights that are not quantised for the CPU's matrix kernels; needs `device` to be a CPU.
        quantization: Of the linear layers inside the decoder layers. The head is left alone, as transformers does it,
            and with it an embedding it is tied to.
        group: The ranks that share the model; this one's share is loaded. None: all of it.

    Returns:
        The decoder, and what it computes: with a group, the rank's share.

    Raises:
        UnsupportedModel: the architecture, or something its configuration asks for, is not served.
        ConfigError: files are missing or damaged, the tensors are not those the configuration describes, they cannot be
            quantised as asked, or the model cannot be divided so.
    """
    hf_config = read_hf_config(folder)
    whole = decoder_config(hf_config)
    shard = WHOLE if group is None else group.shard
    config = share_of(whole, shard)
    checkpoint = read_checkpoint(folder)
    if dtype is None:
        dtype = _checkpoint_dtype(hf_config.dtype, checkpoint)
    # The structure alone: parameters become the loaded tensors, without a copy.
    decoder = Decoder(config, dtype=dtype, device=torch.device("meta"), group=group)
    for name in [name for name in checkpoint if _DERIVED.search(name)]:
        del checkpoint[name]
    is_tied = whole.tied_head and _has_no_other_head(checkpoint)
    if is_tied:
        checkpoint.pop(HEAD, None)
    described = decoder if group is None else Decoder(whole, dtype=dtype, device=torch.device("meta"))
    _check_shapes(checkpoint, described, folder, is_tied)
    quantizer = plan_quantization(quantization, _quantizable(decoder), dtype=dtype, device=device)
    splits = linear_splits(whole) if shard.size > 1 else {}
    for part in _parts(checkpoint):
        part = shard_parameters(part, splits, shard)
        _load_part(part, decoder, dtype=dtype, device=device, is_tied=is_tied, quantizer=quantizer, pack=pack)
        _return_free_memory()
    decoder.rotary = Rotary(config.rotary_tables, device=device)
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


def _has_no_other_head(checkpoint: Mapping[str, Tensor]) -> bool:
    # As transformers has it: a checkpoint that says tied, and has a head of its own that differs, is not tied.
    if EMBEDDING not in checkpoint:
        return False
    return HEAD not in checkpoint or torch.equal(checkpoint[HEAD], checkpoint[EMBEDDING])


def _check_shapes(checkpoint: Mapping[str, Tensor], decoder: Decoder, folder: Path, is_tied: bool) -> None:
    try:
        # On the meta device nothing is copied.
        shapes = stack_weights({name: tensor.to("meta") for name, tensor in checkpoint.items()}, decoder.config.targets)
    except ValueError as error:
        raise ConfigError(f"{error}; download the base model again") from error
    if is_tied:
        shapes[HEAD] = shapes[EMBEDDING]
    expected = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    faults = {
        "it lacks": sorted(expected.keys() - shapes.keys()),
        "it has tensors the model does not": sorted(shapes.keys() - expected.keys()),
        "shapes differ": [
            f"{name} {tuple(shapes[name].shape)} instead of {shape}"
            for name, shape in expected.items()
            if name in shapes and tuple(shapes[name].shape) != shape
        ],
    }
    found = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
    if found:
        raise ConfigError(
            f"the weights in {folder} are not those its config.json describes: {found}; download the base model again"
        )


def _quantizable(decoder: Decoder) -> dict[str, tuple[int, int]]:
    layers = decoder.model.named_modules(prefix="model")
    return {name: (layer.out_features, layer.in_features) for name, layer in layers if isinstance(layer, Linear)}


def _parts(checkpoint: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Take the checkpoint's tensors out of it: first those of no decoder layer, then one layer's after the other's."""
    names: dict[int, list[str]] = {}
    for name in checkpoint:
        layer = _LAYER.search(name)
        names.setdefault(int(layer[1]) if layer else -1, []).append(name)
    for index in sorted(names):
        yield {name: checkpoint.pop(name) for name in names[index]}


def _load_part(
    part: Mapping[str, Tensor],
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_tied: bool,
    quantizer: WeightQuantizer | None,
    pack: bool,
) -> None:
    stacked = stack_weights(part, decoder.config.targets)
    state: dict[str, Tensor] = {}
    for name in list(stacked):
        # What is read from a file is mapped, not copied. A server's weights must outlive the file, and one tensor in
        # use would keep all of the file in memory.
        state[name] = stacked.pop(name).to(device=device, dtype=dtype, copy=name in part)
    if is_tied and EMBEDDING in state:
        start, stop = decoder.config.shard.span(decoder.config.vocab_size)
        state[HEAD] = state[EMBEDDING][start:stop]
    decoder.load_state_dict(state, strict=False, assign=True)
    modules = [decoder.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in state)]
    state.clear()
    for layer in modules:
        if not isinstance(layer, Linear):
            continue
        if quantizer is not None and layer is not decoder.lm_head:
            layer.quantize(quantizer)
        elif pack:
            layer.pack()


def _return_free_memory() -> None:
    """Give the heap's free pages back to the system, where the C library can.

    Plain weights and what quantising needs beside them are freed between the weights that stay. Below 32 MiB glibc
    keeps such holes, which added up to more than the quantised weights of a small model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
