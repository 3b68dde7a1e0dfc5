"""The stand-in over HTTP: `python -m tests.bench.peers.stand_in_server PORT MODEL ...`."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.bench.peers.stand_in import StandIn


class Handler(BaseHTTPRequestHandler):
    """The part of OpenAI's API that the benchmark asks."""

    protocol_version = "HTTP/1.1"
    models: tuple[str, ...] = ()

    def do_GET(self) -> None:
        """The list of models."""
        self._answer(200, {"object": "list", "data": [{"id": name} for name in self.models]})

    def do_POST(self) -> None:
        """A completion of token ids."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] not in self.models:
            self._answer(404, {"error": {"message": f"no model {body['model']!r}"}})
            return
        name = None if body["model"] == self.models[0] else body["model"]
        tokens = StandIn({}).generate([body["prompt"]], [name], body["max_tokens"])[0][0]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        self._answer(200, {"choices": [{"text": str(tokens)}], "usage": usage})

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is logged."""

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as the benchmark opens."""

    request_queue_size = 128


if __name__ == "__main__":
    Handler.models = tuple(sys.argv[2:])
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
