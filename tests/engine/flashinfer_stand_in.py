"""FlashInfer's wrappers as it documents them, in plain torch: what they attend to follows from the lists alone.

As captured launches do, `run` reads the lists from where they are at that moment: it is one operator, which a recording
calls again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@torch.library.custom_op("lora_fleet_tests::attend_pages", mutates_args=("out",))
def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    row_offsets: Tensor,
    page_offsets: Tensor,
    pages: Tensor,
    last_lengths: Tensor,
    out: Tensor,
    scale: float,
    window_left: int,
    softcap: float,
    causal: bool,
) -> None:
    """Attention of each sequence's rows to the tokens of its pages, layout HND."""
    group, size = queries.shape[1] // keys.shape[1], keys.shape[2]
    rows, offsets = row_offsets.tolist(), page_offsets.tolist()
    for place, last in enumerate(last_lengths.tolist()):
        assert 1 <= last <= size
        mine = pages[offsets[place] : offsets[place + 1]].long()
        length = (len(mine) - 1) * size + last
        key, value = (part[mine].transpose(1, 2).flatten(0, 1)[:length].float() for part in (keys, values))
        query = queries[rows[place] : rows[place + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        # Rows are the last of the tokens, in both of its masks.
        position = torch.arange(length - len(query), length)[:, None]
        token = torch.arange(length)
        excluded = (token > position) if causal else torch.zeros(len(query), length, dtype=torch.bool)
        if window_left >= 0:
            excluded = excluded | (token < position - window_left)
        weights = scores.masked_fill(excluded, float("-inf")).softmax(-1)
        found = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))
        out[rows[place] : rows[place + 1]] = found.to(out.dtype)


class _Wrapper:
    """What both wrappers have in common: a plan, and its lists on the device."""

    causal: bool

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        self.lists: dict[str, Tensor] = {}

    def keep(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.query_shape = (num_qo_heads, head_dim)
        self.page_shape = (num_kv_heads, page_size, head_dim)
        self.dtypes = (q_data_type, kv_data_type)
        self.scores: dict[str, Any] = {
            "scale": sm_scale,
            "window_left": window_left,
            "softcap": logits_soft_cap,
            "causal": self.causal,
        }

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        keys, values = paged_kv_cache
        assert tuple(q.shape[1:]) == self.query_shape
        assert tuple(keys.shape[1:]) == tuple(values.shape[1:]) == self.page_shape
        assert keys.stride() == values.stride()
        assert (q.dtype, keys.dtype) == self.dtypes
        assert out.shape == q.shape
        assert out.is_contiguous()
        attend_pages(q, keys, values, **self.lists, out=out, **self.scores)
        return out


class DecodeWrapper(_Wrapper):
    """As `flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    causal = False

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.uses_graph = use_cuda_graph
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert paged_kv_indices_buffer is not None
            num_rows = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == num_rows + 1
            self.lists = {
                "row_offsets": torch.arange(num_rows + 1, dtype=torch.int32),
                "page_offsets": paged_kv_indptr_buffer,
                "pages": paged_kv_indices_buffer,
                "last_lengths": paged_kv_last_page_len_buffer,
            }

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, **shapes: Any) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        if self.uses_graph:
            self.lists["page_offsets"].copy_(indptr)
            self.lists["pages"][: len(indices)].copy_(indices)
            self.lists["last_lengths"].copy_(last_page_len)
        else:
            offsets = torch.arange(len(indptr), dtype=torch.int32)
            self.lists = {"row_offsets": offsets, "page_offsets": indptr, "pages": indices}
            self.lists["last_lengths"] = last_page_len
        self.keep(**shapes)


class PrefillWrapper(_Wrapper):
    """As `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *,
        head_dim_qk: int,
        causal: bool = False,
        **shapes: Any,
    ) -> None:
        self.causal = causal
        self.lists = {
            "row_offsets": qo_indptr,
            "page_offsets": paged_kv_indptr,
            "pages": paged_kv_indices,
            "last_lengths": paged_kv_last_page_len,
        }
        assert all(entry.dtype == torch.int32 for entry in self.lists.values())
        self.keep(head_dim=head_dim_qk, **shapes)


def stand_in_module() -> ModuleType:
    """A module with the two wrappers, under FlashInfer's names."""
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper  # type: ignore[attr-defined]
    return module


@contextmanager
def flashinfer_stand_in(module: ModuleType | None = None) -> Iterator[None]:
    """Within it FlashInfer is installed, runs on the CPU, and serves models of every size."""
    with (
        patch.dict("sys.modules", {"flashinfer": stand_in_module() if module is None else module}),
        patch("kernels.flashinfer_attention.library_fault", lambda device: None),
        patch("kernels.flashinfer_attention.model_fault", lambda layout: None),
    ):
        yield
