"""`EngineReplica` on real Ray Serve, with real engine processes serving a tiny model."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.local_cluster import ENVIRONMENT, LocalCluster

# Ray reads its environment when it is imported.
os.environ.update(ENVIRONMENT)

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig
from ray.serve.handle import DeploymentHandle

from cluster.fleet import ROUTER_ACTOR
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from deployments.replica import EngineReplica
from deployments.router import AdapterRouter
from deployments.router_client import RouterClient
from lora_core.errors import AdapterNotFound, EngineDead, InvalidRequest
from lora_core.messages import SamplingParams
from lora_core.types import LoRAStatus
from tests.factories import reference_tokens

PROMPT = [5, 17, 99, 3, 42]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Application:
    """One replica, as the tests use it."""

    def __init__(self, handle: DeploymentHandle, cluster: LocalCluster) -> None:
        self.handle = handle
        self._cluster = cluster

    def stream(self, num_tokens: int, lora_name: str | None = None, **fields: Any) -> Any:
        call = GenerateCall(
            request_id="r",
            lora_name=lora_name,
            max_tokens=num_tokens,
            **{"sampling": GREEDY, "prompt_token_ids": PROMPT, **fields},
        )
        return self.handle.options(stream=True, multiplexed_model_id=lora_name or "").generate.remote(call)

    def tokens(self, num_tokens: int, lora_name: str | None = None, **fields: Any) -> list[int]:
        chunks: list[GenerateChunk | Refusal] = list(self.stream(num_tokens, lora_name, **fields))
        if isinstance(chunks[-1], Refusal):
            raise chunks[-1].error()
        return [token_id for chunk in chunks if isinstance(chunk, GenerateChunk) for token_id in chunk.token_ids]

    def ask(self, question: Callable[[RouterClient], Any]) -> Any:
        async def locate() -> str:
            return str(await self.handle.router_name.remote())

        return asyncio.run(question(RouterClient(locate)))

    def engine_processes(self) -> list[psutil.Process]:
        session = psutil.Process(self._cluster.pid).children(recursive=True)
        return [process for process in session if is_engine(process)]


def is_engine(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "deployments.engine_process" in process.cmdline()
    except psutil.Error:
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def application(
    tiny_base: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    settings = {
        "model": str(tiny_base),
        "engine": {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_num_seqs": 1},
        "lora_config": {"enable_lora": True, "max_num_loras": 2},
        "replica": {"stall_timeout_s": 5},
    }
    router = {
        "base_name": "base",
        "journal": str(tmp_path_factory.mktemp("router") / "journal.sqlite"),
        "lora_paths": [f"static={tiny_adapters['attention-r2']}"],
        "lease_s": 2.0,
    }
    with LocalCluster(num_cpus=2) as cluster:
        # Workers import this project by name.
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        ray.init(cluster.address, namespace="serve", log_to_driver=False, runtime_env={"env_vars": path})
        try:
            serve.start(proxy_location="Disabled")
            replica = serve.deployment(
                EngineReplica,
                num_replicas=1,
                max_ongoing_requests=64,
                health_check_period_s=1,
                graceful_shutdown_timeout_s=5,
                graceful_shutdown_wait_loop_s=0.1,
                ray_actor_options={"num_cpus": 0.1},
                deployment_actors=[
                    DeploymentActorConfig(
                        name=ROUTER_ACTOR,
                        actor_class=ray.remote(AdapterRouter),
                        init_kwargs={"settings": router},
                        actor_options={"num_cpus": 0},
                    )
                ],
            )
            handle = serve.run(replica.bind(settings), name="replica", route_prefix=None)
            application = Application(handle, cluster)
            yield application
            serve.delete("replica")
            assert application.engine_processes() == []
            serve.shutdown()
        finally:
            ray.shutdown()


def test_base_and_static_adapter_answer_as_the_reference(
    application: Application, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    assert application.tokens(16) == reference_tokens(tiny_base, None, PROMPT, 16)
    expected = reference_tokens(tiny_base, tiny_adapters["attention-r2"], PROMPT, 16)
    assert application.tokens(16, "static") == expected


def test_an_adapter_is_loaded_used_and_unloaded(
    application: Application, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    outcome = application.ask(lambda router: router.load("new", str(tiny_adapters["linear-r4"])))
    assert outcome.status is LoRAStatus.SUCCESS, outcome
    expected = reference_tokens(tiny_base, tiny_adapters["linear-r4"], PROMPT, 16)
    assert application.tokens(16, "new", epoch=outcome.epoch) == expected
    states = application.ask(lambda router: router.table()).replicas.values()
    assert [(state.resident, state.num_slots) for state in states] == [({"static", "new"}, 2)]
    assert application.ask(lambda router: router.unload("new")).status is LoRAStatus.SUCCESS
    with pytest.raises(AdapterNotFound, match="new"):
        application.tokens(4, "new")


def test_a_reply_begins_with_the_slots_and_an_adapter_can_be_warmed_up(application: Application) -> None:
    first, *others = list(application.stream(6, "static"))
    assert first.snapshot is not None
    assert "static" in first.snapshot.resident
    assert first.snapshot.replica_id in application.ask(lambda router: router.table()).replicas
    assert all(chunk.snapshot is None for chunk in others)
    assert first.snapshot.num_busy == 1, "its own"
    assert next(application.stream(6)).snapshot.num_busy == 0, "the base model takes no slot"
    application.ask(lambda router: router.pin("static"))
    assert next(application.stream(6)).snapshot.num_busy == 1, "pinned"
    application.ask(lambda router: router.unpin("static"))
    assert application.handle.warm.remote("static").result().status is LoRAStatus.SUCCESS
    assert application.handle.warm.remote("absent").result().status is LoRAStatus.PIN_NAME_NONEXISTENT


def test_a_refused_call_raises_its_own_error(application: Application) -> None:
    with pytest.raises(InvalidRequest, match=r"5 tokens.*9999"):
        application.tokens(9999)


def test_a_cancelled_stream_ends_in_the_engine(application: Application) -> None:
    start = time.monotonic()
    assert len(application.tokens(500)) == 500
    whole_s = time.monotonic() - start
    start = time.monotonic()
    # One runs at a time: those that were not ended would each hold up the next.
    for _ in range(20):
        stream = application.stream(500)
        next(stream)
        stream.cancel()
    assert len(application.tokens(5)) == 5
    assert time.monotonic() - start < 10 * whole_s


@pytest.mark.parametrize(("fault", "said"), [("kill", "signal 9"), ("suspend", "silent for more than 5 s")])
def test_a_dead_or_stuck_engine_fails_its_calls_and_is_replaced(
    application: Application, tiny_base: Path, tiny_adapters: dict[str, Path], fault: str, said: str
) -> None:
    (engine,) = application.engine_processes()
    stream = application.stream(500, "static")
    next(stream)
    getattr(engine, fault)()
    with pytest.raises(EngineDead, match=said):
        list(stream)
    eventually(lambda: [process.pid for process in application.engine_processes()] not in ([], [engine.pid]))
    expected = reference_tokens(tiny_base, tiny_adapters["attention-r2"], PROMPT, 8)

    def answers() -> bool:
        try:
            return application.tokens(8, "static") == expected
        except EngineDead:
            return False

    eventually(answers)
