"""Other engines get the same requests and stand in the same report."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import FakeEngine
from fake_openai import serving

from swiftapex.config.load import expand_experiment
from swiftapex.core.errors import ConfigError, EngineError
from swiftapex.peers.run import measure_peer
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
    assert {o.error for o in outcomes} == {"5 tokens came, 7 were asked for: see peer.extra"}
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
