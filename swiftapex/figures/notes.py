"""What a reader must know beside a figure's numbers: what ran, on what, what stands for what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swiftapex.config.load import RunPlan
from swiftapex.config.schema import EngineConfig, ModelSection, WorkloadConfig
from swiftapex.figures.spec import FigureConfig, KernelConfig


def notes(
    figure: FigureConfig, plans: Sequence[RunPlan], environment: Mapping[str, Any]
) -> Iterator[str]:
    """Lines for under a figure. `plans`: of its runs, none where it is of kernels."""
    yield f"Here: {figure.note}."
    if figure.kernels is not None:
        yield f"Settings: {_of_kernels(figure.kernels)}."
        sm_count = figure.kernels.sm_count
    else:
        (first, *_) = plans
        run = "; ".join(
            (
                _of_model(first.model),
                _of_engine(first.engine),
                _of_workloads([plan.workload for plan in plans]),
            )
        )
        yield f"Settings: {run}."
        sm_count = first.engine.gpu.sm_count
    yield f"Machine: {_machine(environment, sm_count)}."


def _machine(environment: Mapping[str, Any], sm_count: int | None) -> str:
    cpu, gpus = environment["cpu"], environment["gpus_used"]
    parts = [f"{cpu['model']}, {cpu['usable_threads']} threads"]
    if gpus:
        name = str(gpus[0]).partition(": ")[2].split(",")[0]
        parts.insert(0, f"{len(gpus)} x {name}" if len(gpus) > 1 else name)
    if gpus and sm_count is not None:
        emulated = f"{sm_count} multiprocessors of this large GPU stand for a small one"
        parts.append(f"{emulated}, whose copies and caches are the large one's")
    return "; ".join(parts)


def _of_model(model: ModelSection) -> str:
    layers = "" if model.num_layers is None else f" cut to {model.num_layers} layers"
    weights = "" if model.weights is None else ", dummy weights"
    return f"{model.architecture or model.path}{layers}, {model.dtype}{weights}"


def _of_engine(engine: EngineConfig) -> str:
    ranks = engine.tensor_parallel_size
    parts = [f"device {engine.device}" + (f" x {ranks}" if ranks > 1 else "")]
    for side, kv in (("GPU", engine.gpu), ("CPU", engine.cpu)):
        if kv.kv_memory is not None:
            parts.append(f"{kv.kv_memory / 2**30:.3g} GiB of KV on the {side} side")
        elif kv.kv_tokens is not None:
            parts.append(f"{kv.kv_tokens} tokens of KV on the {side} side")
    return ", ".join(parts)


def _of_workloads(workloads: Sequence[WorkloadConfig]) -> str:
    """Windows may differ in length."""
    first, *_ = workloads
    parts = [f"{first.num_requests} requests"]
    windows = [w.window for w in workloads if w.window is not None]
    seconds = sorted({w.measure_s for w in windows if w.measure_s is not None})
    if any(w.warm_start for w in workloads):
        parts.append("some of them in progress at the beginning")
    if seconds:
        warmup_s = windows[0].warmup_s
        length = " to ".join(f"{s:g}" for s in dict.fromkeys((seconds[0], seconds[-1])))
        parts.append(f"{length} s measured after {warmup_s:g} s")
    elif windows and windows[0].middle is not None:
        parts.append(f"the middle {windows[0].middle:.0%} measured")
    return ", ".join(parts)


def _of_kernels(kernels: KernelConfig) -> str:
    if kernels.measure == "linear":
        return f"{kernels.architecture}, {kernels.dtype}, dummy weights"
    heads = f"{kernels.q_heads} query and {kernels.kv_heads} KV heads of {kernels.head_dim}"
    return f"{heads}, {kernels.context} tokens, {kernels.dtype}"
