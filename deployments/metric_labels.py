"""`AdapterLabels`: a bounded number of adapters get a label of their own in metrics."""

from collections.abc import Mapping

from cluster.progress import BASE

BASE_LABEL = "(base)"
OTHER_LABEL = "(other)"
"""All adapters that came too late for a label of their own."""

MOST_LABELS = 64
"""Adapters with a label of their own in one process, for as long as it lives: whoever stores metrics keeps a series for
each label that there ever was."""


class AdapterLabels:
    """Gives labels in the order in which adapters ask for one, and keeps them."""

    def __init__(self, most: int = MOST_LABELS) -> None:
        self._most = most
        self._labels: dict[str, str] = {}

    def of(self, name: str | None) -> str:
        """The label of an adapter; None or `BASE` is the base model."""
        if name is None or name == BASE:
            return BASE_LABEL
        if name not in self._labels and len(self._labels) >= self._most:
            return OTHER_LABEL
        return self._labels.setdefault(name, name)

    def summed(self, values: Mapping[str | None, float]) -> dict[str, float]:
        """Values by label. Largest first, so that the adapters that matter most get the labels that are left."""
        found: dict[str, float] = {}
        for name, value in sorted(values.items(), key=lambda item: -item[1]):
            label = self.of(name)
            found[label] = found.get(label, 0.0) + value
        return found


class LabelledGauge:
    """What a gauge shows by label: labels that are no longer told fall to 0, and do not stay as they were."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def complete(self, values: Mapping[str, float]) -> dict[str, float]:
        """`values`, and 0 for each label that had one before."""
        gone = self._shown - values.keys()
        self._shown = set(values)
        return {**values, **dict.fromkeys(gone, 0.0)}
