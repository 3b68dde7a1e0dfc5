"""`lora-fleet bench serve` against a real engine behind the real routes: what is sent, counted, kept, and refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import cli
from deployments.fleet_commands import Exit
from tests.engine.byte_model import byte_model
from tests.engine.engine_server import BASE, NAMES, engine_server

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine_server(byte_model(tmp_path_factory.mktemp("base"))) as address:
        yield address


@pytest.fixture
def run(url: str) -> Run:
    return lambda *words: CliRunner().invoke(cli, ["bench", "serve", "--url", url, "--prompt-words", "3:5", *words])


def test_a_run_is_told_as_json_kept_and_drawn(run: Run, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "run.json", tmp_path / "run.png"
    files = ["--save", str(saved), "--plot", str(drawn)]
    result = run("--requests", "12", "--rate", "50", "--answer-tokens", "3:6", "--ignore-eos", "--json", *files)
    assert result.exit_code == Exit.DONE, result.output
    told = json.loads(result.stdout)
    kept = json.loads(saved.read_bytes())
    requests = kept.pop("requests")
    assert kept == told
    summary = told["summary"]
    assert (summary["num_requests"], summary["num_answered"], summary["faults"]) == (12, 12, {})
    assert summary["tokens_are_counted"] is True
    assert summary["answer_tokens"] == sum(one["num_tokens"] for one in requests)
    assert all(3 <= one["num_tokens"] <= 6 for one in requests)
    assert {one["model"] for one in requests} <= set(NAMES)
    assert [one["index"] for one in requests] == list(range(12))
    assert all(one["due_s"] <= one["sent_s"] < one["first_s"] <= one["end_s"] for one in requests)
    assert summary["all"]["ttft_ms"]["count"] == 12
    assert summary["num_cold"] == sum(one["is_cold"] for one in requests) > 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_an_adapter_is_cold_until_it_has_answered(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    load = ["--requests", "12", "--arrivals", "closed", "--users", "1", "--answer-tokens", "2", "--zipf", "0"]
    assert run(*load, "--save", str(saved)).exit_code == Exit.DONE
    seen: set[str] = set()
    for one in json.loads(saved.read_bytes())["requests"]:
        assert one["is_cold"] == (one["model"] not in seen)
        seen.add(one["model"])
    assert seen == set(NAMES)
    assert run(*load, "--cold-after", "0", "--save", str(saved)).exit_code == Exit.DONE
    assert all(one["is_cold"] for one in json.loads(saved.read_bytes())["requests"])


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_both_interfaces_and_the_base_model_are_asked(run: Run, tmp_path: Path, api: str) -> None:
    prompts, saved = tmp_path / "prompts.jsonl", tmp_path / "run.json"
    prompts.write_text('{"prompt": "abcdef", "max_tokens": 2}\n\n{"prompt": "gh", "max_tokens": 3}\n')
    words = ["--prompts", str(prompts), "--requests", "6", "--rate", "100", "--ignore-eos", "--save", str(saved)]
    result = run(*words, "--api", api, "--base-share", "1")
    assert result.exit_code == Exit.DONE, result.output
    requests = json.loads(saved.read_bytes())["requests"]
    assert [one["model"] for one in requests] == [BASE] * 6
    around = len("<user><assistant>") if api == "chat" else 0
    found = sorted((one["prompt_tokens"] - around, one["num_tokens"]) for one in requests)
    assert found == [(2, 3)] * 3 + [(6, 2)] * 3


def test_what_the_server_refuses_is_counted_by_kind(run: Run, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("# of another server\nnobody\n")
    result = run("--models", str(names), "--requests", "3", "--rate", "100")
    assert result.exit_code == Exit.REFUSED
    assert "3 x HTTP 404: no adapter named 'nobody'" in result.output
    assert "0 of 1 adapters within their targets" in result.output


def test_what_is_due_beyond_the_bound_is_missed(run: Run) -> None:
    words = ["--requests", "30", "--rate", "1000", "--answer-tokens", "100", "--ignore-eos", "--max-in-flight", "2"]
    result = run(*words, "--json", "--min-good-share", "0.9")
    assert result.exit_code == Exit.NOT_EVERYWHERE
    summary = json.loads(result.stdout)["summary"]
    missed = summary["faults"]["not sent: too many under way"]["count"]
    assert summary["num_answered"] + missed == 30
    assert missed > 0


def test_a_run_ends_in_time(run: Run) -> None:
    result = run("--requests", "50", "--rate", "10", "--answer-tokens", "2", "--max-seconds", "0.25", "--json")
    assert result.exit_code == Exit.DONE, result.output
    summary = json.loads(result.stdout)["summary"]
    assert summary["num_answered"] + summary["faults"]["not sent: out of time"]["count"] == 50
    slow = run(
        "--requests", "2", "--answer-tokens", "200", "--ignore-eos", "--timeout", "0.1", "--rate", "99", "--json"
    )
    assert slow.exit_code == Exit.REFUSED
    assert json.loads(slow.stdout)["summary"]["faults"]["timeout"]["count"] == 2


def test_targets_decide_what_is_good(run: Run) -> None:
    words = ["--requests", "4", "--rate", "100", "--answer-tokens", "4", "--ignore-eos"]
    loose = run(*words, "--ttft-ms", "60000", "--inter-token-ms", "60000", "--min-good-share", "1")
    assert loose.exit_code == Exit.DONE, loose.output
    assert "4 of 4 answers (100.0%)" in loose.output
    strict = run(*words, "--ttft-ms", "0", "--min-good-share", "0.01")
    assert strict.exit_code == Exit.NOT_EVERYWHERE
    assert "goodput 0.00 requests/s: 0 of 4 answers" in strict.output


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--models", "/no/such/file"), Exit.REFUSED, "/no/such/file cannot be read"),
        (("--prompts", "/no/such/file"), Exit.REFUSED, "/no/such/file cannot be read"),
        (("--plot", "picture.pdf"), Exit.REFUSED, "expected a name that ends with .png"),
        (("--save", "/no/such/folder/x.json"), Exit.REFUSED, "No such file or directory"),
        (("--answer-tokens", "9:3"), 2, "expected a range from at least 1 up"),
        (("--requests", "0"), 2, "greater than or equal to 1"),
        (("--url", "http://127.0.0.1:1"), Exit.UNREACHABLE, "http://127.0.0.1:1 does not answer"),
        (("--url", "nowhere"), Exit.UNREACHABLE, "'nowhere' is no address"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_sent(
    run: Run, words: tuple[str, ...], status: int, said: str
) -> None:
    result = run(*words)
    assert result.exit_code == status, result.output
    assert said in " ".join(result.output.replace("│", "").split())


def test_a_missing_matplotlib_is_said_first(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: Any = lambda name: None  # noqa: E731
    monkeypatch.setattr("deployments.bench_serve.plots.importlib.util.find_spec", found)
    result = run("--plot", str(tmp_path / "a.png"))
    assert result.exit_code == Exit.REFUSED
    assert "pip install 'lora-fleet[bench]'" in result.output
