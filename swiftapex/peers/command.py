"""Other engines as commands: one that starts a server, or one that serves a workload by itself.

The latter gets `{requests}` and `{results}` in its words replaced by paths of JSONL files. A line
of requests: `{"index", "arrival_s", "prompt": ids, "max_tokens", "temperature", "top_p", "seed",
"length_forced"}`. Of results, one per request: `{"index", "token_times_s": [seconds from the first
arrival], "output_ids": ids?, "text": str?, "finish_reason": "length" or "stop"?, "error": str?}`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swiftapex.core.errors import EngineError
from swiftapex.peers.answer import Answer, PeerRequest, checked

_ENDING_S = 30.0  # until a server that was told to end is killed
_ASKING_S = 0.2
_SHOWN_BYTES = 2000  # of a failed command's output


def serve_by_command(command: Sequence[str], requests: Sequence[PeerRequest]) -> list[Answer]:
    """Runs a command to its end; one answer per request. EngineError where it fails."""
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
        with Path(name, "log").open("w+b") as log:
            done = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False)
            if done.returncode != 0 or not results.exists():
                raise EngineError(f"{words[0]} ended with {done.returncode}: {_tail(log)}")
        answers = _read(results)
    missing = Answer("error", error="the command gave no result for this request")
    return [checked(request, answers.get(request.index, missing)) for request in requests]


@contextlib.contextmanager
def server(command: Sequence[str], is_ready: Callable[[], bool], start_s: float) -> Iterator[None]:
    """Runs a server around the block. EngineError where it is not ready within `start_s`."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(list(command), stdout=log, stderr=subprocess.STDOUT)
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


def _read(results: Path) -> dict[int, Answer]:
    answers = {}
    try:
        for line in results.read_text(encoding="utf-8").splitlines():
            fields: dict[str, Any] = json.loads(line)
            error = fields.get("error")
            reason = "error" if error else fields.get("finish_reason") or "length"
            answers[int(fields["index"])] = Answer(
                reason,
                tuple(map(float, fields.get("token_times_s", ()))),
                tuple(map(int, fields.get("output_ids", ()))),
                fields.get("text", ""),
                error,
            )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"a line of the command's results is malformed: {error!r}") from error
    return answers


def _replaced(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _tail(log: IO[bytes]) -> str:
    size = log.seek(0, 2)
    log.seek(max(0, size - _SHOWN_BYTES))
    return log.read().decode("utf-8", "replace").strip() or "no output"
