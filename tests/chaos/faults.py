"""The faults, each inflicted on a fleet under load, with what must be seen of it."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.fleet_client import FleetClient, Refused
from lora_core.errors import LoRAFleetError
from tests.chaos.faulty_engine import EVERYTHING, switch_of
from tests.chaos.faulty_replica import ANSWER_LOST, LOST_ON_THE_WAY
from tests.chaos.fleet import ChaosFleet
from tests.chaos.truth import ask

NUM_CLIENTS = 20
CHURN_S = 5.0

PATIENCE_S = 90.0


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    name: str
    inflict: Callable[[ChaosFleet], None]
    """Returns when it has been done, and what must be seen at once has been seen."""
    ends_streams: bool = False
    """Whether streams may be on what is killed."""
    cuts_streams: bool = False
    """Whether it is not inflicted before one was."""


def kill_replica(fleet: ChaosFleet) -> None:
    """SIGKILL the busiest replica in the middle of its streams: its engine ends with it."""
    victim = fleet.busiest_engine().parent()
    assert victim is not None, "an engine lives as long as its replica"
    victim.kill()
    eventually(lambda: victim not in fleet.replicas() and len(fleet.replicas()) == fleet.num_replicas, "replaced")


def kill_engine(fleet: ChaosFleet) -> None:
    """SIGKILL a replica's engine process: the replica notices, and is replaced."""
    victim = fleet.busiest_engine()
    victim.kill()
    eventually(lambda: victim not in fleet.engines() and len(fleet.engines()) == fleet.num_replicas, "replaced")


def kill_router(fleet: ChaosFleet) -> None:
    """SIGKILL the router actor: its successor knows what it knew."""
    victim = fleet.router()
    router_id = fleet.client.fleet().router_id
    victim.kill()
    eventually(lambda: fleet.client.fleet().router_id != router_id, "another router actor")


def kill_controller(fleet: ChaosFleet) -> None:
    """SIGKILL Serve's controller: a change goes through meanwhile, and a replica that dies later is still replaced."""
    victim = fleet.controller()
    victim.kill()
    load_and_unload(fleet, "beside-the-controller")
    eventually(lambda: fleet.controller() != victim, "another controller")
    kill_replica(fleet)


def start_a_replica_during_broadcasts(fleet: ChaosFleet) -> None:
    """Add a node and a replica while adapters are loaded one after another, and stay so."""
    fleet.add_node()
    fleet.scale(fleet.num_replicas + 1)
    paths = itertools.cycle(fleet.adapters.values())
    for number in itertools.count():
        fleet.load(f"broadcast-{number}", next(paths))
        replicas = fleet.client.fleet().replicas.values()
        if len(replicas) == fleet.num_replicas and all(one.joined for one in replicas):
            break
        assert number < 400, "the replica never joined"
    fleet.settle()
    for name in [name for name in fleet.desired if name.startswith("broadcast-")]:
        fleet.unload(name)


def have_a_node(fleet: ChaosFleet) -> None:
    """Have a second node, with a replica on it."""
    if not fleet.has_node:
        fleet.add_node()
        fleet.scale(fleet.num_replicas + 1)
        fleet.settle()


def lose_a_node(fleet: ChaosFleet) -> None:
    """Cut the power of the added node, and of the replica there; later another one comes."""
    have_a_node(fleet)
    before = len(fleet.replicas())
    fleet.lose_node()
    assert len(fleet.replicas()) == before - 1, "no replica was on the node"
    load_and_unload(fleet, "without-the-node")
    fleet.add_node()


def scale_down(fleet: ChaosFleet) -> None:
    """Take the added replica away: it drains, and no stream ends early."""
    have_a_node(fleet)
    fleet.scale(fleet.num_replicas - 1)
    eventually(lambda: len(fleet.replicas()) == fleet.num_replicas, "one replica fewer")
    fleet.lose_node()


def lose_an_acknowledgement(fleet: ChaosFleet) -> None:
    """Lose one on its way, and the answer to one: the change is known to be done all the same, once."""
    for switch in (LOST_ON_THE_WAY, ANSWER_LOST):
        fleet.switches.turn_on(switch)
        load_and_unload(fleet, "acknowledged")
        assert not fleet.switches.is_on(switch), "no acknowledgement was lost"


def fill_the_journals_disk(fleet: ChaosFleet) -> None:
    """Let the router actor's files grow no more: a load is refused with the reason, and changes nothing."""
    name, path = "on-a-full-disk", next(iter(fleet.adapters.values()))
    with full_disk(fleet.router()):
        refusal = refused(lambda: fleet.client.load(name, str(path)))
        assert "journal" in str(refusal), refusal
        assert name not in {adapter.name for adapter in fleet.client.adapters()}
        served = next(iter(fleet.desired))
        refusal = refused(lambda: fleet.client.unload(served))
        assert "journal" in str(refusal), refusal
    load_and_unload(fleet, name)


def conflicting_clients(fleet: ChaosFleet) -> None:
    """20 clients load and unload the same names: one load of a name wins everywhere, and what is left is one thing."""
    folders = list(fleet.adapters.values())
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        # All at once, one name, as many contents as there are.
        paths = [folders[number % len(folders)] for number in range(NUM_CLIENTS)]
        verdicts = list(pool.map(lambda path: try_load(fleet, "contested", path), paths))
        won = {path for path, verdict in zip(paths, verdicts, strict=True) if verdict == 200}
        assert len(won) == 1, f"loads of {len(won)} different folders succeeded"
        assert set(verdicts) <= {200, 409}, verdicts
        check_content(fleet, "contested", won.pop())
        stop = time.monotonic() + CHURN_S
        statuses = set().union(*pool.map(lambda seed: churn(fleet, seed, folders, stop), range(NUM_CLIENTS)))
    assert statuses <= {200, 404, 409}, f"answers {statuses}"
    for adapter in list(fleet.client.adapters()):
        if adapter.name not in fleet.desired:
            assert adapter.state == "ready", adapter
            check_content(fleet, adapter.name, Path(adapter.path))
            fleet.client.unload(adapter.name)


def stall_an_adapter(fleet: ChaosFleet) -> None:
    """Let an engine compute everything but one adapter: its requests there end, and it is loaded there anew."""
    name, engine = next(iter(fleet.desired)), fleet.busiest_engine()
    switch = switch_of(engine.pid)
    with asking(fleet, name):
        fleet.switches.turn_on(switch, name)
        # The engine's own heal turns it off.
        eventually(lambda: not fleet.switches.is_on(switch), f"{name} loaded anew")
    assert engine.is_running(), "the engine need not be replaced"


def stall_a_replica(fleet: ChaosFleet) -> None:
    """Let an engine speak and compute nothing: the replica is replaced, though it answers its health checks."""
    victim = fleet.busiest_engine()
    fleet.switches.turn_on(switch_of(victim.pid), EVERYTHING)
    eventually(lambda: victim not in fleet.engines() and len(fleet.engines()) == fleet.num_replicas, "replaced")
    fleet.switches.turn_off(switch_of(victim.pid))


FAULTS = [
    Fault("kill a replica", kill_replica, ends_streams=True, cuts_streams=True),
    Fault("kill an engine process", kill_engine, ends_streams=True, cuts_streams=True),
    Fault("lose an acknowledgement", lose_an_acknowledgement),
    Fault("fill the journal's disk", fill_the_journals_disk),
    Fault("20 clients load and unload the same names", conflicting_clients),
    Fault("kill the router actor", kill_router),
    Fault("kill the controller", kill_controller, ends_streams=True),
    Fault("stall an adapter", stall_an_adapter, ends_streams=True),
    Fault("stall a replica", stall_a_replica, ends_streams=True),
    Fault("start a replica during broadcasts", start_a_replica_during_broadcasts),
    Fault("lose a node", lose_a_node, ends_streams=True),
    Fault("scale down", scale_down),
]


def load_and_unload(fleet: ChaosFleet, name: str) -> None:
    """A change that every replica must carry out, seen in its answers, and undone."""
    path = next(iter(fleet.adapters.values()))
    fleet.load(name, path)
    check_content(fleet, name, path)
    fleet.unload(name)


def check_content(fleet: ChaosFleet, name: str, path: Path) -> None:
    """Whether a name answers as the adapter of a folder."""
    original = next(one for one, folder in fleet.adapters.items() if folder == path)
    for prompt in range(2):
        assert ask(fleet.http, name, prompt, 24) == ask(fleet.http, original, prompt, 24), f"{name} is not {path}"


def try_load(fleet: ChaosFleet, name: str, path: Path) -> int:
    """The status of a load by a client of its own."""
    client = FleetClient(fleet.url)
    try:
        client.load(name, str(path))
        return 200
    except Refused as error:
        return error.status
    finally:
        client.close()


def churn(fleet: ChaosFleet, seed: int, folders: list[Path], stop_s: float) -> set[int]:
    """Load and unload names that others load and unload, too; returns the statuses that came."""
    chance = random.Random(seed)
    client = FleetClient(fleet.url)
    statuses = set()
    while time.monotonic() < stop_s:
        name = f"churned-{chance.randrange(4)}"
        try:
            if chance.random() < 0.5:
                client.load(name, str(chance.choice(folders)), in_place=chance.random() < 0.3)
            else:
                client.unload(name)
            statuses.add(200)
        except Refused as error:
            statuses.add(error.status)
    client.close()
    return statuses


@contextmanager
def asking(fleet: ChaosFleet, model: str) -> Iterator[None]:
    """Ask for a model again and again meanwhile, so that it has requests on every replica; some of them may fail."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            # The load judges answers; here they only keep the adapter busy.
            fleet.http.post("/v1/completions", json={"model": model, "prompt": [1, 2, 3], "max_tokens": 64})

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(go_on)
        try:
            yield
        finally:
            stop.set()


@contextmanager
def full_disk(process: psutil.Process) -> Iterator[None]:
    """A process that can write to no file past its first byte, as on a disk without room."""
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


def refused(change: Callable[[], object]) -> Refused:
    """The refusal that a change must meet."""
    try:
        change()
    except Refused as error:
        return error
    raise AssertionError("the change was not refused")


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition; a server that does not answer meanwhile is asked again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (LoRAFleetError, psutil.Error, ValueError):
            pass
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.2)
