"""Ranks that die in the middle of an iteration, and what must not outlive them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed

from swiftapex import SamplingParams
from swiftapex.core.errors import EngineError
from swiftapex.core.request import FinishReason
from swiftapex.executor.ranks import wait_for_end
from swiftapex.executor.ray_ranks import RayRanks
from swiftapex.worker.worker import Worker
from tests.hybrid import Pools, model_path, small_engine

MOMENTS = ("prefill", "decode", "swap")
_GPU_NOISE_MIB = 64  # a process's CUDA context alone holds several hundred


def die_in(worker: Worker, moment: str, victim: int, sign: int = signal.SIGKILL) -> None:
    """On a rank: if it is `victim`, it gets `sign` in the middle of a pass that prefills, of one
    that only decodes, or with copies between the sides in flight."""
    if torch.distributed.get_rank() != victim:
        return
    if moment == "swap":
        worker._copies = DyingCopies(worker._copies, sign)  # type: ignore[assignment]
        return
    # Not the stages: hiding theirs would keep this rank alone from replaying them as graphs, which
    # sum padded rows, and the ranks' sums would no longer match.
    execute, submit, prefills = worker.execute, worker._attention.submit, False

    def noting(plan: Any) -> Any:
        nonlocal prefills
        prefills = any(not row.is_decode for b in plan.sub_batches for row in b.rows)
        return execute(plan)

    def dying(layer: int, *args: Any) -> Any:
        if layer == 3 and prefills == (moment == "prefill"):
            os.kill(os.getpid(), sign)
        return submit(layer, *args)

    worker.execute = noting  # type: ignore[method-assign]
    worker._attention.submit = dying  # type: ignore[method-assign, assignment]


class DyingCopies:
    """Its process gets `sign` after some copies of a move or of a staged prefill."""

    def __init__(self, copies: Any, sign: int) -> None:
        self._copies = copies
        self._sign = sign
        self._submitted = 0

    def submit(self, *args: Any) -> Any:
        ticket = self._copies.submit(*args)
        self._submitted += 1
        if self._submitted == 3:
            os.kill(os.getpid(), self._sign)
        return ticket


def lose_a_rank(
    policy: str,
    args: dict[str, Any],
    moment: str,
    victim: int,
    size: int = 2,
    sign: int = signal.SIGKILL,
    answer_s: float = 60.0,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[str, float]:
    """Runs requests until the rank dies. Every open one must end with the reason, within 10 s;
    afterwards nothing may be left. Returns the reason and the seconds from death to the end."""
    model_path("mha")  # saving it starts a thread
    before, gpus = traces(None), gpu_memory(device)
    ranks = RayRanks(size, device, answer_s=answer_s)
    pids = list(ranks.pids)
    pools = Pools(gpu=7, cpu=24, block_size=16, rows=8, chunk=24)
    engine = small_engine("mha", pools, policy, args, None, device=device, ranks=ranks)
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [
        engine.add([rng.randrange(3, 120) for _ in range(rng.randint(10, 24))], sampling)
        for _ in range(6)
    ]
    try:
        ranks.call("tests.rank_death:die_in", moment, victim, int(sign))
        begin = time.monotonic()
        try:
            while engine.has_work:
                begin = time.monotonic()
                engine.step()
            raise AssertionError(f"no {moment} under {policy}: the rank lives")
        except EngineError as error:
            reason, seconds = str(error), time.monotonic() - begin
        lost = [r for r in requests if r.finish_reason is not FinishReason.LENGTH]
        assert lost and not engine.has_work
        for request in lost:
            assert request.finish_reason is FinishReason.ERROR
            assert request.error is not None and f"rank {victim}" in request.error
    finally:
        engine.close()
        ranks.close()
    assert not wait_for_end(pids, 5), "processes are left"
    left = traces(ranks.address) - before
    assert not left, left
    freed_at = time.monotonic() + 5
    while any(
        now > then + _GPU_NOISE_MIB for now, then in zip(gpu_memory(device), gpus, strict=True)
    ):
        assert time.monotonic() < freed_at, f"MiB on the GPUs: {gpus}, then {gpu_memory(device)}"
        time.sleep(0.1)
    return reason, seconds


def gpu_memory(device: str) -> list[int]:
    """MiB that all processes together hold on each GPU; nothing where `device` is not cuda."""
    if device != "cuda":
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30)
    return [int(line) for line in done.stdout.split()]


def traces(address: str | None) -> set[str]:
    """What there is that was made for ranks: this process's threads, shared memory and files, and
    all connections to the socket `address`."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split(None, 5)[-1] for line in maps if "swiftapex-" in line}
    if address is not None:
        name = address.replace("\0", "@")
        sockets = Path("/proc/net/unix").read_text().splitlines()
        found |= {line for line in sockets if line.endswith(name)}
    found |= {f"/dev/shm/{p.name}" for p in Path("/dev/shm").iterdir() if "swiftapex" in p.name}
    return found | {f"thread {thread.name}" for thread in threading.enumerate()}
