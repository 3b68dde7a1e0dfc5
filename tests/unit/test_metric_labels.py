"""Labels of metrics: few, and none that stays where it was when nothing more is told of it."""

from deployments.metric_labels import BASE_LABEL, OTHER_LABEL, AdapterLabels, LabelledGauge


def test_only_so_many_adapters_have_a_label_of_their_own() -> None:
    labels = AdapterLabels(most=2)
    found = [labels.of(name) for name in ("a", "b", "c", "a", "d", None, "")]
    assert found == ["a", "b", OTHER_LABEL, "a", OTHER_LABEL, BASE_LABEL, BASE_LABEL]


def test_nothing_is_lost_in_the_sum_and_the_busiest_get_the_labels() -> None:
    labels = AdapterLabels(most=2)
    values: dict[str | None, float] = {"idle": 1, "busy": 50, "busier": 60, None: 5, "some": 2}
    assert labels.summed(values) == {"busier": 60, "busy": 50, BASE_LABEL: 5, OTHER_LABEL: 3}


def test_what_is_no_longer_told_falls_to_zero_once() -> None:
    gauge = LabelledGauge()
    assert gauge.complete({"a": 3.0, "b": 1.0}) == {"a": 3.0, "b": 1.0}
    assert gauge.complete({"b": 2.0}) == {"a": 0.0, "b": 2.0}
    assert gauge.complete({"b": 2.0}) == {"b": 2.0}
