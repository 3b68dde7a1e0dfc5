"""Other projects' LoRA kernels, to be compared with ours: vLLM's pair, and SGLang's chunked and dense ones.

They are loaded from the projects' own files where those are installed, or unpacked in a folder that VLLM_SRC or SGL_SRC
names. Of the projects around them only what these files import is there, as stand-ins; their own launch functions pick
their tile sizes and grids, with the settings the projects ship.
"""

import contextlib
import enum
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language
from torch import Tensor

from kernels import Routing

Bind = Callable[[Routing, Tensor, Tensor, Tensor, Tensor, Sequence[int]], Callable[[], object]]

_HOPPER = (9, 0)

_MOST_DECODE_ROWS = 256
"""Steps of more rows are taken for prefills."""


@dataclass(frozen=True)
class Peer:
    """Kernels of another project.

    Attributes:
        name: The project and the kernels.
        bind: `bind(routing, x, a_stack, b_stack, y, slices)` brings a site's weights and the step's routing into the
            project's form and returns what adds the LoRA product to y, as `kernels.sgmv` does, each time it is called.
    """

    name: str
    bind: Bind


def load_peers() -> tuple[list[Peer], list[str]]:
    """The peers that are here, and a line about each project that is not, or whose files are not as expected."""
    peers: list[Peer] = []
    absent = []
    for project, variable, load in (("vllm", "VLLM_SRC", _load_vllm), ("sglang", "SGL_SRC", _load_sglang)):
        folder = _folder(project, variable)
        if folder is None:
            absent.append(f"{project}: not installed, and {variable} names no folder")
            continue
        try:
            peers.extend(load(folder))
        except Exception as error:
            # Their files change with every release: a peer that does not load is told of, and is no failure of ours.
            absent.append(f"{project}: {folder} does not load: {type(error).__name__}: {error}")
    return peers, absent


def _folder(project: str, variable: str) -> Path | None:
    if named := os.environ.get(variable):
        return Path(named)
    spec = importlib.util.find_spec(project)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


class _Package:
    """A project of stand-ins, and of modules loaded from its files, importable only inside `importable`."""

    def __init__(self, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        for name, contents in stand_ins.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents, __path__=[])
            self._add(name, module)

    @contextlib.contextmanager
    def importable(self) -> Iterator[None]:
        hidden = {name: sys.modules.pop(name) for name in self._modules if name in sys.modules}
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            for name in self._modules:
                sys.modules.pop(name, None)
            sys.modules.update(hidden)

    def load(self, name: str, path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(path)
        module = importlib.util.module_from_spec(spec)
        with self.importable():
            # A dataclass looks its own module up while the module is being loaded.
            sys.modules[name] = module
            spec.loader.exec_module(module)
            sys.modules.pop(name, None)
        self._add(name, module)
        return module

    def _add(self, name: str, module: types.ModuleType) -> None:
        self._modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in self._modules:
            setattr(self._modules[parent], child, module)


class _Settings:
    """Settings of a project: those given, and None for every other."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return None


class _Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class _Platform:
    """The device the kernels run on, or an H200 where there is none."""

    @staticmethod
    def _capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else _HOPPER

    def is_cuda(self) -> bool:
        return True

    def is_device_capability(self, capability: int) -> bool:
        major, minor = self._capability()
        return 10 * major + minor == capability

    def has_device_capability(self, capability: int) -> bool:
        major, minor = self._capability()
        return 10 * major + minor >= capability


def _load_vllm(folder: Path) -> list[Peer]:
    def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=torch.int64 if dtype == torch.uint64 else dtype).to(device)

    def no_registry(*args: Any, **options: Any) -> None:
        raise AttributeError("operators are called, not registered")

    settings = _Settings(VLLM_BATCH_INVARIANT=False, VLLM_LORA_DISABLE_PDL=False, VLLM_LORA_ENABLE_DUAL_STREAM=False)
    operators = "vllm.lora.ops.triton_ops"
    package = _Package(
        {
            "vllm": {"envs": settings},
            "vllm.triton_utils": {"tl": triton.language, "triton": triton},
            "vllm.logger": {"init_logger": lambda name: _Silent()},
            "vllm.platforms": {"current_platform": _Platform()},
            "vllm.utils": {},
            "vllm.utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
            "vllm.utils.torch_utils": {"async_tensor_h2d": upload, "direct_register_custom_op": no_registry},
            "vllm.lora": {},
            "vllm.lora.ops": {},
            operators: {},
        }
    )
    files = folder / "lora" / "ops" / "triton_ops"
    names = ("kernel_utils", "utils", "lora_kernel_metadata", "lora_shrink_op", "lora_expand_op")
    _, tables, metadata, shrink, expand = (package.load(f"{operators}.{name}", files / f"{name}.py") for name in names)

    def bind(
        routing: Routing, x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, slices: Sequence[int]
    ) -> Callable[[], object]:
        # It remembers shapes by address, and other weights may now be where earlier ones were.
        tables._LORA_A_PTR_DICT.clear()
        tables._LORA_B_PTR_DICT.clear()
        num_slots, _, rank = b_stack.shape
        a_parts = [part.unsqueeze(1).contiguous() for part in a_stack.chunk(len(slices), dim=1)]
        b_parts = [part.unsqueeze(1).contiguous() for part in b_stack.split_with_sizes(list(slices), dim=1)]
        meta = metadata.LoRAKernelMeta.make(num_slots, routing.num_rows, x.device)
        meta.prepare_tensors(_row_slots(routing, x.device))
        # A graph holds one launch for any number of adapters, as ours do: vLLM's default.
        arguments = meta.meta_args(routing.num_rows, False)

        def run() -> None:
            low = torch.empty(len(slices), routing.num_rows, rank, dtype=torch.float32, device=x.device)
            shrink._lora_shrink(x, a_parts, low, *arguments, 1.0)
            expand._lora_expand(low, b_parts, y, *arguments, offset_start=0, add_inputs=True)

        return run

    return [Peer("vllm", bind)]


class _Phase(str, enum.Enum):
    """What a step does, by which SGLang's dense plans are chosen."""

    DECODE = "decode"
    PREFILL = "prefill"


class _Flag:
    """One of SGLang's settings, which are read through `get`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value


class _Flags:
    """SGLang's settings, as it ships them."""

    def __getattr__(self, name: str) -> _Flag:
        return _Flag(None)


def _load_sglang(folder: Path) -> list[Peer]:
    def uncached(key: Any) -> Callable[[Any], Any]:
        return lambda kernel: kernel

    def device_name(*args: Any) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"

    def architecture(major: int) -> str:
        return {9: "sm90", 10: "sm100"}.get(major, "default")

    kernels, server = "sglang.kernels.ops.lora", "sglang.srt.lora"
    package = _Package(
        {
            **{name: {} for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", kernels)},
            **{f"{kernels}.{name}": {} for name in ("dense", "common", "moe")},
            f"{kernels}.moe.virtual_experts": {"_align_block_size_jit": _aligned_blocks},
            "sglang.srt": {},
            "sglang.srt.environ": {"envs": _Flags()},
            "sglang.srt.utils": {"cached_triton_kernel": uncached, "get_device_name": device_name},
            server: {},
            f"{server}.dense": {},
            f"{server}.utils": {
                "LoRABatchInfo": object,
                "Phase": _Phase,
                "architecture_for_capability": architecture,
            },
        }
    )
    files = folder / "kernels" / "ops" / "lora"
    package.load(f"{kernels}.dense.lora_tuning_config", files / "dense" / "lora_tuning_config.py")
    shrink, expand = (
        package.load(f"{kernels}.dense.chunked_sgmv_{name}", files / "dense" / f"chunked_sgmv_{name}.py")
        for name in ("shrink", "expand")
    )
    common = {
        name: package.load(f"{kernels}.common.{name}", files / "common" / f"{name}.py")
        for name in ("route_view", "routing", "lora_a", "lora_b")
    }
    workspace = package.load(f"{server}.workspace", folder / "srt" / "lora" / "workspace.py")
    package.load(f"{server}.dense.plan", folder / "srt" / "lora" / "dense" / "plan.py")
    runner = package.load(f"{server}.dense.runner", folder / "srt" / "lora" / "dense" / "runner.py")
    if not torch.cuda.is_available():
        runner.slice_geometry = _geometry_on_cpu(common["lora_b"])
    return [
        Peer("sglang chunked", _chunked(shrink, expand)),
        Peer("sglang dense", _dense(package, workspace, runner)),
    ]


def _chunked(shrink: Any, expand: Any) -> Bind:
    chunk = 16
    """`--max-lora-chunk-size` as shipped."""

    def bind(
        routing: Routing, x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, slices: Sequence[int]
    ) -> Callable[[], object]:
        starts = [(slot, row) for slot, start, stop in routing.groups for row in range(start, stop, chunk)]

        def upload(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(x.device)

        batch = types.SimpleNamespace(
            max_len=chunk,
            num_segments=len(starts),
            use_cuda_graph=False,
            seg_indptr=upload([*(row for _, row in starts), routing.end]),
            weight_indices=upload([slot for slot, _ in starts]),
            lora_ranks=routing.ranks,
            permutation=torch.arange(routing.num_rows, dtype=torch.int32, device=x.device),
            scalings=torch.ones(b_stack.shape[0], device=x.device),
        )
        ends = torch.tensor(slices).cumsum(0).tolist()
        offsets_on_host = torch.tensor([0, *ends], dtype=torch.int32)
        offsets = offsets_on_host.to(x.device)

        def run() -> None:
            low = shrink.chunked_sgmv_lora_shrink_forward(x, a_stack, batch, len(slices))
            expand.chunked_sgmv_lora_expand_forward(
                low, b_stack, batch, offsets, max(slices), y, slice_offsets_cpu=offsets_on_host
            )

        return run

    return bind


def _dense(package: _Package, workspace: Any, runner: Any) -> Bind:
    plans = runner.DenseLoraKind

    def bind(
        routing: Routing, x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, slices: Sequence[int]
    ) -> Callable[[], object]:
        num_slots, out_features, rank = b_stack.shape
        with package.importable():
            name = None if x.is_cuda else "sm90"
            dense = runner.DenseLoraRunner(
                workspace.LoraWorkspace(), max_loras=num_slots, device=x.device, architecture=name
            )
        dense.begin_batch(
            token_slots=_row_slots(routing, x.device),
            lora_ranks=routing.ranks,
            scalings=torch.ones(num_slots, device=x.device),
            num_tokens=routing.num_rows,
            phase=_Phase.DECODE if routing.num_rows <= _MOST_DECODE_ROWS else _Phase.PREFILL,
            graph_mode=True,
        )
        plan = dense.plan_for(plans.LINEAR, rank, x.shape[1], out_features, num_tokens=routing.num_rows)
        offsets = (0, *torch.tensor(slices).cumsum(0).tolist())

        def run() -> None:
            dense.apply(x, lambda: y, plan, a=a_stack, b=b_stack, offsets=offsets)

        return run

    return bind


def _geometry_on_cpu(lora_b: Any) -> Callable[..., Any]:
    """SGLang's own slice geometry, where it would ask for a CUDA device."""

    def geometry(offsets: tuple[int, ...], block: int, device: torch.device) -> Any:
        with (
            patch.object(torch.cuda, "device", contextlib.nullcontext),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            return lora_b._build_geometry(offsets, block, device, offsets[:-1])

    return geometry


def _row_slots(routing: Routing, device: torch.device) -> Tensor:
    """int32 `[T]`: each row's slot, -1 for base rows."""
    slots = torch.full((routing.num_rows,), -1, dtype=torch.int32)
    for slot, start, stop in routing.groups:
        slots[start:stop] = slot
    return slots.to(device)


def _aligned_blocks(buckets: Tensor, block_size: int, num_buckets: int, scratch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What SGLang's own CUDA extension makes of a step's rows, once a step: row ids by bucket, in padded blocks."""
    rows = buckets.flatten().tolist()
    ids: list[int] = []
    block_buckets: list[int] = []
    for bucket in (*range(num_buckets), -1):
        members = [row for row, owner in enumerate(rows) if owner == bucket]
        blocks = -(-len(members) // block_size)
        ids += members + [len(rows)] * (blocks * block_size - len(members))
        block_buckets += [bucket] * blocks
    # Grids follow from the lengths: the most blocks that any step of this shape needs.
    capacity = -(-(len(rows) + min(len(rows), num_buckets + 1) * (block_size - 1)) // block_size)
    used = len(ids)
    ids += [len(rows)] * (capacity * block_size - used)
    block_buckets += [-1] * (capacity - len(block_buckets))

    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(buckets.device)

    return upload(ids), upload(block_buckets), upload([used])
