"""What ends an engine that gets nowhere. Policies and pipelines may be anyone's: one that forgets a
row, or leaves a cohort where it is parked, would otherwise have the engine iterate for ever."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from swiftapex.core.errors import some_of
from swiftapex.core.plan import StepPlan, StepResult, Tokens

_EMPTY_STEPS = 100  # iterations in a row that compute nothing while requests wait: no progress
_STANDSTILL_S = 10.0  # so long they must take where cohorts are in flight: no attention does
_MOST_IDS = 8  # that a message names


class Watch:
    """Of one engine, whose model has `num_layers`. Each question is asked once an iteration, and
    answered with what is wrong, or None."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._in_flight: frozenset[int] = frozenset()  # after the last iteration
        self._barren_steps = 0  # iterations in a row that brought nothing
        self._since_s = 0.0  # their beginning

    def forgotten(self, plan: StepPlan, result: StepResult, live: Collection[int]) -> str | None:
        """Rows of `live` requests that were to complete a token and did not, and cohorts that were
        in flight and are neither that nor complete; or tokens that nobody asked for. A new cohort
        may be left alone, for another pass: see `standstill`."""
        due = {row.request_id for b in plan.sub_batches for row in b.rows if row.completes}
        completing = set(result.completing)
        missing = due - completing
        missing |= self._in_flight - result.in_flight - completing
        if missing and (missing := missing.intersection(live)):
            return (
                f"pipeline {plan.pipeline} lost {_requests(missing)}: planned to complete a token, "
                "but not in its result. `step` returns what `parts.complete` gives for the "
                "`results()` of all its walks"
            )
        strangers = completing - due
        if strangers:
            strangers -= self._in_flight | _new(plan)
        if strangers or len(completing) < len(result.completing):
            return (
                f"pipeline {plan.pipeline} completed tokens of {_requests(strangers or completing)}"
                " that were not planned, or twice"
            )
        return None

    def without_token(self, plan: StepPlan, result: StepResult, tokens: Tokens) -> str | None:
        """Requests that completed a token, which never came."""
        there, failed = tokens.by_request, tokens.failures
        missing = [i for i in result.completing if i not in there and i not in failed]
        if not missing:
            return None
        return f"pipeline {plan.pipeline} brought no token for {_requests(missing)}"

    def standstill(self, plan: StepPlan, result: StepResult, is_open: bool) -> str | None:
        """Many iterations in a row that brought nothing, though requests are open or in flight. A
        cohort needs a pass per layer at most, as the one that waits longest is always waited for;
        so the same ones are in flight for that often the number of cohorts."""
        before, self._in_flight = self._in_flight, result.in_flight
        chunks = (row for batch in plan.sub_batches for row in batch.rows if not row.is_decode)
        if result.completing or plan.moves or before != result.in_flight or any(chunks):
            self._barren_steps = 0
            return None
        if self._barren_steps == 0:
            self._since_s = time.perf_counter()
        self._barren_steps += is_open or bool(before)
        steps = self._barren_steps
        if not before:
            return _idle(plan, steps) if steps >= _EMPTY_STEPS else None
        seconds = time.perf_counter() - self._since_s
        if steps < _EMPTY_STEPS + len(before) * (self._num_layers + 1) or seconds < _STANDSTILL_S:
            return None
        return (
            f"no progress in {steps} iterations: pipeline {plan.pipeline} leaves "
            f"{_requests(before)} in flight. It must take in cohorts at every layer, "
            "as `Walk.post` does"
        )


def _idle(plan: StepPlan, steps: int) -> str:
    words, alone = f"no progress in {steps} iterations", _new(plan)
    if not alone:
        return words
    return (
        f"{words}: pipeline {plan.pipeline} leaves {_requests(alone)} alone. They come as "
        "`plan.new_cohorts`, which a `Walk` takes; or another `shape` suits the pipeline"
    )


def _new(plan: StepPlan) -> set[int]:
    """Requests of its new cohorts."""
    return {row.request_id for cohort in plan.new_cohorts for row in cohort.rows}


def _requests(ids: Iterable[int]) -> str:
    """Their ids in words, the first ones."""
    known = [str(request_id) for request_id in sorted(ids)]
    return f"request{'s' * (len(known) > 1)} {some_of(known, _MOST_IDS)}"
