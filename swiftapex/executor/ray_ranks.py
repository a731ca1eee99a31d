"""The ranks as Ray actors on this machine. Nothing else in the engine knows Ray.

Ray places the processes, gives each its GPU, and says why one could not start or has died. What
the driver asks of them goes through Unix sockets beside Ray: a plan crosses without Ray's work for
a call, and a rank's death is seen at once, when its connection ends. Sockets are in the abstract
namespace and the memory for decisions is anonymous: neither has a name in a file system that could
outlive the processes.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from swiftapex.core.errors import ConfigError, EngineError
from swiftapex.executor.rank import Rank, decision_bytes
from swiftapex.executor.ranks import Ranks, wait_for_end
from swiftapex.executor.ray_session import RaySession

_log = logging.getLogger(__name__)

_NODE_SHARE = 0.001  # of the resource that only this machine has: keeps all ranks here
_END_S = 3.0  # in which a process ends that was asked to


class RankActor:
    """A Ray actor: one rank, for as long as the driver is connected."""

    def serve(self, address: str, rank: int, size: int, device: str, path: list[str]) -> None:
        """path: the driver's `sys.path`, so that its pipelines are found here too."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(address)
        client.sendall(struct.pack("i", rank))
        Rank(Connection(client.detach()), rank, size, device).serve()


class RayRanks(Ranks):
    """`size` ranks, started together and joined into a group of torch.distributed.

    On the Ray of this process (`RaySession`). ConfigError where Ray is not installed or has not got
    what is needed; EngineError where a rank does not start within `timeout_s`. `answer_s`: how long
    a rank may take to answer, and to take part in an operation.
    """

    def __init__(
        self, size: int, device: str, *, timeout_s: float = 120.0, answer_s: float = 600.0
    ) -> None:
        super().__init__(size, answer_s)
        self.address = f"\0swiftapex-{secrets.token_hex(16)}"  # of the socket of all connections
        self._actors: list[Any] = []
        self._served: list[Any] = []  # references to what `serve` of each actor returns: nothing
        self._group: Any = None
        self._session: RaySession | None = RaySession(size)
        self._ray = self._session.ray
        try:
            self._launch(device, time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all ranks, by force where they do not answer, and Ray if it was started here. May be
        called again."""
        if self._broken is None:
            with suppress(EngineError):
                self.send(range(len(self._connections)), "end")
                if self._connections and self._has_ray:
                    served = self._served
                    self._ray.wait(served, num_returns=len(served), timeout=_END_S)
        self._broken = self._broken or "the ranks are closed"
        self._kill()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._group is not None and self._has_ray:
            with suppress(Exception):  # Ray may end just now
                self._ray.util.remove_placement_group(self._group)
        self._group = None
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def _has_ray(self) -> bool:
        return self._session is not None and self._session.is_open

    def _launch(self, device: str, deadline: float) -> None:
        ray, size = self._ray, self.size
        needed = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        self._place(needed, deadline)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(size)
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            for rank in range(size):
                actor = ray.remote(RankActor).options(
                    num_cpus=needed["CPU"],
                    num_gpus=needed.get("GPU", 0),
                    scheduling_strategy=strategy(self._group, rank),
                )
                self._actors.append(actor.remote())
                served = self._actors[rank].serve.remote(self.address, rank, size, device, sys.path)
                self._served.append(served)
            self._accept(listener, deadline)
        self._share_memory()
        self.send([0], "open_store")
        port = self.receive(0)
        self.send(range(size), "join", port, self._answer_s)
        self.receive_all(range(size))

    def _place(self, needed: dict[str, float], deadline: float) -> None:
        """Reserves what the ranks need, all on this machine."""
        ray, size = self._ray, self.size
        node = f"node:{ray.util.get_node_ip_address()}"
        bundle = needed | {node: _NODE_SHARE}
        here = ray.get_runtime_context().get_node_id()
        (total,) = (n["Resources"] for n in ray.nodes() if n["NodeID"] == here and n["Alive"])
        missing = [
            f"{size * count:g} {kind}s, of which Ray has {total.get(kind, 0):g} on this machine"
            for kind, count in needed.items()
            if total.get(kind, 0) < size * count
        ]
        if missing:
            raise ConfigError(
                f"engine.tensor_parallel_size: {size} ranks need {' and '.join(missing)}"
            )
        self._group = ray.util.placement_group([bundle] * size, strategy="STRICT_PACK")
        if not self._group.wait(max(1.0, deadline - time.monotonic())):
            free = ray.available_resources()
            have = ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in needed)
            raise EngineError(
                f"engine.tensor_parallel_size: Ray did not give {size} ranks their place in time: "
                f"each needs {', '.join(f'{n:g} {kind}' for kind, n in needed.items())} on this "
                f"machine, and {have} are free in all"
            )

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        """Takes in the connection of every rank."""
        connected: dict[int, tuple[Connection, int]] = {}
        listener.settimeout(0.2)
        while len(connected) < self.size:
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(self.size) if rank not in connected]
                ended, _ = self._ray.wait([self._served[r] for r in missing], timeout=0)
                for served in ended:
                    rank = self._served.index(served)
                    raise EngineError(
                        f"rank {rank} cannot start: {self._last_words(rank)}"
                    ) from None
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"ranks {missing} of {self.size} did not start in time"
                    ) from None
                continue
            pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, _PEER, 12))
            if uid != os.getuid():
                peer.close()
                continue
            (rank,) = struct.unpack("i", peer.recv(4, socket.MSG_WAITALL))
            connected[rank] = (Connection(peer.detach()), pid)
        self._connections = [connected[rank][0] for rank in range(self.size)]
        self.pids = [connected[rank][1] for rank in range(self.size)]

    def _share_memory(self) -> None:
        """Gives all ranks the memory through which they agree on readiness."""
        memory = os.memfd_create("swiftapex-decisions")
        try:
            os.ftruncate(memory, decision_bytes(self.size))
            for connection, pid in zip(self._connections, self.pids, strict=True):
                reduction.send_handle(connection, memory, pid)
        finally:
            os.close(memory)

    def _last_words(self, rank: int) -> str:
        """What Ray knows of the end of a rank's process, in one line."""
        if not self._has_ray:
            return "this process is no longer connected to the Ray that it was started by"
        try:
            self._ray.get(self._served[rank], timeout=_END_S)
        except Exception as error:
            cause = getattr(error, "cause", None)
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
            text = " ".join(text.split())
            detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)
            return (detail[1] if detail else text)[:400]
        return "it was told to"

    def _kill(self) -> None:
        for actor in self._actors if self._has_ray else ():
            with suppress(Exception):  # Ray may end just now
                self._ray.kill(actor)
        self._actors.clear()
        for pid in wait_for_end(
            self.pids, _END_S
        ):  # stopped, say: Ray asks a process to end itself
            _log.warning("rank's process %d does not end: killed", pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


_PEER = getattr(socket, "SO_PEERCRED", 17)
