"""Choices of the policies against tables computed by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from harness import CPU, GPU, STAGING, ConstantCostModel, Harness

import swiftapex
from swiftapex.core.errors import ConfigError
from swiftapex.core.plan import Row, StepPlan
from swiftapex.core.request import Request, SamplingParams
from swiftapex.cost_model import Load, overlap_us, spare_us
from swiftapex.pipelines import pipeline_class
from swiftapex.policies import POLICIES, make_policy
from swiftapex.policies.apex import Strategy, select_strategy
from swiftapex.policies.gpu_only import GpuOnly
from swiftapex.policies.model_based import ModelBased
from swiftapex.scheduler import steady
from swiftapex.scheduler.candidates import ASYMMETRIC, GPU_ONLY
from swiftapex.scheduler.cohorts import cohorts_wanted
from swiftapex.scheduler.prefill import overlap_chunk_tokens
from swiftapex.scheduler.queue import RequestQueue
from swiftapex.scheduler.split import Split, choose_split, split_wins, trim_swap_out

if TYPE_CHECKING:
    from decimal import Decimal

# L = 4; T_l = 100 µs whatever the rows, T_ga = 0.1 µs and T_ca = 1 µs a token.
COST = ConstantCostModel(num_layers=4, linear_fixed=100, gpu_token=0.1, cpu_token=1.0)
ROOM = (100, 100)


def test_split_fills_the_sub_batch_with_more_room_and_stops_at_both_constraints() -> None:
    main = Load(rows=4, gpu_tokens=400)  # T_l0 100, T_ga0 40
    # 1: T_l0 - 30 = 70 against T_ga0 - 30 = 10 (T_l1 is 0 while empty)   -> second, spare (140, 70)
    # 2: 140 - 30 = 110 against 70 - 30 = 40                             -> first,  spare (110, 70)
    # 3: 80 / 40 -> first, 4: 50 / 40 -> first, 5: 20 / 40 -> second, 6: 20 / 10 -> first (20),
    # 7: -10 / 10 -> second (10); nothing more of 30 fits.
    split = choose_split(COST, main, [30] * 9, ROOM)
    assert split.picks == ((1, 2, 3, 5), (0, 4, 6))
    assert split.loads[0] == Load(8, 400, 120, cpu_requests=4)
    assert split.loads[1] == Load(3, 0, 90, cpu_requests=3)


def test_split_skips_what_is_longer_than_what_did_not_fit_and_takes_shorter_ones() -> None:
    main = Load(rows=1)  # T_l0 100, T_ga0 0: only the second sub-batch has room at first
    split = choose_split(COST, main, [150, 160, 90, 120, 60], ROOM)
    assert split.picks == ((4,), (2,))  # 90 hides behind T_l0, then 60 behind T_l1
    assert choose_split(COST, main, [101], ROOM).count == 0
    assert choose_split(COST, main, [100], ROOM).picks == ((), (0,))


def test_a_split_of_many_is_hidden_and_leaves_no_room_for_one_more() -> None:
    cost = replace(COST, linear_fixed=4000, linear_row=10, cpu_fixed=50, hand_off_row=1)
    main = Load(rows=100, gpu_tokens=5000)
    contexts = [20 + 7 * (index % 5) for index in range(900)]
    split = choose_split(cost, main, contexts, (900, 900))
    picks = [*split.picks[0], *split.picks[1]]
    assert split.count > 200 and len(set(picks)) == split.count
    for load, half in zip(split.loads, split.picks, strict=True):
        assert load.cpu_tokens == sum(contexts[index] for index in half)
    left = spare_us(cost, *split.loads)
    assert all(0 <= us < 20 for us in left)  # the shortest one would take 20 µs


def test_forced_decodes_are_taken_whether_hidden_or_not() -> None:
    split = choose_split(COST, Load(rows=1), [500, 500, 10], ROOM, forced=1)
    assert split.picks[1] == (0,) and 1 not in split.picks[0]
    assert 2 in split.picks[0]  # 10 <= T_l1 = 100 still hides


def test_split_respects_the_rows_that_fit() -> None:
    split = choose_split(COST, Load(rows=2), [1] * 9, (1, 2))
    assert (len(split.picks[0]), len(split.picks[1])) == (1, 2)


def test_without_gpu_rows_all_cpu_decodes_run_in_two_halves() -> None:
    split = choose_split(COST, Load(), [1000] * 6, ROOM)
    assert len(split.picks[0]) == len(split.picks[1]) == 3


def test_parked_decodes_count_as_parts_of_tokens_on_both_sides_of_the_choice() -> None:
    # One GPU row alone: 4 (100 + 1) = 404 µs; with one CPU row more 4 (100 + 101) = 804 µs. Then
    # 2 / 804 > 1 / 404. With 10 parked, 10 / (L + 1) = 2 tokens a pass: 4 / 804 < 3 / 404.
    harness = hybrid("neo")
    requests = fill(harness, 11, output=60)
    first = harness.state.new_batch()
    first.add(Row(requests[0].request_id, GPU, 9, None, True))
    main = Load.of(first.rows)
    split = Split(((), (0,)), (main, Load(1, 0, 50, cpu_requests=1)))
    assert split_wins(harness.state, COST, first, split)
    parked = frozenset(request.request_id for request in requests[1:])
    harness.state.settle(StepPlan("async_overlap", ()), parked)
    assert harness.state.num_in_flight == 10
    assert not split_wins(harness.state, COST, first, split)


@pytest.mark.parametrize(
    ("cpu_first", "cpu_second", "kept"),
    [
        (0, 50, 102),  # 100 + p <= 2 (100 + 1)
        (0, 220, 120),  # 100 + p <= 220: that much hides T_ca1
        (230, 50, 140),  # T_l1 + T_ga0 = 101 + 140 hides 230, 101 + 102 would not
    ],
)
def test_chunks_of_cpu_prompts_are_trimmed_to_what_hides_cpu_attention(
    cpu_first: int, cpu_second: int, kept: int
) -> None:
    cost = ConstantCostModel(num_layers=4, linear_row=1, prefill_token=1, cpu_token=1)
    harness = hybrid("neo", cost)
    request = harness.add(140, 9)
    assert request is not None
    harness.state.start(request, STAGING)
    first = harness.state.new_batch()
    harness.state.add_chunk(first, request, 140)
    large = Load(140, 0, cpu_first, ((140, 0),))
    split = trim_swap_out(
        harness.state, cost, first, Split(((), (0,)), (large, Load(1, 0, cpu_second)))
    )
    (row,) = first.chunks
    assert row.num_tokens == kept and row.completes == (kept == 140)
    assert split.loads[0] == Load(kept, 0, cpu_first, ((kept, 0),))
    assert harness.state.staging_blocks_left == 40 - -(-kept // 4)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # num_gpu, num_cpu, gpu_rows, overdue, scheduled, wins
        ((4, 0, 4, 0, 0, False), Strategy.GPU_ONLY),  # no CPU decodes
        ((4, 31, 4, 0, 5, True), Strategy.GPU_ONLY),  # fewer than 8 per GPU request
        ((4, 32, 4, 0, 5, True), Strategy.ASYMMETRIC),
        ((4, 32, 4, 0, 5, False), Strategy.OVERLAP),  # schedulable, but no gain
        ((4, 32, 4, 0, 0, False), Strategy.OVERLAP),  # nothing schedulable
        ((4, 31, 0, 0, 0, False), Strategy.OVERLAP),  # no GPU-only without GPU rows
        ((4, 31, 0, 0, 3, True), Strategy.ASYMMETRIC),
        ((4, 31, 4, 1, 0, False), Strategy.OVERLAP),  # overdue: the ratio does not count
        ((0, 3, 1, 0, 0, False), Strategy.OVERLAP),  # a chunk alone, no GPU request: ratio holds
    ],
)
def test_strategy_selection(
    numbers: tuple[int, int, int, int, int, bool], expected: object
) -> None:
    num_gpu, num_cpu, gpu_rows, overdue, scheduled, wins = numbers
    assert expected is select_strategy(
        num_gpu=num_gpu,
        num_cpu=num_cpu,
        gpu_rows=gpu_rows,
        overdue=overdue,
        min_ratio=8,
        scheduled=scheduled,
        asymmetric_wins=wins,
    )


def hybrid(policy: str, cost: ConstantCostModel = COST, **kwargs: object) -> Harness:
    """Three prompts of 20 tokens fit on the GPU; the CPU takes any number."""
    sizes = {"cpu_blocks": 2000, "staging_blocks": 40, "max_skipped": 1000, **kwargs}
    return Harness(20, 4, 64, 256, policy=policy, cost=cost, **sizes)  # type: ignore[arg-type]


def decoding(harness: Harness) -> tuple[int, int]:
    return harness.state.num_decoding(GPU), harness.state.num_decoding(CPU)


def fill(harness: Harness, count: int, prompt: int = 20, output: int = 20) -> list[Request]:
    """Adds requests and steps until all decode; the GPU takes the first."""
    added = [harness.add(prompt, output) for _ in range(count)]
    requests = [r for r in added if r is not None]
    for _ in range(60):
        if all(r.output_ids for r in requests):
            break
        harness.step()
    return requests


def test_neo_runs_two_batches_where_that_serves_more_requests_per_time() -> None:
    # Three GPU decodes of about 24 tokens (T_ga 7). Alone: 3 in 4 (100 + 7) = 428 µs. With c CPU
    # decodes in the second sub-batch 3 + c in 4 (100 + 107) = 828 µs: c >= 3 wins.
    harness = hybrid("neo")
    fill(harness, 9)
    assert decoding(harness)[0] == 3 and decoding(harness)[1] >= 3
    plan = harness.step()
    assert plan.pipeline == "asymmetric"
    assert plan.sub_batches[1].rows
    assert plan.predicted_us == pytest.approx(4 * 207, rel=0.02)
    harness.drain()
    harness = hybrid("neo")
    fill(harness, 4)
    assert decoding(harness) == (3, 1)
    plan = harness.step()
    assert plan.pipeline == "sequential"
    assert plan.predicted_us == pytest.approx(4 * 107, rel=0.02)
    harness.drain()


def test_neo_stays_on_the_gpu_where_the_cpu_cannot_hide() -> None:
    # Each CPU decode of 22 tokens takes 220 µs, longer than T_l0 = 100 and T_l1 + T_ga0.
    harness = hybrid("neo", ConstantCostModel(num_layers=4, cpu_token=10.0))
    fill(harness, 4)
    assert decoding(harness) == (3, 1)
    assert harness.step().pipeline == "sequential"
    harness.drain()


def test_neo_promotes_the_oldest_cpu_request_when_gpu_blocks_free() -> None:
    harness = hybrid("neo")
    requests = fill(harness, 5)
    on_cpu = [r for r in requests if r.placement is CPU]
    assert on_cpu
    for request in requests:
        if request.placement is GPU:
            harness.abort(request.request_id)
    plan = harness.step()
    assert plan.moves and plan.moves[0].request_id == on_cpu[0].request_id
    assert plan.moves[0].target is GPU
    rows = {r.request_id for b in plan.sub_batches for r in b.rows}
    assert not rows & {m.request_id for m in plan.moves}, "a moved request rests"
    harness.drain()


def test_gpu_decodes_that_find_no_block_demote_the_newest() -> None:
    harness = Harness(8, 4, 64, 256, policy="neo", cost=COST, cpu_blocks=100, staging_blocks=8)
    first, second = fill(harness, 2, prompt=9, output=20)
    assert first.placement is second.placement is GPU
    while not harness.state.num_moves:
        harness.step()
    assert harness.plans[-1].moves[0].request_id == second.request_id
    assert harness.state.num_preemptions == 0 and second.placement is CPU
    harness.drain()
    assert harness.state.num_preemptions == 0


def test_promotion_leaves_one_free_block_per_gpu_decode() -> None:
    # The oldest CPU request owns 6 blocks (21 to 24 tokens); 20 blocks exist. With n GPU requests
    # of 6 blocks it may come only if 20 - 6 n >= 6 + n + 1: n = 1 (14 >= 8), not n = 2 (8 < 9).
    harness = hybrid("fixed:symmetric")
    requests = fill(harness, 4, prompt=20, output=60)
    while requests[3].num_tokens < 22:
        harness.step()
    assert [r.placement for r in requests] == [GPU, GPU, GPU, CPU]
    harness.abort(0)
    assert not harness.step().moves
    harness.abort(1)
    assert [m.request_id for m in harness.step().moves] == [3]
    harness.drain()


def test_a_younger_request_does_not_take_the_place_that_an_older_one_waits_for() -> None:
    harness = hybrid("fixed:symmetric")
    requests = fill(harness, 4, prompt=20, output=60)
    while requests[3].num_tokens < 22:
        harness.step()
    harness.abort(0)  # as above: room for a short prompt, not yet for the older request
    younger = harness.add(4, 8)
    assert younger is not None
    harness.step()
    assert requests[3].placement is CPU and younger.placement is not GPU
    harness.drain()


def test_the_cpu_keeps_room_for_what_the_gpu_may_demote() -> None:
    # Three GPU requests own 15 blocks; of 24 CPU blocks half, 12, stay free. A prompt of 5 blocks
    # starts beside n others if 24 - 5 n >= 5 + n + 12: n = 0 and 1.
    harness = hybrid("fixed:symmetric", cpu_blocks=24)
    for _ in range(8):
        harness.add(20, 20)
    harness.step()
    placements = [r.placement for r in harness.queue.running]
    assert placements == [GPU] * 3 + [CPU] * 2
    harness.drain()


def test_what_could_never_end_on_the_gpu_is_not_promoted() -> None:
    # 20 + 79 tokens need 25 blocks, 20 exist: it decodes on the CPU, beside an empty GPU.
    harness = hybrid("neo")
    (request,) = fill(harness, 1, prompt=20, output=79)
    assert request.placement is CPU
    harness.drain()
    assert harness.state.num_moves == harness.state.num_preemptions == 0


def test_one_demotion_serves_all_decodes_that_lack_a_block() -> None:
    # Three GPU requests of 5 blocks, none free. All three need a block in the same iteration: the
    # newest leaves 5, and the two others wait for those instead of making another leave.
    harness = Harness(
        15, 4, 64, 256, policy="fixed:asymmetric", cost=COST, cpu_blocks=100, staging_blocks=15
    )
    requests = fill(harness, 3, prompt=8, output=16)
    while not harness.state.num_moves:
        harness.step()
    moves = harness.plans[-1].moves
    assert [m.request_id for m in moves] == [requests[-1].request_id]
    assert harness.state.num_preemptions == 0
    harness.drain()


def test_apex_overlaps_where_asymmetric_pipelining_does_not_pay() -> None:
    # T_ca 10 µs a token: a CPU decode of 22 tokens never hides; min_cpu_gpu_ratio 1.
    harness = hybrid(
        "apex",
        ConstantCostModel(num_layers=64, cpu_token=10.0),
        policy_args={"min_cpu_gpu_ratio": 1},
    )
    fill(harness, 6)
    assert decoding(harness)[1] >= decoding(harness)[0]
    assert harness.step().pipeline == "async_overlap"
    assert any(p.new_cohorts for p in harness.plans)
    harness.drain()


def test_apex_is_gpu_only_below_the_ratio_and_counts_parked_requests() -> None:
    cost = ConstantCostModel(num_layers=64, cpu_token=10.0)
    harness = hybrid("apex", cost, policy_args={"min_cpu_gpu_ratio": 100})
    fill(harness, 6)
    num_gpu, num_cpu = decoding(harness)
    assert num_cpu > 0
    plan = harness.step()
    assert plan.pipeline == "sequential" and plan.inequality is not None
    assert "min_cpu_gpu_ratio" in plan.inequality.words  # in the report's words: why
    assert (plan.inequality.left, plan.inequality.right) == (num_cpu / num_gpu, 100)
    harness = hybrid("apex", cost, policy_args={"min_cpu_gpu_ratio": 1, "cohorts": 2})
    fill(harness, 6)
    while not harness.state.num_in_flight:
        harness.step()
    num_gpu, num_cpu = decoding(harness)
    assert num_gpu > 0 and num_cpu >= harness.state.num_in_flight
    assert harness.step().pipeline == "async_overlap"


def test_cohorts_are_even_and_start_one_at_a_time() -> None:
    harness = Harness(
        8, 4, 64, 256, policy="fixed:async_overlap", policy_args={"cohorts": 4},
        cpu_blocks=2000, staging_blocks=200, cost=ConstantCostModel(num_layers=64, cpu_token=0.001),
    )  # fmt: skip
    fill(harness, 24, prompt=8, output=100)
    for _ in range(30):
        harness.step()
    sizes = [len(c.rows) for p in harness.plans[-30:] for c in p.new_cohorts]
    on_cpu = harness.state.num_decoding(CPU)
    assert on_cpu >= 20 and max(sizes) <= -(-on_cpu // 4) + 1
    assert all(len(p.new_cohorts) <= 1 for p in harness.plans)
    assert len(harness.state.cohorts) <= 4


def test_number_of_cohorts() -> None:
    assert [cohorts_wanted(n, None) for n in (0, 40, 64, 200, 640, 5000)] == [2, 2, 4, 8, 10, 32]
    assert cohorts_wanted(5, 7) == 7


def test_chunks_of_an_overlapped_pass_fit_the_cpus_visit() -> None:
    cost = ConstantCostModel(num_layers=2, linear_fixed=100, linear_row=1, gpu_token=0)
    load = Load(rows=104, gpu_tokens=50, chunks=((60, 0), (40, 7)))
    assert overlap_us(cost, load.without_chunks(), 0) == 208
    # A visit of 260 µs is less than twice 208: up to 2 (100 + 4 + p) = 416, p = 104: all.
    assert overlap_chunk_tokens(cost, load, 0, 260, cpu_free=1.0) == 100
    cost = ConstantCostModel(num_layers=2, linear_fixed=10, linear_row=10, gpu_token=0)
    # Alone 2 (10 + 40) = 100, twice that is 200: 2 (10 + 10 (4 + p)) <= 200, p = 5.
    assert overlap_chunk_tokens(cost, load, 0, 0, cpu_free=1.0) == 5
    # With a fifth of the CPU's KV left: 2 (10 + 10 (4 + p)) <= 120, p = 1.
    assert overlap_chunk_tokens(cost, load, 0, 0, cpu_free=0.2) == 1
    # A visit of 500 µs: 2 (10 + 10 (4 + p)) <= 500, p = 20.
    assert overlap_chunk_tokens(cost, load, 0, 500, cpu_free=0.2) == 20
    alone = Load(rows=100, chunks=((100, 0),))
    assert overlap_chunk_tokens(cost, alone, 0, 0, 0.0) == 100  # nothing else waits for the pass


def test_cpu_takes_in_no_more_than_it_can_serve_in_a_pass() -> None:
    # A pass takes 4 (100 + ~2) = 408 µs, a visit 2 µs a token of KV: about 204 tokens.
    cost = ConstantCostModel(num_layers=4, linear_fixed=100, gpu_token=0.1, cpu_token=2.0)
    harness = hybrid("fixed:async_overlap", cost)
    for _ in range(40):
        harness.add(20, 20)
    for _ in range(15):
        harness.step()
    on_cpu = [r for r in harness.queue.running if r.placement is not GPU]
    assert 4 <= len(on_cpu) <= 12 and harness.queue.num_waiting > 15
    harness.drain()


def test_fastdecode_decodes_on_the_cpu_in_two_equal_halves() -> None:
    harness = hybrid("fastdecode")
    fill(harness, 8)
    plan = harness.step()
    assert plan.pipeline == "symmetric"
    halves = [[r for r in b.rows if r.is_decode] for b in plan.sub_batches]
    assert [len(half) for half in halves] == [4, 4]
    assert all(r.placement is CPU for half in halves for r in half)
    chunks = [r for p in harness.plans for b in p.sub_batches for r in b.rows if not r.is_decode]
    assert chunks and all(r.placement is STAGING for r in chunks)
    harness.drain()


def test_fixed_shapes_and_their_errors() -> None:
    assert not make_policy("fixed:sequential").uses_cpu
    assert make_policy("fixed:sequential", {"use_cpu": True}).uses_cpu
    for pipeline in ("asymmetric", "symmetric", "async_overlap"):
        assert make_policy(f"fixed:{pipeline}").uses_cpu
    custom = make_policy("fixed:my_package.my_file:Mine", {"shape": "cohorts"})
    assert custom.uses_cpu
    with pytest.raises(ConfigError, match="one, two, halves, cohorts"):
        make_policy("fixed:sequential", {"shape": "three"})
    with pytest.raises(ConfigError, match="min_cpu_gpu_ratio must be >= 0"):
        make_policy("apex", {"min_cpu_gpu_ratio": -1})
    with pytest.raises(ConfigError, match="does not take"):
        make_policy("neo", {"cohorts": 3})
    with pytest.raises(ConfigError, match=r"'tests\.test_policies:Picky' cannot be made of"):
        make_policy("tests.test_policies:Picky", {"start": "x"})


class Picky(GpuOnly):
    """Its annotations are not there at run time."""

    def __init__(self, start: int, seed: Decimal | None = None) -> None:
        self.start = start + 1


@pytest.mark.parametrize("name", ["apex", "rho", "model_based", "fixed:async_overlap"])
def test_cohorts_are_between_2_and_32(name: str) -> None:
    for cohorts in (-1, 0, 1, 33, 50, 100):
        with pytest.raises(ConfigError, match=f"cohorts: .* from 2 to 32 or null, got {cohorts}"):
            make_policy(name, {"cohorts": cohorts})
    for cohorts in (None, 2, 32):
        make_policy(name, {"cohorts": cohorts})


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("apex", {"overlap": "no"}, "overlap: expected true or false, got 'no'"),
        ("apex", {"analytic_model": 1}, "analytic_model: expected true or false, got 1"),
        ("apex", {"cohorts": 4.0}, "cohorts: expected an integer or null, got 4.0"),
        ("apex", {"cohorts": True}, "cohorts: expected an integer or null, got True"),
        ("apex", {"min_cpu_gpu_ratio": None}, "min_cpu_gpu_ratio: expected a number, got None"),
        ("rho", {"threshold": "high"}, "threshold: expected a number, got 'high'"),
        ("rho", {"threshold": math.nan}, "threshold: expected a number, got nan"),
        ("model_based", {"margin": [1]}, "margin: expected a number, got [1]"),
        ("model_based", {"margin": 20}, "margin: expected a share from 0 to 1, got 20"),
        ("fixed:sequential", {"use_cpu": "yes"}, "use_cpu: expected true or false, got 'yes'"),
        ("fixed:sequential", {"shape": 2}, "shape: expected a text or null, got 2"),
    ],
)
def test_arguments_of_another_type_are_refused(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_policy(name, args)


@pytest.mark.parametrize(
    "name", ["json:JSONDecoder", "json:loads", "swiftapex.policies.base:Policy"]
)
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': expected a class with a plan"):
        make_policy(name)


@pytest.mark.parametrize(
    "name",
    ["json:loads", "swiftapex.policies.gpu_only:GpuOnly", "swiftapex.pipelines.base:Pipeline"],
)
def test_what_is_no_pipeline_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': expected a class with a step"):
        pipeline_class(name)


def test_policies_import_neither_pipelines_nor_each_other() -> None:
    root = Path(swiftapex.__file__).parent
    names = {path.partition(":")[0].rpartition(".")[2] for path in POLICIES.values()} | {"fixed"}
    for name in names:
        text = (root / "policies" / f"{name}.py").read_text()
        assert len(text.splitlines()) < 200
        imported = set(re.findall(r"^\s*(?:from|import) (swiftapex\S*)", text, re.MULTILINE))
        assert {i for i in imported if i.startswith("swiftapex.policies")} == {
            "swiftapex.policies.base"
        }
        assert not any(i.startswith("swiftapex.pipelines") for i in imported)


def test_model_based_takes_what_yields_most_in_the_long_run() -> None:
    cheap_cpu = ConstantCostModel(num_layers=4, linear_fixed=100, gpu_token=0.1, cpu_token=0.1)
    costly_rows = ConstantCostModel(num_layers=16, linear_row=10, cpu_token=10.0)
    for cost, expected in ((cheap_cpu, "asymmetric"), (costly_rows, "async_overlap")):
        harness = hybrid("model_based", cost, policy_args={"margin": 0.0})
        fill(harness, 12, output=60)
        for _ in range(20):
            harness.step()
        later = harness.plans[-20:]
        for plan in later:
            assert set(plan.candidates_us) == {"sequential", "asymmetric", "async_overlap"}
            sides = plan.inequality
            assert sides is not None and sides.left >= sides.right
        assert expected in {plan.pipeline for plan in later}
        harness.drain()


def test_model_based_overlaps_where_nothing_can_be_hidden_in_a_layer() -> None:
    # A visit takes 0.6 of a pass: T_ca 55 µs a decode of 22 tokens never hides behind T_l0 = 40
    # alone, while 32 layers of 40 µs hide many visits.
    cost = ConstantCostModel(num_layers=32, linear_fixed=40, gpu_token=0.01, cpu_token=2.5)
    harness = hybrid("model_based", cost, policy_args={"margin": 0.0})
    fill(harness, 20, output=60)
    ran = {plan.pipeline for plan in harness.plans}
    assert "async_overlap" in ran
    harness.drain()


def test_model_based_goes_on_with_what_is_on_the_cpu_where_more_would_not_pay() -> None:
    # A prompt takes 13 ms, and so many requests wait that the CPU could hold many more.
    cost = ConstantCostModel(num_layers=16, linear_row=10, cpu_token=10.0)
    harness = hybrid("model_based", cost, policy_args={"margin": 0.0})
    fill(harness, 12, output=60)
    for _ in range(300):
        harness.add(20, 10)
    before = len(harness.plans)
    for _ in range(30):
        harness.step()
    assert {plan.pipeline for plan in harness.plans[before:]} == {"async_overlap"}


def test_model_based_sends_nothing_to_a_cpu_that_does_not_pay() -> None:
    # One decode on the CPU takes 2200 µs a layer, where a layer takes the GPU 100.
    slow = ConstantCostModel(num_layers=4, cpu_token=100.0)
    harness = hybrid("model_based", slow)
    for _ in range(9):
        harness.add(20, 20)
    for _ in range(12):
        harness.step()
    assert {plan.pipeline for plan in harness.plans} == {"sequential"}
    chunks = [r for p in harness.plans for r in p.sub_batches[0].rows if not r.is_decode]
    assert chunks and all(r.placement is GPU for r in chunks)  # what goes there was swapped out
    harness.drain()


@pytest.mark.parametrize(
    ("gain", "on_cpu", "known_tokens", "expected"),
    [
        (1.10, 0, 1e3, GPU_ONLY),
        (1.10, 0, 1e5, ASYMMETRIC),
        (1.04, 99, 1e3, ASYMMETRIC),
        (1.04, 0, 1e9, ASYMMETRIC),
        (1.30, 0, 3e3, GPU_ONLY),
        (1.30, 0, 6e3, ASYMMETRIC),
        (1.01, 90, 1e9, GPU_ONLY),  # the margin of 2 %
    ],
)
def test_the_cpu_is_not_filled_for_a_gain_that_comes_too_late(
    gain: float, on_cpu: int, known_tokens: float, expected: str
) -> None:
    # A prompt takes 9 µs, as nine tokens do, and 100 of them must be there: 900 µs beside
    # known_tokens that take 1 / gain µs each, in place of 1.
    alone = steady.Steady(1.0, 100.0, 10, worth=1.0)
    gained = weighed(gain, gain, known_tokens, on_cpu)
    if not on_cpu:
        assert 1 / gained.worth == pytest.approx(1 / gain + 909 / known_tokens, rel=0.01)
    assert ModelBased().best({GPU_ONLY: alone, ASYMMETRIC: gained}) == expected


def weighed(
    rate: float, without_prompts: float, known: float, on_cpu: int, coming: float = 0.0
) -> steady.Steady:
    """An iteration with 100 requests on the CPU, where a token of prompt takes 1 µs and a request
    has 9.09 of them and 1.82 of output."""
    cost = ConstantCostModel(num_layers=1, linear_fixed=0, linear_row=1, prefill_token=0)
    mix = steady.Mix(5, 200, 10, 5, 1000, 64, known, coming, on_cpu)
    found = steady.Steady(rate, 100.0, 10, on_cpu=100)
    return steady.weighed(cost, mix, found, lambda: 1 / without_prompts)


def test_filling_the_cpu_costs_only_what_its_prompts_would_not_cost_later() -> None:
    """Where tokens take 10 µs with prompts and 5 without, a prompt is paid for either way; where
    they take 10 both times, as what the CPU does lasts longer, it is a loss."""
    assert weighed(0.1, 0.2, 1e3, 0).worth == pytest.approx(0.1, rel=0.001)
    assert 1 / weighed(0.1, 0.1, 1e3, 0).worth == pytest.approx(1 / 0.1 + 0.909, rel=0.001)
    # Nine times as many are still to come: a tenth of it each, and no end at which it is spared.
    assert 1 / weighed(0.1, 0.1, 1e3, 0, 9e3).worth == pytest.approx(1 / 0.1 + 0.0909, rel=0.001)
    assert 1 / weighed(0.1, 0.13, 1e3, 0, 9e3).worth == pytest.approx(1 / 0.1 + 0.0909, rel=0.001)


def test_parked_decodes_are_gone_on_with_where_more_would_gain_little() -> None:
    """A row and a token of prompt take 4 µs of a pass each, reading the weights another 4: that is
    shared by the more, the more decodes are parked, but of a hundred it is little already."""
    cost = ConstantCostModel(
        num_layers=4, linear_fixed=1, linear_row=1, gpu_token=0, cpu_token=0.01
    )
    mix = steady.Mix(20, 400, tokens_each=10, prompt_share=1, max_tokens=2048, max_rows=2048)
    most = steady.overlap(cost, mix, cohorts=1)
    there = {n: steady.overlap(cost, replace(mix, on_cpu=n), cohorts=1) for n in (5, 100)}
    assert most.on_cpu == there[5].on_cpu == 400 and there[5].there == 5 / 400
    assert there[100].on_cpu == 100 and there[100].there == 1
    assert there[100].rate < most.rate == pytest.approx(there[100].worth)


def test_two_sub_batches_take_as_many_whatever_waits_on_the_cpu() -> None:
    """A decode takes the CPU 6 µs a layer and asks for 5 of prompt: from 108 to 287 of them yield
    the same within 2 %, and the shortest iteration is taken."""
    cost = ConstantCostModel(
        num_layers=4, linear_fixed=20, linear_row=1, gpu_token=0.1, cpu_token=0.6
    )
    mix = steady.Mix(2, 2000, tokens_each=10, prompt_share=5, max_tokens=2048, max_rows=256)
    for on_cpu in (5, 120, 240, 1000):
        found = steady.asymmetric(cost, replace(mix, on_cpu=on_cpu))
        assert found.taken == 108 and found.on_cpu == 135
        assert found.there == min(1, on_cpu / 135)
        assert found.worth >= found.rate >= 0.985 * found.worth


def test_requests_that_came_while_others_ran_are_expected_to_go_on_coming() -> None:
    harness = hybrid("model_based", ConstantCostModel(num_layers=4))
    for _ in range(6):
        harness.add(20, 20)
    at_once = steady.Mix.of(harness.state)
    harness.step()
    running = harness.queue.num_running
    assert running and harness.queue.num_came_later == 0
    for _ in range(4):
        harness.add(20, 20)
    assert harness.queue.num_came_later == 4
    later = steady.Mix.of(harness.state)
    waiting = harness.queue.num_waiting
    assert at_once.known_tokens == pytest.approx(6 * at_once.output)
    assert later.known_tokens == pytest.approx((waiting + running / 2) * later.output)
    assert later.coming_tokens == pytest.approx(4 * later.output)
    harness.drain()
    assert harness.queue.num_came_later == 0  # what comes next is a new time


def test_margin_keeps_the_gpu_alone_where_the_gain_is_small() -> None:
    # A decode on the CPU for 16 on the GPU, in twice the time: a gain of a few percent at best.
    cost = ConstantCostModel(num_layers=4, linear_fixed=20, gpu_token=1.0, cpu_token=1.0)

    def share_alone(margin: float) -> float:
        """Of the iterations with rows on the GPU."""
        harness = hybrid("model_based", cost, policy_args={"margin": margin})
        fill(harness, 9, output=30)
        with_rows = [p for p in harness.plans if any(r.placement is GPU for r in rows_of(p))]
        harness.drain()
        return sum(p.pipeline == "sequential" for p in with_rows) / len(with_rows)

    def rows_of(plan: StepPlan) -> list[Row]:
        return [row for batch in plan.sub_batches for row in batch.rows]

    assert share_alone(1.0) == 1.0 and share_alone(0.0) < 0.5
    with pytest.raises(ConfigError, match="margin: expected a share from 0 to 1, got -1"):
        make_policy("model_based", {"margin": -1})


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.2, 1.3])
def test_with_prompts_a_slower_cpu_costs_no_more_than_its_share(slower: float) -> None:
    """A token asks for five of prompt: 6 µs of linear layers, which hide 6 µs of attention. Were
    only what is hidden taken in, a CPU that is slower by a tenth would find less to hide its work
    behind in each shorter iteration, down to where reading the weights hides it."""

    def best(factor: float) -> steady.Steady:
        cost = ConstantCostModel(
            num_layers=4, linear_fixed=100, linear_row=1, gpu_token=0.1, cpu_token=0.6 * factor
        )
        mix = steady.Mix(2, 2000, tokens_each=10, prompt_share=5, max_tokens=2048, max_rows=256)
        return steady.asymmetric(cost, mix)

    found = best(slower)
    # The bound: all work of a token, on whichever side there is more of it; weights for nothing.
    bound = 1 / (4 * max(6.0, 6.0 * slower))
    assert 0.88 * bound < found.rate < 1.02 * bound
    assert found.rate >= 0.98 * best(1.0).rate / slower
    assert found.chunk == 5 * (2 + found.taken) and found.taken >= 60


def test_model_based_takes_as_many_cpu_decodes_as_it_found_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where they are not hidden: a layer of 100 µs hides 4 of some 25 µs."""

    def compare(policy: ModelBased, *_: object) -> None:
        policy._strategy = ASYMMETRIC
        policy._yields = {
            GPU_ONLY: steady.Steady(1.0, 100.0, 0),
            ASYMMETRIC: steady.Steady(2.0, 100.0, 10, on_cpu=30, taken=13),
        }

    monkeypatch.setattr(ModelBased, "_compare", compare)
    harness = hybrid("model_based")
    fill(harness, 30, output=60)
    assert decoding(harness)[1] > 13
    plan = harness.step()
    assert plan.pipeline == "asymmetric"
    assert (
        sum(r.placement is CPU for batch in plan.sub_batches for r in batch.rows if r.is_decode)
        == 13
    )
    harness.drain()


@pytest.mark.parametrize(("taken", "waiting", "chunk"), [(30, 0, 100), (3, 0, 18), (30, 3, 18)])
def test_a_prompt_is_not_cut_where_all_cpu_decodes_are_taken_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch, taken: int, waiting: int, chunk: int
) -> None:
    def compare(policy: ModelBased, *_: object) -> None:
        policy._strategy = ASYMMETRIC
        policy._yields = {
            GPU_ONLY: steady.Steady(1.0, 100.0, 0),
            ASYMMETRIC: steady.Steady(2.0, 100.0, 10, on_cpu=40, taken=taken),
        }

    monkeypatch.setattr(ModelBased, "_compare", compare)
    harness = hybrid("model_based")
    fill(harness, 8, output=60)
    for _ in range(1 + waiting):  # the staging area holds one of them
        harness.add(100, 20)
    plan = harness.step()
    chunks = [r.num_tokens for batch in plan.sub_batches for r in batch.rows if not r.is_decode]
    assert plan.pipeline == "asymmetric" and chunks == [chunk]
    harness.drain()


def test_long_run_yields_by_hand() -> None:
    cost = ConstantCostModel(num_layers=4, linear_fixed=100, linear_row=1, gpu_token=1, cpu_token=1)
    mix = steady.Mix(
        gpu_decodes=2, cpu_decodes=40, tokens_each=10, prompt_share=0, max_tokens=50, max_rows=64
    )
    # 4 (100 + 2 + 20) = 488 µs for two tokens.
    alone = steady.gpu_only(cost, mix)
    assert alone == steady.Steady(2 / 488, 488, 0, worth=2 / 488, tokens=2, at_hand=2 / 488)
    # T_l0 = 102 at first hides 10 decodes of 10 µs; T_l1 = 110 and T_ga0 = 20 hide 13 more. With 15
    # rows in the first T_l0 = 115: no less is hidden. 4 (115 + 130) = 980 µs for 25 tokens, 23 of
    # them on the CPU, which should hold a quarter more.
    two = steady.asymmetric(cost, mix)
    assert two == steady.Steady(25 / 980, 980, 0, on_cpu=28, taken=23, worth=25 / 980, tokens=25)
    # 40 decodes rejoin 40 / 5 = 8 at a time: 4 (100 + 10 + 20) = 520 µs; a visit takes 400.
    parked = steady.overlap(cost, mix, cohorts=1)
    assert parked == steady.Steady(10 / 520, 520, 0, on_cpu=40, worth=10 / 520, tokens=10)
    # A visit of 80 decodes takes 800 µs, the pass 4 (100 + 18 + 20) = 552.
    slow = steady.overlap(cost, replace(mix, cpu_decodes=80), cohorts=1)
    assert slow.rate == pytest.approx((2 + 16 * 552 / 800) / 552)
    assert slow.on_cpu == 55  # 80 x 552 / 800: more of them only wait for the CPU
    # Each token comes with 4 of a prompt: 8 beside the two, of a prompt of 9. So 59 % of the
    # iterations have a chunk, of 14 tokens: 4 (100 + 16 + 20) = 544 µs; the others take 488.
    fed = steady.gpu_only(cost, replace(mix, prompt_share=4))
    us = 488 + (1 - math.exp(-8 / 9)) * (544 - 488)
    assert fed.chunk == 8 and fed.us == pytest.approx(us) and fed.rate == pytest.approx(2 / us)
    # With 40 of them 80 would be asked for, and 48 fit: a little more than half of the tokens.
    cut = steady.gpu_only(cost, replace(mix, prompt_share=40))
    assert cut.chunk == 48 and cut.rate == pytest.approx(2 * 49 / 80 / cut.us)
    assert steady.gpu_only(cost, replace(mix, gpu_decodes=0)).rate == 0


def test_a_long_chunk_is_whole_prompts_and_a_part_of_one() -> None:
    mix = steady.Mix(2, 40, tokens_each=60, prompt_share=1, max_tokens=500, max_rows=64)
    assert mix.output == mix.prompt == 40
    assert mix.with_chunk(0) == Load(2, 120, 0, (), 2)
    assert mix.with_chunk(10).chunks == ((10, 15),)  # behind none to 30 tokens
    assert mix.with_chunk(40).chunks == ((40, 0),)
    assert mix.with_chunk(90) == Load(92, 120, 0, ((40, 0), (40, 0), (10, 15)), 2)


class Tiles(ConstantCostModel):
    """Up to 100 rows a layer takes as long as reading its weights."""

    def linear_us(self, rows: int) -> float:
        return max(100.0, rows) if rows > 0 else 0.0


def test_gpu_only_reads_the_weights_for_decodes_alone_while_no_request_ends() -> None:
    cost = Tiles(num_layers=4, gpu_token=0)
    mix = steady.Mix(4, 40, tokens_each=525, prompt_share=10, max_tokens=2048, max_rows=64)
    share = 1 - math.exp(-40 / mix.prompt)  # of the iterations: the others have no chunk
    found = steady.gpu_only(cost, mix)
    assert mix.prompt == 500 and found.chunk == 40
    assert found.us == pytest.approx(4 * (100 + share * (4 + 40 / share - 100)), rel=0.001)
    # With the CPU each iteration has its part of a prompt, beside the weights.
    assert steady.asymmetric(cost, replace(mix, on_cpu=40)).chunk > 40
    # Prompts fill every iteration of this one, which holds no more.
    full = steady.gpu_only(cost, replace(mix, max_tokens=44))
    assert full.us == pytest.approx(4 * 100)


def test_a_few_parked_decodes_are_no_reason_to_overlap() -> None:
    """What need not be filled for is chosen again and again, one more each time."""
    cost = ConstantCostModel(num_layers=4, linear_fixed=1, linear_row=1, gpu_token=0)
    mix = steady.Mix(20, 400, tokens_each=10, prompt_share=1, max_tokens=2048, max_rows=2048)
    found = [steady.overlap(cost, replace(mix, on_cpu=n), cohorts=1) for n in (1, 49, 60)]
    assert found[0].on_cpu >= 50 and found[1].on_cpu >= 50 and found[0].there < 0.1
    assert found[2].there == 1


@pytest.mark.parametrize(("beyond_gpu", "expected"), [(1.0, ASYMMETRIC), (0.5, GPU_ONLY)])
def test_only_what_the_gpu_does_not_hold_counts_for_the_margin(
    beyond_gpu: float, expected: str
) -> None:
    found = {
        GPU_ONLY: steady.Steady(1.0, 100.0, 10, worth=1.0),
        ASYMMETRIC: steady.Steady(1.03, 100.0, 10, worth=1.03),
    }
    assert ModelBased().best(found, beyond_gpu) == expected


@pytest.mark.parametrize(("cpu_tokens", "expected"), [(2, GPU_ONLY), (20, ASYMMETRIC)])
def test_a_few_cpu_requests_fill_no_gaps_between_prompts(cpu_tokens: float, expected: str) -> None:
    # GPU-only yields .9 as it waits for prompts, and 1 if it did not.
    found = {
        GPU_ONLY: steady.Steady(0.9, 100.0, 10, worth=0.9, tokens=90, at_hand=1.0),
        ASYMMETRIC: steady.Steady(0.95, 100.0, 10, worth=0.95, tokens=90 + cpu_tokens),
    }
    assert ModelBased().best(found) == expected


def test_the_share_of_requests_that_the_gpu_cannot_hold() -> None:
    harness = hybrid("model_based", ConstantCostModel(num_layers=4))
    for _ in range(2):
        harness.add(20, 20)
    assert steady.Mix.of(harness.state).beyond_gpu == 0
    for _ in range(18):
        harness.add(20, 20)
    mix = steady.Mix.of(harness.state)
    assert mix.beyond_gpu == pytest.approx(1 - mix.gpu_decodes / 20) and mix.beyond_gpu > 0.5
    harness.drain()


@pytest.mark.parametrize(("on_cpu", "full", "room"), [(10, 60, 100), (20, 130, 150)])
def test_prompts_do_not_pile_up_where_the_gpu_holds_fewer_than_were_counted_on(
    monkeypatch: pytest.MonkeyPatch, on_cpu: int, full: int, room: int
) -> None:
    """100 tokens of prefill for 20 GPU decodes, of which 8 are missing, that ask for 5 each. Where
    the CPU holds 10 and should hold 20, half as many again are asked for, and half of the 8 count.
    """
    policy = ModelBased()
    policy._gpu_decodes = 20
    policy._yields = {ASYMMETRIC: steady.Steady(1.0, 100.0, 100, on_cpu=on_cpu, taken=3)}
    harness = hybrid("model_based")
    harness.add(50, 10)
    running = {GPU: 12, CPU: 10}
    monkeypatch.setattr(harness.state, "running_on", running.__getitem__)
    monkeypatch.setattr(harness.state, "can_start", lambda *_: False)
    assert policy._chunk(ASYMMETRIC, harness.state) == full
    monkeypatch.setattr(harness.state, "can_start", lambda *_: True)
    assert policy._chunk(ASYMMETRIC, harness.state) == room


@pytest.mark.parametrize("zero", ["cpu_token", "linear_fixed"])
def test_costs_that_a_profile_could_not_tell_from_noise_divide_nothing(zero: str) -> None:
    """Measured times are clipped at 0. Of a CPU that takes no time all decodes are hidden."""
    cost = replace(ConstantCostModel(num_layers=4, gpu_token=0, cpu_token=1), **{zero: 0.0})
    mix = steady.Mix(
        gpu_decodes=2, cpu_decodes=40, tokens_each=10, prompt_share=0, max_tokens=50, max_rows=64
    )
    found = steady.asymmetric(cost, mix)
    assert 0 < found.taken <= 40 and found.rate > 0
    with_prompts = replace(mix, prompt_share=2, known_tokens=1000)
    for filled in (steady.asymmetric(cost, with_prompts), steady.overlap(cost, with_prompts, 1)):
        assert 0 <= filled.worth <= filled.rate
    if zero == "cpu_token":
        assert found.taken == 40


def test_no_more_decodes_are_counted_than_a_batch_takes_tokens() -> None:
    # 10 decodes on a GPU whose batches take 6 tokens: no chunk beside them, and none of -4.
    harness = Harness(20, 16, 12, 6, policy="model_based", cpu_blocks=20, staging_blocks=20)
    for _ in range(10):
        harness.add(6, 10)
    while harness.state.queue.num_waiting:
        harness.step()
    for _ in range(3):
        harness.add(6, 10)
    mix = steady.Mix.of(harness.state)
    assert mix.prompt_share > 0 and mix.gpu_decodes == mix.max_rows == 6
    alone = steady.gpu_only(harness.cost, mix)
    assert alone.chunk == 0 and alone.rate > 0
    harness.drain()


def test_prompts_are_weighed_by_what_ended_requests_had() -> None:
    queue = RequestQueue()

    def ended(prompt: int, output: int) -> None:
        request = Request(len(queue), (1,) * prompt, SamplingParams(max_tokens=100), 0.0)
        queue.add(request)
        queue.start(request)
        request.output_ids.extend([1] * output)
        queue.remove(request)

    waiting = Request(50, (1,) * 50, SamplingParams(max_tokens=100), 0.0)
    queue.add(waiting)
    assert queue.prompt_share() == 0.5  # as long as it may get
    queue.remove(waiting)
    for _ in range(12):
        ended(30, 10)
    assert queue.prompt_share() == pytest.approx(3.0)
    for _ in range(400):
        ended(10, 20)
    assert queue.prompt_share() == pytest.approx(0.5, rel=0.01)
