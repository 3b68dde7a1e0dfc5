"""Grammars are tried out in a process of their own first: some take hours or all memory to compile.

`python -m lora_core.engine.grammar_trial` reads grammars from its standard input, one JSON text a line, and answers
each with a line: nothing, or why it must not be compiled elsewhere. It ends with its input.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILE_S = 3
"""Processor time that a compilation may take."""

MAX_COMPILE_BYTES = 128 * 2**20
"""Memory that a compilation may take, what it leaves behind included."""


class GrammarTrial:
    """The other process, as whoever sends it grammars sees it; for one thread. It ends with this object."""

    def __init__(self) -> None:
        # The package need not be installed, and what is expected leaves no trace.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lora_core.engine.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "RUST_BACKTRACE": "0"},
            text=True,
        )
        self.pid = self._process.pid
        self.close = weakref.finalize(self, _end, self._process)

    def failure(self, grammar: str) -> str | None:
        """What a compilation of the grammar would go beyond, or None; a grammar that is merely wrong goes beyond
        nothing. Raises OSError when the process is gone."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None, "a pipe"
        assert stdout is not None, "a pipe"
        print(json.dumps(grammar), file=stdin, flush=True)
        answer = stdout.readline()
        if not answer:
            raise OSError("the process that tries grammars out is gone")
        return answer.strip() or None


def parser_limits() -> LLParserLimits:
    """llguidance's bounds of a compilation and of one token: its defaults, but half of the work or less for a token."""
    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, max_items_in_row=1000, verbose_errors=False)


def try_out(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """Compile a grammar in a child of this process, which has one thread; why that did not come to an end, or None."""
    child = os.fork()
    if not child:
        _compile(grammar, tokenizer)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return None
    if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes more than {MAX_COMPILE_S} s of work"
    return f"takes more than {MAX_COMPILE_BYTES >> 20} MiB of memory"


def _compile(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compile, within limits that end this process, or end it."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_COMPILE_S, MAX_COMPILE_S))
        if (sizes := Path("/proc/self/statm")).exists():
            most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MAX_COMPILE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    finally:
        # Whatever else is wrong with it shows again where it is compiled to be used.
        os._exit(0)


def _end(process: "subprocess.Popen[str]") -> None:
    # Of what could not be written any more.
    with contextlib.suppress(BrokenPipeError), process:
        process.kill()


def main() -> None:
    """Answer until there is no more input."""
    # A terminal's interrupt is meant for the parent, with which this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Which tokens there are is of no matter to a compilation.
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        print(try_out(json.loads(line), tokenizer) or "", flush=True)


if __name__ == "__main__":
    main()
