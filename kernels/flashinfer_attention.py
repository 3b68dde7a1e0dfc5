"""Attention over a paged KV cache by FlashInfer, on NVIDIA GPUs where it is installed.

FlashInfer reads the cache as it lies: keys and values of a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`
each, are its layout "HND", and block tables are its lists of pages. A step is planned once on the host, for all layers
of a window, and run in each of them.
"""

import importlib
import importlib.util
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import paged_attention_reference as reference
from kernels.paged_attention_tiles import PagedLayout
from kernels.support import cuda_fault

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64)

WORKSPACE_BYTES = 512 << 20
"""For partial results: FlashInfer advises a quarter of it, and plans more for graphs of many rows and query heads."""

WRAPPER_BYTES = 8 << 20
"""What each of its wrappers allocates for plans."""

_TOLERANCE = 0.03
"""Largest difference from the reference at start, as a part of the largest output: 16 bits, rounded twice."""


class PageLists(NamedTuple):
    """A step's sequences as FlashInfer takes them; int32 arrays on the host.

    Attributes:
        row_offsets: `[N + 1]`, first row of each sequence and, last, the number of rows.
        page_offsets: `[N + 1]`, the same of its entries in `pages`.
        pages: Cache blocks of each sequence in order, one sequence after the other.
        last_lengths: `[N]`, tokens in the last page of each sequence, 1 to `block_size`.
    """

    row_offsets: npt.NDArray[np.int32]
    page_offsets: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    last_lengths: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        q_lens: Sequence[int] | npt.NDArray[np.int64],
        kv_lens: Sequence[int] | npt.NDArray[np.int64],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> "PageLists":
        """From sequences as `build_paged_schedule` takes them; each has a row and a token at least."""
        kv = np.asarray(kv_lens, dtype=np.int64)
        counts = -(-kv // block_size)
        for count, table in zip(counts.tolist(), block_tables, strict=True):
            assert len(table) >= count, f"{count} blocks are in use, and a block table has {len(table)}"
        used = (itertools.islice(table, count) for table, count in zip(block_tables, counts.tolist(), strict=True))
        return cls(
            row_offsets=_offsets(np.asarray(q_lens, dtype=np.int64)),
            page_offsets=_offsets(counts),
            pages=np.fromiter(itertools.chain.from_iterable(used), np.int32, count=int(counts.sum())),
            last_lengths=(kv - (counts - 1) * block_size).astype(np.int32),
        )

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one row."""
        return int(self.row_offsets[-1]) == len(self.last_lengths)


class FlashInferStep(NamedTuple):
    """A planned step; good until the next step is planned, or, of a graph's rows, until that graph's next one.

    Attributes:
        wrappers: FlashInfer's, by window in tokens; None is the whole past.
        scale: Of the scores, as planned.
        softcap: Bound on the scores, as planned.
    """

    wrappers: Mapping[int | None, Any]
    scale: float
    softcap: float | None

    def attend(
        self, queries: Tensor, cache: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """What `kernels.paged_attention.paged_attention` computes, for the rows of the step.

        Args:
            queries: `[T, num_heads, head_dim]`; its rows may be those of a wider tensor.
            cache: `[2, num_blocks, num_kv_heads, block_size, head_dim]`, keys first.
            scale: Of the scores.
            window: Tokens a row attends to, its own included; one that was planned.
            softcap: Bound on the scores' absolute value.
        """
        assert (scale, softcap) == (self.scale, self.softcap), "the step was planned for other scores"
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        keys, values = cache.unbind(0)
        self.wrappers[window].run(queries, (keys, values), out=out)
        return out


class FlashInferAttention:
    """FlashInfer's wrappers for one model, and the memory they share; for the thread that runs the model."""

    def __init__(
        self,
        library: Any,
        layout: PagedLayout,
        *,
        windows: Sequence[int | None],
        scale: float,
        softcap: float | None,
        device: torch.device,
    ) -> None:
        """Take the memory that steps without a graph need.

        Args:
            library: The package `flashinfer`.
            layout: Of the model and its cache.
            windows: Those of the model's layers, in tokens; None: all.
            scale: Of the scores.
            softcap: Bound on the scores' absolute value; None: no bound.
            device: Where the model is.
        """
        self._library, self._layout, self._device = library, layout, device
        self._windows, self._scale, self._softcap = tuple(windows), scale, softcap
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        make_prefill = library.BatchPrefillWithPagedKVCacheWrapper
        self._prefills = self._step({window: make_prefill(self._workspace, "HND") for window in self._windows})
        self._decodes = self._step({window: self._decode_wrapper() for window in self._windows})
        self._graphs: dict[int, FlashInferStep] = {}
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self._is_copied: torch.cuda.Event | None = None

    def plan(self, lists: PageLists) -> FlashInferStep:
        """Plan a step that no graph was captured for."""
        with self._copied(lists) as (rows, offsets, pages, lengths):
            if lists.decodes:
                self._plan_decodes(self._decodes, offsets, pages, lengths)
                return self._decodes
            for window, wrapper in self._prefills.wrappers.items():
                wrapper.plan(rows, offsets, pages, lengths, causal=True, **self._shapes("head_dim_qk", window))
            return self._prefills

    def reserve_graphs(self, max_rows: int, max_blocks: int) -> None:
        """Take the memory that captured graphs read a step from.

        Args:
            max_rows: Rows of the largest graph.
            max_blocks: Most blocks of a sequence.
        """
        sizes = (max_rows + 1, max_rows * max_blocks, max_rows)
        offsets, pages, lengths = (torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes)
        self._buffers = (offsets, pages, lengths)

    def plan_graph(self, lists: PageLists) -> FlashInferStep:
        """Plan a step in which every sequence decodes, for the graph of as many rows.

        What the graph launches is the same for all of them. It is captured after a first plan, and another plan must
        not come before it is replayed. Rows that pad the step are sequences, of one token in a block that is nobody's.
        """
        assert self._buffers is not None, "reserve_graphs comes before the first graph"
        assert lists.decodes, "graphs are of steps in which every sequence decodes"
        num_rows = len(lists.last_lengths)
        if num_rows not in self._graphs:
            offsets, pages, lengths = self._buffers
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": offsets[: num_rows + 1],
                "paged_kv_indices_buffer": pages,
                "paged_kv_last_page_len_buffer": lengths[:num_rows],
            }
            self._graphs[num_rows] = self._step({window: self._decode_wrapper(**buffers) for window in self._windows})
        with self._copied(lists) as (_, offsets, pages, lengths):
            self._plan_decodes(self._graphs[num_rows], offsets, pages, lengths)
        return self._graphs[num_rows]

    def _step(self, wrappers: Mapping[int | None, Any]) -> FlashInferStep:
        return FlashInferStep(wrappers, self._scale, self._softcap)

    def _decode_wrapper(self, **buffers: Any) -> Any:
        # Its kernels without matrix units serve few numbers of query heads to a KV head.
        make = self._library.BatchDecodeWithPagedKVCacheWrapper
        return make(self._workspace, "HND", use_tensor_cores=True, **buffers)

    def _plan_decodes(self, step: FlashInferStep, offsets: Tensor, pages: Tensor, lengths: Tensor) -> None:
        for window, wrapper in step.wrappers.items():
            wrapper.plan(offsets, pages, lengths, **self._shapes("head_dim", window))

    def _shapes(self, head_dim: str, window: int | None) -> dict[str, Any]:
        layout = self._layout
        return {
            "num_qo_heads": layout.num_heads,
            "num_kv_heads": layout.num_kv_heads,
            head_dim: layout.head_dim,
            "page_size": layout.block_size,
            # FlashInfer counts the tokens before a row's own one.
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": self._softcap or 0.0,
            "sm_scale": self._scale,
            "q_data_type": layout.dtype,
            "kv_data_type": layout.dtype,
        }

    @contextmanager
    def _copied(self, lists: PageLists) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Offsets of rows and of pages, pages, and last lengths; the pages on the device, from where they are copied
        without waiting."""
        is_cuda = self._device.type == "cuda"
        if self._is_copied is not None:
            # A wrapper copies its plan from page-locked memory of its own, which the next plan overwrites.
            self._is_copied.synchronize()
        rows, offsets, pages, lengths = (
            torch.from_numpy(array).pin_memory() if is_cuda else torch.from_numpy(array) for array in lists
        )
        yield rows, offsets, pages.to(self._device, non_blocking=True), lengths
        if is_cuda:
            self._is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_copied.record()

    def fault(self) -> str | None:
        """What is wrong with FlashInfer here, found by a few sequences; None where it computes what it should.

        Compiles what steps will run, too.
        """
        layout, size = self._layout, self._layout.block_size
        generator = torch.Generator().manual_seed(0)
        tables = [[4, 1], [3, 0, 2]]
        for q_lens, kv_lens in (([1, 1], [size + 3, 2 * size + 1]), ([1, size + 1], [size, 2 * size + 1])):
            # Past a sequence's own tokens blocks may hold anything.
            cache = torch.full((2, 5, *layout.cache_shape[2:]), float("nan"), dtype=layout.dtype)
            for table, kv_len in zip(tables, kv_lens, strict=True):
                for place in range(kv_len):
                    shape = (2, layout.num_kv_heads, layout.head_dim)
                    cache[:, table[place // size], :, place % size] = torch.randn(shape, generator=generator)
            shape = (sum(q_lens), layout.num_heads, layout.head_dim)
            queries = torch.randn(shape, generator=generator).to(layout.dtype)
            step = self.plan(PageLists.of(q_lens, kv_lens, tables, size))
            for window in self._windows:
                features: dict[str, Any] = {"scale": self._scale, "window": window, "softcap": self._softcap}
                found = step.attend(queries.to(self._device), cache.to(self._device), **features).cpu().float()
                expected = reference.paged_attention(queries, cache, q_lens, kv_lens, tables, **features)
                wrong = float((found - expected).abs().max() / expected.abs().max())
                if not wrong < _TOLERANCE:
                    return f"its output differs by {wrong:.3g} of the largest value from what is right"
        return None


def open_flashinfer(
    layout: PagedLayout,
    *,
    windows: Sequence[int | None],
    scale: float,
    softcap: float | None,
    device: torch.device,
) -> FlashInferAttention | None:
    """FlashInfer for a model, tried; None where it does not serve it, of which the log says why.

    Arguments are those of `FlashInferAttention`.
    """
    fault = library_fault(device) or model_fault(layout)
    if fault is None:
        try:
            library = importlib.import_module("flashinfer")
            attention = FlashInferAttention(
                library, layout, windows=windows, scale=scale, softcap=softcap, device=device
            )
            fault = attention.fault()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # It compiles on this machine when first used, and that fails in many ways.
            fault = f"trying it failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if fault is None:
            return attention
    logger.warning("attention on %s is left to the Triton kernels, not to FlashInfer: %s", device, fault)
    return None


def library_fault(device: torch.device) -> str | None:
    """Why FlashInfer does not run on a device; None where it does."""
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed; install flashinfer-python, or set engine.attention_backend to triton"
    if device.type != "cuda" or torch.version.hip:
        return "it runs on NVIDIA GPUs only"
    return cuda_fault(torch.cuda.get_device_capability(device))


def model_fault(layout: PagedLayout) -> str | None:
    """Why FlashInfer does not serve a model, as the end of a sentence; None if it does."""
    if layout.dtype not in DTYPES:
        return f"the cache is {layout.dtype}, none of {', '.join(map(str, DTYPES))}"
    if layout.head_dim not in HEAD_DIMS:
        return f"heads are {layout.head_dim} long, none of {', '.join(map(str, HEAD_DIMS))}"
    if layout.block_size not in BLOCK_SIZES:
        return f"engine.block_size is {layout.block_size}, none of {', '.join(map(str, BLOCK_SIZES))}"
    return None


def workspace_bytes(num_windows: int, num_graph_sizes: int, num_pages: int) -> int:
    """Device memory it takes: for steps without graphs, for graphs of so many sizes, and for the pages they read."""
    return WORKSPACE_BYTES + num_windows * (2 + num_graph_sizes) * WRAPPER_BYTES + 4 * num_pages


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
