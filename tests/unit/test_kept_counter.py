"""Counters that are on the page of metrics before they have counted anything."""

import threading
from typing import get_args

import pytest

from deployments.kept_counter import KeptCounter
from deployments.queue_metrics import QueueMetrics, Reason
from deployments.replica_metrics import LOADED_FROM, ReplicaMetrics
from lora_core.workload import CacheCounts, SlotCounts, Workload
from tests.unit.recorded_metrics import shown

pytestmark = pytest.mark.usefixtures("recorded_metrics")


def test_a_counter_without_labels_begins_at_0_by_itself() -> None:
    counter = KeptCounter("heals", "Heals.")
    assert shown("heals_total") == {(): 0}
    counter.inc()
    counter.inc(0)
    counter.inc(2.5)
    assert shown("heals_total") == {(): 3.5}


def test_a_series_begins_when_it_is_told_to_and_not_anew() -> None:
    counter = KeptCounter("loads", "Loads.", ("tier",))
    assert shown("loads_total") == {}, "its labels are not known yet"
    counter.inc(0, {"tier": "host"})
    counter.inc(2, {"tier": "disk"})
    counter.inc(0, {"tier": "disk"})
    assert shown("loads_total") == {("host",): 0, ("disk",): 2}


def test_threads_that_count_at_a_time_lose_nothing() -> None:
    counter = KeptCounter("tokens", "Tokens.")

    def count() -> None:
        for _ in range(2000):
            counter.inc()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert shown("tokens_total") == {(): 8000}


def test_a_replica_that_has_done_nothing_shows_its_counters() -> None:
    ReplicaMetrics().start(num_slots=4)
    for name in (
        "vllm_prefix_cache_queries", "vllm_prefix_cache_hits", "vllm_num_preemptions", "lora_fleet_slot_hits",
        "lora_fleet_slot_misses", "lora_fleet_slot_evictions", "lora_fleet_watchdog_heals",
    ):  # fmt: skip
        assert shown(f"{name}_total") == {(): 0}, name
    for name in ("lora_fleet_requests_started", "lora_fleet_request_wait_seconds", "lora_fleet_tokens"):
        assert shown(f"{name}_total") == {("(base)",): 0}, name
    for name in ("lora_fleet_loads", "lora_fleet_load_seconds"):
        assert shown(f"{name}_total") == {(tier,): 0 for tier in LOADED_FROM}


def test_a_replica_counts_what_its_engine_has_done_since_the_last_account() -> None:
    metrics = ReplicaMetrics()
    for count in (2, 5, 5):
        slots = SlotCounts(num_hits=count, num_loads={"disk": count}, load_s={"disk": count / 4})
        metrics.take_work(Workload(slots=slots, cache=CacheCounts(num_preemptions=count)))
    metrics.count_heal()
    assert shown("lora_fleet_slot_hits_total") == {(): 5}
    assert shown("lora_fleet_slot_misses_total") == {(): 0}
    assert shown("lora_fleet_loads_total") == {("host",): 0, ("disk",): 5, ("remote",): 0}
    assert shown("lora_fleet_load_seconds_total")[("disk",)] == 1.25
    assert shown("vllm_num_preemptions_total") == {(): 5}
    assert shown("lora_fleet_watchdog_heals_total") == {(): 1}


def test_each_reason_of_a_refusal_stands_at_0_first() -> None:
    metrics = QueueMetrics()
    assert shown("lora_fleet_requests_refused_total") == {(reason,): 0 for reason in get_args(Reason)}
    metrics.refused("no_replica")
    assert shown("lora_fleet_requests_refused_total")[("no_replica",)] == 1
