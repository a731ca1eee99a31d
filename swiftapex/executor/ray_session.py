"""This process's connection to Ray. There is one for all engines of the process: the Ray that was
there before them, or one that the first of them starts and the last of them ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swiftapex.core.errors import ConfigError, EngineError

_OBJECT_STORE_BYTES = 80 << 20  # Ray's smallest: nothing goes through it

_lock = threading.Lock()
_users: dict[str, int] = {}  # sessions on each Ray that was started here, by its address


class RaySession:
    """A user of Ray. `size`: ranks for which there must be CPUs, if Ray is started here.

    ConfigError where Ray is not installed, EngineError where it does not start.
    """

    def __init__(self, size: int) -> None:
        self.ray = _import_ray(size)
        with _lock:
            if not self.ray.is_initialized():
                _start(self.ray, size)
                _users[_address(self.ray)] = 0
            self._address = _address(self.ray)
            if self._address in _users:
                _users[self._address] += 1

    @property
    def is_open(self) -> bool:
        """Whether this process is still connected to that Ray. It would start another one where
        something is asked of it after its end."""
        return bool(self.ray.is_initialized()) and _address(self.ray) == self._address

    def close(self) -> None:
        """To be called once. Ends Ray with the last session on one that was started here."""
        with _lock:
            if self._address not in _users:
                return
            _users[self._address] -= 1
            if _users[self._address] == 0:
                del _users[self._address]
                if self.is_open:
                    self.ray.shutdown()


def _start(ray: Any, size: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with _interrupts_held():
            ray.init(
                address="local",
                num_cpus=max(size, os.cpu_count() or 1),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):
            raise
        raise EngineError(
            f"engine.tensor_parallel_size: Ray does not start: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C comes at the end: Ray forgets the processes of a start that was cut short, and they
    would live as long as this one. Handlers of signals are the main thread's alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual or signal.SIG_DFL)  # None: not set by Python
    if held:
        signal.raise_signal(signal.SIGINT)


def _address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def _import_ray(size: int) -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"engine.tensor_parallel_size: {size} needs Ray: pip install 'swiftapex[tp]' ({error})"
        ) from error
    return ray
