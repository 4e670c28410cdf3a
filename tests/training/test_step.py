"""What a step is: the mean gradient of its sequences, clipped by the norm over all parameters, for the optimizer.

Oracles: autograd on the plain model and all sequences at once, and the rule of SGD in float64.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from altgrad.config import Cell
from altgrad.config.schema import Train, learning_rate
from altgrad.model import linear_layers
from altgrad.model.layers import quantizer_of
from altgrad.numerics import compute_scale
from altgrad.training.run import make_trainer
from altgrad.training.trainer import Trainer, probe_steps
from tests.training.conftest import VOCABULARY, make_cell, without_dropout

SGD = {"base": "sgd", "lr": 0.5, "momentum": 0.0, "decay": 0.0, "plain_decay": 0.0}


def trainer_of(cell: Cell, tokens: Path, scratch: Path) -> Trainer:
    """Return what trains a cell, in float32 and without dropout."""
    scratch.mkdir(parents=True, exist_ok=True)
    return make_trainer(without_dropout(cell), tokens, scratch, torch.device("cpu"), "float32", compiled=False)


def oracle(trainer: Trainer, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the mean loss of all sequences of a step in one batch, and its gradients."""
    parts = [trainer.task.batch(step=step, micro=micro) for micro in range(trainer.cell.train.grad_accumulation)]
    loss = trainer.model(*(torch.cat(each) for each in zip(*parts, strict=True)))
    return loss.detach(), torch.autograd.grad(loss, list(trainer.model.parameters()))


@pytest.mark.parametrize("train", [
    {"grad_accumulation": 1}, {"grad_accumulation": 3}, {"grad_accumulation": 3, "loss_scale": 64.0}
], ids=str)  # fmt: skip
def test_micro_batches_give_the_loss_and_the_gradients_of_one_batch(tokens, tmp_path, train):
    trainer = trainer_of(make_cell("bf16", **train), tokens, tmp_path)
    for step in (1, 2):
        expected, gradients = oracle(trainer, step)
        loss, total_norm, norm = trainer._gradients(step)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for p, gradient in zip(trainer.model.parameters(), gradients, strict=True):
            assert torch.allclose(p.grad, gradient, rtol=1e-4, atol=1e-7)
        whole = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
        assert norm == total_norm.item() == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("clip", [1e-3, 0.05, 1e9])
def test_a_step_of_sgd_is_the_rate_times_the_clipped_gradient(tokens, tmp_path, clip):
    """So no step moves all parameters together further than the rate times the clip."""
    trainer = trainer_of(make_cell("bf16", arm=SGD, clip=clip, warmup=0.0, final_lr=1.0), tokens, tmp_path)
    for step in (1, 2, 3):
        before = [p.detach().clone() for p in trainer.model.parameters()]
        _, gradients = oracle(trainer, step)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).double().norm().item()
        trainer.update(step)
        moves = [p.detach().double() - old for p, old in zip(trainer.model.parameters(), before, strict=True)]
        for move, gradient in zip(moves, gradients, strict=True):
            wanted = -SGD["lr"] * min(1.0, clip / norm) * gradient.double()
            assert torch.allclose(move, wanted, rtol=1e-3, atol=1e-7 * max(1.0, before[0].abs().max().item()))
        moved = torch.cat([move.flatten() for move in moves]).norm().item()
        assert moved <= SGD["lr"] * clip * (1 + 1e-3) and norm > 0.1
        assert trainer.totals["clipped"] == (step if clip < 0.1 else 0)


def test_an_instrumented_pass_sees_the_scales_that_the_step_will_have(tokens, tmp_path):
    """Those of the amax histories as they are, of which it learns nothing, whatever is larger in its own tensors."""
    trainer = trainer_of(make_cell(scaling="delayed"), tokens, tmp_path)
    places = [(name, layer, role) for name, layer in linear_layers(trainer.model).items() for role in ("input", "grad")]
    quantizers = {(name, role): quantizer_of(layer, role) for name, layer, role in places}
    for quantizer in quantizers.values():
        quantizer.history.fill_(2.0**-20)
    expected = {place: compute_scale(2.0**-20, q.recipe.format).item() for place, q in quantizers.items()}
    rows = trainer._observe(1, {"tensors"})
    assert {(row.layer, row.role): row.value for row in rows if row.metric == "scale"}.items() >= expected.items()
    assert all((quantizer.history == 2.0**-20).all() for quantizer in quantizers.values())
    assert not any(module._forward_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("fmt", ["bf16", "E4M3", "E5M2"])
def test_the_first_loss_is_that_of_knowing_nothing(tokens, tmp_path, fmt):
    """The logarithm of the vocabulary, before the first step on either side, whatever the format."""
    trainer = trainer_of(make_cell(fmt), tokens, tmp_path)
    for loss in (trainer.evaluation.loss(), trainer._gradients(1)[0]):
        assert loss == pytest.approx(math.log(VOCABULARY), abs=0.05)


def rates(steps: int, warmup: float, final: float) -> list[float]:
    return [learning_rate(s, peak=2.0, steps=steps, warmup=warmup, final=final) for s in range(1, steps + 1)]


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    found = rates(100, 0.1, 0.1)
    assert found[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert found[-1] == pytest.approx(0.2)
    assert found[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half-way down: step 10 + 45
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))


def test_with_a_cooldown_a_shorter_run_branches_off_a_longer_one():
    """Until it cools down it has the rates of the longer run; then the rate falls in equal steps to its end."""
    short, long = (
        [learning_rate(s, peak=2.0, steps=n, warmup=20 / n, final=0.1, cooldown=0.2) for s in range(1, n + 1)]
        for n in (200, 800)
    )
    assert short[:160] == long[:160] and set(long[19:640]) == {2.0}
    assert [a - b for a, b in itertools.pairwise(short[159:])] == pytest.approx([1.8 / 40] * 40)
    assert short[-1] == pytest.approx(0.2)
    alone = [learning_rate(s, peak=2.0, steps=10, warmup=0, final=0.5, cooldown=0) for s in range(1, 11)]
    assert alone == [2.0] * 10
    with pytest.raises(ValueError, match="warmup 0.5 and cooldown 0.6 are more than all steps together"):
        Train(warmup=0.5, cooldown=0.6)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (10, 1.0), (10, 0.0)])
def test_extreme_schedules_stay_between_zero_and_the_peak(steps, warmup):
    assert all(0 < lr <= 2.0 for lr in rates(steps, warmup, 0.1))


def test_probe_steps_are_evenly_spaced_and_include_both_ends():
    assert probe_steps(300, 3) == [0, 150, 300]
    assert probe_steps(300, 1) == [300]
    assert probe_steps(1, 5) == [0, 1]
