"""Measured tables: interpolation, the closed forms on constant tables, online correction."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from harness import ConstantCostModel
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftapex.cost_model import (
    CHUNKS,
    DECODES,
    TWO_BATCHES,
    TWO_DECODES,
    Load,
    asymmetric_us,
    gpu_only_us,
    overlap_us,
    visit_us,
)
from swiftapex.costs.measured import MeasuredCostModel
from swiftapex.costs.tables import Curve, Grid, Line, Surface, Tables
from swiftapex.scheduler.equations import (
    asymmetric_wins,
    cpu_rows,
    gpu_rows,
    t_gpu_only,
    t_overlap,
    t_overlap_prefill,
)

values = st.lists(st.floats(0, 1e4), min_size=1, max_size=8)


@given(ys=values, xs=st.lists(st.floats(0, 2000), min_size=2, max_size=30))
@settings(max_examples=200, deadline=None)
def test_a_curve_never_falls_whatever_was_measured(ys: list[float], xs: list[float]) -> None:
    curve = Curve([2**i for i in range(len(ys))], ys)
    read = [curve(x) for x in sorted(xs)]
    assert all(a <= b + 1e-6 for a, b in pairwise(read))


def test_a_curve_reads_its_points_and_says_what_lies_beyond() -> None:
    curve = Curve([1, 4, 8], [10, 16, 40])
    assert [curve(x) for x in (1, 4, 8)] == [10, 16, 40]
    assert curve(0) == 0 and curve(0.5) == 10  # below the first point its value
    assert curve(2) == 12 and curve(6) == 28
    assert curve(10) == 40 + 2 * 6  # the last slope goes on
    assert Curve([3], [7])(100) == 7  # one point has no slope
    assert Curve([1, 2, 3], [5, 4, 6]).ys == [4.5, 4.5, 6]  # what falls is pooled
    disturbed = Curve([1, 2, 3, 4, 5], [1, 900, 3, 4, 5]).ys
    assert disturbed == [1, 4, 4, 4, 5]  # one outlier spoils little
    assert curve.dense(3) == [0, 10, 12, 14]


@given(
    rows=st.lists(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), min_size=1, max_size=4),
    points=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 900)), min_size=2, max_size=10),
    steps=st.tuples(st.floats(0, 20), st.floats(0, 500)),
)
@settings(max_examples=200, deadline=None)
def test_a_surface_never_falls_in_either_direction(
    rows: list[list[float]], points: list[tuple[float, float]], steps: tuple[float, float]
) -> None:
    surface = Surface([4**i for i in range(len(rows))], [16, 64, 256], rows)
    for x, y in points:
        here = surface(x, y)
        assert surface(x + steps[0], y) >= here - 1e-6
        assert surface(x, y + steps[1]) >= here - 1e-6


def test_a_surface_is_exact_where_time_is_a_sum_of_parts() -> None:
    def true(requests: float, tokens: float) -> float:
        return 5 + 2 * requests + 0.5 * tokens

    xs, ys = [1, 4, 16], [16, 64, 1024]
    surface = Surface(xs, ys, [[true(x, y) for y in ys] for x in xs])
    for x in (1, 2, 4, 9, 16, 40):
        for y in (16, 20, 300, 1024, 5000):
            assert surface(x, y) == pytest.approx(true(x, y))
    assert surface(0, 100) == 0
    assert surface(4, 3) == surface(4, 16)  # below the first point its value


def test_points_that_do_not_exist_follow_from_their_curve() -> None:
    surface = Surface([1, 64], [16, 64, 256], [[10, 20, None], [None, 90, 150]])
    assert surface(1, 256) == 10 + 240 / 48 * 10  # extrapolated
    assert surface(64, 16) == 90


def constant_tables(**change: object) -> Tables:
    """T_l 10 µs whatever the rows; attention 0.1 µs a token on the GPU, 1 on the CPU."""
    tokens = (1, 1000)
    lines: dict[str, object] = {
        "num_layers": 4,
        "linear": Line((1,), (10.0,)),
        "iteration": Line((1,), (0.0,)),
        "gpu_attention": Grid((1,), tokens, ((0.1, 100.0),)),
        "prefill_attention": Grid((1, 1000), (0, 1000), ((0.5, 0.5), (500.0, 500.0))),
        "cpu_attention": Grid((1,), tokens, ((1.0, 1000.0),)),
        "hand_off": Line((1,), (0.0,)),
        "layerwise": Line((1,), (0.0,)),
        "copy": Line((1, 1000), (2.0, 2000.0)),
    }
    return Tables(**{**lines, **change})  # type: ignore[arg-type]


positive = st.floats(0.5, 50)


@given(t_l=positive, gpu=st.integers(1, 500), n_g=st.floats(0.01, 1), n_c=st.floats(0.001, 0.1))
@settings(max_examples=100, deadline=None)
def test_predictions_on_constant_tables_are_the_closed_forms(
    t_l: float, gpu: int, n_g: float, n_c: float
) -> None:
    """Eq. 1 and 2, and Eq. 5 by the predictions of both: CPU rows fill the whole cycle, so that
    neither side waits in NEO's T."""
    context = 100
    tokens = (1, 10**6)
    cost = MeasuredCostModel(
        constant_tables(
            linear=Line((1,), (t_l,)),
            gpu_attention=Grid((1,), tokens, ((1 / context / n_g, 1e6 / context / n_g),)),
            cpu_attention=Grid((1,), tokens, ((1 / context / n_c, 1e6 / context / n_c),)),
        )
    )
    t_a = gpu / n_g
    main = Load(gpu, gpu * context, gpu_requests=gpu)
    assert gpu_only_us(cost, main) == pytest.approx(4 * t_gpu_only(t_l, t_a))
    first = main.with_cpu_decodes(int(n_c * (t_l + t_a) * context))
    second = Load().with_cpu_decodes(int(n_c * t_l * context))
    if min(first.cpu_tokens, second.cpu_tokens) < 1:
        return
    assert asymmetric_us(cost, first, second) == pytest.approx(4 * t_overlap(t_l, t_a), rel=0.02)
    rows = gpu_rows(n_g, t_a), cpu_rows(n_c, t_l, t_a)
    assert rows[0] == pytest.approx(gpu)
    two, one = asymmetric_us(cost, first, second), gpu_only_us(cost, main)
    by_rates = (rows[0] + rows[1]) / two > rows[0] / one
    margin = abs((rows[0] + rows[1]) * one - rows[0] * two) / (rows[0] * two)
    if margin > 0.05:
        assert by_rates == asymmetric_wins(*rows, t_overlap(t_l, t_a), t_gpu_only(t_l, t_a))


def test_neos_time_and_equation_7_on_constant_tables() -> None:
    cost = MeasuredCostModel(constant_tables())
    # T_l 10; T_ga0: 60 decodes' tokens 6 and a chunk of 8 tokens 4; T_ca0 12, T_ca1 25.
    first = Load(20, 60, 12, ((8, 0),), gpu_requests=3, cpu_requests=2)
    second = Load(5, 0, 25, cpu_requests=5)
    assert asymmetric_us(cost, first, second) == pytest.approx(4 * (max(10, 25) + max(20, 12)))
    hidden = Load(5, 0, 9, cpu_requests=5)
    assert asymmetric_us(cost, first, hidden) == pytest.approx(4 * t_overlap_prefill(10, 4, 10, 6))


def test_what_an_iteration_costs_besides_its_layers() -> None:
    cost = ConstantCostModel(
        num_layers=2, linear_fixed=100, gpu_token=0, cpu_token=0, iteration=7, hand_off_row=3
    )
    first, second = Load(4, 40, gpu_requests=4), Load(2, 0, 20, cpu_requests=2)
    assert gpu_only_us(cost, first) == 2 * 100 + 7
    assert asymmetric_us(cost, first, second) == 2 * (100 + 100 + 2 * 3) + 7
    # 6 parked in 2 cohorts: two hand-offs of three rows in a pass
    assert overlap_us(cost, first, 6, cohorts=2) == 2 * 100 + 7 + 2 * 9
    apart = replace(cost, layerwise=5)
    assert overlap_us(apart, first, 6, cohorts=2) == 2 * (100 + 5) + 7 + 2 * 9
    assert overlap_us(apart, first, 0) == gpu_only_us(apart, first) == 2 * 100 + 7
    slow_host = ConstantCostModel(num_layers=2, host=1e6)
    for us in (
        gpu_only_us(slow_host, first),
        asymmetric_us(slow_host, first, second),
        overlap_us(slow_host, first, 6),
    ):
        assert us == 1e6
    assert visit_us(ConstantCostModel(cpu_token=1, cpu_fixed=5), 50, 3, 9) == 55 + 2 * 6


def test_measured_model_reads_its_tables_and_missing_ones_cost_nothing() -> None:
    host = {DECODES: 5.0, CHUNKS: 6.0, TWO_BATCHES: 7.0}
    cost = MeasuredCostModel(constant_tables(host_us=host))
    assert cost.linear_us(0) == 0 and cost.linear_us(300) == cost.linear_us(10_000) == 10
    assert cost.host_us(TWO_BATCHES) == 7 and cost.host_us("unheard of") == 0
    assert cost.copy_us(500) == pytest.approx(1000)
    two = MeasuredCostModel(constant_tables(host_us={TWO_DECODES: 1e6, TWO_BATCHES: 2e6}))
    first, second = Load(2, 20, gpu_requests=2), Load(1, 0, 10, cpu_requests=1)
    assert asymmetric_us(two, first, second) == 1e6  # one graph
    assert asymmetric_us(two, Load(6, 20, chunks=((4, 0),), gpu_requests=2), second) == 2e6
    nothing = {"hand_off": Line(), "layerwise": Line(), "copy": Line()}
    alone = MeasuredCostModel(constant_tables(cpu_attention=Grid(), **nothing))
    assert alone.cpu_attention_us(100) == alone.hand_off_us(3) == alone.copy_us(9) == 0
    assert alone.layerwise_us(30) == 0


def test_tables_survive_json() -> None:
    tables = constant_tables(
        gpu_attention=Grid((1, 4), (8, 16), ((1.0, 2.0), (None, 3.0))), host_us={DECODES: 1.5}
    )
    assert Tables.from_dict(json.loads(json.dumps(tables.as_dict()))) == tables
    with pytest.raises((KeyError, TypeError, ValueError)):
        Tables.from_dict({"num_layers": 3})
