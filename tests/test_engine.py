"""The engine over a tiny model: batching, chunking, preemption change no token; nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from swiftapex import LLM, SamplingParams
from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.core.errors import ConfigError, EngineError, RequestError
from swiftapex.core.plan import StepPlan
from swiftapex.core.request import FinishReason, Placement, Request
from swiftapex.core.trace import TraceRecorder
from swiftapex.engine.engine import Engine
from swiftapex.policies.base import Policy
from swiftapex.scheduler.index import RequestIndex
from swiftapex.scheduler.state import SchedulerState

TINY = ModelSection(architecture="tiny", weights="dummy", dtype="float32")
DEVICES = ("reference", "cpu")


def make_engine(
    device: str = "cpu",
    kv_tokens: int = 4096,
    block_size: int = 16,
    rows: int = 256,
    chunk: int = 2048,
    **kwargs: object,
) -> Engine:
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        gpu=GpuConfig(kv_tokens=kv_tokens),
        block_size=block_size,
        max_batch_size=rows,
        max_tokens_in_batch=chunk,
        max_model_len=512,
    )
    return Engine(TINY, config, **kwargs)  # type: ignore[arg-type]


def random_prompts(n: int, seed: int = 0, longest: int = 100) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine._blocks.check_integrity()
        engine._queue.check_integrity()
    stats = engine.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total
    assert stats.running_gpu == stats.waiting == 0


def run_all(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[Request]:
    ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    requests = [engine.request(i) for i in ids]
    drain(engine)
    return requests


def alone(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    """Each request by itself, unchunked, on the reference backend."""
    engine = make_engine("reference")
    outputs = [
        run_all(engine, [p], [s])[0].output_ids for p, s in zip(prompts, params, strict=True)
    ]
    engine.close()
    return outputs


@pytest.mark.parametrize("device", DEVICES)
def test_batching_chunking_and_preemption_change_no_token(device: str) -> None:
    prompts = random_prompts(12)
    params = [
        SamplingParams(max_tokens=40, temperature=0.0 if i % 3 else 0.9, top_p=0.9, seed=i)
        for i in range(12)
    ]
    expected = alone(prompts, params)
    preemptions = 0
    for kv_tokens, block_size, rows, chunk in (
        (4096, 16, 256, 2048),
        (4096, 32, 5, 7),
        (192, 4, 256, 33),
        (160, 16, 3, 64),
    ):
        engine = make_engine(device, kv_tokens, block_size, rows, chunk)
        assert [r.output_ids for r in run_all(engine, prompts, params)] == expected
        preemptions += engine.stats().preemptions
        engine.close()
    assert preemptions > 0


@pytest.mark.parametrize("block_size", (4, 16))
def test_lengths_around_a_block(block_size: int) -> None:
    b = block_size
    prompts = [list(range(5, 5 + n)) for n in (1, b - 1, b, b + 1, 2 * b)]
    params = [SamplingParams(max_tokens=b + 2)] * len(prompts)
    engine = make_engine("cpu", block_size=b)
    assert [r.output_ids for r in run_all(engine, prompts, params)] == alone(prompts, params)
    engine.close()


def test_abort_in_every_state_returns_all_blocks() -> None:
    engine = make_engine(kv_tokens=160, block_size=4, chunk=16)
    for seed in range(12):
        ids = [
            engine.add_request(p, SamplingParams(max_tokens=30)) for p in random_prompts(8, seed)
        ]
        for _ in range(seed):
            engine.step()
        for request_id in ids:
            engine.abort(request_id)
        assert not engine.has_work and engine.step() == []
        drain(engine)
    engine.close()


def test_a_bad_request_is_refused_alone() -> None:
    llm = LLM(TINY.model_dump(), device="cpu", gpu={"kv_tokens": 800}, block_size=16)
    first = llm.generate(random_prompts(10, longest=20), SamplingParams(max_tokens=5))
    bad: list[tuple[object, SamplingParams, str]] = [
        ([], SamplingParams(), "empty"),
        ([512], SamplingParams(), "outside the vocabulary of 512"),
        ([-1], SamplingParams(), "outside the vocabulary"),
        ([True], SamplingParams(), "not an integer"),
        ([5], SamplingParams(temperature=-1), "temperature"),
        ([5], SamplingParams(max_tokens=0), "max_tokens"),
        ([5], SamplingParams(top_p=0), "top_p"),
        ("text", SamplingParams(), "no tokenizer"),
        ([5], SamplingParams(stop=("x",)), "need a tokenizer"),
        ([7] * 1002, SamplingParams(max_tokens=50), "need 66 KV blocks of 16 tokens, 50 exist"),
    ]
    prompts = [b[0] for b in bad] + [[5, 6, 7]]
    outputs = llm.generate(prompts, [b[1] for b in bad] + [SamplingParams(max_tokens=50)])
    for output, (_, _, message) in zip(outputs, bad, strict=False):
        assert output.finish_reason == "error" and output.token_ids == ()
        assert output.error is not None and message in output.error, output.error
    assert outputs[-1].finish_reason == "length" and len(outputs[-1].token_ids) == 50
    again = llm.generate(random_prompts(10, longest=20), SamplingParams(max_tokens=5))
    assert [o.token_ids for o in again] == [o.token_ids for o in first]
    stats = llm.stats()
    assert stats.gpu_blocks_free == stats.gpu_blocks_total == 50
    llm.close()


def test_equal_seeds_give_equal_tokens_beside_greedy_rows() -> None:
    engine = make_engine()
    prompt = random_prompts(1)[0]
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=s) for s in (1, 1, 2)]
    params.append(SamplingParams(max_tokens=20))
    one, same, other, greedy = (r.output_ids for r in run_all(engine, [prompt] * 4, params))
    assert one == same != other
    assert [greedy] == alone([prompt], [params[-1]])
    unseeded = [SamplingParams(max_tokens=20, temperature=1.0)] * 2
    a, b = (r.output_ids for r in run_all(engine, [prompt] * 2, unseeded))
    assert a != b
    engine.close()


def test_a_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="5000 is more than the model's 4096"):
        Engine(TINY, EngineConfig(device="reference", max_model_len=5000))


def test_stop_tokens_and_the_models_end_of_sequence() -> None:
    engine = make_engine()
    prompt = random_prompts(1)[0]
    (free,) = run_all(engine, [prompt], [SamplingParams(max_tokens=20, ignore_eos=True)])
    stop_id = free.output_ids[7]
    expected = free.output_ids[: free.output_ids.index(stop_id) + 1]
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(stop_id,), ignore_eos=True)
    (stopped,) = run_all(engine, [prompt], [sampling])
    assert stopped.output_ids == expected and stopped.finish_reason is FinishReason.STOP
    object.__setattr__(engine.model_config, "eos_token_ids", (511, stop_id))
    (eos,) = run_all(engine, [prompt], [SamplingParams(max_tokens=20)])
    assert eos.output_ids == expected and eos.finish_reason is FinishReason.STOP
    (ignored,) = run_all(engine, [prompt], [SamplingParams(max_tokens=20, ignore_eos=True)])
    assert ignored.output_ids == free.output_ids
    assert ignored.finish_reason is FinishReason.LENGTH
    engine.close()


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    engine = make_engine("reference")
    engine._executor._worker._stages.weights.embedding[500] = float("nan")
    sampling = SamplingParams(max_tokens=4)
    bad, good = run_all(engine, [[5, 500, 6], [5, 6, 7]], [sampling] * 2)
    assert bad.finish_reason is FinishReason.ERROR and "not finite" in (bad.error or "")
    assert len(good.output_ids) == 4 and good.error is None
    engine.close()


def test_a_failed_iteration_fails_open_requests_and_the_engine_closes() -> None:
    engine = make_engine("reference")
    request = engine.request(engine.add_request([5, 6], SamplingParams()))

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    engine._executor.execute = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="the device is gone"):
        engine.step()
    assert request.finish_reason is FinishReason.ERROR and "device is gone" in (request.error or "")
    with pytest.raises(EngineError, match="broken"):
        engine.add_request([5], SamplingParams())
    engine.close()
    engine.close()


def test_a_policy_that_never_schedules_is_found_out() -> None:
    engine = make_engine("reference", policy="tests.test_engine:Lazy")
    engine.add_request([5, 6], SamplingParams())
    with pytest.raises(EngineError, match=r"no progress.*request 0: waiting, 2 tokens"):
        while True:
            engine.step()
    engine.close()


class Lazy(Policy):
    """Schedules nothing."""

    def plan(self, state: SchedulerState, *_: object) -> StepPlan:
        return state.step_plan("sequential", [])


def test_unknown_policies_and_devices_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'gpu_onli'"):
        make_engine(policy="gpu_onli")
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        make_engine(policy="nowhere:Policy")
    with pytest.raises(ConfigError, match="has no 'Missing'"):
        make_engine(policy="tests.test_engine:Missing")
    with pytest.raises(ConfigError, match="does not take"):
        make_engine(policy="gpu_only", policy_args={"x": 1})


def test_streams_from_threads_and_asyncio_give_the_tokens_of_generate() -> None:
    with LLM(TINY.model_dump(), device="cpu") as llm:
        prompts = random_prompts(4)
        sampling = SamplingParams(max_tokens=12)
        expected = [o.token_ids for o in llm.generate(prompts, sampling)]

        got: dict[int, tuple[int, ...]] = {}

        def consume(index: int) -> None:
            chunks = list(llm.stream(prompts[index], sampling))
            got[index] = tuple(t for c in chunks for t in c.token_ids)
            assert [c.finish_reason for c in chunks][-1] == "length"

        threads = [threading.Thread(target=consume, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[i] for i in range(4)] == expected

        async def consume_all() -> list[tuple[int, ...]]:
            async def one(prompt: list[int]) -> tuple[int, ...]:
                return tuple([t async for c in llm.astream(prompt, sampling) for t in c.token_ids])

            return await asyncio.gather(*(one(p) for p in prompts))

        assert asyncio.run(consume_all()) == expected
        stream = llm.stream(prompts[0], sampling)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        stats = llm.stats()
        assert stats.running_gpu == 0 and stats.gpu_blocks_free == stats.gpu_blocks_total
        with pytest.raises(RequestError):
            next(llm.stream([], sampling))


def test_a_cancelled_stream_ends_its_request_and_nothing_else() -> None:
    async def cancel_one(llm: LLM, prompt: list[int]) -> None:
        began = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.astream(prompt, SamplingParams(max_tokens=200, ignore_eos=True)):
                began.set()

        task = asyncio.create_task(consume())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with LLM(TINY.model_dump(), device="cpu") as llm:
        (prompt,) = random_prompts(1)
        for _ in range(5):
            asyncio.run(cancel_one(llm, prompt))
        stats = llm.stats()
        assert stats.running_gpu == 0 and stats.gpu_blocks_free == stats.gpu_blocks_total
        (out,) = llm.generate([prompt], SamplingParams(max_tokens=4))
        assert len(out.token_ids) == 4


@pytest.mark.parametrize("how", ("once", "twice", "at the loop's end"))
def test_a_stream_cancelled_during_an_iteration(how: str) -> None:
    """Its thread goes on: the task ends as cancelled, and the request once the iteration has."""
    ended: list[BaseException] = []

    async def cancel_one(llm: LLM) -> None:
        async def consume() -> None:
            try:
                async for _ in llm.astream([5, 6, 7], SamplingParams(max_tokens=200)):
                    pass
            except BaseException as error:
                ended.append(error)
                raise

        task = asyncio.create_task(consume())
        await asyncio.to_thread(begun.wait)
        for _ in range({"once": 1, "twice": 2}.get(how, 0)):
            task.cancel()
            await asyncio.sleep(0.01)
        threading.Timer(0.1, go_on.set).start()
        if how != "at the loop's end":
            await asyncio.wait([task])

    with LLM(TINY.model_dump(), device="cpu") as llm:
        begun, go_on, step = threading.Event(), threading.Event(), llm._engine.step

        def held_step() -> list[Request]:
            begun.set()
            go_on.wait()
            return step()

        llm._engine.step = held_step  # type: ignore[method-assign]
        asyncio.run(cancel_one(llm))  # waits for the threads
        assert [type(error) for error in ended] == [asyncio.CancelledError]
        stats = llm.stats()
        assert not llm._engine.has_work and stats.gpu_blocks_free == stats.gpu_blocks_total


def test_engines_one_after_another_leave_no_memory_and_no_thread() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def native_threads() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))

    sizes, threads = [], []
    for _ in range(4):
        engine = make_engine("cpu", kv_tokens=100_000)
        store = engine._executor._worker._store
        for layer in range(engine.model_config.num_layers):
            store.layer(Placement.GPU, layer).fill_(1.0)  # 200 MB in all are really there
        run_all(engine, random_prompts(4), [SamplingParams(max_tokens=4)] * 4)
        engine.close()
        del engine, store
        gc.collect()
        sizes.append(resident_bytes())
        threads.append(native_threads())
    assert threads[-1] == threads[0]
    assert sizes[-1] - sizes[0] < 100e6, sizes


def test_an_interrupted_iteration_ends_the_engine_rather_than_giving_wrong_tokens() -> None:
    """The worker may have run ahead of the books: nothing that follows could be trusted."""
    for policy in ("gpu_only", "fastdecode"):
        engine = make_engine(policy=policy)
        request = engine.request(engine.add_request([5, 9, 17], SamplingParams(max_tokens=20)))
        engine.step()
        execute = engine._executor.execute

        def interrupted(plan: StepPlan, execute: object = execute) -> None:
            execute(plan)  # type: ignore[operator]
            raise KeyboardInterrupt

        engine._executor.execute = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert request.finish_reason is FinishReason.ERROR
        with pytest.raises(EngineError, match="interrupted by KeyboardInterrupt"):
            engine.step()
        engine.close()


def test_wrongly_typed_parameters_are_refused_alone() -> None:
    with LLM(TINY.model_dump(), device="reference") as llm:
        good = SamplingParams(max_tokens=3)
        bad = [
            SamplingParams(temperature=1, seed=1.5),  # type: ignore[arg-type]
            SamplingParams(temperature="0.5"),  # type: ignore[arg-type]
            SamplingParams(max_tokens=float("nan")),  # type: ignore[arg-type]
            SamplingParams(max_tokens=None),  # type: ignore[arg-type]
            SamplingParams(top_k=10**400),
            SamplingParams(stop=(5,)),  # type: ignore[arg-type]
        ]
        outputs = llm.generate([[5, 6]] * 7, [good, *bad])
        assert outputs[0].finish_reason == "length"
        assert all(o.finish_reason == "error" and o.error for o in outputs[1:])
        stats = llm.stats()
        assert stats.waiting == stats.running_gpu == 0
        seeded = SamplingParams(temperature=1, seed=np.int64(5), max_tokens=3)
        assert llm.generate([[5]], seeded)[0].finish_reason == "length"


def test_settings_that_nothing_heeds_are_refused() -> None:
    for config, why in (
        ({"gpu": {"memory": "1MB"}}, "memory: 1000000 needs device cuda; with device cpu leave it"),
        ({"cpu": {"mlock": True}}, "mlock: True is not supported; with device cpu leave it out"),
    ):
        with pytest.raises(ConfigError, match=why):
            LLM(TINY.model_dump(), **config)


@pytest.mark.parametrize("block_size", [4, 16])
def test_traces_of_cpu_decodes_with_any_block_size(block_size: int) -> None:
    trace = TraceRecorder(10)
    config = EngineConfig(
        block_size=block_size, gpu=GpuConfig(kv_tokens=256), cpu=CpuConfig(kv_tokens=1024)
    )
    engine = Engine(TINY, config, policy="fastdecode", trace=trace)
    run_all(engine, [[i + 5, 6] for i in range(6)], [SamplingParams(max_tokens=4)] * 6)
    assert engine.stats().cpu_decoded_tokens > 0
    engine.close()


def test_cpu_decodes_are_filed_together_not_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = []
    touch = RequestIndex.touch
    monkeypatch.setattr(
        RequestIndex, "touch", lambda self, request: (touched.append(request), touch(self, request))
    )
    config = EngineConfig(gpu=GpuConfig(kv_tokens=256), cpu=CpuConfig(kv_tokens=1024))
    engine = Engine(TINY, config, policy="fastdecode")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = run_all(engine, [[i + 5, 6] for i in range(6)], [params] * 6)
    assert engine.stats().cpu_decoded_tokens == sum(len(r.output_ids) - 1 for r in requests)
    assert len(touched) == 2 * len(requests), "touched when they start and when prefilled"
    engine.close()
