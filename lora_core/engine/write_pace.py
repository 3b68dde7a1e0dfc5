"""How long a step may spend on writing adapters into slots, so that nobody's tokens wait for it."""

from collections import deque

WRITE_SHARE = 0.5
"""Of the shortest recent step: what a step may spend on writing adapters into slots while requests run, so that no gap
between two tokens comes near twice the usual."""

NUM_RECENT_STEPS = 8
"""Steps looked back at; among them some with long prompts, which say nothing of how long a token takes."""

SHORTEST_WRITE_S = 0.0005
"""What a step may always spend on writing: steps that are shorter yet need no protection."""


class WritePace:
    """Remembers how long the last steps took."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    @property
    def budget_s(self) -> float:
        """Seconds that the next step may spend on writing."""
        return max(SHORTEST_WRITE_S, WRITE_SHARE * min(self._recent_s, default=0.0))

    def note(self, step_s: float) -> None:
        """Take note of a step that has run."""
        self._recent_s.append(step_s)
