"""A request and its life in the control plane. No torch here."""

from __future__ import annotations

import enum
import math
import operator
from dataclasses import dataclass, field

from swiftapex.core.errors import RequestError


class Placement(enum.Enum):
    """Where a request's KV lies, whole. STAGING: it is being prefilled on the GPU, layer by layer
    through a staging area, into blocks on the CPU."""

    GPU = "gpu"
    CPU = "cpu"
    STAGING = "staging"

    # A member equals itself alone; the hash of Enum takes three times as long.
    __hash__ = object.__hash__

    @property
    def side(self) -> Placement:
        """The pool that a request's blocks come from."""
        return GPU if self is GPU else CPU


# Under names of their own: before Python 3.12 an enum takes 0.1 µs to look a member up.
GPU, CPU, STAGING = Placement.GPU, Placement.CPU, Placement.STAGING
SIDES = (GPU, CPU)


class RequestState(enum.Enum):
    WAITING = "waiting"  # owns no blocks
    RUNNING = "running"  # owns blocks; prefilling or decoding
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"
    ERROR = "error"


_KINDS: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "seed": (int, type(None)),
    "max_tokens": (int,),
}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    temperature 0 is an exact argmax. `seed` (None: 0) and the token's index alone decide the
    random number of a token, whatever the batch around it. `top_k` 0 means all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name in ("top_k", "seed", "max_tokens"):
            value = getattr(self, name)
            if hasattr(value, "__index__") and not isinstance(value, bool):
                object.__setattr__(self, name, operator.index(value))  # numpy's integers too

    def check(self) -> None:
        """Raise RequestError naming the first field that is of a wrong type or out of range."""
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise RequestError(f"{name} is of a wrong type: {value!r}")
        if not all(isinstance(s, str) for s in self.stop):
            raise RequestError(f"stop strings must be texts, got {self.stop!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k must be >= 0 (0: all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if any(not s for s in self.stop):
            raise RequestError("stop strings must not be empty")


@dataclass(eq=False, slots=True)
class Request:
    """One request. The engine owns it; policies read it.

    `num_computed` tokens of `prompt_ids + output_ids` have their K and V in the cache. A request
    decodes once only its newest token is not computed; until then it prefills. A preempted request
    starts again from `num_computed = 0` with the output it has.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float  # engine clock (time.perf_counter), seconds
    state: RequestState = RequestState.WAITING
    placement: Placement = Placement.GPU
    output_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_pending: int = 0  # tokens that a launched iteration completes, not known here yet
    num_computed: int = 0
    num_preemptions: int = 0
    in_flight: bool = False  # a decode is parked in a pipeline: not to be moved, freed or preempted
    moving: bool = False  # its KV is on the way to the other side
    last_served: int = 0  # iteration in which it last had a row
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def num_generated(self) -> int:
        """Output tokens, those included that are not known yet."""
        return len(self.output_ids) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        generated = len(self.output_ids) + self.num_pending  # spelled out: asked very often
        return generated > 0 and self.num_computed == len(self.prompt_ids) + generated - 1

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at positions [start, end) of prompt and output together, all of them known."""
        split = len(self.prompt_ids)
        if end <= split:
            return self.prompt_ids[start:end]
        output = self.output_ids[max(start - split, 0) : end - split]
        return self.prompt_ids[start:split] + tuple(output)
