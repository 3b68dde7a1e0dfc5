"""The highest rate that a fleet sustains, found for every fleet by the same search."""

from collections.abc import Awaitable, Callable

STEP = 1.5
"""Between two rates that are tried first."""
LOWEST = 0.1
"""Of the first rate: no lower one is tried."""
NUM_HALVINGS = 2
"""How often what lies between the highest rate that held and the lowest that did not is halved, by ratio: what is found
is exact to a tenth."""


async def sustained(holds: Callable[[float], Awaitable[bool]], first: float, most: float) -> float:
    """Find the highest rate that a fleet holds.

    Args:
        holds: Tries a rate.
        first: The rate to begin with.
        most: No higher one is tried.

    Returns:
        A rate that was tried and held; 0 where none did.
    """
    held, failed = 0.0, 0.0
    rate = first
    while LOWEST * first <= rate <= most and not (held and failed):
        if await holds(rate):
            held, rate = rate, rate * STEP
        else:
            failed, rate = rate, rate / STEP
    for _ in range(NUM_HALVINGS if held and failed else 0):
        between = (held * failed) ** 0.5
        if await holds(between):
            held = between
        else:
            failed = between
    return held
