"""The applications that `bench_hop` compares, on a Ray cluster of its own: one ingress, one replica, no computing."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.context import _get_global_client

from cluster.fleet import ROUTER_ACTOR
from cluster.schema import parse_settings
from deployments.app import router_settings
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from deployments.ingress import BaseModelCard, Ingress
from deployments.local_cluster import LocalCluster, free_port
from deployments.ray_internals import forget_cluster
from deployments.replica import EngineReplica
from deployments.request_router import AffinityRequestRouter
from deployments.router import AdapterRouter

BASE, ADAPTER = "base", "adapter"


class HopReplica(EngineReplica):
    """The product's replica before an engine process that computes nothing."""

    engine_module = "tests.bench.hop_engine"


class OneTokenReplica(HopReplica):
    """Sends each token by itself, as soon as it comes (`_application` leaves no window), however many come at once."""

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk | Refusal, None]:
        async with aclosing(super().generate(call)) as chunks:
            async for chunk in chunks:
                if isinstance(chunk, Refusal) or len(chunk.token_ids) < 2:
                    yield chunk
                    continue
                *early, last = chunk.token_ids
                for token_id in early:
                    yield msgspec.structs.replace(chunk, token_ids=[token_id], finish_reason=None)
                yield msgspec.structs.replace(chunk, token_ids=[last])


class Kind(NamedTuple):
    """What one application is made of."""

    replica: type[EngineReplica]
    is_routed_by_adapter: bool


KINDS = {
    "ours": Kind(HopReplica, True),
    "one_token": Kind(OneTokenReplica, True),
    "plain": Kind(OneTokenReplica, False),
}
"""`one_token` and `plain` differ in Ray's request router alone, `ours` and `one_token` in how tokens are grouped."""


class Hop(NamedTuple):
    """The running applications."""

    cluster: LocalCluster
    urls: dict[str, str]
    """Where the routes of each are."""


@contextmanager
def running(base: Path, adapter: Path, environment: dict[str, str]) -> Iterator[Hop]:
    """All of `KINDS` on one cluster, each idle while it is not asked."""
    root = str(Path(__file__).parents[2])
    port = free_port()
    with LocalCluster(num_cpus=4, environment={**environment, "PYTHONPATH": root}) as cluster:
        ray.init(cluster.address, namespace="serve", log_to_driver=False)
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            for name, kind in KINDS.items():
                serve.run(_application(kind, base, adapter), name=name, route_prefix=f"/{name}")
            yield Hop(cluster, {name: _url(name, port) for name in KINDS})
        finally:
            forget_cluster()


def _application(kind: Kind, base: Path, adapter: Path) -> Application:
    settings = parse_settings(
        {
            "model": str(base),
            "model_name": BASE,
            "engine": {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_cache_tokens": 1024},
            "lora_config": {"enable_lora": True, "max_num_loras": 2, "lora_paths": [f"{ADAPTER}={adapter}"]},
            **({"replica": {"stream_window_s": 0}} if kind.replica is OneTokenReplica else {}),
        }
    )
    ours = {"request_router_config": RequestRouterConfig(request_router_class=AffinityRequestRouter)}
    actor = DeploymentActorConfig(
        name=ROUTER_ACTOR,
        actor_class=ray.remote(AdapterRouter),
        init_kwargs={"settings": router_settings(settings)},
        actor_options={"num_cpus": 0},
    )
    engine: Any = serve.deployment(
        kind.replica,
        name="EngineReplica",
        max_ongoing_requests=256,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=1,
        deployment_actors=[actor],
        **(ours if kind.is_routed_by_adapter else {}),
    )
    ingress: Any = serve.deployment(
        serve.ingress(None)(Ingress), name="Ingress", max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0}
    )
    card = BaseModelCard(BASE, root=str(base), created=int(time.time()))
    bound: Application = ingress.bind(engine.bind(settings.model_dump(mode="json")), card, enable_lora=True)
    return bound


def _url(name: str, port: int) -> str:
    """The application's own port, where Ray gives its ingress one; the proxy's otherwise."""
    controller = _get_global_client()._controller
    groups = ray.get(controller.get_target_groups.remote(app_name=name))
    ports = [target.port for group in groups if group.protocol == "HTTP" for target in group.targets]
    return f"http://127.0.0.1:{ports[0] if ports else port}/{name}"
