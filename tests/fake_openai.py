"""A small server of the OpenAI completions API, which generates nothing but numbers.

`python tests/fake_openai.py PORT` serves until it is ended. Token i of a request is its prompt's
sum plus i, modulo 90. `pace_s` between tokens.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI(ThreadingHTTPServer):
    """`per_chunk`: tokens in a chunk. `tells_ids`: as vLLM does where asked. `short_by`: tokens
    less than asked for. `refuses`: answers every completion with HTTP 400. `choice`: put over each
    chunk's; `usage`: the count of tokens that is told."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0, **behaviour: Any) -> None:
        defaults = {"pace_s": 0.0, "per_chunk": 1, "tells_ids": False, "short_by": 0}
        self.behaviour = defaults | {"refuses": False, "choice": {}, "usage": None} | behaviour
        self.received: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "fake-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append(body)
        b = self.server.behaviour
        if b["refuses"]:
            self._send(400, {"message": "no such model"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        count = body["max_tokens"] - b["short_by"]
        ids = [(sum(body["prompt"]) + i) % 90 for i in range(count)]
        with contextlib.suppress(OSError):
            for begin in range(0, count, b["per_chunk"]):
                time.sleep(b["pace_s"])
                chunk = ids[begin : begin + b["per_chunk"]]
                is_last = begin + b["per_chunk"] >= count
                choice = {"text": "".join(f" {i}" for i in chunk), "index": 0}
                choice |= {"finish_reason": "length" if is_last else None}
                choice |= {"token_ids": chunk} if b["tells_ids"] else {}
                self._event({"choices": [choice | b["choice"]]})
            usage = count if b["usage"] is None else b["usage"]
            self._event({"choices": [], "usage": {"completion_tokens": usage}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(**behaviour: Any) -> Iterator[FakeOpenAI]:
    server = FakeOpenAI(**behaviour)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    FakeOpenAI(int(sys.argv[1])).serve_forever()
