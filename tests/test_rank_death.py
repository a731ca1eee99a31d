"""A rank that dies takes its engine's requests with it, at once and with the reason, and nothing
else stays. `scripts/kill_ranks.py` does this twenty times for every pipeline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from swiftapex import SamplingParams
from swiftapex.core.errors import EngineError
from swiftapex.core.plan import StepPlan, StepResult
from swiftapex.core.request import FinishReason
from swiftapex.worker.worker import Worker

ray = pytest.importorskip("ray")
from swiftapex.executor.ray_ranks import RayRanks  # noqa: E402
from tests.hybrid import Pools, small_engine, strategy  # noqa: E402
from tests.rank_death import lose_a_rank  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """For all tests here: ranks are started anew in each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=80 << 20,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("name", "moment", "victim"),
    [("asymmetric", "prefill", 1), ("async_overlap", "decode", 0), ("sequential", "swap", 1)],
)
def test_kill_9(one_ray: None, name: str, moment: str, victim: int) -> None:
    policy, args = strategy(name, 0)
    reason, seconds = lose_a_rank(policy, args, moment, victim)
    assert f"rank {victim} of 2 failed: its process" in reason
    assert seconds < 10


def test_a_rank_that_hangs_is_given_up(one_ray: None) -> None:
    policy, args = strategy("symmetric", 0)
    reason, seconds = lose_a_rank(policy, args, "decode", 0, sign=signal.SIGSTOP, answer_s=3.0)
    assert "rank 0 of 2 failed: no answer for 3 s" in reason
    assert seconds < 10


def fail_after(worker: Worker, victim: int) -> None:
    """On a rank: if it is `victim`, it fails once its part in an iteration's sums is done."""
    execute = worker.execute

    def failing(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if dist.get_rank() == victim:
            raise MemoryError("no memory for what was left to do")
        return result

    worker.execute = failing  # type: ignore[method-assign]


def test_a_failure_that_nobody_awaits_is_not_taken_for_that_of_another_request(
    one_ray: None,
) -> None:
    ranks = RayRanks(2, "cpu")
    engine = small_engine("mha", Pools(7, 24, 16, 8, 24), "gpu_only", {}, None, ranks=ranks)
    try:
        ranks.call("tests.test_rank_death:fail_after", 1)
        request = engine.add([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        with pytest.raises(EngineError, match="rank 1 of 2 failed: MemoryError: no memory for"):
            engine.step()  # rank 0 answers for both, unless the failure is there before
            while engine.has_work:  # the failure is on its way
                engine.busy()
                engine.step()
        assert request.finish_reason is FinishReason.ERROR
    finally:
        engine.close()
        ranks.close()


def run_script(code: str, path: Path) -> None:
    """In a process of its own: what it starts must not be there already."""
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


ENGINES = """
import os
import psutil
import ray
from swiftapex import LLM, SamplingParams
from swiftapex.core.errors import EngineError

MODEL = {"architecture": "tiny", "weights": "dummy", "dtype": "float32"}

def engine(**more):
    return LLM(MODEL, gpu={"kv_tokens": 256}, cpu={"kv_tokens": 256}, policy="apex", **more)

def tokens(llm):
    outputs = llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, ignore_eos=True))
    return [out.token_ids for out in outputs]

def assert_nothing_is_left(children):
    assert len(children) > 2
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert not psutil.Process().children(recursive=True)
    assert psutil.Process().net_connections() == []
    assert not ray.is_initialized()
"""


def test_engines_of_ranks_leave_no_process(tmp_path: Path) -> None:
    """The first one starts Ray, the last one ends it, in whatever order they are closed."""
    code = (
        ENGINES
        + """
if __name__ == "__main__":
    os.cpu_count = lambda: 4  # Ray's, so that both have their place
    llm = engine()
    expected = tokens(llm)
    llm.close()
    first, second = (engine(tensor_parallel_size=2) for _ in range(2))
    assert tokens(first) == tokens(second) == expected
    children = psutil.Process().children(recursive=True)
    first.close()
    first.close()
    assert tokens(second) == expected
    second.close()
    assert_nothing_is_left(children)
"""
    )
    run_script(code, tmp_path / "script.py")


def test_a_ray_that_was_shut_down_takes_its_engines_along(tmp_path: Path) -> None:
    """Asking Ray anything then would start another one."""
    code = (
        ENGINES
        + """
if __name__ == "__main__":
    llm = engine(tensor_parallel_size=2)
    children = psutil.Process().children(recursive=True)
    ray.shutdown()
    try:
        tokens(llm)
        raise AssertionError("ranks without Ray")
    except EngineError as error:
        assert "no longer connected to the Ray" in str(error), error
    llm.close()
    assert_nothing_is_left(children)
"""
    )
    run_script(code, tmp_path / "script.py")


def test_ctrl_c_while_ray_starts_leaves_no_process(tmp_path: Path) -> None:
    """Ray forgets what it had started so far."""
    code = (
        ENGINES
        + """
import signal
from ray._private.node import Node

start = Node.start_ray_processes

def interrupted(node):
    start(node)
    Node.start_ray_processes = start
    assert psutil.Process().children()
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    Node.start_ray_processes = interrupted
    try:
        engine(tensor_parallel_size=2)
        raise AssertionError("it was not interrupted")
    except KeyboardInterrupt:
        assert not psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)[1]
        assert not ray.is_initialized()
    llm = engine(tensor_parallel_size=2)
    assert len(tokens(llm)) == 2
    llm.close()
"""
    )
    run_script(code, tmp_path / "script.py")
