"""The fleet's page of metrics, read back by Prometheus' own parser."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.exposition import FleetExposition

HOSTILE = 'a"b\\c\u2028} 5,x="y'
"""Adapters' names are what clients choose."""

RAY = {"SessionName": "session_1", "Version": "2.60.0", "Component": "core_worker", "WorkerId": "abc"}


def node(*, replica: str, adapter: str, running: float = 1.0) -> str:
    """What a node's agent shows of one replica, written by Prometheus' own library, as Ray's agents do."""
    registry = CollectorRegistry()
    labels = {**RAY, "replica": replica, "adapter": adapter}
    for name, value in (("vllm_num_requests_running", running), ("vllm_num_requests_waiting", 0.0)):
        Gauge(f"ray_{name}", "Requests.", labels, registry=registry).labels(**labels).set(value)
    Counter("ray_lora_fleet_tokens", "Tokens.", labels, registry=registry).labels(**labels).inc(7)
    slots = {**RAY, "replica": replica}
    Gauge("ray_lora_fleet_slots", "Slots.", slots, registry=registry).labels(**slots).set(4)
    for part, value in (("sum", 2.5), ("count", 3.0)):
        Gauge(f"ray_vllm_wait_seconds_{part}", "Wait.", labels, registry=registry).labels(**labels).set(value)
    buckets = Gauge("ray_vllm_wait_seconds_bucket", "Wait.", [*labels, "le"], registry=registry)
    for le, value in (("0.5", 1.0), ("+Inf", 3.0)):
        buckets.labels(**labels, le=le).set(value)
    Gauge("ray_node_mem_used", "Not of this project.", registry=registry).set(5)
    return generate_latest(registry).decode()


def page(*nodes: str) -> dict[str, Metric]:
    exposition = FleetExposition('the "base"', clock=lambda: 1234.5)
    for text in nodes:
        exposition.take(text)
    exposition.add("lora_fleet_nodes", "Nodes.", len(nodes))
    return {family.name: family for family in text_string_to_metric_families(exposition.text())}


def test_the_nodes_pages_become_one_with_one_family_of_each_name() -> None:
    families = page(node(replica="r1", adapter="a"), node(replica="r2", adapter=HOSTILE))
    # Ray's agents write no time of creation.
    assert families.keys() - {"lora_fleet_tokens_created"} == {
        "lora_fleet_nodes", "lora_fleet_slots", "lora_fleet_tokens", "vllm:lora_requests_info",
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:wait_seconds",
    }  # fmt: skip
    tokens = families["lora_fleet_tokens"]
    assert (tokens.type, tokens.documentation) == ("counter", "Tokens.")
    by_replica = {one.labels["replica"]: one for one in tokens.samples if one.name == "lora_fleet_tokens_total"}
    assert {replica: one.value for replica, one in by_replica.items()} == {"r1": 7.0, "r2": 7.0}
    assert by_replica["r2"].labels == {"replica": "r2", "adapter": HOSTILE, "worker_id": "abc"}, "what Ray adds"
    assert families["lora_fleet_nodes"].samples[0].value == 2.0


def test_a_gauge_of_a_sum_becomes_a_counter() -> None:
    registry = CollectorRegistry()
    Gauge("ray_vllm_num_preemptions_total", "Waited again.", ["replica"], registry=registry).labels(replica="r1").set(0)
    family = page(generate_latest(registry).decode())["vllm:num_preemptions"]
    assert (family.type, family.documentation) == ("counter", "Waited again.")
    (sample,) = family.samples
    assert (sample.name, sample.value) == ("vllm:num_preemptions_total", 0.0)
    assert sample.labels == {"model_name": 'the "base"', "replica": "r1"}


def test_three_gauges_become_a_histogram_of_vllms_name() -> None:
    family = page(node(replica="r1", adapter="a"))["vllm:wait_seconds"]
    assert (family.type, family.documentation) == ("histogram", "Wait.")
    assert {(one.name, one.labels.get("le")): one.value for one in family.samples} == {
        ("vllm:wait_seconds_bucket", "0.5"): 1.0,
        ("vllm:wait_seconds_bucket", "+Inf"): 3.0,
        ("vllm:wait_seconds_sum", None): 2.5,
        ("vllm:wait_seconds_count", None): 3.0,
    }
    assert {one.labels["model_name"] for one in family.samples} == {'the "base"'}


def test_the_adapters_with_requests_are_told_as_vllm_tells_them() -> None:
    texts = [node(replica="r1", adapter="a"), node(replica="r2", adapter="(base)")]
    texts.append(node(replica="r3", adapter="b", running=0))
    samples = page(*texts)["vllm:lora_requests_info"].samples
    told = {one.labels["replica"]: (one.labels["running_lora_adapters"], one.labels["max_lora"]) for one in samples}
    assert told == {"r1": ("a", "4"), "r2": ("", "4"), "r3": ("", "4")}
    assert {one.value for one in samples} == {1234.5}


def test_a_fleet_without_any_metrics_yet_has_a_page() -> None:
    assert page("").keys() == {"lora_fleet_nodes"}
