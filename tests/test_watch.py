"""Pipelines that forget something end the engine, by name, instead of having it step for ever."""

from __future__ import annotations

import dataclasses
import re

import pytest

from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import EngineError
from swiftapex.core.plan import Row, StepPlan, StepResult, SubBatch, Tokens
from swiftapex.core.request import FinishReason, Placement, SamplingParams
from swiftapex.cost_model import CostModel
from swiftapex.engine import watch
from swiftapex.engine.engine import Engine
from swiftapex.engine.watch import Watch
from swiftapex.pipelines.async_overlap import AsyncOverlap
from swiftapex.pipelines.sequential import Sequential
from swiftapex.pipelines.walk import Walk
from swiftapex.policies.base import Policy
from swiftapex.scheduler.state import SchedulerState

TINY = ModelSection(architecture="tiny", weights="dummy", dtype="float32")
ROW = Row(3, Placement.CPU, 5, None, True)


class ForgetsDecodes(Sequential):
    """Computes decodes, and says nothing of the first one."""

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        first = next((r.request_id for b in plan.sub_batches for r in b.rows if r.is_decode), None)
        return dataclasses.replace(
            result, completing=tuple(i for i in result.completing if i != first)
        )


class ForgetsEverything(Sequential):
    def step(self, plan: StepPlan) -> StepResult:
        super().step(plan)
        return StepResult()


class TwiceOver(Sequential):
    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        return dataclasses.replace(result, completing=result.completing * 2)


class Strangers(Sequential):
    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        return dataclasses.replace(result, completing=(*result.completing, 77))


class WithoutTokens(Sequential):
    def step(self, plan: StepPlan) -> StepResult:
        return dataclasses.replace(super().step(plan), fetch=Tokens)


class ForgetsRiders(AsyncOverlap):
    """Completes what it began with, and drops the cohorts that joined."""

    def step(self, plan: StepPlan) -> StepResult:
        mine = {row.request_id for row in plan.sub_batches[0].rows}
        walk = Walk(self.parts, plan.sub_batches[0], plan.new_cohorts)
        if walk.is_empty:
            self.parts.parked.wait_for_oldest()
        for layer in range(self.parts.num_layers):
            walk.pre(layer)
            walk.post(layer)
        return self.parts.complete(
            [(batch, x) for batch, x in walk.results() if mine.intersection(batch.request_ids)]
        )


class LeavesThemParked(AsyncOverlap):
    def step(self, plan: StepPlan) -> StepResult:
        walk = Walk(self.parts, plan.sub_batches[0], plan.new_cohorts)
        walk._with_riders = False
        for layer in range(self.parts.num_layers):
            walk.pre(layer)
            walk.post(layer)
        return self.parts.complete(walk.results())


def engine_with(pipeline: type, shape: str = "one") -> Engine:
    """The GPU side holds two of the requests of `generate` at a time."""
    return Engine(
        TINY,
        EngineConfig(
            device="cpu",
            gpu=GpuConfig(kv_tokens=96),
            cpu=CpuConfig(kv_tokens=2048),
            block_size=16,
            max_model_len=64,
        ),
        policy=f"fixed:tests.test_watch:{pipeline.__name__}",
        policy_args={"shape": shape},
    )


@pytest.mark.parametrize(
    ("pipeline", "shape", "expected"),
    [
        (ForgetsDecodes, "one", r"lost request 0: .* `parts.complete`"),
        (ForgetsEverything, "one", r"lost requests 0, 1, 2: .* `parts.complete`"),
        (TwiceOver, "one", r"completed tokens of requests 0, 1.* twice"),
        (Strangers, "one", r"completed tokens of request 77 that were not planned"),
        (WithoutTokens, "one", r"brought no token for requests 0, 1"),
        (ForgetsRiders, "cohorts", r"lost requests? \d+.*: .* `parts.complete`"),
        (LeavesThemParked, "cohorts", r"no progress in \d+ iterations: .* in flight.*`Walk.post`"),
    ],
)
def test_what_a_pipeline_forgets_ends_the_engine(
    pipeline: type, shape: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_STANDSTILL_S", 0.0)
    engine = engine_with(pipeline, shape)
    prompts = [[5, 9, 17 + i] for i in range(12)]
    requests = [engine.add(prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
    with pytest.raises(EngineError, match=expected) as caught:
        for _ in range(3000):
            engine.step()
    assert f"pipeline tests.test_watch:{pipeline.__name__} " in str(caught.value)
    assert {r.finish_reason for r in requests} <= {FinishReason.ERROR, FinishReason.LENGTH}
    failed = [r for r in requests if r.finish_reason is FinishReason.ERROR]
    assert failed and all(pipeline.__name__ in (r.error or "") for r in failed)
    with pytest.raises(EngineError, match="the engine is broken"):
        engine.step()
    engine.close()


def test_aborted_requests_that_stay_parked_end_the_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for them: `abort` brings back what is in flight, and would do so for ever."""
    monkeypatch.setattr(watch, "_STANDSTILL_S", 0.0)
    engine = engine_with(LeavesThemParked, "cohorts")
    requests = [engine.add([5, 9, i], SamplingParams(max_tokens=20)) for i in range(12)]
    while not engine.stats().parked:
        engine.step()
    with pytest.raises(EngineError, match=r"LeavesThemParked leaves .* in flight"):
        for request in requests:
            engine.abort(request.request_id)
    engine.close()


def test_a_slow_cohort_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that bring nothing are counted while the same requests are in flight, and only those
    that took long in all."""
    found = Watch(num_layers=4)
    first = StepPlan("p", (SubBatch(),), new_cohorts=(SubBatch((ROW,)),))
    empty, parked = StepPlan("p", (SubBatch(),)), StepResult(in_flight=frozenset({3}))
    assert found.forgotten(first, parked, {3}) is None
    assert found.standstill(first, parked, True) is None
    now = 0.0
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now)
    assert not any(found.standstill(empty, parked, True) for _ in range(1000))
    now = 11.0
    assert "leaves request 3 in flight" in (found.standstill(empty, parked, True) or "")
    assert "lost request 3" in (found.forgotten(empty, StepResult(), {3}) or "")
    assert found.forgotten(empty, StepResult(), set()) is None  # it was aborted
    assert found.standstill(empty, StepResult(), True) is None  # it came back


def test_new_cohorts_may_be_left_alone_but_not_for_ever() -> None:
    found = Watch(num_layers=4)
    plan = StepPlan("p", (SubBatch(),), new_cohorts=(SubBatch((ROW,)),))
    assert found.forgotten(plan, StepResult(), {3}) is None
    answers = [found.standstill(plan, StepResult(), True) for _ in range(100)]
    assert not any(answers[:99])
    assert "pipeline p leaves request 3 alone" in (answers[99] or "")


class WithoutResult(Sequential):
    def step(self, plan: StepPlan) -> StepResult:
        super().step(plan)
        return None  # type: ignore[return-value]


class WithoutPlan(Policy):
    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        return None  # type: ignore[return-value]


def test_a_pipeline_that_returns_nothing_is_named() -> None:
    engine = engine_with(WithoutResult)
    request = engine.add([5, 9, 17], SamplingParams(max_tokens=4))
    expected = r"step\(\) of tests\.test_watch:WithoutResult returned None: expected a StepResult"
    with pytest.raises(EngineError, match=expected):
        engine.step()
    assert re.search(expected, request.error or "")
    engine.close()


def test_a_policy_that_returns_nothing_is_named() -> None:
    expected = r"plan\(\) of tests\.test_watch:WithoutPlan returned None: expected a StepPlan"
    engine = engine_with(Sequential)
    engine.use_policy("tests.test_watch:WithoutPlan")
    request = engine.add([5, 9, 17], SamplingParams(max_tokens=4))
    with pytest.raises(EngineError, match=expected):
        engine.step()
    assert re.search(expected, request.error or "")
    engine.close()
