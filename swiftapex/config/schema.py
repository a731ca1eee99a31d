"""The settings of a model, an engine and an experiment: frozen, typed, unknown keys refused.

These classes are the YAML file's shape. `swiftapex.config.load` reads files into them and turns
pydantic's errors into messages for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from swiftapex.config.presets import PRESETS
from swiftapex.config.values import (
    MAX_TOKENS,
    Auto,
    Bytes,
    Count,
    FileName,
    OnOffOrText,
    PositiveFloat,
    PositiveInt,
    Tokens,
)

PROFILE_WORDS = ("auto", "on", "off")  # what is none of these is a profile's path
DEFAULT_KV_TOKENS = 16384  # of a side for which neither kv_tokens nor kv_memory is given


class Section(BaseModel):
    """Base of all sections: values are not converted from other types ("2" is no integer)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """Which model: a checkpoint, or an architecture by name with dummy weights.

    `path`: a checkpoint folder, a .gguf file, or `package:NAME` (a GGUF file inside an installed
    Python package). `num_layers` cuts or extends a dummy model; null keeps the architecture's own.
    """

    path: str | None = None
    architecture: str | None = None
    weights: Literal["dummy"] | None = None
    num_layers: PositiveInt | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("expected either path or architecture (with weights: dummy)")
        if self.architecture is not None and self.weights is None:
            raise ValueError("an architecture without a path needs weights: dummy")
        if self.path is not None and (self.weights or self.num_layers):
            raise ValueError("weights and num_layers belong to an architecture, not to a path")
        return self


class KvSection(Section):
    """Size of one side's KV cache: `kv_tokens`, or `kv_memory` in bytes, or DEFAULT_KV_TOKENS (on
    the GPU side of device cuda: what is left, which is measured)."""

    kv_tokens: Count | None = None
    kv_memory: Bytes | None = None

    @model_validator(mode="after")
    def _one_size(self) -> KvSection:
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise ValueError("expected kv_tokens or kv_memory, not both")
        return self

    def num_blocks(self, block_size: int, block_bytes: int) -> int:
        """Whole blocks of `block_size` tokens, `block_bytes` over all layers, in this cache."""
        if self.kv_memory is not None:
            return self.kv_memory // block_bytes
        tokens = DEFAULT_KV_TOKENS if self.kv_tokens is None else self.kv_tokens
        return tokens // block_size


class GpuConfig(KvSection):
    """The GPU side: each GPU's. `sm_count` and `memory` (bytes) cap a larger GPU to emulate a
    smaller one; `preset` gives both where they are null (config/presets.py says what for).
    `memory_share`: of that memory, what weights, passes and a measured KV cache take together."""

    preset: Literal["none", "t4", "a10g", "l4", "h100"] = "none"
    sm_count: PositiveInt | None = None
    memory: Bytes | None = None
    memory_share: float = Field(default=0.9, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        preset = PRESETS.get(str(data.get("preset"))) if isinstance(data, Mapping) else None
        if preset is None:
            return data
        filled = {"sm_count": preset.sm_count, "memory": preset.memory}
        return filled | {k: v for k, v in data.items() if k not in filled or v is not None}


class CpuConfig(KvSection):
    """The CPU side: KV in host memory and the threads that attend over it, the host's as a whole:
    the ranks of tensor parallelism share them.

    `kv_dtype` auto: as on the GPU; int8: with a float32 scale per token and head, about half the
    bytes of 16 bits, not exact. `threads` auto: from affinity and the cgroup's quota.
    `attention_kernel` plain: simple loops instead of the tuned kernel, to measure what that gains.
    """

    threads: PositiveInt | Auto = "auto"
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    attention_kernel: Literal["tuned", "plain"] = "tuned"
    numa: Literal["auto", "none"] = "auto"
    hugepages: bool = True
    mlock: bool = False

    @model_validator(mode="after")
    def _kernel_takes_dtype(self) -> CpuConfig:
        if self.attention_kernel == "plain" and self.kv_dtype == "int8":
            raise ValueError("kv_dtype int8 needs attention_kernel: tuned")
        return self


class EngineConfig(Section):
    """`max_batch_size`: rows in one linear batch; requests in flight are bounded by KV alone.
    `max_tokens_in_batch`: tokens in it, prefill chunks included. `max_model_len` auto: the model's.
    `tensor_parallel_size`: ranks that share every layer, each a process with a GPU of its own.

    `profile`: where policies take the cost of work from. on: measured tables, from the cache of
    profiles or measured now; off: closed forms at default rates; auto: with device cuda a profile
    that is in the cache, else as off; else the path of a profile, which must be one of this model
    on this machine. `profile_folder`: the cache (null: ~/.cache/swiftapex/profiles).
    `online_correction`: whether measured iterations correct measured tables.
    """

    device: Literal["cpu", "cuda", "reference"] = "cpu"
    gpu: GpuConfig = GpuConfig()
    cpu: CpuConfig = CpuConfig()
    block_size: PositiveInt = 32
    max_model_len: PositiveInt | Auto = "auto"
    max_batch_size: PositiveInt = 256
    max_tokens_in_batch: PositiveInt = 2048
    tensor_parallel_size: PositiveInt = 1
    profile: OnOffOrText = "auto"
    profile_folder: str | None = None
    online_correction: bool = True


class LengthRange(Section):
    """Lengths uniform in [mean * (1 - spread), mean * (1 + spread)], in tokens, at least 1."""

    mean: float = Field(gt=0, le=MAX_TOKENS)
    spread: float = Field(default=0.0, ge=0, le=1)


Distribution = Literal["osc", "azure_conv", "azure_code", "livebench", "dolphin_r1"]
Length = Tokens | LengthRange | Distribution


class WindowConfig(Section):
    """What is measured: either `measure_s` seconds from `warmup_s` after the first arrival, and the
    run ends there; or the `middle` share of the requests in order of their ends, with those before
    them as warm-up and those after them as cool-down (NEO's artifact: 0.4)."""

    warmup_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    measure_s: PositiveFloat | None = None
    middle: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _one_kind(self) -> WindowConfig:
        if (self.measure_s is None) == (self.middle is None):
            raise ValueError("expected either measure_s or middle")
        if self.middle is not None and self.warmup_s:
            raise ValueError("warmup_s belongs to measure_s, not to middle")
        return self

    def middle_requests(self, num_requests: int) -> tuple[int, int]:
        """How many requests have ended when a `middle` window begins, and when it ends."""
        assert self.middle is not None
        first = round(num_requests * (1 - self.middle) / 2)
        return first, num_requests - first


class SloConfig(Section):
    """Latency limits in ms; the report gives the share of requests that keep all of them."""

    ttft_ms: PositiveFloat | None = None
    tpot_ms: PositiveFloat | None = None

    @model_validator(mode="after")
    def _limits_something(self) -> SloConfig:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise ValueError("expected ttft_ms, tpot_ms or both (slo: null: no limits)")
        return self


class WorkloadConfig(Section):
    """The requests. Every run of an experiment gets the same ones.

    A seed and these settings fix every request, whatever run it is in. Named lengths are described
    in `workloads/lengths.py`.

    kind prompts: `path` is a JSONL file (relative to the experiment file), `num_requests` repeats
    or cuts it. synthetic: random token ids of `input_len`. trace: random token ids with the
    lengths (and times) of `path`, an Azure CSV or a JSON list of {prompt, max_tokens}.
    `rate` is in requests/s (arrival: poisson), `speedup` divides a trace's times (arrival: trace).
    warm_start: requests begin at uniformly random progress with their KV in place, as many as fit
    (true) or at most so many, so that a short window measures the steady state. More than a policy
    lets in by itself make it drain them, and the window is none of a steady state.
    """

    kind: Literal["prompts", "synthetic", "trace"] = "prompts"
    path: str | None = None
    num_requests: PositiveInt | None = None
    input_len: Length | None = None
    output_len: Length | None = None
    arrival: Literal["all", "poisson", "trace"] = "all"
    rate: PositiveFloat | None = None
    speedup: PositiveFloat = 1.0
    ignore_eos: bool | None = None  # null: true for synthetic and trace, false for prompts
    chat: bool = False
    over_length: Literal["reject", "truncate"] = "reject"
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_k: Count = 0
    top_p: float = Field(default=1.0, gt=0, le=1)
    window: WindowConfig | None = None
    warm_start: bool | PositiveInt = False
    slo: SloConfig | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> WorkloadConfig:
        if self.kind == "synthetic":
            if self.path is not None:
                raise ValueError("kind synthetic reads no file: expected no path")
            if self.input_len is None or self.output_len is None or self.num_requests is None:
                raise ValueError("kind synthetic needs num_requests, input_len and output_len")
        else:
            if self.path is None:
                raise ValueError(f"kind {self.kind} needs a path")
            if self.input_len is not None:
                raise ValueError(f"kind {self.kind} takes its inputs from the file: no input_len")
        if (self.rate is not None) != (self.arrival == "poisson"):
            raise ValueError("rate (requests/s) and arrival: poisson belong together")
        if self.arrival == "trace" and self.kind != "trace":
            raise ValueError("arrival: trace needs kind: trace")
        if self.speedup != 1 and self.arrival != "trace":
            raise ValueError(f"speedup {self.speedup:g} divides a trace's times: it needs "
                             f"arrival: trace, not {self.arrival}")  # fmt: skip
        if self.chat and self.kind != "prompts":
            raise ValueError(f"chat is for texts: kind {self.kind} sends token ids")
        if self.warm_start and (self.arrival != "all" or not self.forces_length):
            raise ValueError("warm_start needs arrival: all and ignore_eos: true")
        return self

    @property
    def forces_length(self) -> bool:
        """Whether requests run to their output length whatever they generate."""
        return self.kind != "prompts" if self.ignore_eos is None else self.ignore_eos


class TraceConfig(Section):
    """Iterations that `trace.json` covers, taken from about the middle of a run; 0: no trace."""

    iterations: Count = 50


class PeerConfig(Section):
    """Another engine that gets the same requests. `url`: of an OpenAI-compatible server, up to and
    with /v1. `command`: starts that server, which is ended afterwards (`start_s`: patience until it
    answers); without `url` it serves the workload itself, see `peers/command.py`.

    `model`: its name there (null: the first that the server lists). `extra`: put into every
    request; `ignore_eos` is vLLM's word for forced lengths. `timeout_s`: of a server,
    without any answer; of a command that serves the workload, from the last arrival to its end.
    """

    url: str | None = None
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    model: str | None = None
    extra: Mapping[str, Any] = Field(default_factory=lambda: {"ignore_eos": True})
    start_s: PositiveFloat = 600.0
    timeout_s: PositiveFloat = 600.0

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, command: Any) -> Any:
        return tuple(command) if isinstance(command, list) else command

    @model_validator(mode="after")
    def _reachable(self) -> PeerConfig:
        if self.url is None and self.command is None:
            raise ValueError("expected url, command or both")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("expected a url such as http://127.0.0.1:8000/v1")
        return self


class RunConfig(Section):
    """One strategy to measure. `pipeline: X` is short for `policy: fixed:X`. `peer`: another engine
    in its place.

    `engine` holds overrides of the experiment's engine section for this run only.
    """

    name: FileName
    policy: str | None = None
    pipeline: str | None = None
    peer: PeerConfig | None = None
    policy_args: Mapping[str, Any] = Field(default_factory=dict)
    engine: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_strategy(self) -> RunConfig:
        if sum(given is not None for given in (self.policy, self.pipeline, self.peer)) != 1:
            raise ValueError("expected either policy or pipeline, or a peer")
        return self

    @property
    def policy_name(self) -> str:
        """The policy to construct: `policy`, or `fixed:<pipeline>`; of a peer only a word."""
        if self.peer is not None:
            return "peer"
        return self.policy if self.policy is not None else f"fixed:{self.pipeline}"


class ExperimentConfig(Section):
    """A whole experiment file. `paper`: reported values to compare with, not read by a run."""

    name: FileName
    description: str = ""
    model: ModelSection
    engine: EngineConfig = EngineConfig()
    runs: tuple[RunConfig, ...] = Field(min_length=1, strict=False)
    workload: WorkloadConfig
    sweep: Mapping[str, Any] = Field(default_factory=dict)
    trace: TraceConfig = TraceConfig()
    seed: int = 0
    paper: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("runs")
    @classmethod
    def _distinct_names(cls, runs: tuple[RunConfig, ...]) -> tuple[RunConfig, ...]:
        names = [run.name for run in runs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"expected distinct names, {name!r} occurs twice")
        return runs
