"""`make bench-peers`: this engine, vLLM on CPU, transformers and PEFT, in one run on the same cores.

SmolLM2-135M in bf16, prompts of 128 tokens and answers of 96, eight all-linear adapters of rank 4 to 16 of which 0, 1,
4 or 8 are spread over the rows. Systems: `ours-base`, `vllm-base` (eager), `vllm-base-compiled`, `transformers`
(`generate`) and `transformers-cb` (continuous batching) have no adapters; `ours`, `vllm` and `peft` do, also where a
batch has none. Then `ours` over HTTP, the whole stack with one replica, beside vLLM's OpenAI server.

Each system is a process of its own (`tests.bench.peers.protocol`). Its tokens in fp32 are first compared with PEFT's,
up to a row's first near tie, and where they differ it is not timed. Then all systems take turns at each point, and the
best of the rounds counts; `slowest_s` tells how far apart they were. All have the same cores, and a thread for each.

Prints one JSON line per point and system, and one per goal; writes them, tables and a plot to a folder. Figures mean
something where nothing else runs: every line has the machine's load.

Decode rate: B * (N - 1) / (T(N) - T(1)); prefill rate: B * P / T(1), for B rows, prompts of P tokens, answers of N.
Where the steps of a system can be seen (`ours`, `vllm`), `together_tok_s` is the rate of those after every row's first.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from cluster.demo.base_model import prepare
from lora_core.types import ADAPTER_CONFIG_FILE
from lora_core.weight_files import WEIGHTS_FILE
from tests.bench.peers import offline, over_http, servers, stand_in
from tests.bench.peers.goals import report_goals
from tests.bench.peers.points import Point, Results, all_points, quick_points
from tests.bench.peers.process import ROOT
from tests.bench.peers.servers import ServerKind
from tests.bench.peers.systems import REFERENCE, SYSTEMS, System, Workplace
from tests.bench.peers.table import markdown, plot
from tests.bench.random_adapter import write_adapter

RANKS = (16, 4, 8, 12, 16, 4, 8, 12)
HTTP_BATCHES = (8, 32)
PEERS = ROOT / ".make" / "peers" / "bin" / "python"
OUTPUT = ROOT / ".make" / "bench-peers"
THREADS = 2


@dataclass(frozen=True)
class Plan:
    """What is compared at which points."""

    reference: System
    systems: Sequence[System]
    points: Sequence[Point]
    servers: Sequence[ServerKind]
    http_points: Sequence[Point]
    rounds: int


def full_plan(rounds: int) -> Plan:
    """Everything."""
    http_points = [Point(batch, adapters) for batch in HTTP_BATCHES for adapters in (0, 8)]
    return Plan(REFERENCE, SYSTEMS, list(all_points()), servers.KINDS, http_points, rounds)


def quick_plan() -> Plan:
    """One round, few points, nothing compiled."""
    systems = [system for system in SYSTEMS if not system.settings.get("compile")]
    kinds = [kind for kind in servers.KINDS if not kind.compile]
    points = [replace(point, new_tokens=24) for point in quick_points()]
    return Plan(REFERENCE, systems, points, kinds, [point for point in points if not point.is_mixed], 1)


def check_plan() -> Plan:
    """The whole course with stand-ins for every system."""
    systems = [replace(s, program="stand_in", settings={}, is_foreign=False) for s in SYSTEMS]
    reference = next(system for system in systems if system.name == REFERENCE.name)
    points = [replace(point, vocab=stand_in.VOCAB) for point in all_points()]
    kinds = [replace(kind, program="stand-in") for kind in servers.KINDS]
    http_points = [Point(8, adapters, vocab=stand_in.VOCAB) for adapters in (0, 8)]
    return Plan(reference, systems, points, kinds, http_points, 1)


def run(plan: Plan, place: Workplace, results: Results) -> bool:
    """Check and time everything of a plan; returns whether nothing was wrong or missing."""
    wrong: offline.Wrong = set()
    if plan.systems:
        wrong = offline.check(plan.reference, plan.systems, plan.points, place, results)
        offline.measure(plan.systems, plan.points, place, results, rounds=plan.rounds, wrong=wrong)
    if plan.servers:
        first, *others = plan.servers
        over_http.measure(first, others, plan.http_points, place, results, rounds=plan.rounds)
    report_goals(results, place.model, dict(place.adapters))
    return not any("error" in line for line in results.lines)


def make_adapters(base: Path, folder: Path) -> dict[str, Path]:
    """Random adapters that all compared systems read."""
    adapters = {}
    for index, rank in enumerate(RANKS):
        path = write_adapter(base, folder / f"a{index}", rank, seed=index)
        config = path / ADAPTER_CONFIG_FILE
        # PEFT generates only with models of a known task.
        config.write_text(json.dumps({**json.loads(config.read_text()), "task_type": "CAUSAL_LM"}))
        adapters[f"a{index}"] = path
    return adapters


def stand_in_files(folder: Path) -> tuple[Path, dict[str, Path]]:
    """A base and adapters with nothing in them but their sizes."""
    base = folder / "base"
    base.mkdir()
    save_file({"weight": torch.zeros(64, 64)}, base / "model.safetensors")
    adapters = {f"a{index}": folder / f"a{index}" for index in range(len(RANKS))}
    for rank, path in zip(RANKS, adapters.values(), strict=True):
        path.mkdir()
        save_file({"a": torch.zeros(rank, 64), "b": torch.zeros(64, rank)}, path / WEIGHTS_FILE)
    return base, adapters


def machine(place: Workplace) -> str:
    """What it ran on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(":")[2].strip() if models else "an unknown processor"
    return f"{model}, {len(place.cores)} of {os.cpu_count()} cores, a thread for each, for every system."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the status is 1 if a system failed or gave wrong tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points, one round, nothing compiled")
    parser.add_argument("--check", action="store_true", help="only the course of the benchmark, with stand-ins")
    parser.add_argument("--threads", type=int, default=THREADS, help="of every system, each on a core of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=["offline", "http"], help="only this part")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="only these, in both parts")
    parser.add_argument("--points", nargs="+", metavar="POINT", help="only these: BATCHxADAPTERS[xPROMPT]")
    parser.add_argument("--peers", type=Path, default=PEERS, help="interpreter of the peers' environment")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for results and logs")
    options = parser.parse_args(arguments)
    plan = check_plan() if options.check else quick_plan() if options.quick else full_plan(options.rounds)
    if options.systems:
        known = {system.name for system in plan.systems}
        if unknown := set(options.systems) - known:
            parser.error(f"no system is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
        kept = [system for system in plan.systems if system.name in options.systems]
        # This project's server is what the others are compared with.
        first, *others = plan.servers
        plan = replace(plan, systems=kept, servers=[first, *(kind for kind in others if kind.name in options.systems)])
    if options.points:
        kept_points = [point for point in plan.points if point.matches(options.points)]
        kept_over_http = [point for point in plan.http_points if point.matches(options.points)]
        if not kept_points:
            parser.error(f"no point is {' or '.join(options.points)}; there are {', '.join(map(str, plan.points))}")
        plan = replace(plan, points=kept_points, http_points=kept_over_http)
    if options.part:
        plan = replace(plan, systems=[]) if options.part == "http" else replace(plan, servers=[])
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    if len(cores) < options.threads:
        parser.error(f"--threads is {options.threads}, and this process may use {len(cores)} cores")
    if not options.check and not options.peers.exists():
        parser.error(f"there is no {options.peers}; `make bench-peers` builds it, or name another with --peers")
    return _run_and_write(plan, cores, options)


def _run_and_write(plan: Plan, cores: Sequence[int], options: argparse.Namespace) -> int:
    # The systems run in other folders.
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    results = Results()
    with tempfile.TemporaryDirectory() as name:
        if options.check:
            base, adapters = stand_in_files(Path(name))
        else:
            base = prepare(report=lambda line: print(line, file=sys.stderr))
            adapters = make_adapters(base, Path(name))
        place = Workplace(base, adapters, cores, output, options.peers)
        print(machine(place), file=sys.stderr)
        is_whole = run(plan, place, results)
        about = machine(place)
    page = markdown(results.lines, about)
    (output / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results.lines))
    (output / "results.md").write_text(page)
    (output / "results.svg").write_text(plot(results.lines))
    print(page, file=sys.stderr)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
