"""Adapters read from their folders and checked, for one base model."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from lora_core.adapter_record import AdapterRecord, FolderStamp
from lora_core.model import LoRAModel
from lora_core.module_weights import BaseModules
from lora_core.targets import LoRASite


class AdapterReader:
    """Reads adapters of one base model. Thread-safe.

    Attributes:
        base: The base model's layers, once there are some (see `LoRAModel`).
        num_reads: How often an adapter's files were read.
    """

    def __init__(
        self,
        *,
        base_dtype: torch.dtype,
        max_lora_rank: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        sites: Sequence[LoRASite],
        num_layers: int,
        pin_memory: bool,
    ) -> None:
        """Read for a base model of these shapes.

        Args:
            base_dtype: Data type of its weights.
            max_lora_rank: Largest true rank accepted.
            n_heads: Query heads.
            n_kv_heads: Key and value heads.
            head_dim: Width of one head.
            sites: The places adapters may change.
            num_layers: Decoder layers.
            pin_memory: Page-lock the tensors, for copies to a GPU.
        """
        self.base: BaseModules | None = None
        self.num_reads = 0
        self._count_lock = threading.Lock()
        self._base_dtype = base_dtype
        self._max_lora_rank = max_lora_rank
        self._n_heads, self._n_kv_heads, self._head_dim = n_heads, n_kv_heads, head_dim
        self._projections = {
            path: (out_features, site.in_features)
            for site in sites
            for path, out_features in zip(site.target.siblings(), site.slices, strict=True)
        }
        self._num_layers = num_layers
        self._pin_memory = pin_memory

    def read(self, name: str, folder: Path) -> tuple[AdapterRecord, LoRAModel]:
        """Read and check the adapter in a folder.

        Raises:
            InvalidAdapterPath: no adapter folder can be read there.
            InvalidAdapter: the adapter cannot be served exactly.
        """
        with self._count_lock:
            self.num_reads += 1
        stamp = FolderStamp.of(folder)
        model = LoRAModel(
            name,
            str(folder),
            self._base_dtype,
            self._max_lora_rank,
            self._n_heads,
            self._n_kv_heads,
            self._head_dim,
            projections=self._projections,
            num_layers=self._num_layers,
            base=self.base,
            pin_memory=self._pin_memory,
        )
        record = AdapterRecord(
            path=folder,
            stamp=stamp,
            content_hash=model.content_hash,
            num_bytes=model.num_bytes,
            rank=model.rank,
            ranks=dict(model.ranks),
            noop_modules=model.noop_modules,
            phases_s=dict(model.phases_s),
        )
        return record, model
