"""Moments that are stored in a format: the definition against torchao's states and optimizers, and what must hold.

torchao is the oracle of quantizing and dequantizing, to the bit, and of steps up to the order of the operations in
the update: it computes ``v + (1 - beta2) (g^2 - v)``, ``p - lr wd p`` and ``sqrt(v) / sqrt(1 - beta2^t)``, and the rule
here ``v beta2 + (1 - beta2) g^2``, ``p (1 - lr wd)`` and ``sqrt(v / (1 - beta2^t))``. So a moment before it is rounded
differs by some 1e-7 of itself, and its code where a boundary lies between.
"""

import io
from functools import partial

import pytest
import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.quant_utils import create_dynamic_map
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from altgrad.config.state import Moment, State
from altgrad.formats import FloatFormat
from altgrad.formats.registry import codebook
from altgrad.optim import Arm, ArmOptimizer, update_cpu
from altgrad.optim.state_codec import Coding, Codings
from tests.optim.arms import make, normal_weights, step

TORCHAO = {
    "8bit": (AdamW8bit, OptimState8bit, {"m": "dynamic8", "v": "unsigned_dynamic8"}),
    "4bit": (AdamW4bit, OptimState4bit, {
        "m": {"format": "dynamic4", "block": 128}, "v": {"format": "unsigned_linear4", "block": 128},
    }),
    "fp8": (AdamWFp8, OptimStateFp8, {"m": "E4M3", "v": "E4M3"}),
}  # fmt: skip


def spread(shape, scale, seed=0):
    """Return numbers over some 12 binades, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp() * scale
    x[0] = 0
    return x


@pytest.mark.parametrize("name", ["dynamic8", "unsigned_dynamic8", "dynamic4"])
def test_the_dynamic_maps_are_those_of_torchao_and_bitsandbytes(name):
    arguments = {"dynamic8": (True, 7, 8), "unsigned_dynamic8": (False, 7, 8), "dynamic4": (True, 3, 4)}[name]
    assert codebook(name).values.tolist() == torch.tensor(create_dynamic_map(*arguments)).tolist()


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0])
@pytest.mark.parametrize("role", ["m", "v"])
@pytest.mark.parametrize("name", TORCHAO)
def test_a_moment_is_stored_as_torchao_stores_it(name, role, scale):
    _, kind, settings = TORCHAO[name]
    x = spread((64, 256), scale)
    x = x if role == "m" else x.abs()
    coding = Coding(getattr(State(**settings), role))
    signed = () if name == "fp8" else (role == "m",)
    theirs = kind.zeros(x.shape, *signed)
    assert torch.equal(coding.decode(coding.zeros(x.shape), x.shape), theirs.dequantize())
    theirs.copy_(x)
    parts = coding.encode(x)
    assert torch.equal(parts[""], theirs.codes.view(torch.uint8))
    assert torch.equal(parts["_scale"], theirs.scale)
    assert torch.equal(coding.decode(parts, x.shape), theirs.dequantize())


@pytest.mark.parametrize("name", TORCHAO)
def test_steps_are_those_of_torchao(name):
    """Of 16,384 codes at most 1 in 1,000 differs after a step, by one place, and no weight by more than 1e-3 lr."""
    theirs, _, settings = TORCHAO[name]
    mine, other = (nn.Parameter(normal_weights((64, 256))[0].detach().clone()) for _ in range(2))
    own = ArmOptimizer({}, [mine], Arm(lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-2, state=settings))
    reference = theirs([other], lr=1e-3, betas=(0.9, 0.95), weight_decay=1e-2)
    reference.step = partial(_eagerly, reference.step)
    for i in range(5):
        mine.grad = spread(mine.shape, 1e-3, seed=i)
        other.grad = mine.grad.clone()
        own.step()
        reference.step()
        for key in ("exp_avg", "exp_avg_sq"):
            codes, expected = own.state[mine][key], reference.state[other][key].codes.view(torch.uint8)
            apart = (codes != expected).float().mean().item()
            assert apart <= (i + 1) * 1e-3, (i, key, apart)
        assert torch.isclose(mine, other, rtol=1e-6, atol=1e-6 * (i + 1)).float().mean() > 0.995


def _eagerly(step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        step()


FORMATS = ("E4M3", "E5M2", "E2M5", "E7M0", "E0M7", "E4M3FNUZ", "E2M1", "BF16", "dynamic8", "dynamic4", "NF4", "HIF8")
UNSIGNED = ("UE4M4", "UE5M3", "UE8M0", "UE2M2", "unsigned_dynamic8", "unsigned_linear4")


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("fmt", [*FORMATS, *UNSIGNED])
def test_storing_again_changes_nothing(fmt, granularity):
    """The largest of a group stays where its scale was found, so that codes are found again."""
    x = spread((7, 33), 1e-3)
    coding = Coding(Moment(format=fmt, granularity=granularity, **({"block": 32} if granularity == "block" else {})))
    x = x if coding.book.fmt.signed else x.abs() + 1e-9
    x[:, 0] = x.flatten()[::32] = 1e3  # positive, as no negative value of a map is -1
    once = coding.decode(coding.encode(x), x.shape)
    parts = coding.encode(once)
    assert torch.allclose(coding.decode(parts, x.shape), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", [*FORMATS, *UNSIGNED])
def test_each_value_is_the_nearest(fmt):
    coding = Coding(Moment(format=fmt, granularity="tensor"))
    x = torch.cat([torch.tensor([1.0]), torch.rand(4000) ** 3])
    x[1::2] *= -1 if coding.book.fmt.signed else 1
    grid = torch.unique(coding.code_values).double()
    grid = grid[grid.abs() <= coding.book.largest]
    found = coding.decode(coding.encode(x), x.shape).double()
    unit = 1 / torch.tensor(coding.book.largest).double()
    distances = torch.stack([(x.double() - value * unit).abs() for value in grid]).amin(0) if len(grid) < 300 else None
    if distances is not None:
        assert ((found - x.double()).abs() <= distances + 1e-7).all()


def test_stochastic_rounding_is_right_on_average_and_repeats():
    coding = Coding(Moment(format="E4M3", granularity="tensor", rounding="stochastic"))
    x = torch.full((1 << 18,), 0.3)
    x[0] = 1.0
    stream = torch.tensor([1, 2, 3])
    found = coding.decode(coding.encode(x, stream), x.shape)
    assert torch.equal(found, coding.decode(coding.encode(x, stream), x.shape))
    values = found[1:].unique().double()
    share = (0.3 - values[0]) / (values[1] - values[0])
    up = (found[1:] == values[1].float()).double().mean()
    assert len(values) == 2
    assert abs(up - share) < 5 * (share * (1 - share) / x.numel()) ** 0.5


def test_range_expansion_takes_the_groups_range_to_that_of_the_format():
    """The largest and the smallest magnitude of each group become the format's, so that both come back exactly."""
    x = 10 ** (torch.rand(8, 256).double() * 2).float() * 1e-4
    coding = Coding(Moment(format="E4M3", granularity="row", expand=True))
    parts = coding.encode(x)
    found = coding.decode(parts, x.shape)
    assert (parts[""].amax(1) == 0x7E).all() and (parts[""].amin(1) == 1).all()
    for end in (torch.amax, torch.amin):
        assert torch.allclose(end(found, 1), end(x, 1), rtol=1e-5)


def test_a_root_is_stored_and_squared_again():
    x, root = spread((8, 256), 1e-3).square(), Coding(Moment(format="UE4M4", root=True))
    plain = Coding(Moment(format="UE4M4"))
    assert torch.equal(root.decode(root.encode(x), x.shape), plain.decode(plain.encode(x.sqrt()), x.shape).square())


def test_codes_of_powers_of_two_scales_lie_under_them():
    x, coding = spread((4, 256), 1e-3), Coding(Moment(format="E4M3", scale="E8M0"))
    parts = coding.encode(x)
    assert parts["_scale"].dtype == torch.uint8
    scale = torch.exp2(parts["_scale"].double() - 127)
    amax = x.double().abs().amax(1).clamp_min(1e-12)
    assert (amax / 448 <= scale).all() and (scale < 2 * amax / 448).all()


def test_small_parameters_keep_float32_and_others_a_byte():
    weights = [nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 63))]
    optimizer = ArmOptimizer({}, weights, Arm(lr=1e-3, state={"m": "E4M3", "v": "dynamic4"} | {"v": "UE4M4"}))
    step(weights, optimizer, 0)
    coded, plain = (optimizer.state[p] for p in weights)
    assert coded["exp_avg"].dtype == coded["exp_avg_sq"].dtype == torch.uint8
    assert coded["exp_avg_scale"].numel() == 16
    assert plain["exp_avg"].dtype == torch.float32 and "exp_avg_scale" not in plain


ARMS = {
    "adamw": {}, "stiff": {"stiffness": "ulp"}, "muon": {"base": "muon", "momentum": 0.95},
    "rung": {"base": "rung", "weights": "quantized", "rounding": "stochastic", "lr": 0.2},
    "madam": {"base": "madam"}, "sgd": {"base": "sgd", "momentum": 0.9}, "riemann_adam": {
        "base": "riemann_adam", "stiffness": "ulp"},
    "eco": {"weights": "quantized", "feedback": "momentum"}, "matched": {"stiffness": "ulp", "match_rms": True},
}  # fmt: skip
STATES = {"fp8": {"m": "E4M3", "v": "E4M3"}, "stochastic": {
    "m": {"format": "E4M3", "rounding": "stochastic"}, "v": {"format": "UE4M4", "rounding": "stochastic", "block": 64},
}, "maps": {"m": "dynamic8", "v": "unsigned_dynamic8"}}  # fmt: skip


def arm_of(base, state):
    settings = {"lr": 1e-3} | ARMS[base]
    kept = {key: value for key, value in STATES[state].items() if (base != "sgd" or key == "m")}
    return Arm(**settings, state=kept | {"least": 0})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("base", ARMS)
def test_every_base_goes_on_to_the_same_bits_from_a_saved_state(base, state):
    def fresh():
        linear = nn.Parameter(normal_weights((32, 64), seed=5)[0].detach())
        weights, optimizer = make(arm_of(base, state), "E4M3", [*normal_weights((67, 131))], seed=3)
        optimizer.add_param_group({"params": [linear]})
        return [*weights, linear], optimizer

    weights, optimizer = fresh()
    for i in range(2):
        step(weights, optimizer, i)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, resumed = fresh()
    with torch.no_grad():
        for p, q in zip(others, weights, strict=True):
            p.copy_(q)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for run in ((weights, optimizer), (others, resumed)):
        step(*run, 7)
    for p, q in zip(weights, others, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(torch.equal(t, resumed.state[q][name]) for name, t in optimizer.state[p].items())
    assert any(t.dtype == torch.uint8 for t in optimizer.state[weights[0]].values())


@pytest.mark.parametrize("there", [None, {"m": "E5M2", "v": {"format": "unsigned_linear4", "block": 128}}])
def test_a_state_is_loaded_into_another_format_and_back(there):
    """What float32, or another format, makes of codes is what it stands for; what becomes of it then is rounding."""
    here = {"m": "E4M3", "v": "E4M3"}
    optimizers = []
    for state in (here, there):
        weights = normal_weights((64, 256))
        optimizers.append((weights, ArmOptimizer({}, weights, Arm(lr=1e-3, state=state))))
    (weights, own), (others, other) = optimizers
    step(weights, own, 0)
    before = own._decoded(weights[0])
    other.load_state_dict(own.state_dict())
    found = other._decoded(others[0])
    codings = Codings(other.arm).of(others[0])
    for name in ("exp_avg", "exp_avg_sq"):
        c = codings.get(name)
        expected = before[name] if c is None else c.decode(c.encode(before[name]), before[name].shape)
        assert torch.equal(found[name], expected)
    step(others, other, 1)
    own.load_state_dict(other.state_dict())
    step(weights, own, 2)
    assert own.state[weights[0]]["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"m": "UE4M4"}, "UE4M4 is unsigned, and a first moment has a sign"),
        ({"m": {"format": "E4M3", "root": True}}, "only v, which is not negative, has a root"),
        ({"v": {"format": "E4M3", "granularity": "row", "block": 64}}, "is of granularity block"),
        ({"v": {"format": "E4M3", "expand": True, "scale": "E8M0"}}, "it needs scale float32"),
        ({"v": "unsigned_dynamic"}, "did you mean unsigned_dynamic8"),
        ({"v": "E4N3"}, "did you mean E4M3"),
        ({}, "name a format for m, for v or for both"),
    ],
)
def test_settings_that_mean_nothing_are_errors(settings, said):
    with pytest.raises(ValueError, match=said):
        State(**settings)


def test_a_moment_that_the_base_does_not_keep_is_an_error():
    with pytest.raises(ValueError, match="base sgd without momentum keeps no m"):
        Arm(lr=1e-3, base="sgd", state={"m": "E4M3"})
    with pytest.raises(ValueError, match="base sgd keeps no v"):
        Arm(lr=1e-3, base="sgd", momentum=0.9, state={"v": "E4M3"})


CODED_BY_LOOPS = {
    "m": ["E4M3", "E5M2", "E2M5", "E7M0", "E0M7", "E4M3FNUZ", "E2M1", "E3M2", "dynamic8", "dynamic4", "NF4"],
    "v": ["E4M3", "UE4M4", "UE5M3", "UE2M2", "E7M0", "unsigned_dynamic8", "unsigned_linear4"],
}
VARIANTS = [{}, {"block": 64}, {"scale": "E8M0"}, {"rounding": "stochastic"}, {"root": True}, {"expand": True}]
MEASURED = [{"granularity": "tensor"}, {"granularity": "row"}, {"block": 96}, {"block": 1024}]  # before they are stored
BOTH = [("E4M3", "E4M3"), ("E5M2", "E5M2"), ("E0M7", "UE1M7"), ("E2M5", "UE5M3"), ("E6M1", "UE6M2"), ("E4M3", "UE4M4")]


def coded_by_loops():
    """Yield states that the loops take: of one moment, and of both in one pass."""
    for changes in VARIANTS:
        for role, names in CODED_BY_LOOPS.items():
            for fmt in names:
                of_formats = "rounding" in changes or "expand" in changes
                of_floats = isinstance(codebook(fmt).fmt, FloatFormat)
                if (role == "v" or "root" not in changes) and (of_floats or not of_formats):
                    yield {role: {"format": fmt} | changes}
        for m, v in BOTH if "rounding" not in changes else ():
            yield {"m": {"format": m} | ({} if "root" in changes else changes), "v": {"format": v} | changes}
    yield {"m": {"format": "E4M3", "block": 32}, "v": {"format": "UE4M4", "block": 512}}
    yield {"m": {"format": "E4M3", "block": 512}, "v": {"format": "E4M3", "block": 64, "root": True}}
    for groups in MEASURED:
        for more in ({}, {"scale": "E8M0"}, {"rounding": "stochastic"}, {"expand": True}):
            yield {"m": {"format": "E4M3"} | groups | more, "v": {"format": "E5M2"} | groups | more}
        yield {"m": {"format": "dynamic8"} | groups, "v": {"format": "UE4M4", "root": True} | groups}
        yield {"m": {"format": "E2M1"} | groups, "v": {"format": "E4M3", "block": 64}}


@pytest.mark.parametrize("state", coded_by_loops(), ids=str)
def test_the_loops_store_the_codes_of_the_definition(compiler, monkeypatch, state):
    """To the bit, as AdamW's moments have no sums: codes and scales, of a last block that is short too.

    A weight is near to rounding, of which a stiffness adds some.
    """
    state, found = state | {"least": 0}, []
    for loops in (True, False):
        with monkeypatch.context() as patch:
            if not loops:
                patch.setattr(update_cpu, "available", lambda *_: False)
            weights, optimizer = make(Arm(lr=1e-2, stiffness="ulp", normalise="none", state=state), "E4M3", [
                nn.Parameter(spread((37, 131), 0.1))], seed=4)  # fmt: skip
            plain = [nn.Parameter(spread(shape, 0.1, seed=2)) for shape in ((35, 77), (21, 520), (19, 544))]
            optimizer.add_param_group({"params": plain})
            weights.extend(plain)
            for i in range(3):
                for p in weights:
                    p.grad = spread(p.shape, 1e-3, seed=i)
                    p.grad[5:9] = 0
                    p.grad[20:21, :3] = torch.tensor([1e30, 1e-30, -1e19])  # one with an infinite square
                optimizer.step()
            assert bool(optimizer._loops) == loops
            found.append([(p.detach(), optimizer.state[p]) for p in weights])
    for (p, own), (q, expected) in zip(*found, strict=True):
        for name, t in own.items():
            assert torch.equal(t, expected[name]), (name, (t != expected[name]).sum())
        assert torch.allclose(p, q, rtol=2e-6, atol=2e-6 * q.abs().max().item())
