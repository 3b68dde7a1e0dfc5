"""How long a step takes by the number of its tokens: a straight line through the recent ones."""

FADE = 0.99
"""What a step counts for after the next one."""

LEAST_STEPS = 8.0
"""Weight of the steps from which on the line says something."""

LEAST_SPREAD = 0.05
"""Standard deviation of the tokens over their mean below which steps are too much alike for a slope."""


LEAST_ERRORS = 2.0
"""Standard errors by which the slope must differ from none. A slope that chance may have made says that a request costs
nothing, which draws all others to the replica."""


class StepLine:
    """Least squares over steps, of which newer ones count more."""

    def __init__(self) -> None:
        self._weight = 0.0
        # Sums over the steps.
        self._tokens = self._seconds = 0.0
        self._tokens_squared = self._seconds_squared = self._products = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a step."""
        self._weight = FADE * self._weight + 1
        self._tokens = FADE * self._tokens + num_tokens
        self._seconds = FADE * self._seconds + seconds
        self._tokens_squared = FADE * self._tokens_squared + num_tokens * num_tokens
        self._seconds_squared = FADE * self._seconds_squared + seconds * seconds
        self._products = FADE * self._products + num_tokens * seconds

    @property
    def per_token_s(self) -> float | None:
        """Seconds by which one token more makes a step longer, above 0; None while that is not known."""
        if self._weight < LEAST_STEPS:
            return None
        mean = self._tokens / self._weight
        variance = self._tokens_squared / self._weight - mean * mean
        if variance <= (LEAST_SPREAD * mean) ** 2:
            return None
        mean_s = self._seconds / self._weight
        slope = (self._products / self._weight - mean * mean_s) / variance
        unexplained = max(0.0, self._seconds_squared / self._weight - mean_s * mean_s - slope * slope * variance)
        error = (unexplained / (variance * self._weight)) ** 0.5
        return slope if slope > LEAST_ERRORS * error else None
