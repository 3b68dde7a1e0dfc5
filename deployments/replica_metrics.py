"""`ReplicaMetrics`: what a replica's engine does, as gauges and counters of Ray."""

from collections.abc import Mapping

from deployments.kept_counter import KeptCounter
from deployments.kept_gauge import KeptGauge
from deployments.metric_labels import BASE_LABEL, AdapterLabels, LabelledGauge
from lora_core.messages import Residency
from lora_core.workload import CacheCounts, SlotCounts, Workload

LOADED_FROM = ("host", "disk", "remote")
"""Tiers that loads come from."""


class ReplicaMetrics:
    """Made inside a replica: Ray Serve adds its labels for application, deployment and replica.

    `docs/metrics.md` lists them.
    """

    def __init__(self) -> None:
        self._labels = AdapterLabels()
        self._resident = KeptGauge("lora_fleet_adapters", "Adapters in each tier; one may be in several.", ("tier",))
        self._slots = KeptGauge("lora_fleet_slots", "Adapter slots.")
        self._slots_used = KeptGauge("lora_fleet_slots_used", "Adapter slots taken by any generation.")
        self._running = KeptGauge("vllm_num_requests_running", "Requests in the engine's batch.", ("adapter",))
        self._waiting = KeptGauge("vllm_num_requests_waiting", "Requests in the engine's queue.", ("adapter",))
        self._idle = KeptGauge(
            "lora_fleet_oldest_request_idle_seconds",
            "Since an adapter's oldest request last got on.",
            ("adapter",),
        )
        self._started = KeptCounter("lora_fleet_requests_started", "Requests that began to run.", ("adapter",))
        self._wait_s = KeptCounter(
            "lora_fleet_request_wait_seconds", "Seconds those had waited in the engine's queue.", ("adapter",)
        )
        self._tokens = KeptCounter("lora_fleet_tokens", "Tokens computed, prompts and answers.", ("adapter",))
        self._kv_usage = KeptGauge("vllm_kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        self._queried = KeptCounter("vllm_prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self._found = KeptCounter("vllm_prefix_cache_hits", "Prompt tokens that were in the prefix cache.")
        self._preemptions = KeptCounter("vllm_num_preemptions", "Running requests that had to wait again.")
        self._hits = KeptCounter("lora_fleet_slot_hits", "Requests that found their adapter in a slot.")
        self._misses = KeptCounter("lora_fleet_slot_misses", "Requests that did not.")
        self._evictions = KeptCounter("lora_fleet_slot_evictions", "Adapters that lost their slot to another one.")
        self._loads = KeptCounter("lora_fleet_loads", "Loads by the tier they came from.", ("tier",))
        self._load_s = KeptCounter("lora_fleet_load_seconds", "Seconds of loads by the tier they came from.", ("tier",))
        for by_adapter in (self._started, self._wait_s, self._tokens):
            by_adapter.inc(0, {"adapter": BASE_LABEL})
        for tier in LOADED_FROM:
            self._loads.inc(0, {"tier": tier})
            self._load_s.inc(0, {"tier": tier})
        self._heals = KeptCounter("lora_fleet_watchdog_heals", "Stalled adapters whose requests were ended.")
        self._counts, self._cache = SlotCounts(), CacheCounts()
        self._shown = {gauge: LabelledGauge() for gauge in (self._running, self._waiting, self._idle)}

    def start(self, num_slots: int) -> None:
        """Show how many adapter slots there are, and that there is no work yet."""
        self._slots.set(num_slots)
        self.take_work(Workload())

    def take_residency(self, residency: Residency) -> None:
        """Show where adapters are; nothing is left out of the report."""
        held = {"slot": residency.resident, "host": residency.in_memory, "disk": residency.loaded}
        for tier, adapters in held.items():
            self._resident.set(len(adapters or ()), {"tier": tier})
        self._slots_used.set(residency.num_slots_used)

    def take_work(self, work: Workload) -> None:
        """Show what the engine did since the last time."""
        adapters = work.adapters
        # The base model always, so that there is a series before its first request.
        self._show(self._running, {None: 0, **{one.name: one.num_running for one in adapters if one.num_running}})
        self._show(self._waiting, {None: 0, **{one.name: one.num_waiting for one in adapters if one.num_waiting}})
        with_requests = [one for one in adapters if one.num_running + one.num_waiting]
        idle = {BASE_LABEL: 0.0, **{self._labels.of(one.name): 0.0 for one in with_requests}}
        for one in with_requests:
            label = self._labels.of(one.name)
            idle[label] = max(idle[label], one.oldest_idle_s)
        self._set(self._idle, idle)
        self._count(self._tokens, {one.name: one.num_tokens for one in adapters})
        self._count(self._started, {one.name: one.num_started for one in adapters})
        self._count(self._wait_s, {one.name: one.wait_s for one in adapters})
        self._take_counts(work.slots)
        self._take_cache(work.cache)

    def count_heal(self) -> None:
        """Count an adapter that the watchdog healed."""
        self._heals.inc()

    def _take_counts(self, counts: SlotCounts) -> None:
        last, self._counts = self._counts, counts
        self._hits.inc(counts.num_hits - last.num_hits)
        self._misses.inc(counts.num_misses - last.num_misses)
        self._evictions.inc(counts.num_evictions - last.num_evictions)
        for tier, count in counts.num_loads.items():
            self._loads.inc(count - last.num_loads.get(tier, 0), {"tier": tier})
        for tier, seconds in counts.load_s.items():
            self._load_s.inc(seconds - last.load_s.get(tier, 0.0), {"tier": tier})

    def _take_cache(self, cache: CacheCounts) -> None:
        last, self._cache = self._cache, cache
        self._kv_usage.set(cache.usage)
        self._queried.inc(cache.num_queried_tokens - last.num_queried_tokens)
        self._found.inc(cache.num_hit_tokens - last.num_hit_tokens)
        self._preemptions.inc(cache.num_preemptions - last.num_preemptions)

    def _count(self, counter: KeptCounter, values: Mapping[str | None, float]) -> None:
        for label, amount in self._labels.summed(values).items():
            counter.inc(amount, {"adapter": label})

    def _show(self, gauge: KeptGauge, values: Mapping[str | None, float]) -> None:
        self._set(gauge, self._labels.summed(values))

    def _set(self, gauge: KeptGauge, by_label: Mapping[str, float]) -> None:
        for label, value in self._shown[gauge].complete(by_label).items():
            gauge.set(value, {"adapter": label})
