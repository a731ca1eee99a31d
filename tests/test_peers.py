"""Other engines get the same requests and stand in the same report."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine
from fake_openai import serving

from swiftapex.config.load import expand_experiment
from swiftapex.core.errors import ConfigError, EngineError
from swiftapex.peers.run import measure_peer
from swiftapex.report.files import write_run
from swiftapex.run_experiment import check_runs, main
from swiftapex.workloads.build import build_workload

HERE = Path(__file__).resolve().parent
WORKLOAD = {"kind": "synthetic", "num_requests": 6, "input_len": 5, "output_len": 7}
OFFLINE = """
import json, sys
with open(sys.argv[2], "w") as results:
    for line in open(sys.argv[1]):
        r = json.loads(line)
        count = r["max_tokens"] - (r["index"] == 3)
        times = [r["arrival_s"] + 0.5 + 0.25 * i for i in range(count)]
        if r["index"] == 4:
            continue
        ids = [(sum(r["prompt"]) + i) % 90 for i in range(len(times))]
        line = {"index": r["index"], "token_times_s": times, "output_ids": ids}
        print(json.dumps(line), file=results)
"""


def experiment(peer: dict[str, Any], **workload: Any) -> dict[str, Any]:
    return {
        "name": "peers",
        "model": {"architecture": "tiny", "weights": "dummy"},
        "engine": {"device": "reference", "gpu": {"kv_tokens": 4096}, "cpu": {"kv_tokens": 0}},
        "runs": [{"name": "vllm", "peer": peer}, {"name": "ours", "policy": "gpu_only"}],
        "workload": WORKLOAD | workload,
    }


def measured(peer: dict[str, Any], **workload: Any) -> Any:
    plans = expand_experiment(experiment(peer, **workload), Path("exp.yaml")).runs
    return measure_peer(plans[0])


def test_a_server_gets_the_same_requests() -> None:
    with serving(tells_ids=True) as server:
        result = measured({"url": server.url})
    items = build_workload(result.plan.workload, 0, 512)
    sent = sorted(server.received, key=lambda body: body["seed"])
    expected = sorted(items, key=lambda item: item.sampling.seed or 0)
    assert [tuple(body["prompt"]) for body in sent] == [item.prompt for item in expected]
    assert {(b["max_tokens"], b["ignore_eos"], b["model"]) for b in sent} == {
        (7, True, "fake-model")
    }
    summary = result.summary()
    assert (summary["num_requests"], summary["num_failed"], summary["output_tokens"]) == (6, 0, 42)
    assert summary["outputs_sha256"] is not None
    for outcome, item in zip(result.log.outcomes, items, strict=True):
        assert outcome.output_ids == tuple((sum(item.prompt) + i) % 90 for i in range(7))
        assert outcome.token_times_s == tuple(sorted(outcome.token_times_s))


def test_times_are_those_of_the_stream() -> None:
    with serving(pace_s=0.03) as server:
        summary = measured({"url": server.url}, num_requests=2).summary()
    assert summary["outputs_sha256"] is None  # the ids are not known
    # At least the server's pace; a busy machine adds to it.
    assert 30 <= summary["ttft_ms"]["p50"] < 500
    assert 29 <= summary["tpot_ms"]["p50"] < 150
    assert summary["cpu_token_share"] is summary["gpu_busy"] is None


def test_tokens_of_a_chunk_are_counted_by_the_servers_usage() -> None:
    with serving(per_chunk=3) as server:
        summary = measured({"url": server.url}).summary()
    assert (summary["num_failed"], summary["output_tokens"]) == (0, 42)


def test_too_few_tokens_and_refusals_are_failures() -> None:
    with serving(short_by=2) as server:
        outcomes = measured({"url": server.url}).log.outcomes
    came = "token_times_s: 5 tokens came, 7 were asked for: see peer.extra"
    assert [o.error for o in outcomes] == [f"request {i}: {came}" for i in range(6)]
    with serving(refuses=True) as server:
        outcomes = measured({"url": server.url}).log.outcomes
    assert all("HTTP 400" in o.error and "no such model" in o.error for o in outcomes)


def test_a_window_ends_a_run_and_keeps_what_came() -> None:
    with serving(pace_s=0.05) as server:
        window = {"warmup_s": 0.1, "measure_s": 0.4}
        result = measured({"url": server.url}, output_len=1000, window=window)
    summary = result.summary()
    assert summary["num_unfinished"] == 6 and summary["num_failed"] == 0
    assert 30 < summary["output_tokens_per_s"] <= 6 / 0.05 * 1.15
    assert result.log.busy is not None


def test_a_command_starts_a_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    command = [sys.executable, str(HERE / "fake_openai.py"), str(port)]
    assert measured({"url": url, "command": command}).summary()["output_tokens"] == 42
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # ended afterwards
    broken = [sys.executable, "-c", "raise SystemExit('no GPU here')"]
    with pytest.raises(EngineError, match="no GPU here"):
        measured({"url": url, "command": broken})
    with pytest.raises(EngineError, match="cannot be reached"):
        measured({"url": url})


def test_a_command_serves_the_workload_itself(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(OFFLINE)
    command = [sys.executable, str(tmp_path / "engine.py"), "{requests}", "{results}"]
    result = measured({"command": command}, arrival="poisson", rate=4.0)
    outcomes = result.log.outcomes
    assert [o.completed for o in outcomes] == [True, True, True, False, False, True]
    assert "6 tokens came" in (outcomes[3].error or "") and "no result" in (outcomes[4].error or "")
    summary = result.summary()
    assert summary["ttft_ms"]["p50"] == pytest.approx(500)
    assert summary["tpot_ms"]["p50"] == pytest.approx(250)
    with pytest.raises(EngineError, match="ended with 1"):
        measured({"command": [sys.executable, "-c", "raise SystemExit(1)"]})


ANSWERS = """
import json, sys
with open(sys.argv[2], "w") as results:
    for line in open(sys.argv[1]):
        r = json.loads(line)
        times = [r["arrival_s"] + 0.5 + 0.25 * i for i in range(r["max_tokens"])]
        fields = {"index": r["index"], "token_times_s": times, "output_ids": [1] * len(times)}
        if r["index"] == 2:
            fields.update(eval(sys.argv[3]))
        print(json.dumps(fields), file=results)
"""


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("token_times_s=times[:-1] + [float('nan')]", "token_times_s: .*nan"),
        ("token_times_s=times[:-1] + [float('inf')]", "token_times_s: .*inf"),
        ("token_times_s=times[:-1] + [10 ** 400]", "token_times_s: .*finite"),
        ("token_times_s=times[:-1] + ['9']", "token_times_s: .*finite"),
        ("token_times_s=times[::-1]", "token_times_s: .* ascending"),
        ("token_times_s=[t - 100 for t in times]", "token_times_s: -99.5 s is before the arrival"),
        ("token_times_s=7", "token_times_s: 7: expected a list"),
        ("token_times_s=[], output_ids=[], finish_reason='stop'", "token_times_s: empty"),
        ("token_times_s=None, finish_reason='stop'", "token_times_s: empty"),
        ("finish_reason='banana'", "finish_reason: 'banana': expected stop or length"),
        ("output_ids=[1, 2]", "output_ids: 2 ids for 7 token_times_s"),
        ("output_ids=[1.5] * 7", "output_ids: .*expected a list of token ids"),
        ("output_ids=[2 ** 31] * 7", "output_ids: .*expected a list of token ids"),
        ("text=3", "text: 3: expected a text"),
    ],
)
def test_a_wrong_answer_is_its_requests_error(tmp_path: Path, changed: str, named: str) -> None:
    (tmp_path / "engine.py").write_text(ANSWERS)
    command = [sys.executable, str(tmp_path / "engine.py"), "{requests}", "{results}"]
    result = measured({"command": [*command, f"dict({changed})"]})
    errors = {o.index: o.error for o in result.log.outcomes if o.error}
    assert list(errors) == [2]
    assert re.match(f"request 2: {named}", errors[2] or "")
    summary = result.summary()
    assert (summary["num_failed"], summary["output_tokens"]) == (1, 35)
    write_run(tmp_path, result)
    text = (tmp_path / "requests.jsonl").read_text() + json.dumps(summary)
    assert "NaN" not in text and "Infinity" not in text


def test_optional_fields_may_be_null(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ANSWERS)
    command = [sys.executable, str(tmp_path / "engine.py"), "{requests}", "{results}"]
    nulls = "dict(output_ids=None, text=None, finish_reason=None, error=None)"
    result = measured({"command": [*command, nulls]})
    assert all(o.completed for o in result.log.outcomes)
    assert result.log.outcomes[2].output_ids == () and result.log.outcomes[2].text == ""
    summary = result.summary()
    assert summary["output_tokens"] == 42 and summary["outputs_sha256"] is None


def test_lines_that_are_no_requests_cost_only_what_they_are_of(tmp_path: Path) -> None:
    right, double = (
        json.dumps({"index": index, "token_times_s": [1, 2, 3, 4, 5, 6, 7]}) for index in (3, 4)
    )
    text = "\n".join(["hello", '{"index": 99}', right, double, double])
    code = f"import sys; open(sys.argv[1], 'w').write({text!r})"
    outcomes = measured({"command": [sys.executable, "-c", code, "{results}"]}).log.outcomes
    assert [o.completed for o in outcomes] == [False, False, False, True, False, False]
    assert "no result" in (outcomes[0].error or "") and "line 1" in (outcomes[0].error or "")
    assert outcomes[4].error == "request 4: index: 2 results have it"


def test_a_command_that_hangs_or_is_missing(tmp_path: Path) -> None:
    began = time.perf_counter()
    hangs = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"]
    with pytest.raises(EngineError, match=r"not ended 1 s \(peer.timeout_s\)"):
        measured({"command": hangs, "timeout_s": 1.0})
    assert time.perf_counter() - began < 30
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while child.exists() and child.read_text().split()[2] != "Z":  # gone with what started it
        assert time.perf_counter() - began < 30
    for url in ({}, {"url": "http://127.0.0.1:1/v1"}):
        with pytest.raises(EngineError, match=r"no/such/program cannot be started"):
            measured({"command": ["no/such/program"], **url})


def test_a_server_whose_answers_are_malformed() -> None:
    for usage in (float("nan"), -1, 3.5, "7", 10**12):
        with serving(usage=usage) as server:
            outcomes = measured({"url": server.url}, num_requests=2).log.outcomes
        assert all(o.failed and not o.token_times_s for o in outcomes), usage
    for choice, named in (
        ({"finish_reason": "abort"}, "request 0: finish_reason: 'abort'"),
        ({"token_ids": [0.5]}, "request 0: output_ids: "),
        ({"text": 5}, "TypeError"),
    ):
        with serving(choice=choice) as server:
            outcomes = measured({"url": server.url}, num_requests=2).log.outcomes
        assert named in (outcomes[0].error or "") and all(o.failed for o in outcomes)


def test_peers_stand_in_one_report(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "exp.yaml"
    with serving(tells_ids=True) as server:
        path.write_text(yaml.safe_dump(experiment({"url": server.url})))
        arguments = [str(path), "--out", str(tmp_path / "out")]
        assert main(arguments, lambda plan, trace: FakeEngine()) == 0  # type: ignore[arg-type, return-value]
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    assert [(run["name"], run["policy"], run["output_tokens"]) for run in runs] == [
        ("vllm", "peer", 42),
        ("ours", "gpu_only", 42),
    ]
    html = (folder / "report.html").read_text()
    assert "Run vllm" in html and "Run ours" in html
    assert yaml.safe_load((folder / "vllm" / "run.yaml").read_text())["peer"]["url"] == server.url


def test_what_a_peer_cannot_do_is_refused() -> None:
    warm = experiment({"url": "http://127.0.0.1:1/v1"}, warm_start=True)
    with pytest.raises(ConfigError, match=r"vllm.peer: it cannot begin"):
        check_runs(expand_experiment(warm, Path("exp.yaml")))
    for wrong, message in (({}, "url, command or both"), ({"url": "localhost"}, "such as http")):
        with pytest.raises(ConfigError, match=message):
            expand_experiment(experiment(wrong), Path("exp.yaml"))
    both = experiment({"url": "http://127.0.0.1:1/v1"})
    both["runs"][0]["policy"] = "neo"
    with pytest.raises(ConfigError, match="either policy or pipeline, or a peer"):
        expand_experiment(both, Path("exp.yaml"))
