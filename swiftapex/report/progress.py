"""A progress bar on stderr: requests ended, and the tokens per second of the last moments."""

from __future__ import annotations

import sys
import time
from collections import deque

from tqdm import tqdm

from swiftapex.workloads.replay import Progress

_SPAN_S = 3.0  # over which the current rate is taken


class ProgressBar:
    """Use as a context manager; give `update` to `replay`."""

    def __init__(self, num_requests: int) -> None:
        # A log file would keep every line that a terminal overwrites.
        every_s = 0.2 if sys.stderr.isatty() else 5.0
        self._bar = tqdm(
            total=num_requests, unit="req", dynamic_ncols=True, miniters=0, mininterval=every_s
        )
        self._recent: deque[tuple[float, int]] = deque([(time.perf_counter(), 0)])

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, progress: Progress) -> None:
        """Call after every iteration; draws only so often."""
        now = time.perf_counter()
        self._recent.append((now, progress.output_tokens))
        while len(self._recent) > 2 and now - self._recent[0][0] > _SPAN_S:
            self._recent.popleft()
        then, tokens = self._recent[0]
        rate = (progress.output_tokens - tokens) / max(now - then, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update(progress.ended - self._bar.n)
