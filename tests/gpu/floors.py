# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""What no kernel can go below on this device: the bandwidth of its memory, and the time of empty launches."""

import torch
import triton

from tests.gpu.stage import Stage

_COPIED_BYTES = 1 << 30
_LAYERS = 32


@triton.jit
def _empty_kernel(tensor):
    pass


def copy_bytes_per_s(stage: Stage, num_bytes: int = _COPIED_BYTES, repeats: int = 20) -> float:
    """Bytes read and written a second by a copy far larger than any cache."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=stage.device)
    target = torch.zeros_like(source)
    (us,) = stage.times_us([stage.record(lambda: target.copy_(source))], repeats)
    return 2 * num_bytes / max(us, 1e-3) * 1e6


def launch_floor_us(stage: Stage, launches: int, programs: int = 132, repeats: int = 20) -> float:
    """Microseconds a layer of that many dependent empty launches takes in a graph."""
    tensor = torch.zeros(1, device=stage.device)

    def run() -> None:
        for _ in range(_LAYERS * launches):
            _empty_kernel[(programs,)](tensor, enable_fp_fusion=True)

    (us,) = stage.times_us([stage.record(run)], repeats)
    return us / _LAYERS
