"""What every arm owes as one of torch's optimizers, and settings that are none."""

import pytest
import torch
from torch import nn

from altgrad.config.recipe import Rule
from altgrad.formats import get_format
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, ArmOptimizer, WeightGrid, build_optimizer, update_cpu, weight_grids
from tests.optim.arms import ARMS, arm_named, final, grid_of, make, normal_weights, step


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("match_rms", [False, True])
def test_an_arm_keeps_the_moments_that_it_needs_and_no_others(reference, match_rms):
    adam, own = {"step", "exp_avg", "exp_avg_sq"}, {
        "spacing_unmatched": {"step", "exp_avg", "exp_avg_sq"}, "spacing_gradient": {"step", "exp_avg", "exp_avg_sq"},
        "riemann_adam": {"step", "exp_avg", "exp_avg_sq"}, "riemann_sgd": {"step"},
        "spacing_sgd": {"step", "momentum_buffer"},
        "madam": {"step", "exp_avg_sq"}, "adamw_sr_weights": {"step", "exp_avg", "exp_avg_sq"},
    }  # fmt: skip
    for name, expected in own.items():
        weights, optimizer = make(arm_named(name, match_rms=match_rms), reference=reference)
        step(weights, optimizer, seed=0)
        has_adams = expected == adam and name not in ("spacing_gradient", "riemann_adam")
        more = set() if has_adams or not (reference or match_rms) else {"reference_avg", "reference_avg_sq"}
        assert optimizer.state[weights[0]].keys() == expected | more
        assert (optimizer.adamw_direction(weights[0]) is not None) == bool(has_adams or more)


@pytest.mark.parametrize(
    "name",
    ["spacing_gradient", "riemann_adam", "madam", "spacing_sgd", "adamw", "spacing_unmatched", "rung", "eco", "muon"],
)
def test_the_direction_of_adamw_is_that_of_the_same_gradients(name):
    """Against the formula written out, after three steps."""
    arm = arm_named(name)
    (b1, b2), (weights, optimizer) = arm.betas, make(arm, reference=True)
    m = v = torch.zeros(24, 32, dtype=torch.float64)
    for i in range(3):
        step(weights, optimizer, seed=i)
        g = weights[0].grad.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    expected = m / (1 - b1**3) / ((v / (1 - b2**3)).sqrt() + 1e-8)
    assert torch.allclose(optimizer.adamw_direction(weights[0]).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ARMS)
def test_e0m7_and_e1m6_are_the_same_to_the_bit(name):
    assert torch.equal(final(arm_named(name), "E0M7"), final(arm_named(name), "E1M6"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["adamw", "spacing_unmatched", "rung", "sgd"])
def test_a_gradient_that_is_no_number_is_skipped_and_counted(name, bad):
    weights, optimizer = make(arm_named(name))
    step(weights, optimizer, seed=0)
    before, state = weights[0].detach().clone(), optimizer.state_dict()
    weights[0].grad[3, 4] = bad
    optimizer.step()
    assert optimizer.skipped == 1 and torch.equal(weights[0], before)
    assert str(optimizer.state_dict()) == str(state)
    step(weights, optimizer, seed=1)
    assert optimizer.skipped == 1 and weights[0].isfinite().all() and not torch.equal(weights[0], before)


@pytest.mark.parametrize("norm", [torch.nan, torch.inf, None])
def test_a_norm_that_is_no_number_has_the_gradients_looked_at(norm):
    weights, optimizer = make(arm_named("spacing_unmatched"))
    weights[0].grad = torch.full_like(weights[0], 1e30)  # finite, with a norm beyond float32
    before = weights[0].detach().clone()
    optimizer.step(norm=norm)
    assert optimizer.skipped == 0 and not torch.equal(weights[0], before)
    weights[0].grad[0, 0] = torch.nan
    optimizer.step(norm=norm)
    assert optimizer.skipped == 1


@pytest.mark.parametrize("name", ARMS)
def test_a_weight_at_zero_moves_and_a_gradient_of_zero_does_no_harm(name):
    weights, optimizer = make(arm_named(name, decay=0.0))
    weights[0].data[0] = 0.0
    step(weights, optimizer, seed=0)
    assert weights[0].isfinite().all()
    assert name == "madam" or (weights[0][0] != 0).any()  # multiplication keeps zero
    weights[0].grad = torch.zeros_like(weights[0])
    optimizer.step()
    assert weights[0].isfinite().all()


@pytest.mark.parametrize("name", ["spacing_unmatched", "rung", "madam", "spacing_sgd"])
def test_only_quantized_weights_take_the_arm(name):
    arm = arm_named(name)
    quantized, matrix, vector = normal_weights((8, 8), (8, 8), (1, 8))
    vector = nn.Parameter(vector.detach()[0])
    optimizer = ArmOptimizer({quantized: grid_of("E4M3", arm)}, [matrix, vector], arm)
    groups = optimizer.param_groups
    assert [group["quantized"] for group in groups] == [True, False, False]
    assert [group["weight_decay"] * group["lr"] for group in groups] == pytest.approx([arm.decay, arm.plain_decay, 0])
    assert groups[1]["lr"] == (arm.plain_lr or arm.lr)


RUNG = {"base": "rung", "weights": "quantized", "rounding": "stochastic"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base": "adamx"}, "^Arm: base: input should be 'adamw', 'sgd'.*, not 'adamx'$"),
        ({"stiffness": "ulps"}, "^Arm: stiffness: input should be 'ulp', .*, not 'ulps'$"),
        ({"stiffness": "foreign"}, "need each other"),
        ({"base": "riemann_adam"}, "takes its metric from a stiffness"),
        ({"base": "riemann_adam", "stiffness": "ulp", "acts": "gradient"}, "acts: gradient means nothing"),
        ({"acts": "gradient"}, "acts: gradient means nothing to an arm that has no stiffness"),
        ({"base": "rung"}, "set weights: quantized"),
        ({"base": "madam", "stiffness": "ulp"}, "remove stiffness"),
        ({"rounding": "stochastic"}, "set weights: quantized or remove it"),
        *(({name: value}, f"^Arm: {name}: input should be (greater|less) than .*, not {value}$")
          for name in ("decay", "plain_decay") for value in (-0.1, 1.0)),
        ({"weight_decay": -0.1}, "^Arm: weight_decay: input should be greater than or equal to 0, not -0.1$"),
        ({"decay": 1e-3}, "^Arm: decay and plain_decay need each other$"),
        ({"decay": 1e-3, "plain_decay": 1e-3, "weight_decay": 0.1}, "mean two shares; remove one of them$"),
        ({"lr": 0.0}, "^Arm: lr: input should be greater than 0"),
        ({"plain_lr": 0.0}, "^Arm: plain_lr: input should be greater than 0"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"eps": -1e-9}, "^Arm: eps: input should be greater than or equal to 0"),
        ({"base": "sgd", "momentum": 1.0}, "^Arm: momentum: input should be less than 1"),
        ({"base": "sgd", "momentum": -0.1}, "^Arm: momentum: input should be greater than or equal to 0"),
        ({**RUNG, "max_rungs": 0}, "^Arm: max_rungs: input should be greater than or equal to 1"),
        ({"foreign": "E5M2"}, "need each other"),
        *(({"stiffness": "profile", **some}, "stiffness: profile and its knee and slope need each other$") for some in (
            {}, {"knee": 7}, {"slope": 1},
        )),
        ({"stiffness": "rms"}, "one number per tensor, which normalise: rms takes out; set it to none"),
        ({"stiffness": "rms", "normalise": "none", "match_rms": True}, "which match_rms takes out; set it to false"),
        ({"stiffness": "ulp", "slope": 1}, "its knee and slope need each other"),
        ({"knee": 7, "slope": 1}, "its knee and slope need each other"),
        ({"stiffness": "profile", "knee": -0.5, "slope": 1}, "^Arm: knee: input should be greater than or equal to 0"),
        ({"stiffness": "profile", "knee": 62.5, "slope": 1}, "^Arm: knee: input should be less than or equal to 62"),
        ({"stiffness": "profile", "knee": 7, "slope": -0.1}, "^Arm: slope: input should be greater than or equal to 0"),
        ({"stiffness": "profile", "knee": 7, "slope": 2.1}, "^Arm: slope: input should be less than or equal to 2"),
        ({"power": 2}, "power: 2 means nothing to an arm that has no stiffness"),
        ({"base": "riemann_sgd", "stiffness": "ulp", "power": 2}, "power: 2 means nothing to an arm that takes its"),
        ({"base": "riemann_sgd"}, "takes its metric from a stiffness"),
        ({**RUNG, "stiffness": "ulp"}, "remove stiffness"),
        ({**RUNG, "match_rms": True}, "match_rms has nothing to match"),
        ({**RUNG, "rounding": "nearest"}, "set rounding: stochastic"),
        ({"base": "madam", "momentum": 0.5}, "momentum: 0.5 means nothing to an arm that has base madam"),
        *(({name: value}, f"{name}: {value} is of weights on the quantization grid; set weights: quantized")
          for name, value in {"feedback": "momentum", "store": "codes", "held_scale": "fixed"}.items()),
        *(({name: value}, f"{name}: {value} means nothing to an arm that has no stiffness; remove it")
          for name, value in {"normalise": "none", "schedule": "cosine"}.items()),
        ({"base": "sgd", "betas": (0.8, 0.9)}, "means nothing to an arm that has base sgd; remove it, or set momentum"),
        ({"base": "riemann_sgd", "stiffness": "ulp", "eps": 1e-6}, "eps: 1e-06 means nothing to an arm that has base"),
        ({"max_rungs": 4}, "max_rungs: 4 is of base rung, not adamw; remove it"),
        *(({"feedback": "momentum", "weights": "quantized", **other}, "is of adamw and sgd, without") for other in (
            {"stiffness": "ulp"}, {"match_rms": True}, RUNG, {"base": "madam"},
        )),
        *(({"feedback": "momentum", "weights": "quantized", **none}, "feedback: momentum needs one") for none in (
            {"betas": (0.0, 0.9)}, {"base": "sgd"},
        )),
        *(({name: "x"}, f"^Arm: {name}: input should be .*, not 'x'$") for name in (
            "acts", "normalise", "schedule", "weights", "rounding", "held_scale",
        )),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_together_or_alone_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Arm(**{"lr": 1e-3} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"betas": (0.0, 0.0), "eps": 0.0, "decay": 0.0, "plain_decay": 0.0},
        {"base": "sgd", "momentum": 0.0}, {"base": "riemann_sgd", "stiffness": "ulp", "momentum": 0.5},
        {**RUNG, "max_rungs": 1}, {"stiffness": "foreign", "foreign": "E5M2", "acts": "gradient", "power": 2},
        {"stiffness": "profile", "knee": 0, "slope": 0}, {"stiffness": "profile", "knee": 62, "slope": 2},
        {"base": "madam", "match_rms": True}, {"weights": "quantized", "rounding": "nearest", "held_scale": "fixed"},
        {"weights": "quantized", "feedback": "momentum", "rounding": "stochastic"},
        {"weights": "quantized", "feedback": "momentum", "rounding": "selective"},
        {"base": "sgd", "weights": "quantized", "feedback": "momentum", "momentum": 0.5},
    ],
)  # fmt: skip
def test_the_limits_themselves_are_allowed(settings):
    Arm(**{"lr": 1e-3} | settings)


def test_a_closure_computes_the_loss_anew_with_gradients():
    (weight,) = normal_weights((4, 4))
    for name in ("adamw", "spacing_unmatched"):
        arm = arm_named(name)
        optimizer = ArmOptimizer({weight: grid_of("E4M3", arm)}, [], arm)

        def closure():
            weight.grad = None
            loss = weight.square().sum()
            loss.backward()
            return loss

        before = weight.detach().clone()
        assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
        assert not torch.equal(weight, before)


def test_without_any_gradient_nothing_happens_and_nothing_is_skipped():
    weights, optimizer = make(arm_named("spacing_unmatched"))
    before = weights[0].detach().clone()
    assert optimizer.step() is None and optimizer.skipped == 0 and torch.equal(weights[0], before)


@pytest.mark.parametrize("name", ["spacing_unmatched", "spacing_sgd", "rung"])
def test_a_weight_without_a_gradient_stays_and_is_a_step_behind(name):
    weights, optimizer = make(arm_named(name), weights=normal_weights((8, 16), (8, 16)))
    step(weights[:1], optimizer, seed=0)
    before = weights[1].detach().clone()
    assert weights[1] not in optimizer.state
    step(weights, optimizer, seed=1)
    assert not torch.equal(weights[1], before)
    assert [optimizer.state[p]["step"].item() for p in weights] == [2, 1]


@pytest.mark.parametrize("name", ["rung", "madam", "spacing_unmatched", "sgd"])
def test_a_linear_layer_left_plain_takes_the_arms_rate_if_it_means_the_same_there(name):
    arm = arm_named(name)
    linear, embedding = normal_weights((8, 8), (8, 8))
    optimizer = ArmOptimizer({}, [linear, embedding], arm, linear=[linear])
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rate[id(linear)] == (arm.plain_lr if name in ("rung", "madam") else arm.lr)
    assert rate[id(embedding)] == arm.plain_lr


def test_a_model_is_split_into_what_its_grids_quantize_its_other_layers_and_the_rest():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    arm = arm_named("spacing_unmatched")
    optimizer = build_optimizer(model, arm, {model[1].weight: grid_of("E4M3", arm)})
    quantized, linear, matrices, vectors = (group["params"] for group in optimizer.param_groups)
    assert quantized[0] is model[1].weight and linear[0] is model[2].weight and matrices[0] is model[0].weight
    assert len(quantized) == len(linear) == len(matrices) == 1 and len(vectors) == 2
    with pytest.warns(UserWarning, match="is its plain form, adamw: the model has no quantized weight"):
        assert len(build_optimizer(model, arm).param_groups) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{"base": "muon"}, {"base": "madam"}, {"stiffness": "row_rms"}])
def test_an_arm_that_needs_no_format_steps_linear_layers_alike_quantized_in_part_or_not(settings):
    """But for a weight that an embedding shares; whatever grids it is given."""
    arm, ends = Arm(lr=1e-2, **settings), []
    for recipe in (None, [Rule(layers="1", weight="E4M3")], [Rule(layers="*", weight="MXFP8")]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(8, 5, bias=False))
        model[3].weight = model[0].weight
        if recipe:
            quantize_model(model, Recipe(rules=recipe))
        optimizer = build_optimizer(model, arm, weight_grids(model, on_grid=False) if recipe else None)
        own = [p for group in optimizer.param_groups if group["quantized"] for p in group["params"]]
        assert [id(p) for p in own] == [id(model[i].weight) for i in (1, 2)]
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))


def test_an_arm_that_needs_no_format_says_that_nothing_is_left_for_it():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8).requires_grad_(False))
    with pytest.warns(UserWarning, match="is its plain form, adamw: the model has no linear layer to train"):
        build_optimizer(model, Arm(base="muon", lr=1e-2))


def test_weights_on_the_quantization_grid_need_a_buffer_for_their_scale():
    arm = arm_named("adamw_sr_weights")
    (weight,) = normal_weights((4, 4))
    with pytest.raises(ValueError, match="need a buffer that holds the amax"):
        ArmOptimizer({weight: WeightGrid(get_format("E4M3"))}, [], arm)


@pytest.mark.usefixtures("compiler")
def test_the_loops_take_what_they_can():
    arm = arm_named("spacing_unmatched")
    matrix, grid = normal_weights((8, 16))[0], grid_of("E4M3", arm)
    assert update_cpu.available(arm, matrix, grid)
    assert not update_cpu.available(arm, matrix.detach().double(), grid)
    assert not update_cpu.available(arm, matrix.detach().t(), grid)
    assert not update_cpu.available(arm, matrix, WeightGrid(get_format("E4M3"), {"granularity": "row"}))
    assert update_cpu.available(arm_named("shuffled_unmatched"), matrix, grid)
    for name in ("riemann_adam", "riemann_sgd"):
        assert update_cpu.available(arm_named(name), matrix, grid)
        for others in (
            {"stiffness": "permuted"}, {"stiffness": "profile", "knee": 7, "slope": 1},
            {"stiffness": "rms", "normalise": "none"},
        ):  # fmt: skip
            assert not update_cpu.available(arm_named(name, **others), matrix, grid)
    assert update_cpu.available(arm_named("size_profile"), matrix, grid)
    assert update_cpu.available(arm_named("tensor_relative"), matrix, grid)
    assert not update_cpu.available(arm_named("row_relative"), matrix, grid)
