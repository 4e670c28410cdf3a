"""What takes seconds to import is imported by what needs it alone. Oracle: a fresh process's ``sys.modules``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys

FRAMEWORKS = "transformers peft lightning accelerate torchtitan"
def loaded(names):
    print(*(name for name in names.split() if name in sys.modules), sep=",")

import altgrad.optim, altgrad.training, altgrad.diagnostics, altgrad.benchmark.session
import altgrad.integrations
loaded("torch._dynamo torch._inductor geoopt torchao triton " + FRAMEWORKS)

from altgrad.optim.checks import check_cells
from tests.training.conftest import arm_cell
check_cells([arm_cell("rung")], 300, "bf16")
loaded("torch._dynamo torchao")

import torch
from altgrad.model import GPT, GPTConfig, LayerRecipe, Recipe, quantize_model
for recipe in (Recipe.uniform("E4M3"), Recipe(rules=[LayerRecipe(torchao="rowwise").on("blocks.*")])):
    gpt = quantize_model(GPT(GPTConfig(96, 1, 16, 2, 16)), recipe)
    tokens = torch.arange(16)[None]
    gpt(tokens, tokens).backward()
    loaded("torchao")
"""


def test_nobody_waits_for_the_compiler_or_anothers_package_before_it_is_needed() -> None:
    """Neither all packages that train, nor cells that are checked, nor a model of ours; and torchao says nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["", "", "", "torchao", ""]
    assert done.stderr == ""
