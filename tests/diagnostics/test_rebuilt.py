"""The model rebuilt from a run's files, and the loss around its final weights.

Oracles: a spectrum that is known beforehand, `torch.func.hessian`, the Hessian of the unrounded model at rounded
weights, gradients of one sample at a time, and the loss that training itself wrote down.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional as F

from altgrad.config import Cell, UserError
from altgrad.config.schema import Diagnose
from altgrad.diagnostics.geometry import TOLERANCE, curvatures, fishers, lanczos, mean_and_error
from altgrad.diagnostics.gradients import gradient_noises
from altgrad.diagnostics.saved import RebuiltModel, SavedRun, StraightThroughLinear, replace_linear
from altgrad.model import GPT, GPTConfig, Recipe, linear_layers
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import compute_scale, quantize
from altgrad.training.run import train_cell
from tests.training.conftest import diagnosed, make_cell, make_tokens

LAYERS = {"blocks.0.attn.qkv", "blocks.0.attn.out", "blocks.0.mlp.up", "blocks.0.mlp.down"}


def small_model(recipe: Recipe | None = None, seed: int = 0, labels: tuple[float, ...] = ()) -> RebuiltModel:
    """A model of 8 features and one block, weights large enough to bend the loss; 6 sequences of 8 tokens."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=11, layers=1, width=8, heads=2, context=8, labels=labels, end=11))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10 if p.ndim == 2 else 1)
    replace_linear(model, recipe.match(linear_layers(model)) if recipe else {}, {})
    inputs = torch.randint(11, (6, 8))
    return RebuiltModel(model, inputs, torch.rand(6, len(labels)).round() if labels else torch.randint(11, (6, 8)))


# --- eigenvalues ---------------------------------------------------------------------------------


def quadratic(eigenvalues: Tensor) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64,
                                           generator=torch.Generator().manual_seed(0)))  # fmt: skip
    return basis @ torch.diag(eigenvalues.double()) @ basis.T


def start(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_quadratics_spectrum_is_found_whole_and_in_part() -> None:
    eigenvalues = torch.tensor([-3.0, -1.0, 0.0, 0.5, 0.7, 2.0, 9.0, 40.0])
    matrix = quadratic(eigenvalues)
    whole = lanczos(lambda v: matrix @ v, start(8), 8, 0.0)
    assert torch.allclose(whole.values, eigenvalues.double(), atol=1e-9) and whole.residual < 1e-9
    for steps in (2, 3, 5):
        part = lanczos(lambda v: matrix @ v, start(8), steps, 0.0)
        assert len(part.values) == steps
        assert part.values[0] >= -3 - 1e-9 and part.values[-1] <= 40 + 1e-9  # Ritz values lie inside the spectrum
        nearest = (eigenvalues - part.values[-1]).abs().min()
        assert nearest <= part.residual * part.values[-1].abs() + 1e-6  # what the residual promises


def test_it_stops_at_the_tolerance_or_when_the_space_is_exhausted() -> None:
    eigenvalues = torch.cat([torch.linspace(0, 1, 99), torch.tensor([100.0])])
    matrix = quadratic(eigenvalues)
    found = lanczos(lambda v: matrix @ v, start(100), 50, 0.05)
    assert len(found.values) < 10 and found.residual <= 0.05 and found.values[-1] == pytest.approx(100, rel=0.01)
    low = lanczos(lambda v: torch.cat([3 * v[:1], 0 * v[1:]]), start(6), 6, 0.0)  # of rank one
    assert len(low.values) == 2 and low.values.tolist() == pytest.approx([0, 3], abs=1e-9) and low.residual == 0
    none = lanczos(lambda v: 0 * v, start(4), 4, 0.05)
    assert none.values.tolist() == [0] and none.residual == 0


def test_a_mean_has_the_standard_error_of_scipy() -> None:
    samples = start(16)
    assert mean_and_error(samples) == pytest.approx((np.mean(samples.numpy()), scipy.stats.sem(samples.numpy())))


# --- the Hessian ---------------------------------------------------------------------------------


def dense(model: RebuiltModel, name: str) -> Tensor:
    """The Hessian by `torch.func`, (n, n) of the weight ``name``, through the plain model without any rounding."""
    parameters = dict(model.model.named_parameters())

    def loss(w: Tensor) -> Tensor:
        return functional_call(model.model, parameters | {name: w}, (model.inputs, model.targets))

    n = parameters[name].numel()
    return hessian(loss)(parameters[name].detach()).reshape(n, n).double()


def test_curvature_is_that_of_the_dense_hessian() -> None:
    model = small_model()
    layers, whole = curvatures(model, 64, 100)
    assert set(layers) == LAYERS  # the head's weight is the embedding's
    for name, found in layers.items():
        matrix = dense(model, f"{name}.weight")
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert found.spectrum.residual <= TOLERANCE
        assert found.spectrum.values[-1] == pytest.approx(eigenvalues[-1].item(), rel=TOLERANCE)
        assert eigenvalues[0] - 1e-3 <= found.spectrum.values[0]
        assert abs(found.trace - matrix.trace()) <= 4 * found.trace_error
        assert found.trace_error > 0
    assert whole.spectrum.values[-1] >= max(f.spectrum.values[-1] for f in layers.values()) * (1 - TOLERANCE)


def test_the_straight_through_hessian_is_that_of_the_plain_model_at_the_rounded_weights() -> None:
    """Weights alone are rounded, so the model at rounded weights without any rounding is the same function nearby."""
    rounded = small_model(Recipe.uniform("E2M1", grad=None).but(rules=(weight_only("E2M1"),)))
    plain = small_model()
    with torch.no_grad():
        for name, layer in plain.layers.items():
            scale = compute_scale(layer.weight.abs().amax(), "E2M1")
            layer.weight.copy_(quantize(layer.weight * scale, "E2M1") / scale)
            assert not torch.equal(layer.weight, rounded.layers[name].weight)
        head = plain.model.get_submodule("head")  # rounded in products, and looked up as it is
        head.quantizers["weight"] = rounded.model.get_submodule("head").quantizers["weight"]
    assert rounded.loss().item() == pytest.approx(plain.loss().item(), rel=1e-6)
    ours, theirs = (curvatures(model, 16, 8) for model in (rounded, plain))
    for name in LAYERS:
        assert ours[0][name].spectrum.values[-1] == pytest.approx(theirs[0][name].spectrum.values[-1].item(), rel=1e-3)
        assert ours[0][name].trace == pytest.approx(theirs[0][name].trace, rel=1e-2, abs=1e-3)


def weight_only(fmt: str):
    (rule, *_) = Recipe.uniform(fmt, grad=None).rules
    return rule.but(input=None)


# --- Fisher information --------------------------------------------------------------------------


def test_fisher_is_that_of_gradients_of_one_sequence_at_a_time() -> None:
    """Labels are drawn again in the same order; each sequence's gradient comes from autograd, by the weight itself."""
    model = small_model(Recipe.uniform("E4M3"))
    found = fishers(model)
    generator = torch.Generator().manual_seed(0)
    squares = {name: torch.zeros_like(layer.weight) for name, layer in model.layers.items()}
    for row in model.inputs.split(1):
        logits = model.model(row).flatten(0, 1)
        labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        for name, g in zip(squares, torch.autograd.grad(loss, [m.weight for m in model.layers.values()]), strict=True):
            squares[name] += g.square() / model.inputs.numel()
    plain = torch.autograd.grad(model.loss(), [layer.weight for layer in model.layers.values()])
    for (name, expected), gradient in zip(squares.items(), plain, strict=True):
        assert torch.allclose(found[name].diagonal, expected, rtol=1e-4, atol=1e-7)
        assert torch.allclose(found[name].gradient, gradient)


@pytest.mark.parametrize("labels", [(), (1.0, 1.0, 1.0)], ids=["text", "classifier"])
def test_factors_are_means_over_all_tokens(labels: tuple[float, ...]) -> None:
    """Oracle: hooks on every layer. Of what goes in the mean is over tokens, of gradients over losses, labels drawn."""
    model = small_model(Recipe.uniform("E4M3"), labels=labels)
    found, seen = fishers(model), {name: ([], []) for name in model.layers}
    for name, layer in model.layers.items():
        def hook(layer: nn.Module, x: tuple[Tensor], y: Tensor, both: tuple[list, list] = seen[name]) -> None:
            both[0].append(layer._rounded(x[0], "input").detach())
            y.register_hook(both[1].append)

        layer.register_forward_hook(hook)
    generator = torch.Generator().manual_seed(0)
    for row in model.inputs.split(1):
        logits = model.model(row)
        if labels:
            drawn = torch.bernoulli(logits.detach().sigmoid(), generator=generator)
            F.binary_cross_entropy_with_logits(logits, drawn, reduction="sum").backward()
        else:
            drawn = torch.multinomial(logits.detach().flatten(0, 1).softmax(-1), 1, generator=generator).flatten()
            F.cross_entropy(logits.flatten(0, 1), drawn, reduction="sum").backward()
    losses = len(model.inputs) * (len(labels) or model.inputs.shape[1])
    assert set(seen) == (LAYERS | {"head"} if labels else LAYERS)
    for name, both in seen.items():
        a, g = (torch.cat([t.flatten(0, -2) for t in each]) for each in both)
        assert torch.allclose(found[name].inputs, a.T @ a / len(a), rtol=1e-4, atol=1e-6), name
        assert torch.allclose(found[name].outputs, g.T @ g / losses, rtol=1e-4, atol=1e-6), name
        assert torch.linalg.eigvalsh(found[name].outputs).min() > -1e-6


# --- rebuilding ----------------------------------------------------------------------------------


def test_a_layer_rounds_as_its_recipe_and_has_the_derivative_of_none() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 4, bias=True)
    recipe = Recipe.uniform("E3M4").match(["a"])["a"]
    layer = StraightThroughLinear(linear, {"weight": Quantizer(recipe.weight), "input": Quantizer(recipe.input)})
    x = torch.randn(3, 5, 8, requires_grad=True)
    rounded = [quantize(t * (s := compute_scale(t.abs().amax(), "E3M4")), "E3M4") / s for t in (x, linear.weight)]
    assert torch.allclose(layer(x), F.linear(*rounded, linear.bias), atol=1e-6)
    (grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.allclose(grad, rounded[1].sum(0).expand_as(x), atol=1e-6)


def test_a_held_scale_comes_from_the_saved_history() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, layers=1, width=8, heads=2, context=8))
    name = "blocks.0.mlp.up"
    recipes = Recipe.uniform("E4M3").match([name])
    replace_linear(model, recipes, {f"{name}.quantizers.weight.history": torch.tensor([7.0])})
    quantizer = model.get_submodule(name).quantizers["weight"]
    assert quantizer.scales(torch.ones(2, 2)) == compute_scale(torch.tensor(7.0), "E4M3")


class Trained(NamedTuple):
    """A cell that was really trained, and its files."""

    cell: Cell
    root: Path

    def diagnose(self, settings: Diagnose) -> tuple[dict[str, Any], pd.DataFrame]:
        return diagnosed(self.cell, self.root / "run", self.root, self.root / "tokens", settings)


@pytest.fixture(scope="module", params=["E4M3", "delayed", "on grid", "bf16"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    arm = {"lr": 1e-2, "weights": "quantized", "rounding": "stochastic"} if request.param == "on grid" else None
    scaling = "delayed" if request.param == "delayed" else "dynamic"
    fmt = "bf16" if request.param == "bf16" else "E4M3"
    cell = make_cell(fmt, scaling=scaling, arm=arm, compute="float32", steps=6, eval_every=3, grad_accumulation=1)
    # Sums in float32, as in the rebuilt model: on a CPU with bfloat16 instructions they are rounded to it otherwise.
    cell = cell.model_copy(update={"rules": [rule.but(accumulate="float32") for rule in cell.rules]})
    train_cell(cell, make_tokens(root / "tokens"), root / "run", root)
    return Trained(cell, root)


def on_sample(rebuilt: RebuiltModel) -> float:
    """Return the mean loss over training's batches of the validation sample, whose own amax scales the inputs."""
    with torch.no_grad():
        batches = zip(rebuilt.inputs.split(4), rebuilt.targets.split(4), strict=True)
        return sum(rebuilt.model(*batch).item() * len(batch[0]) for batch in batches) / 10


def test_a_diagnosis_has_them_at_the_last_step_and_the_same_every_time(trained: Trained) -> None:
    settings = Diagnose(fisher_tokens=64, hessian_tokens=64, lanczos=4, hutchinson=2)
    diagnosis, frame = trained.diagnose(settings)
    last = frame[frame["metric"] == "hessian_top"]
    assert set(last["layer"]) == LAYERS and set(last["step"]) == {6}
    whole = frame[frame["layer"] == ""]
    assert set(whole["metric"]) == {f"model_hessian_{q}" for q in
                                    ("top", "second", "bottom", "residual", "trace", "trace_error")}  # fmt: skip
    assert diagnosis["summary"]["model_hessian_top"] == whole.set_index("metric")["value"]["model_hessian_top"]
    aligned = set(frame["metric"]) & {"natural_kfac_s", "natural_diagonal_shuffled"}
    assert len(aligned) == (0 if trained.cell.format == "bf16" else 2)
    pd.testing.assert_frame_equal(trained.diagnose(settings)[1], frame)
    without = trained.diagnose(Diagnose(fisher_tokens=0, hessian_tokens=0))[1]
    assert not without["metric"].str.contains("hessian|natural|fisher").any()


def test_a_diagnosis_tells_the_noise_of_gradients_by_cause(trained: Trained) -> None:
    diagnosis, frame = trained.diagnose(Diagnose(fisher_tokens=0, noise_tokens=64, hessian_tokens=0))
    rows = frame[frame["metric"].str.match("gradient_to_noise|cosine_exact|noise_from")].pivot(
        index=["layer", "step"], columns="metric", values="value"
    )
    steps = [0, 3, 6]
    whole = pd.MultiIndex.from_product([sorted(LAYERS), steps])
    assert list(rows.index) == ([] if trained.cell.format == "bf16" else list(whole))
    for metric in ("gradient_to_noise", "cosine_exact") if len(rows) else ():
        assert diagnosis["summary"][metric] == pytest.approx(rows[metric].xs(6, level="step").mean())
    shares = rows.filter(like="noise_from")
    assert np.allclose(shares.sum(axis=1), 1)
    if len(rows):
        assert (rows["noise_from_weight"] > 0).all()  # of weights on their quantization grid, through the head alone


def test_the_model_of_a_snapshot_is_the_one_that_was_trained_that_long(trained: Trained) -> None:
    """Oracle: the validation loss that training wrote down then.

    The whole way: files, scales, remembered ones too, rounding of weights and inputs, the head's weight.
    """
    history = pd.read_csv(trained.root / "run/history.csv").set_index("step")["val_loss"]
    with SavedRun(trained.cell, trained.root / "run") as run:
        assert run.model_steps == [0, 3, 6]
        for step in run.model_steps:
            rebuilt = RebuiltModel.of(trained.cell, run.model(step), trained.root / "tokens", 10 * 16)
            assert len(rebuilt.inputs) == trained.cell.train.eval_sequences and set(rebuilt.layers) == LAYERS
            assert on_sample(rebuilt) == pytest.approx(history[step], rel=1e-6)


def test_weights_on_their_quantization_grid_make_no_noise_at_the_scale_that_they_hold(trained: Trained) -> None:
    if trained.cell.arm.weights != "quantized":
        pytest.skip("weights with masters")
    # Without the head, which rounds the embedding's weight: that one stays off the grid.
    cell = trained.cell.model_copy(update={"rules": [rule.but(layers="blocks.*") for rule in trained.cell.rules]})
    saved = load_file(trained.root / "run/model.safetensors")
    found = gradient_noises(cell, saved, trained.root / "tokens", 64)
    assert set(found) == LAYERS
    # What is left is how float32 rounds products of values that are the same.
    assert all(noise.causes["weight"] < 1e-6 * noise.causes["input"] for noise in found.values())


def test_a_diverged_run_is_diagnosed_without_them(trained: Trained) -> None:
    if trained.cell.format == "bf16":
        pytest.skip("one format is enough")
    path = trained.root / "run/model.safetensors"
    saved, content = load_file(path), path.read_bytes()
    saved["norm.weight"] = torch.full_like(saved["norm.weight"], math.inf)
    save_file(saved, path)
    try:
        _, frame = trained.diagnose(Diagnose(fisher_tokens=64, hessian_tokens=64, lanczos=4, hutchinson=2))
    finally:
        path.write_bytes(content)
    assert len(frame) and not frame["metric"].str.contains("hessian|natural").any()


def test_weights_of_another_model_are_refused(trained: Trained) -> None:
    saved = load_file(trained.root / "run/model.safetensors")
    del saved["blocks.0.norm1.weight"]
    with pytest.raises(UserError, match="lack blocks.0.norm1.weight"):
        RebuiltModel.of(trained.cell, saved, trained.root / "tokens", 64)
