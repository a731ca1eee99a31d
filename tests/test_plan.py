"""Plans cross processes as they are, in few bytes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace

from swiftapex.core.plan import Admission, Inequality, Move, Row, StepPlan, SubBatch
from swiftapex.core.request import Placement, SamplingParams

GPU, CPU, STAGING = Placement.GPU, Placement.CPU, Placement.STAGING


@dataclass
class NotedPlan(StepPlan):
    """For a pipeline of one's own."""

    note: str = ""


def test_a_plan_is_the_same_after_pickling() -> None:
    rows = (
        Row(1, GPU, 5, None, True),
        Row(2, GPU, 0, (7, 8, 9), False),
        Row(3, STAGING, 3, (4,), True),
    )
    plan = StepPlan(
        pipeline="asymmetric",
        sub_batches=(SubBatch(rows), SubBatch()),
        new_cohorts=(SubBatch((Row(4, CPU, 9, None, True),)),),
        moves=(Move(5, GPU, CPU, (1, 2), (3, 4)),),
        admitted=(Admission(2, 3, SamplingParams(temperature=0.5), 0),),
        new_blocks={2: (8,)},
        released=(0,),
        dropped=(6,),
        predicted_us=12.5,
        candidates_us={"asymmetric": 12.5, "sequential": 20.0},
        inequality=Inequality("left > right", 2.0, 1.0),
    )
    assert not [f.name for f in fields(plan) if getattr(plan, f.name) in ((), {}, None)]
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.sub_batches[0].rows[0].placement is GPU
    noted = NotedPlan(*(getattr(plan, f.name) for f in fields(plan)), note="mine")
    again = pickle.loads(pickle.dumps(replace(noted, pipeline="symmetric")))
    assert type(again) is NotedPlan and again.note == "mine"
    assert replace(again, pipeline="asymmetric") == noted


def test_a_decode_takes_a_few_bytes() -> None:
    def size(n: int) -> int:
        rows = tuple(Row(i, GPU, 100 + i, None, True) for i in range(n))
        return len(pickle.dumps(StepPlan("sequential", (SubBatch(rows),)), pickle.HIGHEST_PROTOCOL))

    assert size(256) < 2700
    assert (size(256) - size(128)) / 128 < 12
