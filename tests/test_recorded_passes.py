"""Passes with CPU decodes as one graph, without a GPU: tokens, what is recorded, and hand-offs of
replays that are launched one behind the other. On a GPU: tests/cuda/test_engine_cuda.py."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import swiftapex.worker.worker as worker_module
from swiftapex import SamplingParams
from swiftapex.backends.cpu_lane import CpuLane
from swiftapex.backends.graph_rows import Recordings
from swiftapex.backends.reference import ReferenceBackend
from swiftapex.backends.threads import cpu_threads
from swiftapex.core.errors import EngineError
from swiftapex.core.ops import AttentionBatch
from swiftapex.core.request import FinishReason
from swiftapex.worker.worker import Worker
from tests.cuda_double import cuda_modules, maker
from tests.graph_double import Graph, capture
from tests.hybrid import STRATEGIES, Pools, Tally, run_schedule, small_engine, strategy
from tests.lane_cases import SHAPE, make_case
from tests.replays import noted_replays

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def modules() -> Iterator[dict[str, Any]]:
    """Passes are recorded the first time that they come."""
    with (
        cuda_modules() as found,
        mock.patch.object(worker_module, "make_backends", maker(found)),
        mock.patch.object(found["cuda_graphs"], "HYBRID_SEEN_BEFORE", 0),
    ):
        yield found


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "async_overlap"])
def test_tokens_equal_the_oracles(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any], name: str
) -> None:
    """Also where spans are traced now and then, and where what was recorded is forgotten."""
    rng, execute = random.Random(name), Worker.execute

    def disturbed(self: Worker, plan: Any) -> Any:
        if rng.random() < 0.1:
            traced = rng.random() < 0.5
            self._repeated._is_traced = lambda: traced  # type: ignore[attr-defined]
        if rng.random() < 0.03:
            self._repeated.forget()
        return execute(self, plan)

    monkeypatch.setattr(Worker, "execute", disturbed)
    tally = Tally()
    with noted_replays(modules["cuda_lane"].CudaCpuLane) as replays:
        for seed in range(20):
            policy, args = strategy(name, seed)
            run_schedule("gqa-3", policy, args, seed, tally, late=False, device="cuda")
            if seed >= 2 and len(replays) > 5:  # parked cohorts, which depend on time, prevent some
                break
    assert tally.cpu_tokens > 0 and not tally.forgiven
    sub_batches = {"sequential": {1}, "random": {1, 2}}.get(name, {2})
    assert len(replays) > 5 and set(replays) <= sub_batches


class Stream:
    """A thread that does what is launched, in order and late."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._launched: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.put(work)

    def _run(self) -> None:
        while (work := self._launched.get()) is not None:
            time.sleep(self._random.choice((0, 0, 1e-3)))
            work()

    def synchronize(self) -> None:
        self._launched.put(None)
        self._thread.join()


LAYERS, ROWS = 5, (4, 8)  # padded, of two sub-batches


class Pass:
    """Attention of two sub-batches, half a layer out of phase, recorded as one graph."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.lane = modules["cuda_lane"].CudaCpuLane(cpu_threads(1), torch.device("cpu"))
        self.kv = [make_case([60] * 12, seed=layer).kv for layer in range(LAYERS)]
        heads = SHAPE.num_q_heads + 2 * SHAPE.num_kv_heads
        self.qkv = [torch.zeros(LAYERS, rows, heads, SHAPE.head_dim) for rows in ROWS]
        self.outputs: list[list[Tensor]] = [[], []]
        self.graph = Graph()
        statics = [AttentionBatch(n, (), torch.zeros(n, 1), torch.zeros(n), ()) for n in ROWS]
        recording = self.lane.recording(statics, SHAPE, torch.float32)
        with recording as self.hand_offs, capture(self.graph):
            tickets: list[Any] = [None, None]
            for layer in range(LAYERS):
                for i, static in enumerate(statics):
                    if tickets[i] is not None:
                        self.outputs[i].append(tickets[i].wait())
                    args = (layer, self.kv[layer], static, SHAPE, self.qkv[i][layer])
                    tickets[i] = self.lane.submit(*args)
            for i, ticket in enumerate(tickets):
                self.outputs[i].append(ticket.wait())

    def batches(self, number: int, rng: random.Random) -> list[AttentionBatch]:
        """Over the same blocks, one token further each time."""
        case = make_case([60] * 12)
        first, last = rng.randint(1, ROWS[0]), rng.randint(1, ROWS[1])
        rows = [slice(0, first), slice(4, 4 + last)]
        return [
            AttentionBatch(
                row.stop - row.start,
                (),
                case.batch.block_table[row],
                torch.full((row.stop - row.start,), 20 + number, dtype=torch.int32),
                (),
            )
            for row in rows
        ]


def test_replays_may_be_launched_one_behind_the_other(modules: dict[str, Any]) -> None:
    """All tasks are queued, over the same words and memory, before the stream does any. A lane
    that is closed then lets the stream have them all, which would else wait for ever."""
    rng, stream = random.Random(0), Stream(0)
    recorded = Pass(modules)
    kv = [tensor.clone() for tensor in recorded.kv]
    expected, results = [], []
    with mock.patch.object(modules["cuda_lane"].torch.cuda.Event, "query", lambda _: False):
        for number in range(20):
            batches = recorded.batches(number, rng)
            qkv = [torch.randn_like(tensor) for tensor in recorded.qkv]

            def one_pass(qkv: list[Tensor] = qkv) -> None:
                for static, given in zip(recorded.qkv, qkv, strict=True):
                    static.copy_(given)
                recorded.graph.replay()
                results.append([[o.clone() for o in outs] for outs in recorded.outputs])

            for i, batch in enumerate(batches):
                n = batch.num_decodes
                for layer in range(LAYERS):
                    out = ReferenceBackend().attend(kv[layer], batch, SHAPE, qkv[i][layer][:n])
                    expected.append((number, i, layer, out))
            recorded.lane.replay(
                recorded.hand_offs, batches, lambda one=one_pass: stream.launch(one)
            )
    cuda = modules["cuda_lane"].torch.cuda
    with mock.patch.object(cuda, "synchronize", lambda *_: stream.synchronize()):
        recorded.lane.close()
    for number, i, layer, out in expected:
        torch.testing.assert_close(results[number][i][layer][: len(out)], out)
    torch.testing.assert_close(recorded.kv, kv)


def test_an_error_in_a_task_holds_nothing_up_and_is_raised_later(modules: dict[str, Any]) -> None:
    recorded = Pass(modules)
    good = recorded.batches(0, random.Random(1))
    bad = [good[0], replace(good[1], context_lens=good[1].context_lens + 1000)]
    recorded.lane.replay(recorded.hand_offs, bad, recorded.graph.replay)
    with pytest.raises(ValueError, match="narrower"):
        recorded.lane.replay(recorded.hand_offs, good, recorded.graph.replay)
    recorded.lane.close()


def test_no_token_of_a_pass_whose_cpu_task_failed_is_handed_out(modules: dict[str, Any]) -> None:
    """The error is raised where its tokens are fetched, be it the last pass of all."""
    pools, args = Pools(2, 16, 16, 8, 40), {"use_cpu": True}
    engine = small_engine("gqa-3", pools, "fixed:sequential", args, None, device="cuda")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [engine.add([5 + i] * 20, params) for i in range(2)]
    submit = CpuLane.submit

    def failing(self: CpuLane, layer: int, kv: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        if layer > 0 and int(batch.context_lens.max()) == 25:  # that of the last token
            batch = replace(batch, context_lens=batch.context_lens + 1000)
        return submit(self, layer, kv, batch, *rest, **more)

    with (
        mock.patch.object(CpuLane, "submit", failing),
        pytest.raises(EngineError, match="narrower"),
    ):
        while engine.has_work:
            engine.step()
    assert all(r.finish_reason is FinishReason.ERROR for r in requests)
    assert all(len(r.output_ids) < 6 for r in requests)
    engine.close()


def test_a_pass_whose_tasks_cannot_be_queued_is_not_launched(modules: dict[str, Any]) -> None:
    recorded = Pass(modules)
    good = recorded.batches(0, random.Random(1))
    recorded.lane.close()
    launch = mock.Mock()
    with pytest.raises(RuntimeError, match="closed"):
        recorded.lane.replay(recorded.hand_offs, good, launch)
    launch.assert_not_called()


def test_a_recording_whose_replay_failed_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]
) -> None:
    """Its tasks may still be queued, over its words. The engine ends, and nothing hangs."""
    hybrid: list[Recordings[Any]] = []
    graphs = modules["cuda_graphs"].CudaGraphs
    make = graphs.__init__

    def noted(self: Any, *args: Any) -> None:
        make(self, *args)
        hybrid.append(self._hybrid)

    monkeypatch.setattr(graphs, "__init__", noted)
    monkeypatch.setattr(Graph, "replay", mock.Mock(side_effect=RuntimeError("no launch")))
    with pytest.raises(AssertionError) as failed:
        run_schedule("gqa-3", *strategy("symmetric", 0), 0, Tally(), late=False, device="cuda")
    assert "no launch" in str(failed.value.__cause__)
    assert len(hybrid) == 1 and not hybrid[0]._kept


def test_bytes_of_a_replay_are_counted_with_its_padding(modules: dict[str, Any]) -> None:
    recorded = Pass(modules)
    recorded.lane.replay(
        recorded.hand_offs, recorded.batches(0, random.Random(1)), recorded.graph.replay
    )
    row = (SHAPE.num_q_heads + 2 * SHAPE.num_kv_heads + SHAPE.num_q_heads) * SHAPE.head_dim * 4
    assert recorded.lane.link_bytes == LAYERS * sum(ROWS) * row
    recorded.lane.close()


def test_a_kind_is_recorded_once_it_came_often_enough() -> None:
    kept: Recordings[int] = Recordings(seen_before=2, most=2, disused=10)
    for _ in range(2):
        assert kept.find("a") is None and not kept.may_add("a")
    assert kept.find("a") is None and kept.may_add("a")
    kept.add("a", 1)
    assert kept.find("a") == 1 and kept.find("b") is None
    kept.drop("a")
    assert kept.find("a") is None and not kept.may_add("a")


def test_only_what_is_not_used_any_more_makes_room() -> None:
    """More kinds in turn than are kept: the first ones stay, and give way once others came."""
    kept: Recordings[str] = Recordings(seen_before=0, most=2, disused=4)

    def one_pass(kind: str) -> bool:
        found = kept.find(kind)
        if found is None and kept.may_add(kind):
            kept.add(kind, kind)
        return found == kind

    replayed = [one_pass(kind) for kind in "abc" * 3]
    assert replayed == [False] * 3 + [True, True, False] * 2
    assert [one_pass("c") for _ in range(6)][-2:] == [True, True]
    assert one_pass("b") != one_pass("a")
