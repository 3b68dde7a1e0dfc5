"""What the comparison is to show, as ratios of two measured lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lora_core.weight_files import WEIGHTS_FILE
from tests.bench.peers.points import LONG_PROMPT_TOKENS, PROMPT_TOKENS, Results
from tests.bench.result import report

STEP_GOAL = 1.25


@dataclass(frozen=True)
class Ratio:
    """A rate of one system over that of another, at a point that both were measured at.

    Attributes:
        rate: The key of both lines.
        ours, other: Names of systems.
        at_least: The goal.
        fields: What both lines have.
        note: After the goal.
    """

    rate: str
    ours: str
    other: str
    at_least: float
    fields: tuple[tuple[str, Any], ...]
    note: str = ""

    def report(self, results: Results) -> None:
        """Print it; `met` is None where one of the two was not measured."""
        # Over HTTP this project's server is measured beside each other one.
        against = {"against": self.other} if ("transport", "http") in self.fields else {}
        mine = results.find(self.ours, **dict(self.fields), **against)
        other = results.find(self.other, **dict(self.fields), **against)
        ratio = quotient(mine, other, self.rate)
        report(
            f"{self.rate} of {self.ours} over {self.other}", **dict(self.fields), ratio=ratio,
            compared=f"{self.rate} of the two systems, measured by turns",
            goal=f"ratio >= {self.at_least}{self.note}", met=None if ratio is None else ratio >= self.at_least,
        )  # fmt: skip


def _at(batch: int, adapters: int = 0, **fields: Any) -> tuple[tuple[str, Any], ...]:
    return tuple({"batch": batch, "adapters": adapters, "prompt_tokens": PROMPT_TOKENS, **fields}.items())


# A decode rate is the difference of two times, long ones after long prompts: there steps are timed apart.
GOALS = (
    Ratio("decode_tok_s", "ours", "vllm", 2.5, _at(8, 8)),
    Ratio("prefill_tok_s", "ours", "vllm", 5, _at(8, 8)),
    Ratio("decode_tok_s", "ours", "vllm", 2, _at(32, 8)),
    Ratio("prefill_tok_s", "ours", "vllm", 8, _at(32, 8)),
    Ratio("output_tok_s", "ours", "vllm", 3, _at(32, 8, transport="http")),
    Ratio("decode_tok_s", "ours-base", "vllm-base", 1, _at(1)),
    Ratio("decode_tok_s", "ours-base", "vllm-base", 1, _at(8)),
    Ratio("decode_tok_s", "ours-base", "vllm-base", 0.85, _at(32)),
    Ratio("together_tok_s", "ours-base", "vllm-base", 0.8, _at(8, prompt_tokens=LONG_PROMPT_TOKENS)),
    Ratio("together_tok_s", "ours-base", "vllm-base", 0.8, _at(32, prompt_tokens=LONG_PROMPT_TOKENS)),
    *(
        Ratio("decode_tok_s", "ours-base", "vllm-base-compiled", 1, _at(batch), " (the next goal)")
        for batch in (1, 8, 32)
    ),
    Ratio("decode_tok_s", "ours", "peft", 4.5, _at(8, 8)),
    Ratio("decode_tok_s", "ours", "peft", 3.5, _at(32, 8)),
)


def quotient(above: dict[str, Any] | None, below: dict[str, Any] | None, rate: str) -> float | None:
    """A rate of one line over that of another; None where one of them was not measured."""
    if above is None or below is None or above[rate] is None or below[rate] is None:
        return None
    return float(above[rate] / below[rate])


def report_goals(results: Results, base: Path, adapters: dict[str, Path]) -> None:
    """Print every goal with what was measured, and whether it was met."""
    for goal in GOALS:
        goal.report(results)
    floor = step_floor(base, list(adapters.values()))
    for batch in (8, 32):
        fields = {"batch": batch, "prompt_tokens": PROMPT_TOKENS}
        mine = results.find("ours", adapters=len(adapters), **fields)
        alone = results.find("ours-base", adapters=0, beside=len(adapters), **fields)
        ratio = quotient(alone, mine, "decode_tok_s")
        over_floor = None if ratio is None else ratio / floor
        report(
            "step_time of ours over ours-base", **fields, adapters=len(adapters), ratio=ratio, floor=floor,
            over_floor=over_floor, compared="a decode step with adapters with one of the base only, measured by turns",
            goal=f"ratio <= {STEP_GOAL} * floor", met=None if over_floor is None else over_floor <= STEP_GOAL,
        )  # fmt: skip


def step_floor(base: Path, adapters: list[Path]) -> float:
    """`(base + adapter bytes) / base bytes`: the weights that a decode step reads at least, with adapters and without.

    All are counted as two bytes each, whatever they are kept as, and the adapters at their own ranks.
    """
    in_base = sum(_num_weights(path) for path in base.glob("*.safetensors"))
    in_adapters = sum(_num_weights(folder / WEIGHTS_FILE) for folder in adapters)
    return (in_base + in_adapters) / in_base


def _num_weights(path: Path) -> int:
    total = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            size = 1
            for length in file.get_slice(name).get_shape():
                size *= length
            total += size
    return total
