"""Other engines as commands: one that starts a server, or one that serves a workload by itself.

The latter gets `{requests}` and `{results}` in its words replaced by paths of JSONL files. A line
of requests: `{"index", "arrival_s", "prompt": ids, "max_tokens", "temperature", "top_p", "seed",
"length_forced"}`. Of results, one per request: `{"index", "token_times_s": [seconds from the first
arrival], "output_ids": ids?, "text": str?, "finish_reason": "length" or "stop"?, "error": str?}`;
what is marked with ? may be left out or null. Times ascend and do not precede the arrival, ids are
as many as times. A line that is wrong is that request's error, and the others count.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swiftapex.config.explain import shorten
from swiftapex.core.errors import EngineError
from swiftapex.peers.answer import Answer, PeerRequest, checked, failed

_ENDING_S = 30.0  # until a server that was told to end is killed
_ASKING_S = 0.2
_SHOWN_BYTES = 2000  # of a failed command's output


def serve_by_command(
    command: Sequence[str], requests: Sequence[PeerRequest], timeout_s: float
) -> list[Answer]:
    """Runs a command to its end; one answer per request. EngineError where it fails, or has not
    ended `timeout_s` after the last arrival."""
    with tempfile.TemporaryDirectory(prefix="swiftapex-peer-") as name:
        sent, results = Path(name, "requests.jsonl"), Path(name, "results.jsonl")
        lines = []
        for request in requests:
            fields = asdict(request)
            fields["prompt"] = fields.pop("prompt_ids")
            lines.append(json.dumps(fields))
        sent.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths = {"{requests}": str(sent), "{results}": str(results)}
        words = [_replaced(word, paths) for word in command]
        last_s = max((request.arrival_s for request in requests), default=0.0)
        with Path(name, "log").open("w+b") as log:
            code = _run(words, log, last_s + timeout_s)
            if code is None:
                raise EngineError(
                    f"{words[0]} had not ended {timeout_s:g} s (peer.timeout_s) after the last "
                    f"arrival: {_tail(log)}"
                )
            if code != 0 or not results.exists():
                raise EngineError(f"{words[0]} ended with {code}: {_tail(log)}")
        return _answers(results, requests)


def _run(words: Sequence[str], log: IO[bytes], limit_s: float) -> int | None:
    """A command's exit code; None where it took too long. It and what it started are ended then,
    as on Ctrl-C."""
    process = _started(words, log)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _started(words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a session of its own, so that it can be ended with all that it starts."""
    try:
        return subprocess.Popen(
            list(words), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise EngineError(f"peer.command: {words[0]} cannot be started: {error}") from error


@contextlib.contextmanager
def server(command: Sequence[str], is_ready: Callable[[], bool], start_s: float) -> Iterator[None]:
    """Runs a server around the block. EngineError where it is not ready within `start_s`."""
    with tempfile.TemporaryFile() as log:
        process = _started(command, log)
        try:
            end = time.perf_counter() + start_s
            while not is_ready():
                if process.poll() is not None or time.perf_counter() > end:
                    state = f"ended with {process.returncode}"
                    state = "did not answer" if process.returncode is None else state
                    raise EngineError(f"{command[0]} {state}: {_tail(log)}")
                time.sleep(_ASKING_S)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(results: Path, requests: Sequence[PeerRequest]) -> list[Answer]:
    found: dict[int, list[dict[str, Any]]] = {request.index: [] for request in requests}
    strange = ""  # the first line that is no request's
    text = results.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        index = fields.get("index") if isinstance(fields, dict) else None
        if type(index) is int and index in found:
            found[index].append(fields)
        elif not strange:
            strange = f"; line {number} of its results is no request's: {shorten(line)}"
    return [_answer(request, found[request.index], strange) for request in requests]


def _answer(request: PeerRequest, found: Sequence[dict[str, Any]], strange: str) -> Answer:
    if not found:
        return failed(f"the command gave no result for this request{strange}")
    if len(found) > 1:
        return failed(f"request {request.index}: index: {len(found)} results have it")
    fields = {key: value for key, value in found[0].items() if value is not None}
    if fields.get("error"):
        return failed(str(fields["error"]))
    return checked(
        request,
        fields.get("finish_reason", "length"),
        fields.get("token_times_s", ()),
        fields.get("output_ids", ()),
        fields.get("text", ""),
    )


def _replaced(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, 2)
    log.seek(max(0, size - _SHOWN_BYTES))
    return log.read().decode("utf-8", "replace").strip() or "no output"
