"""Settings of all tests."""

from __future__ import annotations

import torch

# Tiny models: more threads only wait for each other.
torch.set_num_threads(1)
