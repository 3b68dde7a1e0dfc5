"""Metrics of Ray as tests can read them: Ray itself hands what is set to another process."""

from collections.abc import Mapping, Sequence

Shown = dict[tuple[str, ...], float]


class RecordedMetric:
    """Stands for a gauge or a counter; `shown` has the values by those of the labels, in the order of their names."""

    by_name: Mapping[str, "RecordedMetric"] = {}

    def __init__(self, name: str, description: str = "", tag_keys: Sequence[str] = ()) -> None:
        self.tag_keys = set(tag_keys)
        self.shown: Shown = {}
        type(self).by_name = {**type(self).by_name, name: self}

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """As of a gauge."""
        self.shown[self._key(tags or {})] = value

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """As of a counter."""
        assert value > 0, "Ray refuses it"
        self.shown[self._key(tags or {})] = self.shown.get(self._key(tags or {}), 0.0) + value

    def _key(self, tags: Mapping[str, str]) -> tuple[str, ...]:
        assert tags.keys() == self.tag_keys, "Ray refuses it"
        return tuple(tags[key] for key in sorted(tags))


def shown(name: str) -> Shown:
    """What a metric that was recorded shows now."""
    return RecordedMetric.by_name[name].shown
