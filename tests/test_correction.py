"""Online correction: what it learns of iterations, and that simulated engines heal by it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from harness import CPU, GPU, ConstantCostModel
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Simulation, Traffic

from swiftapex.core.plan import CpuWork, Row, StepPlan, SubBatch
from swiftapex.cost_model import CostModel, Load, asymmetric_us, gpu_only_us
from swiftapex.costs.correction import (
    CPU_ATTENTION,
    GPU_STAGES,
    LINEAR,
    CorrectedCostModel,
    stage_times,
)

BASE = ConstantCostModel(
    num_layers=16, linear_fixed=450, linear_row=4, gpu_token=0.015, prefill_token=0.3,
    cpu_token=0.14, cpu_fixed=60, hand_off_row=0.2, iteration=800, layerwise=25,
)  # fmt: skip
HIDDEN = Traffic(128, 3000, 40, (100, 300), (600, 900))  # decodes, which two sub-batches hide
PROMPTS = Traffic(256, 3000, 90, (200, 240), (45, 55))  # two sub-batches with chunks
MANY = Traffic(128, 9000, 150, (100, 300), (600, 900))  # asynchronous overlap
FEW = Traffic(1000, 3000, 30, (150, 250), (20, 30))  # the GPU holds them all


def truth(linear: float = 1.0, cpu: float = 1.0) -> ConstantCostModel:
    return replace(
        BASE, linear_fixed=450 * linear, linear_row=4 * linear, cpu_token=0.14 * cpu,
        cpu_fixed=60 * cpu,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("traffic", "pipeline", "linear", "cpu"),
    [
        (HIDDEN, "asymmetric", 1.0, 0.5),
        (HIDDEN, "async_overlap", 1.0, 2.0),
        (HIDDEN, "asymmetric", 0.8, 1.0),
        (HIDDEN, "asymmetric", 1.3, 1.0),
        (HIDDEN, "asymmetric", 1.2, 1.0),
        (HIDDEN, "asymmetric", 1.3, 1.5),
        (PROMPTS, "asymmetric", 1.0, 1.3),
        (PROMPTS, "asymmetric", 1.3, 1.0),
        (MANY, "asymmetric", 1.0, 0.5),
        (MANY, "async_overlap", 1.3, 1.5),
        (FEW, "sequential", 1.3, 1.0),
    ],
)
def test_a_wrong_profile_heals(traffic: Traffic, pipeline: str, linear: float, cpu: float) -> None:
    true = truth(linear, cpu)
    cost = CorrectedCostModel(BASE)
    healing = Simulation(traffic, true, cost, noise=0.03)
    right = Simulation(traffic, true, true, noise=0.03)
    alone = Simulation(traffic, true, true, policy="gpu_only", noise=0.03)
    for each in (healing, right, alone):
        each.run(300)
    rate = healing.run(300)  # a hundred differ by 2 %, as prompts come in bursts
    assert cost.factors[CPU_ATTENTION] == pytest.approx(cpu, rel=0.05)
    assert cost.factors[LINEAR] == pytest.approx(linear, rel=0.05)
    assert healing.pipelines.count(pipeline) > 270
    assert rate > 0.98 * right.run(300) and rate > 0.98 * alone.run(300)


@pytest.mark.parametrize("traffic", [HIDDEN, PROMPTS, MANY, FEW])
def test_noise_moves_nothing(traffic: Traffic) -> None:
    cost = CorrectedCostModel(BASE)
    simulation = Simulation(traffic, BASE, cost, noise=0.05)
    for _ in range(8):
        simulation.run(50)
        assert all(abs(factor - 1) < 0.03 for factor in cost.factors.values()), cost.factors


def test_what_changes_back_heals_too() -> None:
    cost = CorrectedCostModel(BASE)
    simulation = Simulation(HIDDEN, truth(cpu=2.0), cost, noise=0.03)
    simulation.run(200)
    simulation.machine.takes(truth(linear=1.3))
    simulation.run(300)
    assert cost.factors[CPU_ATTENTION] == pytest.approx(1.0, rel=0.05)
    assert cost.factors[LINEAR] == pytest.approx(1.3, rel=0.05)
    simulation.machine.takes(BASE)
    simulation.run(300)
    assert all(factor == pytest.approx(1, rel=0.05) for factor in cost.factors.values())


def test_what_two_sub_batches_take_besides_does_not_run_away() -> None:
    """CPU decodes are taken in as long as the believed times hide them: the longer the GPU's work
    is believed to take, the more there are, and the longer iterations take."""
    cost = CorrectedCostModel(BASE)
    simulation = Simulation(HIDDEN, BASE, cost, noise=0.03, overhead=0.07)
    rate = simulation.run(800)
    assert 1.0 < cost.factors[LINEAR] < 1.25  # 1.17 to 1.21, by the noise
    right = Simulation(HIDDEN, BASE, BASE, noise=0.03, overhead=0.07)
    assert rate > 0.97 * right.run(800)


def plan_of(cost: CostModel, gpu: int, cpu: int, context: int = 100) -> StepPlan:
    first = SubBatch(tuple(Row(i, GPU, context - 1, None, True) for i in range(gpu)))
    second = SubBatch(tuple(Row(-i - 1, CPU, context - 1, None, True) for i in range(cpu)))
    batches = (first, second) if cpu else (first,)
    loads = [Load.of(batch.rows) for batch in batches]
    us = asymmetric_us(cost, *loads) if cpu else gpu_only_us(cost, loads[0])
    return StepPlan("asymmetric" if cpu else "sequential", batches, predicted_us=us)


def work_of(cost: ConstantCostModel, cpu: int, slower: float, context: int = 100) -> CpuWork:
    """What the CPU does for `plan_of`, `slower` than it should be."""
    layers, us = cost.num_layers, slower * cost.cpu_token * cpu * (context - 1)
    return CpuWork(1e-6 * layers * us, layers, layers * cpu, layers * cpu * context)


iterations = st.tuples(
    st.floats(0.01, 100), st.integers(0, 6), st.integers(0, 6), st.none() | st.floats(0, 100)
)


@given(st.lists(iterations, min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_factors_stay_within_their_bounds(
    seen: list[tuple[float, int, int, float | None]],
) -> None:
    cost = CorrectedCostModel(ConstantCostModel(), gain=1.0)
    for ratio, gpu, cpu, slower in seen:
        plan = plan_of(cost, gpu, cpu)
        assert plan.predicted_us is not None
        attended = None if slower is None else work_of(ConstantCostModel(), cpu, slower)
        cost.observe(plan, ratio * plan.predicted_us, attended)
        assert all(0.5 <= cost.factors[stage] <= 2 for stage in GPU_STAGES)
        assert 0.25 <= cost.factors[CPU_ATTENTION] <= 4


@given(st.lists(st.floats(0.5, 1.45), min_size=1, max_size=40), st.floats(1.0, 4.0))
@settings(max_examples=50, deadline=None)
def test_the_cpus_factor_is_what_was_measured_of_it(ratios: list[float], slower: float) -> None:
    """Whatever iterations take, and however much of it is the CPU's."""
    base = ConstantCostModel()
    cost, other = CorrectedCostModel(base), CorrectedCostModel(base)
    for ratio in ratios:
        plan = plan_of(cost, 3, 20)
        assert plan.predicted_us is not None
        cost.observe(plan, ratio * plan.predicted_us, work_of(base, 20, slower))
        other.observe(replace(plan, predicted_us=None), 1.0, work_of(base, 20, slower))
    assert cost.factors[CPU_ATTENTION] == other.factors[CPU_ATTENTION]
    assert 1 <= cost.factors[CPU_ATTENTION] <= slower + 1e-9


def test_a_small_task_says_nothing_of_the_cpu() -> None:
    """Most of what it takes is its hand-off, which is not measured."""
    base = ConstantCostModel(cpu_fixed=1000, cpu_token=0.1)
    cost = CorrectedCostModel(base)
    for _ in range(50):
        cost.observe(StepPlan("asymmetric", ()), 1.0, work_of(base, 4, 1.5))
    assert cost.factors[CPU_ATTENTION] == 1.0


def test_outliers_and_iterations_without_prediction_teach_nothing() -> None:
    cost = CorrectedCostModel(ConstantCostModel())
    plan = plan_of(cost, 4, 0)
    assert plan.predicted_us is not None
    for measured in (10 * plan.predicted_us, 0.1 * plan.predicted_us, 0.0):
        cost.observe(plan, measured)
    cost.observe(StepPlan("sequential", plan.sub_batches), 100.0)
    waiting = StepPlan("async_overlap", (SubBatch(),), predicted_us=100.0)
    cost.observe(waiting, 150.0)
    assert set(cost.factors.values()) == {1.0}


def test_a_cpu_that_was_too_slow_is_tried_again() -> None:
    """As long as nothing is attended there, its factor falls; one slow start is not all it takes
    to bring it up."""
    base = ConstantCostModel()
    cost = CorrectedCostModel(base)
    both, gpu_only = plan_of(cost, 1, 30), plan_of(cost, 4, 0)
    assert both.predicted_us is not None and gpu_only.predicted_us is not None
    cost.observe(both, 2.9 * both.predicted_us, work_of(base, 30, 2.9))
    assert 1 < cost.factors[CPU_ATTENTION] < 1.05
    for _ in range(20):
        cost.observe(both, 1.5 * both.predicted_us, work_of(base, 30, 1.5))
    high = cost.factors[CPU_ATTENTION]
    assert high > 1.3
    for _ in range(2300):
        cost.observe(gpu_only, gpu_only.predicted_us, CpuWork(0, 0, 0, 0))
    assert cost.factors[CPU_ATTENTION] == pytest.approx(high**0.5, rel=0.01)


def test_stages_are_told_apart_by_iterations_that_differ() -> None:
    """Linear stages take 1.5 times what the profile says, the CPU's attention 0.7 times."""
    believed = ConstantCostModel(linear_fixed=100, gpu_token=0.1, cpu_token=1.0)
    true = ConstantCostModel(linear_fixed=150, gpu_token=0.1, cpu_token=0.7)
    cost = CorrectedCostModel(believed)
    rng = random.Random(0)
    for _ in range(400):
        gpu, cpu = rng.randint(1, 20), rng.choice((0, 0, 8, 12))
        plan, measured = plan_of(cost, gpu, cpu), plan_of(true, gpu, cpu).predicted_us
        assert measured is not None
        cost.observe(plan, measured, work_of(believed, cpu, 0.7) if cpu else None)
    assert cost.factors[LINEAR] == pytest.approx(1.5, rel=0.05)
    assert cost.factors[CPU_ATTENTION] == pytest.approx(0.7, rel=0.02)


def test_stage_times_are_those_on_the_critical_path() -> None:
    cost = ConstantCostModel(num_layers=2, linear_fixed=100, gpu_token=0.1, cpu_token=1.0)

    def shown_of(gpu: int, cpu: int) -> dict[str, float]:
        plan = plan_of(cost, gpu, cpu)
        assert plan.predicted_us is not None
        loads = [Load.of(batch.rows) for batch in plan.sub_batches]
        return stage_times(cost, loads, plan.predicted_us)

    shown = shown_of(4, 3)  # T_ca1 300 hides T_l0; T_l1 + T_ga0 = 140
    assert shown[CPU_ATTENTION] == 600 and shown[LINEAR] == 200
    shown = shown_of(4, 0)
    assert shown[LINEAR] == 200 and shown[CPU_ATTENTION] == 0
