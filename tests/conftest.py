"""One thread in every test: results do not depend on the cores, and small tensors do not pay for waking them."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
