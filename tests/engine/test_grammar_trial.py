"""Grammars in the process that tries them out."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from lora_core.engine.grammar_trial import GrammarTrial


def grammar(schema: dict[str, object]) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


HARMLESS = grammar({"type": "object", "properties": {f"v{index}": {} for index in range(100)}})
WRONG = grammar({"type": "strin"})
ENDLESS = grammar({"type": "integer", "multipleOf": 99999989})


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    made = GrammarTrial()
    yield made
    made.close()


def test_only_what_goes_beyond_the_bounds_fails(trial: GrammarTrial) -> None:
    assert trial.failure(HARMLESS) is None
    assert trial.failure(WRONG) is None
    assert "takes more than" in (trial.failure(ENDLESS) or "")
    assert trial.failure(HARMLESS) is None


def test_time_and_memory_are_told_apart() -> None:
    program = (
        "import lora_core.engine.grammar_trial as trial, json, sys\n"
        "from llguidance import LLTokenizer\n"
        "trial.MAX_COMPILE_S, trial.MAX_COMPILE_BYTES = 1, int(sys.argv[1])\n"
        "print(trial.try_out(sys.stdin.read(), LLTokenizer('byte')))"
    )
    for num_bytes, words in ((2**24, "16 MiB of memory"), (2**40, "1 s of work")):
        run = subprocess.run(
            [sys.executable, "-c", program, str(num_bytes)], input=ENDLESS, capture_output=True, text=True, check=True
        )
        assert words in run.stdout


def test_a_process_that_was_killed_is_noticed(trial: GrammarTrial) -> None:
    os.kill(trial.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"gone|Broken pipe"):
        trial.failure(HARMLESS)
