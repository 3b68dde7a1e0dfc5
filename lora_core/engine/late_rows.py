"""Rows of which it is not known in time what may come next."""

from torch import Tensor

from lora_core.engine.grammars import Grammars
from lora_core.engine.request import ScheduledBatch


def without_late_rows(batch: ScheduledBatch, logits: Tensor, grammars: Grammars) -> tuple[ScheduledBatch, Tensor]:
    """Leave out constrained rows whose constraints are not ready after a short wait: they are computed anew.

    Args:
        batch: A computed step.
        logits: `[rows that sample, V]`, in row order.
        grammars: Follow the constraints.
    """
    sampling = [row for row in batch.rows if row.samples]
    constraints = [one for row in sampling if (one := row.request.sampler.constraint) is not None]
    if constraints:
        grammars.settle(constraints)
    if all(one.is_ready for one in constraints):
        return batch, logits
    late = {id(row) for row in sampling if (one := row.request.sampler.constraint) is not None and not one.is_ready}
    kept = [place for place, row in enumerate(sampling) if id(row) not in late]
    return ScheduledBatch([row for row in batch.rows if id(row) not in late]), logits[kept]
