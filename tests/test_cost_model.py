"""Closed forms as algebra, the analytic model against sums by hand, predictions of iterations."""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness import CPU, GPU, STAGING, ConstantCostModel
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftapex.core.plan import Row
from swiftapex.cost_model import (
    Load,
    asymmetric_us,
    gpu_only_us,
    overlap_tokens,
    overlap_us,
    spare_us,
    visit_us,
)
from swiftapex.costs.analytic import AnalyticCostModel, Rates, default_rates
from swiftapex.model.config import named_architecture
from swiftapex.scheduler.equations import (
    asymmetric_wins,
    asymmetric_wins_prefill,
    cpu_rows,
    decode_threshold,
    gpu_rows,
    speedup_estimate,
    t_gpu_only,
    t_overlap,
    t_overlap_prefill,
)

positive = st.floats(1e-3, 1e3)


@given(n_g=positive, n_c=positive, t_l=positive, t_a=positive)
@settings(max_examples=200, deadline=None)
def test_equation_6_follows_from_equation_5(n_g: float, n_c: float, t_l: float, t_a: float) -> None:
    gpu, cpu = gpu_rows(n_g, t_a), cpu_rows(n_c, t_l, t_a)
    threshold = decode_threshold(t_l, t_a)
    if abs(n_g / n_c - threshold) < 1e-9 * threshold:
        return  # a tie up to rounding
    wins = asymmetric_wins(gpu, cpu, t_overlap(t_l, t_a), t_gpu_only(t_l, t_a))
    assert wins == (n_g / n_c < threshold)


def test_equation_6_lies_between_its_published_values() -> None:
    ratios = [0.5 + i / 100 for i in range(101)]  # T_a / T_l in [0.5, 1.5]
    values = [decode_threshold(1.0, ratio) for ratio in ratios]
    assert values[0] == pytest.approx(7.5) and values[-1] == pytest.approx(5.8333, abs=1e-4)
    assert min(values) >= 5.8 and max(values) <= 7.5
    least = decode_threshold(1.0, 2**0.5)  # d/dr (2/r + 3 + r) = 0
    assert least == pytest.approx(3 + 2 * 2**0.5) and min(values) >= least


def test_equation_6_has_no_bound_where_attention_is_nothing_or_everything() -> None:
    assert decode_threshold(1.0, 1e-9) > 1e9
    assert decode_threshold(1e-9, 1.0) > 1e9


@given(n_g=positive, n_c=positive, t_l=positive, t_a=positive)
@settings(max_examples=200, deadline=None)
def test_equation_8_without_chunks_is_equation_6(
    n_g: float, n_c: float, t_l: float, t_a: float
) -> None:
    threshold = decode_threshold(t_l, t_a)
    if abs(n_g / n_c - threshold) > 1e-6 * threshold:
        wins = asymmetric_wins_prefill(n_g, n_c, t_l, 0.0, t_l, t_a)
        assert wins == (n_g / n_c < threshold)


def test_equation_8_compares_rows_per_cycle_on_both_sides() -> None:
    # By hand: cycle 30 + 5 + 10 + 10 = 55, alone 30 + 5 + 10 = 45; GPU rows 2 * 10 = 20.
    # CPU rows n_c * 55: asymmetric wins iff (20 + 55 n_c) / 55 > 20 / 45, n_c > 0.0808.
    assert t_overlap_prefill(30, 5, 10, 10) == 55
    assert asymmetric_wins_prefill(2.0, 0.081, 30, 5, 10, 10)
    assert not asymmetric_wins_prefill(2.0, 0.080, 30, 5, 10, 10)


def test_equations_1_to_4_by_hand() -> None:
    assert t_gpu_only(10, 5) == 15 and t_overlap(10, 5) == 25
    assert gpu_rows(0.5, 10) == 5 and cpu_rows(0.1, 10, 5) == 2.5
    assert speedup_estimate(0.2, 0.5) == 0.1


def test_load_sorts_rows_by_who_works_on_them() -> None:
    rows = [
        Row(0, GPU, 99, None, True),
        Row(1, CPU, 49, None, True),
        Row(2, CPU, 9, None, True),
        Row(3, GPU, 8, tuple(range(16)), False),
        Row(4, STAGING, 0, (1, 2), True),
    ]
    load = Load.of(rows)
    assert load == Load(21, 100, 60, ((16, 8), (2, 0)), gpu_requests=1, cpu_requests=2)
    assert load.completing == 5
    assert load.without_chunks() == Load(3, 100, 60, (), 1, 2)
    assert load.with_cpu_decodes(5) == Load(22, 100, 65, ((16, 8), (2, 0)), 1, 3)
    assert load.with_cpu_decodes(5, 2) == Load(23, 100, 65, ((16, 8), (2, 0)), 1, 4)


def test_predictions_by_hand() -> None:
    cost = ConstantCostModel(
        num_layers=2, linear_fixed=100, linear_row=1, gpu_token=0.5, prefill_token=3, cpu_token=2
    )
    first = Load(rows=14, gpu_tokens=100, cpu_tokens=30, chunks=((10, 0),))  # T_l 114, T_ga 80
    second = Load(rows=2, cpu_tokens=90)  # T_l 102, T_ca 180
    assert gpu_only_us(cost, first) == 2 * (114 + 80)
    # max(T_l0 114, T_ca1 180) + max(T_l1 + T_ga0 182, T_ca0 60)
    assert asymmetric_us(cost, first, second) == 2 * (180 + 182)
    assert spare_us(cost, first, second) == (182 - 60, 114 - 180)
    # 7 parked in L + 1 = 3 passes: 3 rows more in a layer, rounded up
    assert overlap_us(cost, first, 7) == 2 * (117 + 80)
    assert overlap_tokens(cost, 6) == 2
    assert visit_us(cost, 120, 3) == 240 + 2 * 2
    assert visit_us(cost, 0, 3) == 0
    assert asymmetric_us(cost, Load(), Load()) == gpu_only_us(cost, Load()) == 0


def test_analytic_model_by_hand() -> None:
    config = named_architecture("tiny")  # 4 layers, hidden 256, 8 and 2 heads of 32, inner 688
    rates = Rates(1e9, 1e12, 2e9, 1e8, stage_us=1, task_us=10)
    cost = AnalyticCostModel(config, rates, "float32", "float16")
    parameters = (12 + 8) * 32 * 256 + 3 * 256 * 688
    assert config.num_layer_parameters == parameters
    read = parameters * 4 / 1e9 * 1e6  # one row takes 1/2000 of that to multiply
    assert cost.linear_us(1) == pytest.approx(read + 2, rel=1e-5)
    assert cost.linear_us(2_000_000) == pytest.approx(1000 * read + 2, rel=1e-4)
    assert cost.linear_us(2_000) == pytest.approx(2 ** (1 / 1.6) * read + 2)
    assert cost.gpu_attention_us(100) == pytest.approx(100 * 2 * 2 * 32 * 4 / 2e9 * 1e6 + 1)
    assert cost.cpu_attention_us(100) == pytest.approx(100 * 2 * 2 * 32 * 2 / 1e8 * 1e6 + 10)
    assert cost.prefill_attention_us(3, 10) == pytest.approx(4 * 256 * (11 + 12 + 13) / 1e6 + 1)
    for nothing in (cost.linear_us(0), cost.gpu_attention_us(0), cost.cpu_attention_us(0)):
        assert nothing == 0
    assert cost.prefill_attention_us(0, 10) == 0


def test_more_work_never_costs_less() -> None:
    cost = AnalyticCostModel(named_architecture("smollm2-135m"), default_rates("cpu", 1), "float32")
    for ask in (cost.linear_us, cost.gpu_attention_us, cost.cpu_attention_us):
        times = [ask(n) for n in range(0, 4000, 7)]
        assert times == sorted(times)
    times = [cost.prefill_attention_us(n, 5) for n in range(0, 4000, 7)]
    assert times == sorted(times)


def test_default_rates_are_those_that_were_measured() -> None:
    cost = AnalyticCostModel(
        named_architecture("llama2-7b"), default_rates("cuda", 14, sm_count=8), "float16"
    )
    assert 32 * cost.linear_us(8) == pytest.approx(15_400, rel=0.05)  # a pass over 8 rows
    gpu = 1 / (cost.gpu_attention_us(100_000) - cost.gpu_attention_us(99_999))
    cpu = 1 / (cost.cpu_attention_us(100_000) - cost.cpu_attention_us(99_999))
    assert 0.08 < cpu / gpu < 0.1  # N_C / N_G
    whole = default_rates("cuda", 14)
    assert whole.weight_bytes_per_s > 4 * default_rates("cuda", 14, sm_count=8).weight_bytes_per_s


def test_cost_model_and_policies_load_no_torch() -> None:
    names = "swiftapex.cost_model swiftapex.policies.neo swiftapex.policies.apex"
    names += " swiftapex.policies.fastdecode swiftapex.policies.fixed swiftapex.policies.gpu_only"
    code = f"import sys, {', '.join(names.split())}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
