"""Settings of all tests."""

from __future__ import annotations

import pytest
import torch

# Tiny models: more threads only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--scheduler-seeds",
        type=int,
        default=60,
        help="random schedules per policy (10000: some minutes for each; raise --timeout)",
    )


@pytest.fixture
def scheduler_seeds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--scheduler-seeds"))
