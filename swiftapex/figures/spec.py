"""What a figure's file says: what the paper reports, what is measured here, and how it is drawn.

`experiments/<paper>/<figure>.yaml`. As it stands it is the paper's size; a variant (`quick`: a few
minutes on one GPU; `cpu`: any machine) is put over it, mapping by mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from swiftapex.config.load import parse_section, read_mapping
from swiftapex.config.overrides import merged, parse_assignment, with_value
from swiftapex.config.schema import Section
from swiftapex.config.values import PositiveFloat, PositiveInt
from swiftapex.core.errors import ConfigError

X = int | float | str
Xs = Annotated[tuple[X, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Range = Annotated[tuple[float, float], Field(strict=False)]


class AxisConfig(Section):
    label: str
    log: bool = False


class MetricConfig(AxisConfig):
    """`metric`: a field of a run's summary (`ttft_ms.p50`), or of a kernel's measurement. `scale`
    multiplies it. `per_series`: as a ratio to this series at the same x."""

    metric: str
    scale: float = 1.0
    per_series: str | None = None


class MeasuredConfig(Section):
    """Which measured value stands beside a reported one: of series `of`, at the x of `at` (null:
    all). With `over`, how much more it is than that series', in %; else its metric, scaled."""

    of: str
    over: str | None = None
    at: Xs | None = None
    metric: str | None = None  # null: the figure's


class ReportedConfig(Section):
    """A value, or a range, as its source reports it. `measured` null: not to be measured here."""

    what: str
    value: float | Range
    unit: str = "%"
    source: str
    measured: MeasuredConfig | None = None


class PointConfig(Section):
    """One place on the x axis: an experiment with `set` put over it, and over that for a run of
    `per_run` what is its own. `only`: some of the runs."""

    x: X
    set: Mapping[str, Any] = Field(default_factory=dict)
    per_run: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    only: Names | None = None


class KernelConfig(Section):
    """A measurement of kernels alone. attention: decode attention of one layer on both sides;
    attention_parts: its products and softmax as separate operations of torch, and the fused kernel;
    linear: the linear stages of one layer. `sm_count`: of the GPU, as in an engine.

    `pool_mib`: of KV through which calls take turns, so that it comes from memory. `seconds`: per
    value.
    """

    measure: Literal["attention", "attention_parts", "linear"]
    device: Literal["cpu", "cuda"] = "cuda"
    sm_count: PositiveInt | None = None
    threads: PositiveInt | Literal["auto"] = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"
    batches: tuple[PositiveInt, ...] = Field(min_length=1, strict=False)
    q_heads: PositiveInt = 32
    kv_heads: PositiveInt = 32
    head_dim: PositiveInt = 128
    num_layers: PositiveInt = 32
    context: PositiveInt = 1024
    block_size: PositiveInt = 16
    pool_mib: PositiveInt = 1024
    architecture: str = "llama2-7b"
    seconds: PositiveFloat = 0.5

    @model_validator(mode="after")
    def _parts_of_one_batch(self) -> KernelConfig:
        if self.measure == "attention_parts" and len(self.batches) != 1:
            raise ValueError("attention_parts is of one batch: its x axis are the parts")
        return self


class VariantConfig(Section):
    """`budget_s`: no new point is begun later than this. `note`: what differs, for the figure."""

    budget_s: PositiveFloat
    note: str
    changes: Mapping[str, Any] = Field(default_factory=dict)


class FigureConfig(Section):
    """`experiment` is an experiment file's content without its `runs`; `points` are put over it."""

    figure: str
    title: str
    source: str
    about: str
    form: Literal["lines", "bars"] = "lines"
    x: AxisConfig
    y: MetricConfig
    labels: Mapping[str, str] = Field(default_factory=dict)
    reported: tuple[ReportedConfig, ...] = Field(strict=False)
    budget_s: PositiveFloat
    note: str = "at the paper's size"
    experiment: Mapping[str, Any] | None = None
    runs: tuple[Mapping[str, Any], ...] = Field(default=(), strict=False)
    points: tuple[PointConfig, ...] = Field(default=(), strict=False)
    kernels: KernelConfig | None = None
    variants: Mapping[str, VariantConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> FigureConfig:
        if (self.experiment is None) == (self.kernels is None):
            raise ValueError("expected either experiment or kernels")
        if self.experiment is not None and not (self.points and self.runs):
            raise ValueError("an experiment needs runs and points")
        return self

    def label(self, series: str) -> str:
        return self.labels.get(series, series)


def load_figure(
    path: Path, variant: str | None = None, assignments: Sequence[str] = ()
) -> FigureConfig:
    """The figure of a file, with a variant and then `assignments` ("a.b=c") put over it.
    ConfigError where something is wrong."""
    data = read_mapping(path)
    figure = parse_section(FigureConfig, data, file=str(path))
    if variant is not None:
        if variant not in figure.variants:
            known = ", ".join(figure.variants) or "none"
            raise ConfigError(f"{path}: no variant {variant!r}; expected one of: {known}")
        chosen = figure.variants[variant]
        settings = {"budget_s": chosen.budget_s, "note": chosen.note}
        data = merged(merged(data, chosen.changes), settings)
    for assignment in assignments:
        data = with_value(data, *parse_assignment(assignment))
    label = str(path) if variant is None else f"{path} (variant {variant})"
    return parse_section(FigureConfig, data, file=label)
