"""`likeliest`: a few largest entries of long rows."""

import torch
from torch import Tensor

GROUPS_PER_FOUND = 12
MIN_GROUPS = 4096
"""The `k` largest entries are looked for in the `k` best of 12 times `k` groups, and 4096 at least: both searches, of
groups and in them, are then short."""


def likeliest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest entries of each row, in falling order, and their positions: as `values.topk(k)`.

    Much faster for large rows, on the CPU: the k largest entries lie in the k groups with the largest maxima.

    Args:
        values: `[N, V]`.
        k: At most V.
    """
    num_rows, vocab_size = values.shape
    num_groups = max(MIN_GROUPS, GROUPS_PER_FOUND * k)
    size = vocab_size // num_groups
    if size < 2:
        found, ids = values.topk(k, dim=-1)
        return found, ids
    # Group g has the entries g, g + num_groups, ...: taking their maximum then runs along memory.
    groups = values[:, : size * num_groups].view(num_rows, size, num_groups).amax(dim=1).topk(k, dim=-1, sorted=False)
    within = torch.arange(0, size * num_groups, num_groups, device=values.device)
    ids = (groups.indices.unsqueeze(1) + within.view(1, size, 1)).view(num_rows, size * k)
    if size * num_groups < vocab_size:
        rest = torch.arange(size * num_groups, vocab_size, device=values.device).expand(num_rows, -1)
        ids = torch.cat((ids, rest), dim=-1)
    found, places = values.gather(-1, ids).topk(k, dim=-1)
    return found, ids.gather(-1, places)
