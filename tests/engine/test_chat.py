"""`lora-fleet chat` against a real engine behind the real routes: questions, conversations, and how they end."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from deployments.cli import cli
from deployments.conversation import Conversation
from deployments.fleet_commands import Exit
from deployments.openai_client import client_options
from deployments.talk import UNSEEN
from tests.engine.byte_model import byte_model
from tests.engine.engine_server import engine_server

SHORT = ("--max-tokens", "4", "--temperature", "0")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine_server(byte_model(tmp_path_factory.mktemp("base"))) as address:
        yield address


def test_one_question_is_answered_and_ends(url: str) -> None:
    said = CliRunner().invoke(cli, ["chat", "first", "Hello", *SHORT, "--url", url])
    assert said.exit_code == Exit.DONE, said.output
    told = CliRunner().invoke(cli, ["chat", "first", "Hello", *SHORT, "--url", f"{url}/v1/", "--json"])
    reply = json.loads(told.stdout)
    assert (reply["model"], reply["finish_reason"]) == ("first", "length")
    assert reply["usage"]["prompt_tokens"] == len("<user>Hello<assistant>")
    assert said.stdout.removesuffix("\n") == reply["content"].removesuffix("\n")
    assert "the answer ends here for its length" in said.stderr


def test_a_pipe_holds_the_question(url: str) -> None:
    words = ["chat", "first", *SHORT, "--json", "--system", "Be brief", "--url", url]
    reply = json.loads(CliRunner().invoke(cli, words, input="Hello\nyou\n").stdout)
    assert reply["usage"]["prompt_tokens"] == len("<system>Be brief<user>Hello\nyou<assistant>")
    empty = CliRunner().invoke(cli, words, input="\n")
    assert empty.exit_code == 2
    assert "there is no question" in empty.stderr


def test_a_conversation_remembers_what_was_answered(url: str) -> None:
    with openai.OpenAI(**client_options(url, None)) as client:
        talk = Conversation(client, "first", max_tokens=4, temperature=0)
        lengths, answers = [], []
        for question in ("one", "two"):
            answer = "".join(talk.ask(question))
            assert talk.last is not None
            assert talk.last.content == answer
            assert talk.last.usage is not None
            lengths.append(talk.last.usage["prompt_tokens"])
            answers.append(answer)
        # A token is a byte, and what was no whole character has become one that takes several.
        assert lengths[1] == lengths[0] + len(f"{answers[0]}<user>two<assistant>".encode())
        assert talk.num_turns == 2
        with pytest.raises(openai.BadRequestError):
            list(talk.ask("x" * 300))
        assert talk.num_turns == 2, "a question that was refused is forgotten"
        broken = talk.ask("three")
        next(broken)
        broken.close()
        assert talk.num_turns == 3, "an answer that was stopped is remembered as far as it came"
        talk.clear()
        list(talk.ask("one"))
        reply = talk.last
        assert reply is not None
        assert (reply.usage or {})["prompt_tokens"] == lengths[0]


def test_what_goes_wrong_has_an_exit_code(url: str) -> None:
    nobody = CliRunner().invoke(cli, ["chat", "nobody", "Hello", "--url", url])
    assert nobody.exit_code == Exit.NOT_FOUND
    assert "error: no adapter named 'nobody'" in nobody.stderr
    too_long = CliRunner().invoke(cli, ["chat", "first", "x" * 300, "--url", url])
    assert too_long.exit_code == Exit.REFUSED
    away = CliRunner().invoke(cli, ["chat", "first", "Hello", "--url", "http://127.0.0.1:1"])
    assert away.exit_code == Exit.UNREACHABLE
    assert "http://127.0.0.1:1 does not answer" in away.stderr


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert "a\x1b[2Jb\r\x9bc\td\n".translate(UNSEEN) == "a[2Jbc\td\n"


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._end, other = pty.openpty()
        command = [str(Path(sys.executable).with_name("lora-fleet")), *words]
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.text = ""

    def type(self, line: str) -> None:
        os.write(self._end, line.encode() + b"\n")

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Read until something new is there; it is taken out."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._end, 4096).decode(errors="replace")
                except OSError:
                    # The program has ended.
                    assert text in self.text, f"no {text!r} in {self.text!r}"
        self.text = self.text.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def test_a_conversation_on_a_terminal(url: str) -> None:
    terminal = Terminal("chat", "first", *SHORT, "--url", url)
    try:
        terminal.wait_for(f"first at {url}; /exit ends")
        terminal.wait_for("> ")
        terminal.type("x" * 300)
        terminal.wait_for("error: ")
        terminal.wait_for("> ")
        terminal.type("Hello")
        terminal.wait_for("the answer ends here for its length")
        terminal.wait_for("> ")
        terminal.type("/help")
        terminal.wait_for("/clear begins anew")
        terminal.type("/clear")
        terminal.wait_for("begun anew")
        terminal.type("/exit")
        assert terminal.process.wait(30) == Exit.DONE
    finally:
        terminal.close()


def test_a_conversation_with_nobody_ends_before_the_first_question(url: str) -> None:
    terminal = Terminal("chat", "nobody", "--url", url)
    try:
        terminal.wait_for("the server has no model 'nobody'; it has base, first, second, third")
        assert terminal.process.wait(30) == Exit.NOT_FOUND
    finally:
        terminal.close()
