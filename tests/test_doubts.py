"""Times that fell to 0 in a profile are named, with the stage; those that may be 0 are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftapex.config.schema import CpuConfig, EngineConfig, GpuConfig, ModelSection
from swiftapex.costs.doubts import doubts
from swiftapex.costs.tables import Grid, Line, Tables
from swiftapex.engine.engine import Engine
from swiftapex.profile import main

LINE = Line((1, 8, 64), (5.0, 6.0, 7.0))
GRID = Grid((1, 4, 16), (64, 256, 1024), ((0.0, 1.0, 4.0), (None, 0.0, 4.0), (None, 1.0, None)))
SOUND = Tables(
    num_layers=2,
    linear=LINE,
    iteration=LINE,
    gpu_attention=GRID,
    prefill_attention=Grid((16, 64), (0, 512), ((0.0, 2.0), (1.0, 2.0))),
    cpu_attention=Grid((1,), (64, 256), ((2.0, 3.0),)),
    hand_off=Line((1, 8), (0.0, 2.0)),
    layerwise=Line((1, 8), (0.0, 0.0)),
    copy=LINE,
)


def with_row(grid: Grid, index: int, row: tuple[float | None, ...]) -> Grid:
    return replace(grid, us=(*grid.us[:index], row, *grid.us[index + 1 :]))


def test_little_work_may_cost_nothing() -> None:
    grid = with_row(GRID, 1, (None, 2.0, 4.0))
    assert doubts(replace(SOUND, gpu_attention=grid)) == []
    without_cpu = dict.fromkeys(("hand_off", "layerwise", "copy"), Line())
    assert doubts(replace(SOUND, gpu_attention=grid, cpu_attention=Grid(), **without_cpu)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "GPU decode attention: no time was left at 1 of 6 points (4 requests, 256 tokens):"),
        ({"linear": Line((1, 8), (0.0, 2.0))}, "linear stages: no time was left at 1 of 2 points"),
        ({"iteration": Line((1,), (0.0,))}, "an iteration besides its layers: no time was left at "
         "any of 1 points: this counts as nothing"),
        ({"copy": Line((16, 128), (3.0, 0.0))}, "copies between the sides: no time was left at 1 "
         "of 2 points (128 tokens):"),
        ({"hand_off": Line((1, 8), (2.0, 0.0))}, "hand-offs: no time was left at 1 of 2"),
        ({"layerwise": Line((1, 8), (2.0, 0.0))}, "layers launched by themselves: no time was"),
        ({"prefill_attention": Grid((16,), (0, 512), ((1.0, 0.0),))}, "prefill attention: no time "
         "was left at 1 of 2 points (16 tokens, 512 before them)"),
        ({"cpu_attention": Grid((1, 8), (64, 256), ((0.0, 0.0), (0.0, 0.0)))}, "CPU decode "
         "attention: no time was left at 2 of 4 points (1 requests, 256 tokens; 8 requests, 256"),
    ],
)  # fmt: skip
def test_what_noise_has_spoilt_is_named(change: dict[str, Any], expected: str) -> None:
    grid = GRID if not change else with_row(GRID, 1, (None, 2.0, 4.0))
    (sentence,) = doubts(replace(SOUND, **({"gpu_attention": grid} | change)))
    assert sentence.startswith(expected)


def test_many_points_are_counted() -> None:
    spoilt = Line(tuple(range(1, 8)), (9.0, *[0.0] * 6))
    grid = with_row(GRID, 1, (None, 2.0, 4.0))
    (sentence,) = doubts(replace(SOUND, gpu_attention=grid, copy=spoilt))
    assert "at 6 of 7 points (2 tokens; 3 tokens; 4 tokens and 3 more)" in sentence


def test_engine_and_command_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored profile whose copies fell to 0."""
    model = ModelSection(architecture="tiny", weights="dummy", num_layers=2, dtype="float32")
    settings = {
        "block_size": 16, "max_model_len": 64, "max_batch_size": 4, "max_tokens_in_batch": 16,
        "profile_folder": str(tmp_path),
    }  # fmt: skip

    def notes(profile: str) -> tuple[str, ...]:
        pools = {"gpu": GpuConfig(kv_tokens=256), "cpu": CpuConfig(kv_tokens=256)}
        engine = Engine(
            model, EngineConfig(profile=profile, **pools, **settings), policy="model_based"
        )
        engine.reuse("model_based")  # which makes the cost model anew
        engine.close()
        return engine.notes

    notes("on")
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    data["tables"]["copy"]["us"] = [0.0 for _ in data["tables"]["copy"]["us"]]
    path.write_text(json.dumps(data))
    (note,) = [note for note in notes("on") if "copies" in note]
    assert note.startswith("In the profile, copies between the sides: no time was left at any of")
    assert "--redo" in note
    assert notes("off") == ()
    capsys.readouterr()
    arguments = ["--model", "tiny", "--dtype", "float32", "--set", "model.num_layers=2"]
    for key, value in {**settings, "gpu.kv_tokens": 256, "cpu.kv_tokens": 256}.items():
        arguments += ["--set", f"engine.{key}={value}"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "disturbed:" in shown and "copies between the sides: no time was left" in shown
    assert "--redo" in shown
