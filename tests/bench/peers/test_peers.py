"""The course of `make bench-peers`, with stand-ins that are processes and speak its protocol, and with real systems."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.bench import bench_peers
from tests.bench.peers import goals, offline, over_http, stand_in, table
from tests.bench.peers.points import Point, Results, all_points
from tests.bench.peers.process import ROOT, Peer, PeerFailed
from tests.bench.peers.protocol import Answers
from tests.bench.peers.servers import ServerKind
from tests.bench.peers.systems import REFERENCE, SYSTEMS, System, Workplace

SMALL = Point(3, 2, base_rows=1, prompt_tokens=4, new_tokens=5, vocab=stand_in.VOCAB)


def _stand_in(name: str, fault: str | None = None, *, lora: bool = True, mixes: bool = True) -> System:
    return System(name, "stand_in", {"fault": fault}, lora=lora, mixes=mixes)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    files = tmp_path / "files"
    files.mkdir()
    base, adapters = bench_peers.stand_in_files(files)
    return Workplace(base, adapters, [0], tmp_path, Path("no-interpreter"))


@pytest.fixture
def peer(request: pytest.FixtureRequest, place: Workplace) -> Iterator[Peer]:
    with _stand_in("peer", request.param).start(place, "float32") as started:
        yield started


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("peer", [None, "chatty"], indirect=True)
def test_a_peer_answers_whatever_its_libraries_print(peer: Peer) -> None:
    assert list(peer.wait_until_ready(20)) == ["psutil"]
    tokens, wall_s, rate = peer.generate([[1, 2], [3]], ["a1", None], 2)
    assert [row[0] for row in tokens] == [stand_in.next_token([1, 2], "a1"), stand_in.next_token([3], None)]
    assert tokens[1][1] == stand_in.next_token([3, tokens[1][0]], None)
    assert wall_s > 0
    assert rate == 2.0
    assert peer.margin([1], None) == 1.0


def test_only_steps_after_every_first_token_count_as_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 15.0, 15.5, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    answers = Answers(2)
    answers.add([(0, [5])])
    answers.add([(0, [6]), (1, [])])
    answers.add([(1, [7]), (0, [8])])
    assert answers.together_tok_s is None
    answers.add([(0, [9]), (1, [1])])
    answers.add([(1, [2])])
    assert answers.tokens == [[5, 6, 8, 9], [7, 1, 2]]
    assert answers.together_tok_s == 3 / 1.0


@pytest.mark.parametrize(
    ("peer", "message", "later"),
    [
        ("refuse", "peer: it answered ValueError: not this batch", "not this batch"),
        ("die", "peer: it ended with status 7", "status 7"),
        ("hang", r"peer: no answer within 0\.5 s", "status -9"),
        ("short", "peer: asked 2 times for 1 tokens, it answered otherwise", "asked 1 times"),
    ],
    indirect=["peer"],
)
def test_a_peer_that_fails_is_named_and_leaves_nothing(peer: Peer, message: str, later: str) -> None:
    before = _children()
    peer.wait_until_ready(20)
    with pytest.raises(PeerFailed, match=message):
        peer.generate([[1], [2]], [None, None], 1, timeout_s=0.5 if "within" in message else 20)
    with pytest.raises(PeerFailed, match=later):
        peer.generate([[1]], [None], 1, timeout_s=20)
    peer.close()
    assert peer.process.pid in before
    assert peer.process.pid not in _children()


@pytest.mark.parametrize("peer", [None], indirect=True)
def test_a_paused_peer_takes_no_time_and_ends_all_the_same(peer: Peer) -> None:
    peer.wait_until_ready(20)
    peer.pause()
    deadline = time.monotonic() + 5
    while psutil.Process(peer.process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    peer.resume()
    assert peer.margin([1], None) == 1.0
    peer.pause()
    peer.close()
    assert peer.process.returncode == 0


def test_a_paused_peer_ends_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from tests.bench.peers.process import Peer
command = [sys.executable, "-m", "tests.bench.peers.stand_in"]
peer = Peer("peer", command, {{}}, environment={{}}, cores=[0], log=Path({str(tmp_path / "log")!r}))
peer.wait_until_ready(20)
peer.pause()
print(peer.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pid = int(killed.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("peer", ["no start"], indirect=True)
def test_why_a_peer_did_not_start_is_told(peer: Peer) -> None:
    with pytest.raises(PeerFailed, match="OSError: no room"):
        peer.wait_until_ready(20)


def test_only_right_tokens_are_timed(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    reference = _stand_in("peft")
    systems = [_stand_in("first", lora=False), _stand_in("wrong", "wrong"), _stand_in("refuse", "refuse"), reference]
    points = [SMALL.base(), replace(SMALL, base_rows=0), SMALL]
    results = Results()
    wrong = offline.check(reference, systems, points, place, results)
    assert wrong == {("wrong", points[1]), ("wrong", SMALL), *(("refuse", point) for point in points)}
    offline.measure(systems, points, place, results, rounds=1, wrong=wrong)
    timed = [(line["system"], line["adapters"], line["base_rows"]) for line in results.lines if "wall_s" in line]
    assert timed == [
        ("first", 0, 0), ("wrong", 0, 0), ("peft", 0, 0),
        ("peft", 2, 0), ("first", 0, 0),
        ("peft", 2, 1),
    ]  # fmt: skip
    assert next(line for line in results.lines if "beside" in line)["beside"] == 2
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == results.lines
    assert not _children()


def test_the_whole_course_runs_with_stand_ins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = bench_peers.main(["--check", "--threads", "1", "--output", str(tmp_path)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == 0, [line for line in lines if "error" in line]
    assert {line["system"] for line in lines if "wall_s" in line} == {system.name for system in SYSTEMS}
    http = [(line["system"], line["against"]) for line in lines if line.get("transport") == "http" and "system" in line]
    assert http == [
        (name, other) for other in ("vllm", "vllm-base", "vllm-base-compiled") for name in ("ours", other)
    ]  # fmt: skip
    assert all(line["other_server_cores"] >= 0 for line in lines if line.get("against"))
    measured = [line for line in lines if "goal" in line]
    assert len(measured) == len(goals.GOALS) + 2
    assert (tmp_path / "results.svg").read_text().count("<rect") > len(lines) / 2
    assert "says nothing about its GPU kernels" in (tmp_path / "results.md").read_text()
    assert not _children()


def test_points_are_chosen_by_name() -> None:
    chosen = [point for point in all_points() if point.matches(["8x8", "32x0x512", "8x4+4"])]
    assert chosen == [Point(32, 0, prompt_tokens=512), Point(8, 8), Point(8, 4, base_rows=4)]
    assert len({str(point) for point in all_points()}) == len(list(all_points()))


def test_every_goal_is_of_points_that_are_measured() -> None:
    places = {(point.batch, point.adapters, point.prompt_tokens) for point in all_points() if not point.is_mixed}
    names = {system.name for system in SYSTEMS}
    for goal in goals.GOALS:
        fields = dict(goal.fields)
        assert (fields["batch"], fields["adapters"], fields["prompt_tokens"]) in places
        assert {goal.ours, goal.other} <= names


def test_a_goal_is_met_by_the_lines_of_its_point(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results()
    results.add(system="ours", **Point(8, 8).figures(), decode_tok_s=250.0, prefill_tok_s=400.0, wall_s=1.0)
    results.add(system="vllm", **Point(8, 8).figures(), decode_tok_s=100.0, prefill_tok_s=100.0, wall_s=1.0)
    results.add(system="ours", **Point(8, 8, base_rows=4).figures(), decode_tok_s=9.0, prefill_tok_s=9.0, wall_s=1.0)
    results.add(
        system="ours-base", **Point(8, 0).figures(), beside=8, decode_tok_s=1000.0, prefill_tok_s=9.0, wall_s=1.0
    )
    capsys.readouterr()
    goals.report_goals(results, place.model, dict(place.adapters))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["ratio"], line["met"]) for line in lines[:3]] == [(2.5, True), (4.0, False), (None, None)]
    # The base has 64 x 64 weights, and the adapters 2 x 64 for each of their 80 ranks.
    assert (lines[-2]["floor"], lines[-2]["ratio"], lines[-2]["met"]) == (3.5, 4.0, True)
    assert lines[-1]["met"] is None


def test_vllm_is_never_asked_to_mix_base_rows_with_adapters() -> None:
    for system in SYSTEMS:
        asked = [point for point in all_points() if system.runs(point)]
        assert asked
        if system.name.startswith("vllm"):
            assert not any(None in point.names and any(point.names) for point in asked)
    mixed = {system.name for system in SYSTEMS if any(system.runs(p) for p in all_points() if p.is_mixed)}
    assert mixed == {"ours", "peft"}


def test_a_server_that_answers_otherwise_is_named(place: Workplace) -> None:
    results = Results()
    # There is no ninth adapter.
    asked = replace(SMALL, batch=9, adapters=9, base_rows=0)
    kinds = ServerKind("ours", "stand-in"), ServerKind("vllm", "stand-in")
    over_http.measure(kinds[0], kinds[1:], [asked], place, results, rounds=1)
    assert "ours: status 404: " in results.lines[0]["error"]
    assert not _children()


def test_a_page_tells_what_was_not_timed() -> None:
    line = {"system": "ours", **SMALL.figures(), "decode_tok_s": None, "prefill_tok_s": 2.0, "wall_s": 3.0}
    line["together_tok_s"] = 4.0
    versions = {"system": "ours", "versions": {"torch": "2.13.0", "transformers": "5.24.0"}}
    page = table.markdown([versions, line, {"system": "vllm", "error": "it <failed>"}], "One machine.")
    assert "- ours: torch 2.13.0, transformers 5.24.0" in page
    assert "| ours | 3 | 2 | 1 | 4 | None | 4.0 | 2.0 | 3.0 |" in page
    assert "- vllm: it <failed>" in page
    assert "<svg" in table.plot([line])


def test_real_systems_answer_alike(tiny_base: Path, tmp_path: Path) -> None:
    """This engine and PEFT, as the processes that are timed, give a mixed batch the same tokens."""
    adapters = bench_peers.make_adapters(tiny_base, tmp_path)
    place = Workplace(tiny_base, adapters, [0], tmp_path, Path("no-interpreter"))
    small = {"max_model_len": 64, "kv_cache_tokens": 1024, "step_tokens": 64}
    reference = replace(REFERENCE, settings={**REFERENCE.settings, **small})
    ours = System("ours", "ours", small, lora=True)
    results = Results()
    point = Point(6, 4, base_rows=2, prompt_tokens=20, new_tokens=8, vocab=128)
    assert offline.check(reference, [ours], [point, point.base()], place, results) == set()
    assert results.lines == []
