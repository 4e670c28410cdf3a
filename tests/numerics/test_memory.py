"""A tensor of 1 GiB is quantized, coded and decoded in 4 GiB."""

from __future__ import annotations

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource", reason="limits on memory need a Unix system")

PROGRAM = """
import resource
import torch

limit = 4 << 30
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
torch.set_num_threads(1)
from altgrad.numerics import decode, encode, quantize

x = torch.randn(1 << 14, 1 << 14)
assert x.numel() * x.element_size() == 1 << 30
{work}
"""

WORK = {
    "nearest-even": "quantize(x, 'E3M4', scale=2.0)",
    "row scales": "quantize(x, 'E3M4', scale=torch.rand(1 << 14, 1) + 1)",
    "stochastic": "quantize(x, 'E3M4', rounding='stochastic', generator=torch.Generator())",
    "codes": "assert torch.equal(decode(encode(x, 'E3M4'), 'E3M4')[-1], quantize(x[-1], 'E3M4'))",
}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_gibibyte_fits_into_four(work):
    command = [sys.executable, "-c", PROGRAM.format(work=work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
