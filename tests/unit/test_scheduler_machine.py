"""Random arrivals, adapters, aborts, reloads and time on the scheduler: every invariant after each step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.stepped_scheduler import SteppedScheduler

NAMES = "uvwxyz"
TEXTS = [[seed * 50 + place for place in range(24)] for seed in range(3)]
LONGEST_PROMPT, MOST_TOKENS = 20, 9


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of few texts, so that they share beginnings; their answers are read from the simulated KV cache only."""

    @initialize(
        block_size=st.integers(1, 5),
        spare_blocks=st.integers(0, 20),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_slot_wait_s=st.sampled_from([0.0, 0.35, 1.0, 1000.0]),
        num_slots=st.integers(1, 3),
        max_loras_per_step=st.sampled_from([None, None, 1, 2]),
        host_adapters=st.sampled_from([1, 3, 100]),
        share=st.sampled_from([True, True, True, False]),
    )
    def start(self, block_size: int, spare_blocks: int, **settings: int) -> None:
        # From the least that holds one largest request.
        num_blocks = -(-(LONGEST_PROMPT + MOST_TOKENS) // block_size) + spare_blocks
        self.engine = SteppedScheduler(num_blocks=num_blocks, block_size=block_size, write_steps=1, **settings)  # type: ignore[arg-type]
        self.ended: set[str] = set()

    @rule(
        name=st.sampled_from([None, *NAMES]),
        text=st.sampled_from(TEXTS),
        length=st.integers(1, LONGEST_PROMPT),
        max_tokens=st.integers(1, MOST_TOKENS),
    )
    def add(self, name: str | None, text: list[int], length: int, max_tokens: int) -> None:
        self.engine.add(name, tokens=text[:length], max_tokens=max_tokens)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(index=st.integers(0, 50), as_failed=st.booleans())
    def end(self, index: int, as_failed: bool) -> None:
        if self.engine.live:
            request = self.engine.live[index % len(self.engine.live)]
            self.ended.add(request.request_id)
            if as_failed and self.engine.running(request):
                self.engine.fail(request)
            else:
                self.engine.abort(request)

    @rule(name=st.sampled_from(NAMES), in_place=st.booleans())
    def change(self, name: str, in_place: bool) -> None:
        """A new generation of a name, whose answers differ from those of the old one."""
        if in_place:
            self.engine.reload(name)
        else:
            self.engine.unload(name)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        """The files of an adapter go or come back; they matter once its tensors are not in memory."""
        self.engine.slots.lost ^= {name}

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for outcome in self.engine.outcomes.values():
            if outcome.error is None and outcome.request.request_id not in self.ended:
                self.engine.assert_exact(outcome.request)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
