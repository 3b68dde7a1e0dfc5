"""`build(args)`: the application that `serve run cluster/config.yaml` deploys, and the only place that binds it."""

import time
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from cluster.base_model import resolve_path
from cluster.fleet import ROUTER_ACTOR
from cluster.schema import AppSettings, parse_settings
from deployments.ingress import BaseModelCard, Ingress
from deployments.replica import EngineReplica
from deployments.router import AdapterRouter

MAX_STREAMS = 8192
"""Answers that one process of the ingress writes at once, beside the requests that wait."""


def build(args: dict[str, Any]) -> Application:
    """Bind the engine deployment, its router actor and the ingress.

    Args:
        args: The `args` of the configuration file, see `cluster.schema.AppSettings`.

    Raises:
        ConfigError: a key is unknown or a value cannot work.
    """
    settings = parse_settings(args)
    engine = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        max_ongoing_requests=256,
        # Per caller, for those that come without an ingress; that one refuses by itself, and says when to come back.
        max_queued_requests=settings.queue.max_waiting,
        health_check_period_s=1,
        health_check_timeout_s=10,
        # Serve takes no new requests to a replica that is to go, and ends it when it has none left, or then.
        graceful_shutdown_timeout_s=settings.replica.drain_timeout_s,
        # A replica that cannot start says why at once; trying long only hides it.
        max_constructor_retry_count=2,
        deployment_actors=[
            DeploymentActorConfig(
                name=ROUTER_ACTOR,
                actor_class=ray.remote(AdapterRouter),
                init_kwargs={"settings": router_settings(settings)},
                # Each replica and each handle holds one long poll; Ray's default is 1000 calls at once.
                actor_options={"num_cpus": 0, "max_concurrency": 10_000},
            )
        ],
        request_router_config=RequestRouterConfig(
            request_router_class="deployments.request_router:AffinityRequestRouter",
            request_router_kwargs={"replica_wait_s": settings.queue.replica_wait_s},
        ),
    )
    ingress = serve.deployment(
        serve.ingress(None)(Ingress),
        name="Ingress",
        # Beyond it requests would wait in front of the ingress, which could not tell them when to come back.
        max_ongoing_requests=settings.queue.max_waiting + MAX_STREAMS,
    )
    base = BaseModelCard(settings.base_name, root=settings.model, created=int(time.time()))
    return ingress.bind(
        engine.bind(settings.model_dump(mode="json")),
        base,
        enable_lora=settings.lora_config.enable_lora,
        queue=settings.queue,
        access=settings.access,
        tracing=settings.tracing,
    )


def router_settings(settings: AppSettings) -> dict[str, Any]:
    """What the router actor is started with; adapters' folders are named absolutely, the same for every replica."""
    return {
        "base_name": settings.base_name,
        "lora_paths": [absolute_path(path) for path in settings.lora_config.lora_paths],
        "num_slots": settings.lora_config.max_num_loras,
        **settings.router.model_dump(mode="json"),
    }


def absolute_path(lora_path: str) -> str:
    """`name=path` with the path made absolute where it is a folder here; a Hub id stays as it is."""
    name, equals, path = lora_path.partition("=")
    folder = resolve_path(path if equals else name)
    return f"{name}={folder}" if folder is not None else lora_path
