"""The cost model of an engine: measured tables, or closed forms where nobody has measured."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from swiftapex.backends.threads import cpu_threads, split_threads
from swiftapex.config.schema import PROFILE_WORDS, EngineConfig
from swiftapex.cost_model import CostModel
from swiftapex.costs.analytic import AnalyticCostModel, default_rates
from swiftapex.costs.correction import CorrectedCostModel
from swiftapex.costs.doubts import REMEDY, doubts
from swiftapex.costs.measured import MeasuredCostModel
from swiftapex.executor.base import Executor
from swiftapex.kv.sizing import KVSizes
from swiftapex.model.config import ModelConfig
from swiftapex.model.shard import Shard
from swiftapex.profiler import store
from swiftapex.profiler.fingerprint import fingerprint
from swiftapex.profiler.measure import Points, profile
from swiftapex.profiler.probe import Probe

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.3  # of one measurement; some 200 of them make a profile


def default_cost_model(
    config: ModelConfig, dtype: str, cpu_kv_dtype: str, engine: EngineConfig, uses_cpu: bool
) -> CostModel:
    """Closed forms at the default rates of the engine's device and threads: what a rank computes,
    at its part of the host's rates. What ranks tell each other costs nothing here."""
    ranks = engine.tensor_parallel_size
    threads = cpu_threads(engine.cpu.threads).count
    gpu_side = cpu_side = threads
    if uses_cpu and engine.device != "cuda":
        gpu_plan, cpu_plan = split_threads(engine.cpu.threads)
        gpu_side, cpu_side = gpu_plan.count, cpu_plan.count
    gpu_threads = max(1, gpu_side // ranks)
    rates = default_rates(engine.device, cpu_side, gpu_threads, engine.gpu.sm_count)
    rates = replace(rates, cpu_kv_bytes_per_s=rates.cpu_kv_bytes_per_s / ranks)
    return AnalyticCostModel(Shard(0, ranks).config(config), rates, dtype, cpu_kv_dtype)


@dataclass(frozen=True)
class ProfiledEngine:
    """What a profile is of: an engine whose executor stands, before its first request."""

    config: ModelConfig
    dtype: str
    engine: EngineConfig
    sizes: KVSizes
    max_model_len: int
    executor: Executor

    def cost_model(self, uses_cpu: bool) -> tuple[CostModel, tuple[str, ...]]:
        """As `engine.profile` says; see EngineConfig. Auto reads what was measured before, and
        measures nothing itself. With what users should know of the profile."""
        asked = self.engine.profile
        auto = asked == "auto" and self.engine.device == "cuda"
        found: store.Profile | None = None
        if auto or asked == "on":
            found = store.find(self.folder, self.fingerprint())
        elif asked not in PROFILE_WORDS:
            found = store.read(Path(asked), self.fingerprint())
        if found is None and asked in ("auto", "off"):
            cpu_dtype = self.sizes.cpu_dtype
            dtype, engine = self.dtype, self.engine
            return default_cost_model(self.config, dtype, cpu_dtype, engine, uses_cpu), ()
        tables = (found or self.measure()).tables
        measured = MeasuredCostModel(tables)
        notes = tuple(f"In the profile, {doubt}; {REMEDY}." for doubt in doubts(tables))
        for note in notes:
            logger.warning("%s", note)
        return CorrectedCostModel(measured) if self.engine.online_correction else measured, notes

    @property
    def folder(self) -> Path:
        """Where profiles are kept."""
        chosen = self.engine.profile_folder
        return store.default_folder() if chosen is None else Path(chosen).expanduser()

    @property
    def points(self) -> Points:
        size = self.engine.block_size
        return Points.within(
            max_batch_size=self.engine.max_batch_size,
            max_tokens=self.engine.max_tokens_in_batch,
            max_context=self.max_model_len,
            gpu_tokens=self.sizes.gpu_blocks * size,
            cpu_tokens=self.sizes.cpu_blocks * size,
            block_size=size,
        )

    def fingerprint(self) -> dict[str, object]:
        return fingerprint(
            self.config,
            self.dtype,
            self.engine,
            self.sizes,
            self.points,
            self.executor.device_name,
        )

    def measure(self) -> store.Profile:
        """Runs the profiler, with a progress bar, and keeps what it finds."""
        start = time.perf_counter()
        self.executor.touch_kv()
        probe = Probe(
            self.executor, self.sizes.num_blocks, self.engine.block_size, patience_s=_PATIENCE_S
        )
        every_s = 0.2 if sys.stderr.isatty() else 5.0
        with tqdm(
            total=100,
            desc="profiling",
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {elapsed}",
            mininterval=every_s,
        ) as bar:

            def watch(share: float) -> None:
                bar.update(100 * share - bar.n)

            tables = profile(probe, self.points, self.config.num_layers, watch)
        found = store.Profile(self.fingerprint(), tables, time.perf_counter() - start)
        store.write(self.folder, found)
        return found
