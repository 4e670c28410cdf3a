"""What schedulers, loops and scripts written for torch's optimizers ask of one. Oracle: `torch.optim.AdamW`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import geoopt
import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler

from altgrad.config.arms import BASES
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, ArmOptimizer, build_optimizer, update_cpu, weight_grids
from altgrad.optim.weight_grid import CodeWeight
from tests.optim.arms import ARMS, arm_named, grid_of, normal_weights

LR, WEIGHT_DECAY = 2.0**-7, 2.0**-4
RECIPE: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True}
ADAMW = Arm(lr=LR, weight_decay=WEIGHT_DECAY)


def start() -> nn.Parameter:
    return normal_weights((8, 16))[0]


def pair() -> tuple[nn.Parameter, ArmOptimizer, nn.Parameter, torch.optim.AdamW]:
    """Return a weight with our AdamW, and the same with torch's."""
    ours, theirs = start(), start()
    return ours, ArmOptimizer({}, [ours], ADAMW), theirs, torch.optim.AdamW([theirs], **RECIPE)


def gradient(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("layout", ["transposed", "with gaps", "of its gradient"])
@pytest.mark.parametrize("name", [*ARMS, "sgd in its plain form"])
def test_a_step_does_not_depend_on_strides(name: str, layout: str) -> None:
    arm = Arm(base="sgd", lr=0.1, momentum=0.9) if name.startswith("sgd") else arm_named(name)
    ends: list[torch.Tensor] = []
    for strided in (False, True):
        values = start().detach()
        if strided and layout == "transposed":
            values = values.t().contiguous().t()
        elif strided and layout == "with gaps":
            values = torch.stack([values, values], dim=-1)[..., 0]
        p = nn.Parameter(values)
        optimizer = ArmOptimizer({p: grid_of("E4M3", arm)}, [], arm)
        for i in range(3):
            turned = strided and layout == "of its gradient"
            p.grad = gradient(i).t().contiguous().t() if turned else gradient(i)
            optimizer.step()
        ends.append(p.detach().contiguous())
    # The loops in C++ take weights in one order of memory alone, and rules sum and round otherwise in the last digits.
    exact = arm.stiffness is None and arm.weights == "master" and arm.base in ("adamw", "sgd")
    torch.testing.assert_close(*ends, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)
    assert not torch.equal(ends[0], start())


def test_moments_that_lie_otherwise_after_loading_are_read_in_their_places() -> None:
    ends = []
    for turned in (False, True):
        p = start()
        optimizer = ArmOptimizer({}, [p], ADAMW)
        for i in range(4):
            if turned and i == 2:
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][name] = optimizer.state[p][name].t().contiguous().t()
            p.grad = gradient(i)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "SequentialLR": sequence,
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=LR / 8, max_lr=LR / 2, step_size_up=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "linear warm-up": lambda o: transformers.get_linear_schedule_with_warmup(o, 2, 8),
    "cosine warm-up": lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 8),
    "constant warm-up": lambda o: transformers.get_constant_schedule_with_warmup(o, 2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_set_in_groups_and_schedulers_do_what_they_do_of_adamw(name: str) -> None:
    """Before a scheduler, in the middle of one, and after a state dict of a run with one has been loaded."""
    ours, optimizer, theirs, reference = pair()
    assert not {"initial_lr", "peak_lr"} & optimizer.param_groups[0].keys()
    courses: list[list[float]] = []
    for o, p in ((optimizer, ours), (reference, theirs)):
        rates: list[float] = []

        def train(o: torch.optim.Optimizer, p: nn.Parameter, plan: Any, first: int, rates: list[float] = rates) -> None:
            for i in range(first, first + 5):
                p.grad = gradient(i)
                o.step()
                plan.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                rates.append(o.param_groups[0]["lr"])

        o.param_groups[0]["lr"] = LR / 4
        plan = SCHEDULERS[name](o)
        rates.append(o.param_groups[0]["lr"])
        train(o, p, plan, 0)
        saved, planned = copy.deepcopy(o.state_dict()), plan.state_dict()
        fresh: Any = type(o)([p], **RECIPE) if o is reference else ArmOptimizer({}, [p], ADAMW)
        plan = SCHEDULERS[name](fresh)
        plan.load_state_dict(planned)
        fresh.load_state_dict(saved)
        train(fresh, p, plan, 5)
        fresh.param_groups[0]["lr"] = LR / 2  # a new phase, with a scheduler of its own
        plan = SCHEDULERS[name](fresh)
        rates.append(fresh.param_groups[0]["lr"])
        train(fresh, p, plan, 10)
        courses.append(rates)
    assert courses[0] == courses[1]
    assert torch.equal(ours, theirs)


def test_a_state_of_groups_without_a_weight_decay_is_refused() -> None:
    _, optimizer, _, _ = pair()
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["weight_decay"]
    with pytest.raises(ValueError, match="no weight_decay: they are of an earlier version"):
        optimizer.load_state_dict(saved)


def test_one_cycle_moves_rate_and_momentum_as_it_does_of_adamw() -> None:
    ours, optimizer, theirs, reference = pair()
    plans = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2 * LR, total_steps=8) for o in (optimizer, reference)]
    for i in range(8):
        ours.grad, theirs.grad = gradient(i), gradient(i)
        for o, plan in zip((optimizer, reference), plans, strict=True):
            o.step()
            if i < 7:
                plan.step()
        assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("base", "source"),
    [
        ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("muon", torch.optim.Muon),
        ("riemann_adam", geoopt.optim.RiemannianAdam), ("riemann_sgd", geoopt.optim.RiemannianSGD),
    ],
)  # fmt: skip
def test_the_defaults_of_a_base_are_those_of_its_source(base: str, source: Any) -> None:
    there = source([start()], lr=LR).defaults
    arm = Arm(base=base, lr=LR, stiffness="ulp" if base.startswith("riemann") else None)
    here = {"weight_decay": arm.weight_decays[0], "betas": arm.betas, "eps": arm.eps, "momentum": arm.momentum}
    read = ("weight_decay", *(("betas", "eps") if "betas" in there else ("momentum",)))  # Muon's eps is of a norm
    assert {name: here[name] for name in read} == {name: there[name] for name in read}


def test_one_cycle_moves_the_momentum_of_sgd() -> None:
    p = start()
    optimizer = ArmOptimizer({}, [p], Arm(base="sgd", lr=0.1, momentum=0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8, max_momentum=0.8)
    assert optimizer.param_groups[0]["momentum"] == 0.8


def test_a_rate_in_a_tensor_is_a_rate() -> None:
    for name in (*ARMS, "sgd in its plain form"):
        arm = Arm(base="sgd", lr=LR, momentum=0.9) if name.startswith("sgd") else arm_named(name)
        ends = []
        for kind in (float, torch.tensor):
            p = start()
            optimizer = ArmOptimizer({p: grid_of("E4M3", arm)}, [], arm)
            for group in optimizer.param_groups:
                group["lr"] = kind(LR)
            p.grad = gradient(0)
            optimizer.step()
            ends.append(p.detach().clone())
        assert torch.equal(*ends), name


def test_a_group_that_is_added_steps_as_adamw_steps_it() -> None:
    ours, optimizer, theirs, reference = pair()
    later = [start() for _ in range(2)]
    for o, new in zip((optimizer, reference), later, strict=True):
        o.add_param_group({"params": new, "lr": 2 * LR})
    for i in range(3):
        for p in (ours, theirs, *later):
            p.grad = gradient(i)
        optimizer.step(), reference.step()
    assert torch.equal(ours, theirs) and torch.equal(*later)


def test_a_group_with_a_vector_does_not_decay_unless_it_says_so() -> None:
    _, optimizer, _, _ = pair()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.25})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [WEIGHT_DECAY, 0.0, 0.25]


@pytest.mark.parametrize("setting", ["maximize", "differentiable", "decay"])
def test_a_setting_that_no_step_looks_at_is_refused(setting: str) -> None:
    _, optimizer, _, _ = pair()
    with pytest.raises(ValueError, match=f"no setting '{setting}' of a group of parameters; there are params, lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], setting: True})


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    model = nn.Sequential(nn.Embedding(10, 16, sparse=True), nn.Linear(16, 8))
    optimizer = build_optimizer(model, ADAMW)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(10, 16\) is sparse.*sparse=False"):
        optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("settings", [{"stiffness": "ulp"}, {"weights": "quantized", "rounding": "stochastic"}])
def test_weights_in_float16_are_refused(settings: dict[str, str]) -> None:
    model = quantize_model(nn.Sequential(nn.Linear(16, 8)).half(), Recipe.uniform("E4M3"))
    grids = weight_grids(model, on_grid="weights" in settings)
    with pytest.raises(ValueError, match=r"shape \(8, 16\) is float16.*autocast"):
        build_optimizer(model, Arm(lr=LR, **settings), grids)


@pytest.mark.parametrize("settings", [{"stiffness": "ulp"}, {"weights": "quantized", "rounding": "stochastic"}, {}])
def test_without_grids_an_arm_finds_those_of_the_model(settings: dict[str, str]) -> None:
    arm, steps = Arm(lr=LR, **settings), []
    for given in (False, True):
        torch.manual_seed(0)
        model = quantize_model(nn.Sequential(nn.Linear(16, 8)), Recipe.uniform("E4M3"))
        grids = weight_grids(model, on_grid="weights" in settings) if given else None
        optimizer = build_optimizer(model, arm, grids, seed=1)
        model(torch.ones(4, 16)).square().sum().backward()
        optimizer.step()
        steps.append(model[0].weight.detach())
    assert torch.equal(*steps)


def test_grids_that_an_arm_with_master_weights_would_leave_without_a_scale_are_refused() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(16, 8)), Recipe.uniform("E4M3"))
    with pytest.raises(ValueError, match=r"keeps master weights: quantize the model anew and leave out grids"):
        build_optimizer(model, Arm(lr=LR, stiffness="ulp"), weight_grids(model, on_grid=True))


def test_grids_of_the_model_that_this_is_a_copy_of_are_refused() -> None:
    model = quantize_model(nn.Sequential(nn.Linear(16, 8)), Recipe.uniform("E4M3"))
    with pytest.raises(ValueError, match="grids are of 1 weights that this model has not"):
        build_optimizer(copy.deepcopy(model), Arm(lr=LR, stiffness="ulp"), weight_grids(model, on_grid=False))


def test_the_first_step_that_is_skipped_is_said_and_no_other() -> None:
    ours, optimizer, _, _ = pair()
    for i in range(3):
        ours.grad = gradient(i) * torch.tensor(float("nan"))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            optimizer.step()
        assert [message.filename for message in heard] == [__file__] * (i == 0)  # the line of whoever calls
    assert optimizer.skipped == 3


def test_a_caller_that_knows_the_norm_is_not_told() -> None:
    ours, optimizer, _, _ = pair()
    ours.grad = gradient(0) * torch.tensor(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(norm=float("inf"))
    assert optimizer.skipped == 1


# --- a step between a forward pass and its backward pass is an error, as with torch's AdamW ----------


STATE = {"state": {"m": "E4M3", "v": "UE4M4", "least": 0}}
_BASES = {base: Arm(lr=1e-2, base=base, **({"stiffness": "ulp"} if row.metric else {}))
          for base, row in BASES.items() if row.unit != "rungs"}  # fmt: skip
CASES = _BASES | {name: arm_named(name) for name in ARMS} | {
    "momentum": Arm(lr=1e-2, base="sgd", momentum=0.9),
    "sgd in codes": Arm(lr=1e-2, base="sgd", momentum=0.9, state={"m": "E4M3", "least": 0}),
    "in codes": Arm(lr=1e-2, **STATE), "spacing, in codes": Arm(lr=1e-2, stiffness="ulp", **STATE),
    "maps": Arm(lr=1e-2, state={"m": "dynamic4", "v": "dynamic8", "least": 0}),
    "stored": arm_named("eco", store="codes"),
}  # fmt: skip


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32, bias=False, dtype=dtype), nn.Linear(32, 32, bias=False, dtype=dtype))


def require_refused(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    """Raise where a backward pass after a step goes on; its error is torch's own."""
    for _ in range(2):  # a first step makes the state
        loss = model(torch.randn(4, 32, dtype=dtype, requires_grad=True)).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_torchs_own_is_refused() -> None:
    model = model_of(torch.float32)
    require_refused(model, torch.optim.AdamW(model.parameters()), torch.float32)


@pytest.mark.filterwarnings("ignore:this model has no quantized weight")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_between_forward_and_backward_is_refused(name: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    require_refused(model, build_optimizer(model, CASES[name]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "by"), [*product(CASES, ("loops", "rules")), ("spacing_unmatched", "compiled")])
def test_so_is_a_step_on_the_quantization_grid(
    name: str, by: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that a plain layer reads too, since a quantized one keeps operands of its own."""
    if by != "loops":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    model = model_of(dtype)
    optimizer = build_optimizer(quantize_model(model, Recipe.uniform("E4M3")), CASES[name], compiled=by == "compiled")
    before = [p._version for p in model.parameters()]
    model(torch.randn(4, 32, dtype=dtype)).sum().backward()
    optimizer.step()
    assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))
    shared = nn.Linear(32, 32, bias=False)
    shared.weight = model[0].weight
    require_refused(shared, optimizer, shared.weight.dtype)
    assert isinstance(shared.weight, CodeWeight) == (CASES[name].store == "codes")


def test_a_step_that_is_skipped_leaves_the_versions() -> None:
    model = model_of(torch.float32)
    optimizer = build_optimizer(model, Arm(lr=1e-2))
    loss = model(torch.randn(4, 32)).square().sum()
    loss.backward(retain_graph=True)
    model[0].weight.grad[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    loss.backward()
