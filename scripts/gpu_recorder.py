"""The activities of a GPU, as CUPTI tells them to torch.profiler."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from gpu_timeline import Activity
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def start_cupti() -> None:
    """Call before graphs are recorded: CUPTI that comes or goes later does not see into them, or
    crashes. torch/profiler/profiler.py sets the same two where it knows of graphs."""
    os.environ["DISABLE_CUPTI_LAZY_REINIT"], os.environ["TEARDOWN_CUPTI"] = "1", "0"
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")


def recorded(work: Callable[[], Result]) -> tuple[list[Activity], Result]:
    """What the GPU did and the host called during `work`, and its result. SystemExit where CUPTI
    does not tell."""
    session: Any = profile(activities=[ProfilerActivity.CUDA])
    with session:
        result = work()
    found = [activity(event) for event in session.profiler.kineto_results.events()]
    if not any(each.kind == "kernel" for each in found):
        raise SystemExit("CUPTI recorded no kernel: this process may not profile the GPU here")
    return found, result


def activity(event: Any) -> Activity:
    """Of a torch._C._autograd._KinetoEvent."""
    name, start_ns = event.name(), event.start_ns()
    end_ns = start_ns + event.duration_ns()
    if event.device_type().name != "CUDA":
        return Activity("call", name, start_ns, end_ns)
    if not name.startswith(("Memcpy", "Memset")):
        return Activity("kernel", name, start_ns, end_ns)
    # Versions of torch that do not tell the bytes have no such function.
    about = event.metadata_json() if hasattr(event, "metadata_json") else ""
    num_bytes = re.search(r'"bytes": (\d+)', about)
    return Activity("copy", name, start_ns, end_ns, int(num_bytes[1]) if num_bytes else None)
