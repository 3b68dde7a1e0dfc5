"""`lora-fleet list|load|unload|pin|unpin|status` against a server that answers as told: output and exit codes."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from cluster.status import AdapterOnReplica, AdapterReport, FleetReport, ReplicaReport
from deployments import fleet_commands
from deployments.cli import cli
from deployments.fleet_client import FleetClient
from deployments.fleet_commands import Exit

Answer = Callable[[httpx.Request], httpx.Response]


def adapter(name: str, **fields: Any) -> AdapterReport:
    settings: dict[str, Any] = {
        "path": f"/adapters/{name}", "state": "ready", "generation": 3, "epoch": 3, "content_hash": "abc",
        "static": False, "pinned": False, "min_copies": 1, "replaced_by": None, "copies": (), "share": 0.25,
        "replicas": {"r0": AdapterOnReplica(acknowledged="applied", tier="slot", num_running=2)}, "last_error": None,
    }  # fmt: skip
    return AdapterReport(name=name, **{**settings, **fields})


def replica(**fields: Any) -> ReplicaReport:
    settings: dict[str, Any] = {
        "epoch": 9, "lag": 0, "joined": True, "num_slots": 4, "num_slots_used": 1, "resident": ("pirate",),
        "loading": (), "num_in_memory": 2, "num_running": 2, "num_waiting": 0, "service_ms": 3.25,
        "load_ms_per_mib": {}, "refused": {}, "stalled": {}, "fault": None,
    }  # fmt: skip
    return ReplicaReport(**{**settings, **fields})


def fleet(**replicas: ReplicaReport) -> FleetReport:
    return FleetReport(
        router_id="x", epoch=9, num_adapters={"ready": 2}, num_copies=0, replicas=replicas or {"r0": replica()},
        failures={},
    )  # fmt: skip


class Server:
    """Answers by path; what is not set is 404. Notes the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[httpx.Request] = []
        self.say("/v1/fleet", fleet())
        self.adapters = [adapter("pirate"), adapter("json", pinned=True)]
        self.answers["/v1/adapters"] = self.listed

    def say(self, path: str, body: Any, status: int = 200) -> None:
        content = msgspec.json.encode(body)
        self.answers[path] = lambda _: httpx.Response(status, content=content)

    def refuse(self, path: str, status: int, message: str) -> None:
        self.say(path, {"error": {"message": message}}, status)

    def listed(self, request: httpx.Request) -> httpx.Response:
        """One adapter a page."""
        after = request.url.params["after"]
        later = sorted((one for one in self.adapters if one.name > after), key=lambda one: one.name)
        return httpx.Response(200, content=msgspec.json.encode({"data": later[:1], "has_more": len(later) > 1}))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.get(request.url.path)
        return httpx.Response(404, text="nothing here") if answer is None else answer(request)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    answering = Server()
    monkeypatch.setattr(
        fleet_commands,
        "FleetClient",
        lambda url, key: FleetClient(url, key, transport=httpx.MockTransport(answering)),
    )
    monkeypatch.delenv("LORA_FLEET_URL", raising=False)
    monkeypatch.delenv("LORA_FLEET_KEY", raising=False)
    return answering


@pytest.fixture
def run(server: Server) -> Callable[..., Any]:
    runner = CliRunner()
    return lambda *words: runner.invoke(cli, list(words))


def test_list_reads_all_pages_into_a_table_or_json(run: Callable[..., Any]) -> None:
    table = run("list")
    assert table.exit_code == 0, table.output
    lines = [line.split() for line in table.output.splitlines()]
    assert lines[0][:4] == ["adapter", "state", "pin", "copies"]
    assert lines[1] == ["json", "ready", "pin", "1", "25.0%", "1/1", "1", "0", "2", "0"]
    assert lines[2] == ["pirate", "ready", "1", "25.0%", "1/1", "1", "0", "2", "0"]
    assert [one["name"] for one in json.loads(run("list", "--json").output)] == ["json", "pirate"]


@pytest.mark.parametrize(
    ("words", "route", "body"),
    [
        (("load", "a", "/p"), "load_lora_adapter", {"lora_name": "a", "lora_path": "/p", "load_inplace": False}),
        (
            ("load", "a", "/p", "--in-place"),
            "load_lora_adapter",
            {"lora_name": "a", "lora_path": "/p", "load_inplace": True},
        ),
        (("unload", "a"), "unload_lora_adapter", {"lora_name": "a"}),
        (("pin", "a"), "pin_lora_adapter", {"lora_name": "a"}),
        (("unpin", "a"), "unpin_lora_adapter", {"lora_name": "a"}),
    ],
)
def test_a_change_says_what_the_server_says(
    run: Callable[..., Any], server: Server, words: tuple[str, ...], route: str, body: dict[str, Any]
) -> None:
    said = {"status": "success", "message": "it is done", "replicas": {"r0": "success: done"}}
    server.say(f"/v1/{route}", said)
    result = run(*words)
    assert (result.exit_code, result.output) == (Exit.DONE, "it is done\n")
    assert json.loads(server.requests[-1].content) == body
    assert json.loads(run(*words, "--json").output) == said


def test_a_load_that_not_every_replica_did_has_its_own_exit_code(run: Callable[..., Any], server: Server) -> None:
    replicas = {"r0": "success: done", "r1": "load_error: disk"}
    server.say("/v1/load_lora_adapter", {"status": "partial", "message": "on 1 of 2", "replicas": replicas}, 207)
    result = run("load", "a", "/p")
    assert result.exit_code == Exit.NOT_EVERYWHERE
    assert "on 1 of 2" in result.output
    assert "r1: load_error: disk" in result.output


@pytest.mark.parametrize(
    ("status", "code"), [(400, Exit.REFUSED), (404, Exit.NOT_FOUND), (409, Exit.CONFLICT), (503, Exit.REFUSED)]
)
def test_a_refusal_is_said_and_has_an_exit_code(
    run: Callable[..., Any], server: Server, status: int, code: Exit
) -> None:
    server.refuse("/v1/load_lora_adapter", status, "the name [a] is taken")
    result = run("load", "a", "/p")
    assert result.exit_code == code
    assert "error: the name [a] is taken" in result.output


def test_no_server_and_a_stranger_have_an_exit_code_of_their_own(run: Callable[..., Any], server: Server) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    server.answers["/v1/adapters"] = refuse
    result = run("list", "--url", "http://127.0.0.1:1")
    assert result.exit_code == Exit.UNREACHABLE
    assert "http://127.0.0.1:1 does not answer: connection refused; name the server with --url" in result.output
    server.say("/v1/fleet", {"hello": "world"})
    assert run("status").exit_code == Exit.UNREACHABLE
    assert run("list", "--url", "http://[").exit_code == Exit.UNREACHABLE


def test_the_key_is_sent(run: Callable[..., Any], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run("list", "--key", "secret")
    assert server.requests[-1].headers["Authorization"] == "Bearer secret"
    monkeypatch.setenv("LORA_FLEET_KEY", "other")
    run("list")
    assert server.requests[-1].headers["Authorization"] == "Bearer other"


def test_a_key_from_a_file_ends_where_the_file_does(
    run: Callable[..., Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_FLEET_KEY", " secret\r\n")
    run("list")
    assert server.requests[-1].headers["Authorization"] == "Bearer secret"
    monkeypatch.setenv("LORA_FLEET_KEY", "\n")
    run("list")
    assert "Authorization" not in server.requests[-1].headers


@pytest.mark.parametrize("key", ["two words", "zwei-schlüssel", "line\nbreak", "a\0b"])
def test_a_key_that_no_header_can_carry_is_neither_sent_nor_shown(
    run: Callable[..., Any], server: Server, key: str
) -> None:
    result = run("list", "--key", key)
    assert result.exit_code == 2, "the command line is wrong"
    assert "visible ASCII characters" in " ".join(result.output.replace("│", " ").split())
    assert key not in result.output
    assert not server.requests


def test_status_is_well_where_every_replica_has_everything(run: Callable[..., Any]) -> None:
    result = run("status")
    assert result.exit_code == Exit.DONE, result.output
    assert "epoch 9, all replicas are there; adapters: 2 ready" in result.output
    assert "serving" in result.output
    found = json.loads(run("status", "--json").output)
    assert (found["fleet"]["epoch"], len(found["adapters"])) == (9, 2)


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        ({"r0": replica(lag=2)}, "1 of 1 replicas are behind"),
        ({"r0": replica(), "r1": replica(fault="nothing moves")}, "stalled: nothing moves"),
        ({"r0": replica(stalled={"pirate": "no progress"})}, "serving, without pirate"),
        ({"r0": replica(joined=False)}, "joining"),
    ],
)
def test_status_says_what_is_not_well(
    run: Callable[..., Any], server: Server, replicas: dict[str, ReplicaReport], said: str
) -> None:
    server.say("/v1/fleet", fleet(**replicas))
    result = run("status")
    assert result.exit_code == Exit.NOT_EVERYWHERE
    assert said in result.output


def test_status_of_one_adapter_shows_each_replica(run: Callable[..., Any], server: Server) -> None:
    error = AdapterOnReplica(acknowledged="refused", tier="none", error="no such folder")
    server.say("/v1/adapters/pirate", adapter("pirate", replicas={"r1": error}))
    result = run("status", "pirate")
    assert result.exit_code == Exit.NOT_EVERYWHERE
    assert "pirate: ready, from /adapters/pirate" in result.output
    assert ["r1", "refused", "none", "0", "0", "no", "such", "folder"] in [
        line.split() for line in result.output.splitlines()
    ]
    server.refuse("/v1/adapters/nobody", 404, "no adapter named 'nobody'")
    assert run("status", "nobody").exit_code == Exit.NOT_FOUND


def test_watching_goes_on_while_the_server_is_away(
    run: Callable[..., Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        server.refuse("/v1/fleet", 503, "the router actor does not answer")
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("deployments.fleet_commands.time.sleep", sleep)
    result = run("status", "--watch", "--json", "--interval", "0.5")
    assert result.exit_code == Exit.DONE, result.output
    first, second = [json.loads(line) for line in result.output.splitlines()]
    assert first["fleet"]["epoch"] == 9
    assert second == {"error": "the router actor does not answer"}
    assert looks == [0.5, 0.5]


def test_a_wrong_command_line_has_typers_own_exit_code(run: Callable[..., Any]) -> None:
    assert run("load", "a").exit_code == 2
    assert run("no-such-command").exit_code == 2
