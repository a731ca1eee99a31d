"""The driver's side of its connections to the ranks: requests, answers, and what went wrong."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from swiftapex.core import errors
from swiftapex.core.errors import EngineError
from swiftapex.executor.rank import Failure

_GRACE_S = 1.0  # in which other ranks may say what went wrong, after one failed


class Ranks:
    """`size` ranks. Who starts them fills in `_connections` and `pids`, and says how they end.
    `answer_s`: how long a rank may take to answer."""

    def __init__(self, size: int, answer_s: float) -> None:
        self.size = size
        self.pids: list[int] = []  # of the ranks
        self.bytes_sent = self.bytes_received = 0
        self._answer_s = answer_s
        self._connections: list[Connection] = []
        self._broken: str | None = None  # why nothing can be asked for any more

    def send(self, ranks: Iterable[int], name: str, *args: Any) -> None:
        """Asks some ranks for one thing. EngineError where one is gone."""
        if self._broken is not None:
            raise EngineError(self._broken)
        request = pickle.dumps((name, args), protocol=pickle.HIGHEST_PROTOCOL)
        for rank in ranks:
            self.bytes_sent += len(request)
            try:
                self._connections[rank].send_bytes(request)
            except OSError:
                self._break(self._gather({rank: self._death(rank)}))

    def receive(self, rank: int) -> Any:
        """The answer of one rank. EngineError, and the end of all ranks, where any has failed."""
        return self.receive_all([rank])[0]

    def receive_all(self, ranks: Sequence[int]) -> list[Any]:
        """The answers of some ranks, in their order."""
        answers = self._answers(ranks)
        failures: dict[int, Failure | str]
        failures = {rank: a for rank, a in answers.items() if isinstance(a, Failure)}
        if failures:
            self._break(self._gather(failures))
        return [answers[rank] for rank in ranks]

    def ask(self, name: str, *args: Any) -> list[Any]:
        """The answers of all ranks to one request. As `receive_all`, but ranks that live go on:
        what failed is raised, in the class of errors it has, and may be asked for again. What a
        rank failed in before, where nobody awaited its answer, ends all of them."""
        everyone = range(self.size)
        self.send(everyone, name, *args)
        answers = self._answers(everyone, until_first_failure=False)
        failures = {r: a for r, a in sorted(answers.items()) if isinstance(a, Failure)}
        earlier: dict[int, Failure | str]
        earlier = {rank: a for rank, a in failures.items() if a.request != name}
        if earlier:
            self._break(self._gather(earlier))
        for rank, failure in failures.items():
            raise _as_error(rank, failure)
        return [answers[rank] for rank in everyone]

    def call(self, function: str, *args: Any) -> list[Any]:
        """What `package.module:function` returns on each rank, given its worker and `args`."""
        return self.ask("call", function, *args)

    def _last_words(self, rank: int) -> str:
        """Why a rank's process has ended, in one line."""
        raise NotImplementedError

    def _kill(self) -> None:
        """Ends all processes, by force where they do not end."""
        raise NotImplementedError

    def _answers(self, ranks: Iterable[int], until_first_failure: bool = True) -> dict[int, Any]:
        """What ranks answer, by rank; a Failure of any rank counts as an answer. A rank that has
        died, or is silent for too long, ends all of them."""
        answers: dict[int, Any] = {}
        awaited = set(ranks)
        deadline = time.monotonic() + self._answer_s
        while awaited - answers.keys():
            ready = wait(self._connections, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = sorted(awaited - answers.keys())
                self._break({r: f"no answer for {self._answer_s:g} s" for r in silent})
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                answer = self._read(rank)
                if isinstance(answer, str):
                    self._break(self._gather({rank: answer}))
                answers[rank] = answer
                if until_first_failure and isinstance(answer, Failure):
                    return answers
        return answers

    def _read(self, rank: int) -> Any:
        """One answer, or why there will be none, as text."""
        try:
            data = self._connections[rank].recv_bytes()
        except (EOFError, OSError):
            return self._death(rank)
        self.bytes_received += len(data)
        return pickle.loads(data)

    def _gather(self, failures: dict[int, Failure | str]) -> dict[int, Failure | str]:
        """After the first failure, what others have to say within a moment: what is seen first is
        often only that another rank is gone."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and all(_is_echo(why) for why in failures.values()):
            rest = [c for r, c in enumerate(self._connections) if r not in failures]
            for connection in wait(rest, timeout=max(0.0, deadline - time.monotonic())):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                answer = self._read(rank)
                if isinstance(answer, Failure | str):
                    failures[rank] = answer
            if not rest:
                break
        return failures

    def _break(self, failures: dict[int, Failure | str]) -> None:
        """Ends all ranks: they cannot go on without one another."""
        causes = {r: why for r, why in failures.items() if not _is_echo(why)} or failures
        rank, why = min(causes.items(), key=lambda item: item[0])
        text = why if isinstance(why, str) else f"{why.kind}: {why.message} ({why.where})"
        self._broken = f"rank {rank} of {self.size} failed: {text}"
        self._kill()
        raise EngineError(self._broken)

    def _death(self, rank: int) -> str:
        return f"its process {self.pids[rank]} ended: {self._last_words(rank)}"


def wait_for_end(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Those of the processes that still live after `timeout_s`; returns as soon as none does."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in pids if _lives(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _is_echo(why: Failure | str) -> bool:
    return isinstance(why, Failure) and why.is_echo


def _as_error(rank: int, failure: Failure) -> Exception:
    """A failure as an exception of the class it had on its rank, if it is one of swiftapex's."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.SwiftapexError):
        return kind(f"rank {rank}: {failure.message}")
    return EngineError(f"rank {rank}: {failure.kind}: {failure.message} ({failure.where})")
