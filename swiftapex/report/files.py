"""The result folder: `DIR/NAME/TIMESTAMP/`, never one that exists already."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from swiftapex.config.load import RunPlan
from swiftapex.core.records import IterationRecord
from swiftapex.report.asked import asked
from swiftapex.report.metrics import e2e_ms, summarize, tpot_ms, ttft_ms
from swiftapex.report.snapshots import Snapshot
from swiftapex.workloads.replay import RequestOutcome, RunLog


@dataclass(frozen=True)
class RunResult:
    """A run that was measured. Block totals are those of the engine's two sides; `snapshots` are
    iterations to make pictures of; `notes` tell how the engine's memory was had, and of its
    profile; `gpu_bound`: why requests could not start on the CPU."""

    plan: RunPlan
    log: RunLog
    gpu_blocks: int
    cpu_blocks: int
    snapshots: tuple[Snapshot, ...] = ()
    notes: tuple[str, ...] = ()
    gpu_bound: str | None = None

    def summary(self) -> dict[str, Any]:
        """The run's entry in `summary.json`."""
        workload = self.plan.workload
        return {
            "name": self.plan.name,
            "folder": self.plan.folder,
            "policy": self.plan.policy,
            "sweep": dict(self.plan.sweep),
            "workload_sha256": _workload_sha256(self.plan),
            "interrupted": self.log.interrupted,
            **asked(self.log.outcomes),
            **summarize(
                self.log,
                workload.window,
                workload.slo,
                (self.gpu_blocks, self.cpu_blocks),
                self.plan.engine.gpu,
            ),
        }


def _workload_sha256(plan: RunPlan) -> str:
    """Tells runs of the same requests and window on the same model from others."""
    settings = [plan.workload.model_dump(mode="json"), plan.model.model_dump(mode="json")]
    # What is cut to the model's length is another workload.
    told = json.dumps([*settings, plan.seed, plan.engine.max_model_len], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def create_folder(parent: Path, name: str) -> Path:
    """A new folder `parent/name/TIMESTAMP` (local time), with a number where it is taken."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1, 1000):
        folder = parent / name / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent / name / stamp}: too many experiments in one second")


def remove_folder(folder: Path, parents: Sequence[Path]) -> None:
    """`parents`: those to go as well, innermost first, unless something else is in them."""
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        for parent in parents:
            parent.rmdir()


def write_run(folder: Path, result: RunResult) -> None:
    """`run.yaml`, `requests.jsonl` and `iterations.jsonl` of one run, into its folder."""
    text = yaml.safe_dump(result.plan.as_dict(), sort_keys=False, allow_unicode=True)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    _write_lines(folder / "requests.jsonl", map(_request_line, result.log.outcomes))
    start_s = result.log.start_s
    lines = (_iteration_line(record, start_s) for record in result.log.iterations)
    _write_lines(folder / "iterations.jsonl", lines)


def write_summary(
    folder: Path, name: str, results: Sequence[RunResult], failures: Mapping[str, str]
) -> None:
    """`summary.json` and `summary.csv`. `failures`: run folder -> why it has no result."""
    runs = [result.summary() for result in results]
    failed = [{"folder": run, "error": error} for run, error in failures.items()]
    write_json(folder / "summary.json", {"name": name, "runs": runs, "failed_runs": failed})
    rows = [flat(run) for run in runs]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with (folder / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    """Numbers that are not finite, which JSON has not, become null."""
    path.write_text(_json(value, indent=2) + "\n", encoding="utf-8")


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _request_line(outcome: RequestOutcome) -> dict[str, Any]:
    times = [round(time_s, 6) for time_s in outcome.token_times_s]
    return {
        "index": outcome.index,
        "finish_reason": outcome.finish_reason,
        "error": outcome.error,
        "prompt_tokens": outcome.prompt_len,
        "output_tokens": outcome.num_output,
        "progress": outcome.progress,
        "truncated": outcome.truncated,
        "arrival_s": round(outcome.arrival_s, 6),
        "ttft_ms": ttft_ms(outcome),
        "tpot_ms": tpot_ms(outcome),
        "e2e_ms": e2e_ms(outcome),
        "num_preemptions": outcome.num_preemptions,
        "prompt": outcome.prompt,
        "text": outcome.text,
        "output_ids": outcome.output_ids,
        "token_times_s": times,
    }


def _iteration_line(record: IterationRecord, start_s: float) -> dict[str, Any]:
    """Times count from the first arrival, as in `requests.jsonl`."""
    return asdict(record) | {"start_s": round(record.start_s - start_s, 6)}


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(_json(line) + "\n")


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `outer.inner` columns."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{prefix}{key}.")
        else:
            found[prefix + key] = inner
    return found
