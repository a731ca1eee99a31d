"""A client of the OpenAI completions API, as vLLM and others serve it: prompts as token ids,
answers as a stream whose chunks are timed."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from swiftapex.config.schema import PeerConfig
from swiftapex.core.errors import EngineError
from swiftapex.peers.answer import Answer, PeerRequest, checked, failed

_MALFORMED = (ValueError, TypeError, AttributeError)  # of an event that is not as the API has it
_SHOWN = 300  # characters of an error that a server answers


class OpenAIServer:
    """One server. Methods may be called from any thread."""

    def __init__(self, peer: PeerConfig) -> None:
        assert peer.url is not None
        self._peer = peer
        self._url = urlsplit(peer.url)
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    def model(self) -> str:
        """The model's name there. EngineError where the server does not answer."""
        if self._peer.model is not None:
            return self._peer.model
        with self._connection() as connection:
            connection.request("GET", f"{self._url.path.rstrip('/')}/models")
            response = connection.getresponse()
            body = response.read()
        if response.status != 200:
            raise EngineError(f"{self._peer.url}/models: HTTP {response.status}")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (LookupError, *_MALFORMED) as error:
            text = body.decode("utf-8", "replace")[:_SHOWN]
            raise EngineError(f"{self._peer.url}/models names no model: {text}") from error

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with self._connection(timeout_s=2.0) as connection:
                connection.request("GET", f"{self._url.path.rstrip('/')}/models")
                return connection.getresponse().status == 200
        except (OSError, EngineError, HTTPException):
            return False

    def complete(self, request: PeerRequest, model: str, start_s: float) -> Answer:
        """Sends a request and reads its answer to the end. `start_s`: time.perf_counter at the
        first arrival. What goes wrong is in the answer."""
        body = {
            "model": model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._peer.extra,
        }
        answer = _Growing(start_s)
        try:
            with self._connection() as connection:
                headers = {"Content-Type": "application/json"}
                path = f"{self._url.path.rstrip('/')}/completions"
                connection.request("POST", path, json.dumps(body), headers)
                response = connection.getresponse()
                if response.status != 200:
                    text = response.read().decode("utf-8", "replace")[:_SHOWN]
                    return failed(f"HTTP {response.status}: {text}")
                for event in _events(response):
                    answer.add(event)
                    if self._closed:
                        return answer.so_far()
            return answer.whole(request)
        except (OSError, EngineError, HTTPException, *_MALFORMED) as error:
            if self._closed:
                return answer.so_far()
            return failed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends all calls: what has come is their answer, unfinished."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _connection(self, timeout_s: float | None = None) -> Iterator[http.client.HTTPConnection]:
        https = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=timeout_s or self._peer.timeout_s)
        with self._lock:
            if self._closed:
                raise EngineError("the run has ended")
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Server-sent events, up to [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise EngineError("the stream ended without [DONE]")


class _Growing:
    """An answer as its events come. `start_s`: the first arrival."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._chunks: list[tuple[float, int]] = []  # time, tokens as far as the server tells
        self._ids: list[int] = []
        self._text = ""
        self._reason = "unfinished"
        self._total: int | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """EngineError where the server reports one."""
        if event.get("error"):
            raise EngineError(str(event["error"])[:_SHOWN])
        self._total = (event.get("usage") or {}).get("completion_tokens", self._total)
        for choice in event.get("choices") or ():
            new = choice.get("token_ids") or ()
            self._ids += new
            self._text += choice.get("text") or ""
            if new or choice.get("text") or not choice.get("finish_reason"):
                self._chunks.append((time.perf_counter() - self._start_s, len(new) or 1))
            self._reason = choice.get("finish_reason") or self._reason

    def whole(self, request: PeerRequest) -> Answer:
        times = self._times()
        if self._total is not None:
            if not 0 <= self._total <= request.max_tokens:
                raise EngineError(
                    f"usage.completion_tokens: {self._total}, {request.max_tokens} were asked for"
                )
            times = _spread(times, self._total)
        known = self._ids if len(self._ids) == len(times) else ()
        return checked(request, self._reason, times, known, self._text)

    def so_far(self) -> Answer:
        return Answer("unfinished", tuple(self._times()), (), self._text)

    def _times(self) -> list[float]:
        return [time_s for time_s, count in self._chunks for _ in range(count)]


def _spread(times: list[float], total: int) -> list[float]:
    """A time for each of `total` tokens that came in chunks whose sizes are not known: evenly."""
    if not times and total:
        raise EngineError(f"{total} tokens were counted and none came")
    return [times[index * len(times) // total] for index in range(total)]
