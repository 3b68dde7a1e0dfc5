"""Random operations on one engine, each answer checked against a quiet run, each invariant at every step."""

import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lora_core.config import LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.messages import GenerateRequest, SamplingParams, TokenDelta
from lora_core.types import LoRAResponse, LoRAStatus
from tests.fuzz.world import MAX_RANK, MAX_TOKENS, QuietRuns, Version, World, engine_config

SHAPES = ((4, 5), (1, 1), (2, 1), (2, 4), (4, 1))
"""Slots, and about how many adapters fit into host memory (the others are read again when they are asked for); a seed
has one of these."""

KV_CACHE_TOKENS = 72
READ_TIMEOUT_S, STALL_S = 4.0, 5.0
STALL_EVERY, STALLED_STEPS = 10_000, 50
"""Steps from one stall of a name's files to the next, and for how many of them it goes on."""
RETURN_STEPS = 30
"""For how long after files have come back a read from before may be what its adapter's requests are told of."""
DRAIN_TIMEOUT_S = 0.05
MOST_STEPS_IN_FLIGHT = 5_000
"""A request that takes longer is stuck."""

POPULARITIES = ("identical", "uniform", "zipf", "distinct", "base")
CHANGE_EVERY = 250
"""Steps after which another popularity rules."""


@dataclass
class Asked:
    """A request in flight, and what may rightly come of it."""

    name: str | None
    prompt: int
    max_tokens: int
    asked_at: int
    answers: list[list[int]]
    """The quiet answers of every version its name may have had when it was asked."""
    may_be_unknown: bool = False
    may_be_unloaded: bool = False
    may_be_lost: bool = False
    tokens: list[int] = field(default_factory=list)


@dataclass
class Operation:
    """An operation on a name that runs in another thread; `outcomes` are the statuses it may end with, by version."""

    kind: str
    name: str
    future: Future[LoRAResponse]
    on_success: Version | None
    allowed: set[LoRAStatus]


class Difference(AssertionError):
    """The engine said something it must not say."""


class Fuzz:
    """One engine with few slots under 12 names; `step` does something random to it, steps it, and checks it."""

    def __init__(self, world: World, quiet: QuietRuns, *, seed: int, num_ranks: int = 1) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._world = world
        self._quiet = quiet
        self._draw = random.Random(seed)
        self._pool = ThreadPoolExecutor(2)
        self._num_slots, self._num_in_memory = SHAPES[seed % len(SHAPES)]
        config = engine_config(world, kv_cache_tokens=KV_CACHE_TOKENS, tensor_parallel_size=num_ranks)
        self._engine = LLMEngine(config, self._lora_config())
        self._loaded: dict[str, Version] = {}
        self._pinned: set[str] = set()
        # Versions in whose folders there is nothing, or the other version's files.
        self._hidden: set[Version] = set()
        self._swapped: set[Version] = set()
        self._generations = itertools.count(1000, 1000)
        # When files of a name came back.
        self._returned: dict[str, int] = {}
        # The name whose files are slow to come.
        self._stalled: str | None = None
        self._operations: dict[str, Operation] = {}
        self._asked: dict[str, Asked] = {}
        self._ids = itertools.count()
        # How often each action comes, of about a hundred steps; None is to do nothing.
        self._weights: dict[Callable[[], None] | None, float] = {
            self._ask: 40,
            self._load: 7,
            self._renumber: 1,
            self._replace: 4,
            self._unload: 2,
            self._pin: 2,
            self._unpin: 3,
            self._abort: 4,
            self._hide: 2,
            None: 35,
        }
        self._popularity = "uniform"
        self._log: list[str] = []

    def run(self, num_steps: int) -> None:
        """Take so many steps, then let everything end, and check that nothing is left.

        Raises:
            Difference: a token, an outcome or an invariant is not what it must be; the seed and the last operations
                are named.
        """
        try:
            with self._world.slow_files():
                for _ in range(num_steps):
                    self.step()
                self._finish()
        except AssertionError as error:
            last = "\n  ".join(self._log[-40:])
            raise Difference(f"seed {self.seed}, step {self.counts['steps']}: {error}\n  {last}") from error
        finally:
            self._pool.shutdown()
            self._engine.close()
            self._world.stalled.clear()
            for version in list(self._hidden | self._swapped):
                self._bring_back(version)

    def step(self) -> None:
        """One random action or none, one step of the engine, all checks."""
        if self.counts["steps"] % CHANGE_EVERY == 0:
            self._popularity = self._draw.choice(POPULARITIES)
        self._collect()
        self._change_stall()
        action = self._draw.choices(list(self._weights), list(self._weights.values()))[0]
        if action is not None:
            action()
        self._step_engine()

    def _step_engine(self) -> None:
        self.counts["steps"] += 1
        for delta in self._engine.step():
            self._check(delta)
        self._engine.check_invariants()
        for request_id, asked in self._asked.items():
            waited = self.counts["steps"] - asked.asked_at
            assert waited <= MOST_STEPS_IN_FLIGHT, f"{request_id} {asked} is stuck"

    # Requests

    def _ask(self) -> None:
        name = self._choose_name()
        prompt = self._draw.randrange(len(self._world.prompts))
        versions = self._possible_versions(name)
        answers = [self._quiet.answer(version, prompt) for version in versions if version is not None or name is None]
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            return
        request_id = f"r{next(self._ids)}"
        asked = Asked(name, prompt, self._draw.randint(1, MAX_TOKENS), self.counts["steps"], known)
        asked.may_be_unknown = name is not None and None in versions
        asked.may_be_unloaded = name in self._operations
        since_return = self.counts["steps"] - self._returned.get(name or "", -RETURN_STEPS)
        asked.may_be_lost = name == self._stalled or since_return < RETURN_STEPS or any(map(self._is_away, versions))
        sampling = SamplingParams(max_tokens=asked.max_tokens, temperature=0, ignore_eos=True)
        self._note(f"ask {request_id} {name} prompt {prompt} tokens {asked.max_tokens}")
        self._engine.add_request(GenerateRequest(request_id, list(self._world.prompts[prompt]), sampling, name))
        self._asked[request_id] = asked
        self.counts["requests"] += 1

    def _choose_name(self) -> str | None:
        names = list(self._world.versions)
        if self._popularity == "base" or self._draw.random() < 0.15:
            return None
        if self._popularity == "identical":
            return names[0]
        if self._popularity == "distinct":
            return names[next(self._ids) % len(names)]
        weights = [1 / (rank + 1) ** 1.5 if self._popularity == "zipf" else 1.0 for rank in range(len(names))]
        return self._draw.choices(names, weights)[0]

    def _possible_versions(self, name: str | None) -> list[Version | None]:
        """What a request of this name may run on; None where the name may not be loaded (or is the base)."""
        if name is None:
            return [None]
        versions = {self._loaded.get(name)}
        operation = self._operations.get(name)
        if operation is not None and operation.kind not in ("pin", "unpin"):
            versions.add(operation.on_success)
        return list(versions)

    def _abort(self) -> None:
        if self._asked:
            request_id = self._draw.choice(list(self._asked))
            self._note(f"abort {request_id}")
            self._engine.abort(request_id)
            del self._asked[request_id]
            self.counts["aborts"] += 1

    def _check(self, delta: TokenDelta) -> None:
        asked = self._asked.get(delta.request_id)
        assert asked is not None, f"an answer for {delta.request_id}, which is done or aborted: {delta}"
        if delta.finish_reason == "error":
            self._check_error(asked, delta)
            del self._asked[delta.request_id]
            return
        asked.tokens += delta.token_ids
        self.counts["tokens"] += len(delta.token_ids)
        self.counts["cached_tokens"] += delta.num_cached_tokens
        is_right = any(answer[: len(asked.tokens)] == asked.tokens for answer in asked.answers)
        assert is_right, f"{delta.request_id} {asked}"
        if delta.finish_reason is not None:
            assert len(asked.tokens) == asked.max_tokens, f"{delta.request_id} ended early: {asked}"
            del self._asked[delta.request_id]
            self.counts["answers"] += 1

    def _check_error(self, asked: Asked, delta: TokenDelta) -> None:
        allowed = {
            "AdapterNotFound": asked.may_be_unknown,
            "AdapterUnloaded": asked.may_be_unloaded,
            "AdapterLost": asked.may_be_lost,
        }
        assert allowed.get(delta.error_type, False), f"{asked} ended with {delta}"
        self.counts[delta.error_type] += 1

    # Operations on adapters

    def _load(self) -> None:
        version = self._choose_version()
        loaded = self._loaded.get(version.name)
        allowed = {LoRAStatus.SUCCESS} if loaded in (None, version) else {LoRAStatus.LOAD_NAME_EXISTS}
        on_success = version if loaded is None else loaded
        self._start("load", version.name, self._loader(version), on_success, allowed | self._refusals(version))

    def _renumber(self) -> None:
        """Load what is loaded, or other content, under a generation of our own."""
        version = self._choose_version()
        loaded = self._loaded.get(version.name)
        allowed = {LoRAStatus.SUCCESS} if loaded in (None, version) else {LoRAStatus.LOAD_NAME_EXISTS}
        load = self._loader(version, generation=next(self._generations))
        on_success = version if loaded is None else loaded
        self._start("renumber", version.name, load, on_success, allowed | self._refusals(version))

    def _loader(self, version: Version, **arguments: Any) -> Callable[[], LoRAResponse]:
        """A load of a version, told by its hash where its folder may hold the other one."""
        if version in self._swapped or self._draw.random() < 0.5:
            arguments["content_hash"] = self._quiet.report(version).content_hash
        return partial(self._engine.manager.load_adapter, f"{version.name}={version.folder}", **arguments)

    def _refusals(self, version: Version) -> set[LoRAStatus]:
        """How a load may end beside the right way: what is in memory, or told apart without reading, is not read."""
        if version in self._hidden:
            return {LoRAStatus.LOAD_INVALID_PATH}
        return {LoRAStatus.LOAD_INVALID_ADAPTER} if version in self._swapped else set()

    def _replace(self) -> None:
        version = self._choose_version()
        allowed = {LoRAStatus.SUCCESS} | self._refusals(version)
        self._start("replace", version.name, self._loader(version, replace=True), version, allowed)

    def _unload(self) -> None:
        name = self._draw.choice(list(self._world.versions))
        allowed = {LoRAStatus.SUCCESS if name in self._loaded else LoRAStatus.UNLOAD_NAME_NONEXISTENT}
        self._start("unload", name, partial(self._engine.manager.unload_adapter, name), None, allowed)

    def _pin(self) -> None:
        name = self._draw.choice(list(self._world.versions))
        allowed = {LoRAStatus.SUCCESS if name in self._loaded else LoRAStatus.PIN_NAME_NONEXISTENT}
        # An operation in flight may pin or free one of the last places.
        if name in self._loaded and len(self._pinned) + len(self._operations) >= self._num_slots - 1:
            allowed.add(LoRAStatus.PIN_ERROR)
        self._start("pin", name, partial(self._engine.manager.pin_adapter, name), self._loaded.get(name), allowed)

    def _unpin(self) -> None:
        name = self._draw.choice(list(self._world.versions))
        allowed = {LoRAStatus.SUCCESS if name in self._loaded else LoRAStatus.PIN_NAME_NONEXISTENT}
        self._start("unpin", name, partial(self._engine.manager.unpin_adapter, name), self._loaded.get(name), allowed)

    def _hide(self) -> None:
        """Move a folder away, with other files in its place or none, or bring one back."""
        version = self._choose_version()
        if version.name in self._operations:
            return
        if self._is_away(version):
            self._bring_back(version)
        else:
            version.folder.rename(_hiding_place(version))
            self._let_be_lost(version.name)
            if self._draw.random() < 0.5:
                self._hidden.add(version)
            else:
                other = self._world.versions[version.name][1 - version.number]
                shutil.copytree(other.original, version.folder)
                self._swapped.add(version)
        self._note(f"hide {version.label}: {self._is_away(version)}")
        self.counts["hides"] += 1

    def _is_away(self, version: Version | None) -> bool:
        return version in self._hidden or version in self._swapped

    def _bring_back(self, version: Version) -> None:
        if version in self._swapped:
            shutil.rmtree(version.folder)
        _hiding_place(version).rename(version.folder)
        self._returned[version.name] = self.counts["steps"]
        self._hidden.discard(version)
        self._swapped.discard(version)

    def _let_be_lost(self, name: str) -> None:
        for asked in self._asked.values():
            asked.may_be_lost |= asked.name == name

    def _change_stall(self) -> None:
        """Have the files of a name come so slowly, for some steps, that requests do not wait for them."""
        since = self.counts["steps"] % STALL_EVERY
        if since == STALL_EVERY // 2:
            self._stalled = self._draw.choice(list(self._world.versions))
            self._world.stalled[self._stalled] = STALL_S
            self._let_be_lost(self._stalled)
            self._note(f"stall {self._stalled}")
            self.counts["stalls"] += 1
        elif since == STALL_EVERY // 2 + STALLED_STEPS:
            # What is on its way may come before anybody is told that it took long.
            self._world.stalled.clear()
            time.sleep(STALL_S)
        elif since == STALL_EVERY // 2 + STALLED_STEPS + 2:
            self._stalled = None

    def _choose_version(self) -> Version:
        return self._draw.choice(self._draw.choice(list(self._world.versions.values())))

    def _start(
        self,
        kind: str,
        name: str,
        operate: Callable[[], LoRAResponse],
        on_success: Version | None,
        allowed: set[LoRAStatus],
    ) -> None:
        if name in self._operations:
            return
        self._note(f"{kind} {name} {on_success and on_success.label}")
        if kind in ("unload", "replace", "renumber"):
            for asked in self._asked.values():
                asked.may_be_unloaded |= asked.name == name
        self._operations[name] = Operation(kind, name, self._pool.submit(operate), on_success, allowed)
        if self._draw.random() < 0.5:
            self._collect(wait=True)

    def _collect(self, *, wait: bool = False) -> None:
        """Take the outcomes of operations that ended."""
        for operation in list(self._operations.values()):
            if not wait and not operation.future.done():
                continue
            response = operation.future.result(60)
            del self._operations[operation.name]
            self._note(f"{operation.kind} {operation.name}: {response.status.value}")
            assert response.status in operation.allowed, f"{operation} ended with {response}"
            self.counts[operation.kind] += 1
            if response.status is LoRAStatus.SUCCESS:
                self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        if operation.kind == "unload":
            self._loaded.pop(operation.name)
            self._pinned.discard(operation.name)
        elif operation.kind == "pin":
            self._pinned.add(operation.name)
        elif operation.kind == "unpin":
            self._pinned.discard(operation.name)
        elif operation.on_success is not None:
            self._loaded[operation.name] = operation.on_success

    # The end

    def _finish(self) -> None:
        self._collect(wait=True)
        while self._asked:
            self._step_engine()
        for name in list(self._loaded):
            self._start("unload", name, partial(self._engine.manager.unload_adapter, name), None, {LoRAStatus.SUCCESS})
        self._collect(wait=True)
        self._step_engine()
        assert not self._engine.has_work(), "the engine still has work"
        self.counts["preempted"], self.counts["put_back"] = self._engine.preemption_counts
        assert self._engine.manager.residency() == ([], []), f"left behind: {self._engine.manager.residency()}"

    def _note(self, event: str) -> None:
        self._log.append(f"{self.counts['steps']}: {event}")
        del self._log[:-200]

    def _lora_config(self) -> LoRAConfig:
        sizes = sorted(self._sizes())
        budget = max(sizes[-1], self._num_in_memory * sizes[len(sizes) // 2])
        return LoRAConfig(
            enable_lora=True,
            max_lora_rank=MAX_RANK,
            max_num_loras=self._num_slots,
            host_memory_bytes=budget,
            read_timeout_s=READ_TIMEOUT_S,
            drain_timeout_s=DRAIN_TIMEOUT_S,
        )

    def _sizes(self) -> Iterator[int]:
        for versions in self._world.versions.values():
            yield self._quiet.report(versions[0]).num_bytes


def _hiding_place(version: Version) -> Path:
    return version.folder.with_name(version.folder.name + ".hidden")
