"""Engines in simulated time take what the closed forms say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from harness import ConstantCostModel

from swiftapex.core.errors import EngineError, RequestError
from swiftapex.core.plan import StepPlan
from swiftapex.core.request import Placement, SamplingParams
from swiftapex.cost_model import CostModel, Load, gpu_only_us, overlap_us
from swiftapex.kv.sizing import KVSizes
from swiftapex.policies.base import Policy
from swiftapex.scheduler.state import SchedulerState
from swiftapex.simulation.engine import SimulatedEngine

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
COST = ConstantCostModel(num_layers=4, linear_fixed=100, linear_row=1, gpu_token=0.5, iteration=50)


def engine(policy: str, cost: ConstantCostModel = COST, gpu: int = 64) -> SimulatedEngine:
    sizes = KVSizes(gpu, 64, 16, "float16")
    return SimulatedEngine(policy, None, cost, sizes, 16, 64, 256, 2048)


def add_decoding(simulated: SimulatedEngine, count: int, output: int) -> None:
    for _ in range(count):
        simulated.add_in_progress([1] * 20, SamplingParams(max_tokens=output), 1)


def test_gpu_only_decoding_takes_equation_1() -> None:
    """Eight requests of 20 + 1 tokens decode nine tokens more each."""
    simulated = engine("gpu_only")
    add_decoding(simulated, 8, 10)
    while simulated.has_work:
        simulated.step()
    passes = [gpu_only_us(COST, Load(8, 8 * (21 + i), gpu_requests=8)) for i in range(9)]
    assert passes[0] == 4 * (100 + 8 + 8 * 21 * 0.5) + 50
    assert [record.duration_us for record in simulated.iterations] == pytest.approx(passes)
    assert simulated.clock() == pytest.approx(1e-6 * sum(passes))
    assert {record.gpu_decodes for record in simulated.iterations} == {8}
    assert simulated.stats().gpu_blocks_free == 64


def test_an_overlapped_token_takes_a_pass_more_than_there_are_layers() -> None:
    """Of six decodes the GPU holds two; four go through L + 1 = 5 passes for each token."""
    simulated = engine("fixed:async_overlap", gpu=5)
    add_decoding(simulated, 6, 40)
    assert simulated.stats().running_cpu == 4
    for _ in range(12):
        simulated.step()
    ended = [i for i, record in enumerate(simulated.iterations) if record.cpu_decodes]
    assert ended == [4, 5, 9, 10]  # two cohorts of two, one formed in each pass
    second = overlap_us(COST, Load(2, 2 * 22, gpu_requests=2), 4, 2)
    assert simulated.iterations[1].duration_us == pytest.approx(second)


def test_a_slow_cpu_is_shared_by_all_cohorts() -> None:
    """A visit of two cohorts with 42 tokens each takes 840 µs, a pass of some 600 less."""
    simulated = engine("fixed:async_overlap", ConstantCostModel(num_layers=4, cpu_token=10), gpu=5)
    add_decoding(simulated, 6, 40)
    for _ in range(20):
        simulated.step()
    ended = [i for i, record in enumerate(simulated.iterations) if record.cpu_decodes]
    assert ended[0] > 5
    assert simulated.busy().cpu_s == pytest.approx(simulated.clock(), rel=0.15)


def test_what_cannot_run_is_refused_and_a_plan_without_work_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = engine("gpu_only", gpu=2)
    with pytest.raises(RequestError, match="can never fit"):
        simulated.add([1] * 100, SamplingParams(max_tokens=10))
    simulated.add([1] * 20, SamplingParams(max_tokens=10))
    with pytest.raises(RequestError, match="no KV blocks are left"):
        add_decoding(simulated, 1, 10)
    monkeypatch.setattr(simulated._policy, "plan", lambda *_: StepPlan("sequential", ()))
    with pytest.raises(EngineError, match="nothing runs"):
        simulated.step()


class StartsAndPreempts(Policy):
    """Its iterations bring nothing, though none is without a reason."""

    uses_cpu = False

    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        if state.queue.num_waiting:
            state.start(state.queue.first_waiting, Placement.GPU)
        plan = state.step_plan("sequential", [state.new_batch()])
        for request in list(state.queue.running):
            state.preempt(request)
        return plan


def test_iterations_that_bring_nothing_do_not_go_on_for_ever() -> None:
    simulated = engine("gpu_only")
    simulated._policy = StartsAndPreempts()
    simulated.add([1] * 20, SamplingParams(max_tokens=10))
    with pytest.raises(EngineError, match="no progress in 100 iterations"):
        for _ in range(200):
            simulated.step()


class WithoutPlan(Policy):
    def plan(self, state: SchedulerState, cost_model: CostModel) -> StepPlan:
        return None  # type: ignore[return-value]


def test_a_policy_that_returns_nothing_is_named() -> None:
    simulated = engine("tests.test_simulate:WithoutPlan")
    add_decoding(simulated, 1, output=4)
    with pytest.raises(EngineError, match=r"plan\(\) of tests\.test_simulate:WithoutPlan returned"):
        simulated.step()


def test_requests_in_progress_have_a_token_left_to_generate_and_no_more_than_asked_for() -> None:
    simulated = engine("gpu_only")
    for tokens in (1, 3):
        with pytest.raises(RequestError):
            simulated.add_in_progress([1] * 20, SamplingParams(max_tokens=tokens), tokens)
    assert not simulated.has_work
    request = simulated.add_in_progress([1] * 20, SamplingParams(max_tokens=3), 0)
    assert len(request.output_ids) == 1
    while simulated.has_work:
        simulated.step()
    assert len(request.output_ids) == 3


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("simulate")


@pytest.mark.parametrize(
    "argument",
    ["outputs 0", "outputs -5", "requests 0", "requests -1", "seconds 0", "seconds nan",
     "stretch inf", "stretch 0.5", "warmup -1", "warmup nan", "cpu-gib -1", "cpu-gib nan",
     "cpu-gib inf", "block-size 0", "max-len 0", "max-batch 0", "max-tokens -3", "start some",
     "start 4:x"],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    monkeypatch.setattr("sys.argv", f"simulate --{argument}".split())
    with pytest.raises(SystemExit) as refused:
        script.main()
    assert refused.value.code == 2
    assert f"argument --{argument.split()[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--regimes t4-864 --outputs 1500", "can never fit"),
        ("--regimes t4-864 --kinds window --outputs 1500", "no request was in progress"),
        ("--regimes low-batch --kinds decode --outputs 50 --seconds 1", "no request was in progr"),
    ],
)
def test_runs_that_are_not_possible_say_why_and_the_others_go_on(
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(SCRIPTS.parent)
    common = "--outputs 50 --policies gpu_only --requests 3"
    monkeypatch.setattr("sys.argv", f"simulate {common} {arguments}".split())
    assert script.main() == 1
    for line in capsys.readouterr().out.splitlines():
        found = script.json.loads(line)
        assert words in found["error"] and "output_tokens_per_s" not in found
    argv = "simulate --regimes t4-864 --outputs 1500 50 --policies gpu_only --requests 2"
    monkeypatch.setattr("sys.argv", argv.split())
    assert script.main() == 1
    lines = list(map(script.json.loads, capsys.readouterr().out.splitlines()))
    assert ["error" in line for line in lines] == [True, False]


def test_a_run_of_a_regime_is_the_same_again(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "simulate --regimes t4-864 --outputs 50 --policies gpu_only apex --requests 30"
    arguments += " --kinds whole window --seconds 2 --warmup 1 --start 20"

    def lines() -> list[dict[str, Any]]:
        monkeypatch.setattr("sys.argv", arguments.split())
        script.main()
        found = [script.json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [{k: v for k, v in line.items() if k != "simulated_in_s"} for line in found]

    first = lines()
    assert first == lines()
    assert [(line["policy"], line["kind"]) for line in first] == [
        ("gpu_only", "whole"), ("apex", "whole"), ("gpu_only", "window"), ("apex", "window"),
    ]  # fmt: skip
    assert first[0]["on_cpu_most"] == 0 and first[1]["on_cpu_most"] > 0
    for line in first:
        assert sum(line["iterations"].values()) == pytest.approx(1, abs=0.01)
        assert line["output_tokens_per_s"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--policies gpu_only apx", "unknown policy 'apx'"),
        ("--policies fixed:asym", "expected a pipeline of sequential, asymmetric"),
        ("--policies my_lab.none:Mine", "no module 'my_lab.none' on the Python path"),
        ("--policies apex?[1]", "expected NAME or NAME?{"),
        ("--policies apex?{", "expected NAME or NAME?{"),
        ("--outputs 3000", "longest request has 3575 tokens, more than --max-len 2048"),
        ("--outputs 0", "--outputs: expected a number of at least 1, got 0"),
        ("--requests -3", "--requests: expected a number of at least 1, got -3"),
        ("--profile /none.json", "--profile /none.json: No such file"),
        (f"--profile {Path(__file__)}", "it holds no measured tables"),
        (f"--profile {SCRIPTS.parent}/docs/results/regimes.json", "it holds no measured tables"),
        (
            f"--profile {SCRIPTS.parent}/docs/results/profile_llama3.1-8b.json",
            "measured on something else than llama2-7b: intermediate_size is 14336, not 11008",
        ),
        ("--kinds window --start some", "--start: invalid start value: 'some'"),
        ("--kinds window --start 0", "--start: expected a number of at least 1, got 0"),
        ("--kinds window --start 9:2", "--start: expected a share of at most 1"),
        ("--kinds window --seconds 0", "--seconds: expected a number of at least 0.001, got 0"),
    ],
)
def test_arguments_that_cannot_be_are_answered_before_anything_runs(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script: Any = importlib.import_module("simulate")
    monkeypatch.setattr("sys.argv", ["simulate", "--regimes", "t4-864", *arguments.split()])
    try:
        code = script.main()
    except SystemExit as error:  # of argparse
        code = error.code
    shown = capsys.readouterr()
    assert code == 2
    assert message in shown.err
    assert shown.out == ""
