"""Workloads: the same requests for the same seed, and files with all their quirks."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from pydantic import ValidationError

from swiftapex.config.schema import WorkloadConfig
from swiftapex.core.errors import ConfigError
from swiftapex.workloads.build import WorkItem, build_workload, check_workload
from swiftapex.workloads.files import read_trace
from swiftapex.workloads.lengths import draw_length
from swiftapex.workloads.replay import Sent, prepare, replay

VOCAB = 1000


def synthetic(**settings: Any) -> WorkloadConfig:
    values = {"kind": "synthetic", "num_requests": 20, "input_len": 12, "output_len": 7} | settings
    return WorkloadConfig.model_validate(values)


def of_file(kind: str, path: Path, text: str, **settings: Any) -> WorkloadConfig:
    path.write_bytes(text.encode())
    return WorkloadConfig.model_validate({"kind": kind, "path": str(path)} | settings)


def build(workload: WorkloadConfig, seed: int = 0) -> list[WorkItem]:
    return build_workload(workload, seed, VOCAB)


def test_same_seed_same_requests() -> None:
    workload = synthetic(input_len={"mean": 50, "spread": 0.5}, arrival="poisson", rate=3.0)
    assert build(workload) == build(workload)
    assert build(workload, seed=1) != build(workload)


def test_a_request_does_not_depend_on_rate_count_or_output() -> None:
    few = build(synthetic(num_requests=5, input_len="osc"))
    many = build(synthetic(input_len="osc", arrival="poisson", rate=9.0, output_len="osc"))
    for one, other in zip(few, many, strict=False):
        assert one.prompt == other.prompt
        assert one.sampling.seed == other.sampling.seed
    assert len({item.sampling.seed for item in many}) == len(many)


def test_a_workload_replayed_twice_sends_the_same_requests() -> None:
    workload = synthetic(
        input_len="livebench", output_len={"mean": 6, "spread": 0.5}, arrival="poisson", rate=200
    )
    sent = []
    for step_s in (0.0, 0.003):  # engines of different speeds
        engine = FakeEngine(step_s=step_s, max_model_len=4096, vocab_size=VOCAB)
        log = replay(engine, build(workload, seed=7), workload)
        requests = [(r.prompt_ids, r.sampling, r.arrival_s - log.start_s) for r in engine.added]
        sent.append((requests, [o.output_ids for o in log.outcomes]))
    (first, first_outputs), (second, second_outputs) = sent
    assert len(first) == 20 and first_outputs == second_outputs
    for (prompt, sampling, arrival_s), other in zip(first, second, strict=True):
        assert (prompt, sampling) == other[:2]
        assert arrival_s == pytest.approx(other[2], abs=1e-6)


def test_random_ids_are_within_the_vocabulary_and_lengths_are_forced() -> None:
    for item in build(synthetic()):
        assert len(item.prompt) == 12
        assert all(isinstance(i, int) and 0 <= i < VOCAB for i in item.prompt)
        assert (item.sampling.max_tokens, item.sampling.ignore_eos) == (7, True)
    assert not build(synthetic(ignore_eos=False))[0].sampling.ignore_eos


def test_poisson_arrivals_have_the_rate() -> None:
    items = build(synthetic(num_requests=4000, input_len=1, arrival="poisson", rate=8.0))
    times = [item.arrival_s for item in items]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / len(times) == pytest.approx(1 / 8, rel=0.06)


@pytest.mark.parametrize(
    ("name", "side", "mean", "median", "p90"),
    [
        ("osc", "input", 373, 371, 514),
        ("osc", "output", 45, 45, 56),
        ("azure_conv", "input", 1155, 1020, 2735),
        ("azure_conv", "output", 211, 129, 424),
        ("azure_code", "input", 2048, 1469, 5194),
        ("azure_code", "output", 28, 13, 55),
        ("livebench", "input", 440, 350, 833),
        ("livebench", "output", 710, 600, 1274),
        ("dolphin_r1", "input", 160, 120, 324),
        ("dolphin_r1", "output", 1300, 1100, 2336),
    ],
)
def test_named_distributions_fit(name: Any, side: Any, mean: int, median: int, p90: int) -> None:
    drawn = sorted(draw_length(name, side, random.Random(f"{i}")) for i in range(20_000))
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert drawn[10_000] == pytest.approx(median, rel=0.05)
    assert drawn[18_000] == pytest.approx(p90, rel=0.05)
    assert drawn[0] >= 1


def test_spread_is_relative_and_uniform() -> None:
    lengths = {
        len(item.prompt)
        for item in build(synthetic(num_requests=900, input_len={"mean": 100, "spread": 0.1}))
    }
    assert lengths == set(range(90, 111))


def test_prompts_file(tmp_path: Path) -> None:
    text = (
        '{"prompt": "one\u2028two", "chat": true}\n\n'
        '{"prompt": [5, 6], "output_len": 3, "chat": true}\r\n'
        '{"prompt": "three"}'
    )
    workload = of_file("prompts", tmp_path / "p.jsonl", text, num_requests=4, output_len=9)
    items = build(workload)
    assert [item.prompt for item in items] == ["one\u2028two", (5, 6), "three", "one\u2028two"]
    assert [item.chat for item in items] == [True, False, False, True]
    assert [item.sampling.max_tokens for item in items] == [9, 3, 9, 9]
    assert not items[0].sampling.ignore_eos
    assert items[0].sampling.seed != items[3].sampling.seed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "p.jsonl:2: not valid JSON"),
        ("[1]", "p.jsonl:2: [1]: expected"),
        ('{"promt": "x"}', "p.jsonl:2: promt: unknown key; nearest known key: prompt"),
        ("{}", "p.jsonl:2: prompt: None: expected a text or token ids"),
        ('{"prompt": [1, true]}', "prompt: [1, True]: expected a text or token ids"),
        ('{"prompt": "x", "chat": 1}', "chat: 1: expected true or false"),
        ('{"prompt": "x", "output_len": 0}', "output_len: 0: expected an integer >= 1"),
    ],
)
def test_malformed_prompts_name_the_line(tmp_path: Path, line: str, expected: str) -> None:
    workload = of_file("prompts", tmp_path / "p.jsonl", f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        check_workload(workload)
    assert expected in str(caught.value)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,480,10\r\n"
    "2023-11-16 18:17:04.0319601,31,8\r\n"
    "2023-11-16 18:18:03.9799600,110,27\r\n"
)


def test_azure_trace_with_crlf_and_seven_digit_fractions(tmp_path: Path) -> None:
    items = build(of_file("trace", tmp_path / "t.csv", AZURE, arrival="trace"))
    assert [len(item.prompt) for item in items] == [480, 31, 110]
    assert [item.sampling.max_tokens for item in items] == [10, 8, 27]
    assert all(item.sampling.ignore_eos for item in items)
    assert [item.arrival_s for item in items] == pytest.approx([0.0, 0.0520001, 60.0], abs=2e-6)
    faster = build(of_file("trace", tmp_path / "t.csv", AZURE, arrival="trace", speedup=4.0))
    assert faster[2].arrival_s == pytest.approx(15.0)
    assert faster[2].prompt == items[2].prompt


def test_trace_is_sorted_by_time_and_cut(tmp_path: Path) -> None:
    rows = AZURE.splitlines()
    text = "\n".join([rows[0], rows[3], rows[2].replace(".0319601", "+00:00"), rows[1]])
    workload = of_file("trace", tmp_path / "t.csv", text, arrival="trace", num_requests=2)
    items = build(workload)
    assert [len(item.prompt) for item in items] == [480, 31]
    assert build(workload.model_copy(update={"output_len": 5}))[0].sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b,c\n", "t.csv:1: ['a', 'b', 'c']: expected the header TIMESTAMP"),
        ("", "expected the header"),
        (AZURE.splitlines()[0], "no requests"),
        (
            AZURE + "2023-11-16 18:17:04.1,3\n",
            "t.csv:5: ['2023-11-16 18:17:04.1', '3']: expected 3",
        ),
        (AZURE + "2023-11-16 18:17:04.1,x,3\n", "t.csv:5: ContextTokens: 'x': expected a number"),
        (AZURE + "2023-11-16 18:17:04.1,3,0\n", "t.csv:5: GeneratedTokens: '0': expected"),
        (AZURE + "18:17,3,3\n", "t.csv:5: TIMESTAMP: '18:17': expected a time"),
        (AZURE + "2023-13-16 18:17:04,3,3\n", "t.csv:5: TIMESTAMP: '2023-13-16 18:17:04'"),
    ],
)
def test_malformed_traces_name_the_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_workload(of_file("trace", tmp_path / "t.csv", text))
    assert expected in str(caught.value)


def test_lengths_beyond_all_models_are_refused_or_cut_before_they_are_made(tmp_path: Path) -> None:
    for many in ("99999999999999", "9" * 5000):
        text = AZURE + f"2023-11-16 18:19:00,{many},44\n"
        with pytest.raises(ConfigError, match=r"t\.csv:5: ContextTokens: .*at most 4194304 tokens"):
            check_workload(of_file("trace", tmp_path / "t.csv", text))
        workload = of_file("trace", tmp_path / "t.csv", text, over_length="truncate")
        assert [line.input_len for line in read_trace(tmp_path / "t.csv", cut=True)] == [
            480, 31, 110, 2**22,
        ]  # fmt: skip
        check_workload(workload)
    entries = [{"prompt": 3, "max_tokens": 2**22 + 1}]
    with pytest.raises(ConfigError, match="entry 0: max_tokens: 4194305: expected at most 4194304"):
        check_workload(of_file("trace", tmp_path / "t.json", json.dumps(entries)))
    with pytest.raises(ConfigError, match=r"t\.json: not valid JSON"):
        check_workload(of_file("trace", tmp_path / "t.json", f'[{{"prompt": {"9" * 5000}}}]'))
    for length in (2**22 + 1, {"mean": 1e14}):
        with pytest.raises(ValidationError, match="less than or equal to 4194304"):
            synthetic(input_len=length)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"speedup": 4.0}, "speedup 4 divides a trace's times: it needs arrival: trace, not all"),
        ({"speedup": 0.5, "arrival": "poisson", "rate": 2.0}, "arrival: trace, not poisson"),
        ({"slo": {}}, "expected ttft_ms, tpot_ms or both"),
        ({"slo": {"ttft_ms": None}}, "expected ttft_ms, tpot_ms or both"),
        ({"chat": True}, "chat is for texts: kind synthetic sends token ids"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: Any, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        synthetic(**settings)
    assert synthetic(speedup=1.0, slo={"tpot_ms": 5.0}).slo is not None


def test_json_trace_has_lengths_only(tmp_path: Path) -> None:
    text = json.dumps([{"prompt": 269, "max_tokens": 42}, {"prompt": 27, "max_tokens": 5}])
    items = build(of_file("trace", tmp_path / "osc.json", text, arrival="poisson", rate=1.0))
    assert [(len(i.prompt), i.sampling.max_tokens) for i in items] == [(269, 42), (27, 5)]
    with pytest.raises(ConfigError, match="has no times; expected all or poisson"):
        check_workload(of_file("trace", tmp_path / "osc.json", text, arrival="trace"))
    with pytest.raises(ConfigError, match="num_requests: 3: expected at most 2"):
        check_workload(of_file("trace", tmp_path / "osc.json", text, num_requests=3))
    with pytest.raises(ConfigError, match="entry 0: max_tokens: None: expected a number"):
        check_workload(of_file("trace", tmp_path / "osc.json", '[{"prompt": 3}]'))


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"workload\.path: /nowhere\.jsonl: no such file"):
        check_workload(WorkloadConfig(path="/nowhere.jsonl"))


def test_a_warm_start_spreads_progress_and_changes_nothing_else() -> None:
    cold, warm = (
        build(synthetic(num_requests=400, output_len=50, warm_start=w)) for w in (False, True)
    )
    assert [replace(item, progress=0.0) for item in warm] == cold
    progress = [Sent(item, sampling=item.sampling).num_generated for item in warm]
    assert set(progress) == set(range(50)) and statistics.mean(progress) == pytest.approx(25, abs=3)
    assert warm == build(synthetic(num_requests=400, output_len=50, warm_start=True))
    some = build(synthetic(num_requests=9, output_len=50, warm_start=3))
    assert [i.progress for i in some[3:]] == [0] * 6 and any(i.progress for i in some[:3])
    with pytest.raises(ValidationError, match="warm_start needs"):
        synthetic(warm_start=True, ignore_eos=False)


def test_progress_is_of_what_truncation_leaves() -> None:
    workload = synthetic(
        num_requests=60, input_len=20, output_len=300, over_length="truncate", warm_start=True
    )
    items = build(workload)
    sent = [prepare(FakeEngine(max_model_len=90), item, workload) for item in items]
    assert all(entry.truncated and entry.sampling.max_tokens == 89 for entry in sent)
    assert [entry.num_generated for entry in sent] == [int(89 * item.progress) for item in items]
    assert 60 < max(entry.num_generated for entry in sent) < 89
    fits = prepare(FakeEngine(max_model_len=320), items[0], workload)
    assert (fits.truncated, fits.num_generated) == (False, int(300 * items[0].progress))


def test_replay_keeps_arrival_times_and_order() -> None:
    workload = synthetic(num_requests=6, arrival="poisson", rate=60.0, output_len=2)
    items = build_workload(workload, 0, 90)
    engine = FakeEngine()
    log = replay(engine, items, workload)
    assert [outcome.index for outcome in log.outcomes] == list(range(6))
    for item, outcome, request in zip(items, log.outcomes, engine.added, strict=True):
        assert outcome.arrival_s == item.arrival_s
        assert request.arrival_s == pytest.approx(log.start_s + item.arrival_s, rel=0, abs=1e-6)
        assert outcome.token_times_s[0] >= item.arrival_s
        assert outcome.finish_reason == "length"


def test_over_length_requests_are_rejected_alone_or_truncated() -> None:
    workload = synthetic(num_requests=2, input_len=12, output_len=7)
    items = build_workload(workload, 0, 90)
    rejected = replay(FakeEngine(max_model_len=18), items, workload).outcomes
    assert all(outcome.failed for outcome in rejected)
    assert "12 prompt tokens and 7 output tokens exceed max_model_len 18" in str(rejected[0].error)
    assert rejected[0].prompt_len == 12

    truncate = synthetic(num_requests=2, input_len=12, output_len=7, over_length="truncate")
    engine = FakeEngine(max_model_len=18)
    outcomes = replay(engine, items, truncate).outcomes
    assert engine.added[0].prompt_ids == items[0].prompt[-11:]
    assert [len(outcome.output_ids) for outcome in outcomes] == [7, 7]
    engine = FakeEngine(max_model_len=5)
    replay(engine, items, truncate)
    assert len(engine.added[0].prompt_ids) == 1
    assert engine.added[0].sampling.max_tokens == 4


def test_text_prompts_are_tokenized_with_their_template(tmp_path: Path) -> None:
    text = '{"prompt": "a bb", "chat": true}\n{"prompt": "a bb"}\n'
    workload = of_file("prompts", tmp_path / "p.jsonl", text, output_len=1)
    engine = FakeEngine()
    outcomes = replay(engine, build(workload), workload).outcomes
    assert [request.prompt_ids for request in engine.added] == [(1, 4, 5, 1), (4, 5)]
    assert [(o.prompt, o.prompt_len) for o in outcomes] == [("a bb", 4), ("a bb", 2)]
    engine.tokenizer = None
    assert "no tokenizer" in str(replay(engine, build(workload), workload).outcomes[0].error)


def test_window_ends_the_run() -> None:
    workload = synthetic(
        num_requests=3, output_len=100_000, window={"warmup_s": 0.02, "measure_s": 0.05}
    )
    log = replay(
        FakeEngine(max_model_len=200_000, step_s=0.001), build_workload(workload, 0, 90), workload
    )
    assert [outcome.finish_reason for outcome in log.outcomes] == ["unfinished"] * 3
    assert 0.02 < log.outcomes[0].token_times_s[-1] < 1.0
    assert log.busy is not None and log.busy.begin.gpu_s is not None
    assert 0.02 <= log.busy.begin_s < log.busy.end_s
    assert 0 < log.busy.begin.gpu_s < 0.25 * len(log.iterations)
    assert log.busy.end.gpu_s == 0.25 * len(log.iterations)


def test_busy_times_span_the_run() -> None:
    workload = synthetic(num_requests=3)
    log = replay(FakeEngine(), build_workload(workload, 0, 90), workload)
    assert log.busy is not None
    assert (log.busy.begin.gpu_s, log.busy.end.gpu_s) == (0.0, 0.25 * 7)
    assert log.busy.end.cpu_s is None
    assert log.busy.begin_s < 0.1
