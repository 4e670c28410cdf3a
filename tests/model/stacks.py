"""What other people's training code does to a quantized model, with every kind of recipe: the cells of STACKS.md.

A stack is a function of a recipe and of how the model runs, ``eager`` or ``compiled``. It trains a little and compares
with an oracle, to the bit unless it says otherwise: the same without the stack, or torch's own layers where the answer
is a kind of result and not a number. It returns where that holds, and raises what the layers say where they refuse.
What several processes do is in `OF_PROCESSES`, of what tests/model/fully_sharded.py found. The page is the product of
stacks, recipes and ways: `cells` has no other, and a cell that the page lacks fails its test.
``python -m tests.model.stacks`` writes the page.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, build_optimizer
from tests.model import fully_sharded

PAGE = Path(__file__).parents[2] / "altgrad/model/STACKS.md"
WORKS, REFUSED = "works", "refused"
RECIPES = fully_sharded.RECIPES
Run = Callable[[nn.Module], Any]
REFUSALS = (NotImplementedError, RuntimeError, ValueError, torch._dynamo.exc.Unsupported)
INPUTS = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def plain(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def recipe_of(name: str) -> Recipe:
    return Recipe.uniform("E4M3", grad="E5M2", **RECIPES[name])


def quantized(recipe: str, model: Any = None) -> Any:
    model = plain() if model is None else model
    return quantize_model(model, recipe_of(recipe))


def passes(model: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return outputs and weights' gradients of three passes; a bias has a sum, whose order compilers choose."""
    found: list[Tensor] = []
    for x in INPUTS:
        model.zero_grad()
        y = model(x.to(dtype).clone().requires_grad_())
        y.float().square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.ndim == 2)]
    return found


def require_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def eager(model: nn.Module) -> Any:
    return model


def traced(model: nn.Module) -> Any:
    """Return ``model`` compiled up to the code that Inductor would write, which tests/training compares."""
    return torch.compile(model, backend="aot_eager")


WAYS: dict[str, Run] = {"eager": eager, "compiled": traced}


# --- moves and copies ------------------------------------------------------------------------------------------------


def cast(recipe: str, run: Run) -> None:
    """`model.to(torch.bfloat16)` after quantizing."""
    require_same(
        passes(run(quantized(recipe).to(torch.bfloat16)), torch.bfloat16),
        passes(quantized(recipe, plain().to(torch.bfloat16)), torch.bfloat16),
    )


def meta(recipe: str, run: Run) -> None:
    """Made on the meta device, `to_empty`, then loaded."""
    model = quantized(recipe, plain("meta")).to_empty(device="cpu")
    model.load_state_dict(plain().state_dict())
    require_same(passes(run(model)), passes(quantized(recipe)))


def copies(recipe: str, run: Run) -> None:
    """`copy.deepcopy` and pickle."""
    model = quantized(recipe)
    passes(model)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    after = passes(model)
    for one in made:
        require_same(passes(run(one)), after)


def average(recipe: str, run: Run) -> None:
    """`AveragedModel` of `torch.optim.swa_utils`: the mean of two states of the weights."""
    model, expected = quantized(recipe), quantized(recipe)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    first = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p, q in zip(expected.parameters(), first, strict=True):
            p.copy_(1.5 * q)
    require_same([p.detach() for p in averaged.module.parameters()], [p.detach() for p in expected.parameters()])
    require_same([averaged.eval()(INPUTS[0])], [expected.eval()(INPUTS[0])])


def scaler(recipe: str, run: Run) -> None:
    """float16 autocast with `GradScaler`, whose scale is a power of two."""
    ends = []
    for enabled in (True, False):
        model = run(quantized(recipe))
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=enabled)
        for x in INPUTS[:1]:
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):  # float16 gradients that are subnormal without the scale
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def plain_checkpoint(recipe: str, run: Run) -> None:
    """A plain checkpoint, strictly, into every recipe, and what a recipe saves into every other one."""
    model = quantized(recipe)
    model.load_state_dict(plain().state_dict())
    for other in RECIPES:
        quantized(other).load_state_dict(model.state_dict())
    require_same(passes(run(model)), passes(quantized(recipe)))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def around_each(recipe: str, reentrant: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Checkpointed(layer, reentrant) for layer in quantized(recipe)))


def recomputed(recipe: str, run: Run) -> None:
    """Activation checkpointing, `use_reentrant=False`."""
    require_same(passes(run(around_each(recipe))), passes(quantized(recipe)))


def recomputed_reentrant(recipe: str, run: Run) -> None:
    """Activation checkpointing, `use_reentrant=True`."""
    require_same(passes(run(around_each(recipe, True))), passes(quantized(recipe)))


def nested(recipe: str, run: Run) -> None:
    """A checkpoint inside of another."""
    require_same(passes(run(Checkpointed(around_each(recipe), False))), passes(quantized(recipe)))


def compiled(recipe: str) -> None:
    """`torch.compile(model, fullgraph=True)`."""
    torch._dynamo.reset()
    require_same(passes(torch.compile(quantized(recipe), fullgraph=True)), passes(quantized(recipe)))


def recomputed_in_a_graph(recipe: str) -> None:
    """`torch.compile(model, fullgraph=True)` of a model with checkpoints inside."""
    torch._dynamo.reset()
    found = torch.compile(around_each(recipe), backend="aot_eager", fullgraph=True)
    require_same(passes(found), passes(quantized(recipe)))


def per_sample(recipe: str, run: Run) -> None:
    """Gradients of each sample by `torch.func.vmap(grad(...))`."""
    model = quantized(recipe)
    ran = run(model)
    weights = dict(ran.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(ran, weights, (x[None],)).square().sum()
        return found

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS[0][:4])
    for i in range(4):
        model.zero_grad()
        model(INPUTS[0][i : i + 1]).square().sum().backward()
        require_same([gradients[name][i] for name in weights], [p.grad for p in weights.values()])


def exported(recipe: str) -> None:
    """`torch.export`, of a model in evaluation."""
    model = quantized(recipe).eval()
    program = torch.export.export(model, (INPUTS[0],))
    require_same([program.module()(INPUTS[0])], [model(INPUTS[0])])


def scripted(recipe: str) -> None:
    """`torch.jit.trace`."""
    torch.jit.trace(quantized(recipe).eval(), INPUTS[0])


def lora(recipe: str, run: Run) -> None:
    """PEFT's LoRA around quantized layers, whose adapters begin at zero."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations.peft import lora_config

    model = run(get_peft_model(quantized(recipe), lora_config(LoraConfig(target_modules=["0", "2"]))))
    expected = quantized(recipe)
    require_same([model(x).detach() for x in INPUTS], [expected(x).detach() for x in INPUTS])
    model(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# --- who writes a weight, and when -----------------------------------------------------------------------------------


def written_by_a_hook(recipe: str, run: Run) -> None:
    """A hook before a layer's forward pass writes its weight: `prune`, max-norm, weight noise."""
    model, expected = quantized(recipe), quantized(recipe)
    torch.manual_seed(2)
    prune.random_unstructured(model[0], "weight", 0.5)
    prune.custom_from_mask(expected[0], "weight", model[0].weight_mask)
    prune.remove(expected[0], "weight")
    with torch.no_grad():
        require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])


def parametrized(recipe: str, run: Run) -> None:
    """`torch.nn.utils.parametrizations.weight_norm`: a weight that is computed when it is read."""
    model, expected = quantized(recipe), quantized(recipe)
    parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2.0)
        expected[0].weight.copy_(model[0].weight)
        require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])
    run(model)(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def functional(recipe: str, run: Run) -> None:
    """`torch.func.functional_call` with other weights."""
    model, other = quantized(recipe).eval(), quantized(recipe).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-3.0)
        ran, weights = run(model), dict(other.named_parameters())
        named = {name: weights[name.removeprefix("_orig_mod.")] for name, _ in ran.named_parameters()}
        require_same([torch.func.functional_call(ran, named, (INPUTS[0],))], [other(INPUTS[0])])


def offloaded(recipe: str, run: Run) -> None:
    """accelerate's `dispatch_model` with a layer on disk."""
    from accelerate import dispatch_model

    places = {"0": "cpu", "1": "cpu", "2": "disk"}
    with tempfile.TemporaryDirectory() as folder:
        model = dispatch_model(
            quantized(recipe).eval(), places, main_device="cpu", offload_dir=folder, force_hooks=True
        )
        expected = quantized(recipe).eval()
        with torch.no_grad():
            require_same([run(model)(x) for x in INPUTS], [expected(x) for x in INPUTS])


def shared(recipe: str, run: Run) -> None:
    """One layer at two places of a forward pass, beside a layer of its own at each with the same weight."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    twice = quantized(recipe, nn.Sequential(layer, nn.ReLU(), layer)).eval()
    apart = quantized(recipe, nn.Sequential(copy.deepcopy(layer), nn.ReLU(), copy.deepcopy(layer))).eval()
    run(twice)(INPUTS[0]).square().sum().backward()
    apart(INPUTS[0]).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, apart[0].weight.grad + apart[2].weight.grad, rtol=1e-6, atol=1e-6)


def stepped_in_backward(recipe: str, run: Run) -> None:
    """An optimizer in the backward pass, by `register_post_accumulate_grad_hook`."""
    ends = []
    for inside in (True, False):
        model = quantized(recipe)
        ran = run(model) if inside else model
        optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
        if inside:
            for p, optimizer in optimizers.items():
                p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        for x in INPUTS:
            ran(x).square().mean().backward()
            for optimizer in optimizers.values():
                _ = None if inside else optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters() if p.ndim == 2])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7 if run is not eager else 0)


def stepped_too_early(recipe: str, run: Run) -> None:
    """A step of the optimizer between forward and backward pass: torch's error, as from its own layers."""
    model = run(quantized(recipe))
    loss = model(INPUTS[0]).square().sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        # A graph keeps what its own backward pass reads: the operands, which are those of the forward pass.
        assert run is not eager
        found = [p.grad for p in model.parameters() if p.ndim == 2]
        one = quantized(recipe)
        one(INPUTS[0]).square().sum().backward()
        require_same(found, [p.grad for p in one.parameters() if p.ndim == 2])


# --- gradients -------------------------------------------------------------------------------------------------------


def overflowing(recipe: str, run: Run) -> None:
    """An overflow in float16: `GradScaler` halves its scale and skips the step."""
    ends = []
    for model in (plain(), quantized(recipe)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaling = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        weights = list(model.parameters())
        before = [p.detach().clone() for p in weights]
        with torch.autocast("cpu", torch.float16):
            loss = run(model)(INPUTS[0]).float().square().sum() * 1e4
        assert loss.isfinite()  # so that it is the gradient that overflows
        scaling.scale(loss).backward()
        scaling.step(optimizer)
        scaling.update()
        ends.append((scaling.get_scale(), [torch.equal(a, b) for a, b in zip(before, weights, strict=True)]))
    assert ends[0] == ends[1] == (2.0**19, [True] * 4)


def infinite(recipe: str, run: Run) -> None:
    """An infinity in an input: all that torch's own layers make not finite, and the next step as ever."""
    x = INPUTS[0].clone()
    x[3, 5] = torch.inf
    model = quantized(recipe)
    ran = run(model)
    y = ran(x.requires_grad_())
    y.square().sum().backward()
    assert not y[3].isfinite().any() and not model[0].weight.grad.isfinite().all()
    assert all(buffer.isfinite().all() for buffer in model.buffers()) and ran(INPUTS[1]).isfinite().all()


def require_alike(found: Any, expected: Any) -> None:
    """Tensors with the direction of torch's own, but for what rounding to 2 and 3 bits of mantissa turns them."""
    for a, b in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97


def penalised(recipe: str, run: Run) -> None:
    """A gradient penalty, `create_graph=True`, with a residual path: as of torch's own layers, but for rounding."""
    ends = []
    for model in (plain(), quantized(recipe)):
        x = INPUTS[0].clone().requires_grad_()
        y = run(model)(x) + x
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (g.norm(dim=1) - 1).square().mean().backward()
        ends.append([p.grad for p in model.parameters() if p.ndim == 2])
    require_alike(*ends)


def hessian(recipe: str, run: Run) -> None:
    """A Hessian-vector product by two backward passes: as of torch's own layers, but for rounding."""
    ends = []
    for model in (plain(), quantized(recipe)):
        weights = [p for p in model.parameters() if p.ndim == 2]
        torch.manual_seed(3)
        vectors = [torch.randn_like(p) for p in weights]
        gradients = torch.autograd.grad(run(model)(INPUTS[0]).square().mean(), weights, create_graph=True)
        along = sum((g * v).sum() for g, v in zip(gradients, vectors, strict=True))
        ends.append(torch.autograd.grad(along, weights))
    require_alike(*ends)


def forces(recipe: str, run: Run) -> None:
    """`enable_grad` inside of a forward pass, `no_grad` around it."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = quantized(recipe)

        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.net(x).square().sum(), x)[0]

    expected = Forces()(INPUTS[0])
    with torch.no_grad():
        require_same([run(Forces())(INPUTS[0])], [expected])


def accumulated(recipe: str, run: Run) -> None:
    """Gradients of several passes that add up, beside their sum."""
    model, one = quantized(recipe), quantized(recipe)
    ran, total = run(model), [torch.zeros_like(p) for p in one.parameters()]
    for x in INPUTS:
        ran(x).square().sum().backward()
        one.zero_grad()
        one(x).square().sum().backward()
        total = [t + p.grad for t, p in zip(total, one.parameters(), strict=True)]
    found = [p.grad for p in model.parameters()]
    require_same([g for g in found if g.ndim == 2], [t for t in total if t.ndim == 2])


def twice_backward(recipe: str, run: Run) -> None:
    """`backward(retain_graph=True)` twice: the same gradient again, with the same random numbers."""
    model = quantized(recipe)
    loss = run(model)(INPUTS[0]).square().sum()
    found = []
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        found.append([p.grad.clone() for p in model.parameters()])
    require_same(*found)


def offloaded_activations(recipe: str, run: Run) -> None:
    """`torch.autograd.graph.save_on_cpu` around the forward pass."""
    model, expected = quantized(recipe), quantized(recipe)
    with torch.autograd.graph.save_on_cpu():
        loss = run(model)(INPUTS[0]).square().sum()
    loss.backward()
    expected(INPUTS[0]).square().sum().backward()
    require_same([p.grad for p in model.parameters() if p.ndim == 2],
                 [p.grad for p in expected.parameters() if p.ndim == 2])  # fmt: skip


def forward_mode(recipe: str, run: Run) -> None:
    """`torch.autograd.forward_ad`."""
    model = run(quantized(recipe).eval())
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(INPUTS[0], INPUTS[1]))


# --- shapes, dtypes and modes ----------------------------------------------------------------------------------------


def autocast_off_inside(recipe: str, run: Run) -> None:
    """`autocast(enabled=False)` for a layer inside of a forward pass under autocast."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = quantized(recipe).eval()

        def forward(self, x: Tensor) -> Any:
            x = self.net[1](self.net[0](x))
            with torch.autocast("cpu", enabled=False):
                return self.net[2](x.float())

    with torch.autocast("cpu", torch.bfloat16):
        one, expected = Mixed(), Mixed().net
        y = run(one)(INPUTS[0])
        middle = expected[1](expected[0](INPUTS[0]))
    require_same([y], [expected[2](middle.float())])
    assert y.dtype == torch.float32


def dynamic(recipe: str, run: Run) -> None:
    """Batches of three sizes; compiled with `dynamic=True`."""
    model, expected = quantized(recipe), quantized(recipe)
    ran = model if run is eager else torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (32, 7, 24):
        for m in (model, expected):
            m.zero_grad()
        ran(INPUTS[0][:rows]).square().sum().backward()
        expected(INPUTS[0][:rows]).square().sum().backward()
        require_same([p.grad for p in model.parameters() if p.ndim == 2],
                     [p.grad for p in expected.parameters() if p.ndim == 2])  # fmt: skip


def shaped(recipe: str, run: Run) -> None:
    """Inputs of one, three and four dimensions, one that is not contiguous, and gradients that are expanded."""
    model, expected = quantized(recipe).eval(), quantized(recipe).eval()
    ran = run(model)
    require_same([ran(INPUTS[0][0])], [expected(INPUTS[0][:1])[0]])
    folded = expected(INPUTS[0])
    require_same([ran(INPUTS[0].view(4, 8, 64)).flatten(0, 1), ran(INPUTS[0].view(2, 2, 8, 64)).flatten(0, 2)],
                 [folded, folded])  # fmt: skip
    require_same([ran(INPUTS[0].t().contiguous().t())], [folded])
    ran(INPUTS[0]).sum().backward()
    expected(INPUTS[0]).backward(torch.ones_like(folded))
    require_same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def empty(recipe: str, run: Run) -> None:
    """A batch without rows."""
    model = quantized(recipe)
    y = run(model)(INPUTS[0][:0])
    y.sum().backward()
    assert y.shape == (0, 64) and all(not p.grad.any() for p in model.parameters())


def inference(recipe: str, run: Run) -> None:
    """`torch.inference_mode`, then training."""
    model, expected = quantized(recipe), quantized(recipe)
    with torch.inference_mode():
        run(model.eval())(INPUTS[0])
    require_same(passes(run(model.train())), passes(expected))


def frozen(recipe: str, run: Run) -> None:
    """Frozen weights: the input's gradient alone, with the bits that it has beside theirs."""
    model, expected = quantized(recipe).eval(), quantized(recipe).eval()
    model.requires_grad_(False)
    inputs = [INPUTS[0].clone().requires_grad_() for _ in range(2)]
    run(model)(inputs[0]).square().sum().backward()
    expected(inputs[1]).square().sum().backward()
    require_same([inputs[0].grad], [inputs[1].grad])


# --- models and optimizers of other libraries ------------------------------------------------------------------------


def encoder(recipe: str, run: Run) -> None:
    """`nn.TransformerEncoder` in evaluation: what its layers compute, within 1e-3."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = quantized(recipe, nn.TransformerEncoder(layer, 2)).eval()
    x = INPUTS[0].view(4, 16, 32)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        found = run(model)(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = model(x)
            assert (found - expected).norm() < 1e-3 * expected.norm()
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


TOKENS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(4))


def resized(recipe: str, run: Run) -> None:
    """transformers' `resize_token_embeddings` after quantizing, of a tied head."""
    model, expected = quantized(recipe, language_model()), language_model()
    for m in (model, expected):
        torch.manual_seed(1)
        m.resize_token_embeddings(80, mean_resizing=False)
    with torch.no_grad():
        require_same([run(model)(input_ids=TOKENS).logits], [quantized(recipe, expected)(input_ids=TOKENS).logits])


def saved_head(recipe: str, run: Run) -> None:
    """PEFT's LoRA with `modules_to_save=["lm_head"]`, before quantizing and after."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations import peft

    def config() -> Any:
        return LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head"])

    torch.manual_seed(1)
    one = get_peft_model(quantized(recipe, language_model()), peft.lora_config(config())).eval()
    other = language_model()
    torch.manual_seed(1)
    other = peft.quantize_model(get_peft_model(other, config()), recipe_of(recipe)).eval()
    with torch.no_grad():
        require_same([run(one)(input_ids=TOKENS).logits], [other(input_ids=TOKENS).logits])


def copied_with_optimizer(recipe: str, run: Run) -> None:
    """`copy.deepcopy` of a model together with its optimizer, which then goes on."""
    model = quantized(recipe)
    pairs = [(model, build_optimizer(model, Arm(lr=1e-2, stiffness="ulp")))]
    for _ in range(2):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            run(m)(INPUTS[0]).square().mean().backward()
            optimizer.step()
        pairs = [*pairs, copy.deepcopy(pairs[0])] if len(pairs) == 1 else pairs
    require_same(pairs[0][0].parameters(), pairs[1][0].parameters())


def default_dtype(recipe: str, run: Run) -> None:
    """`torch.set_default_dtype(torch.float16)`, with parameters and inputs in float32."""
    expected, model = passes(quantized(recipe)), plain()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        require_same(passes(run(quantized(recipe, model))), expected)
    finally:
        torch.set_default_dtype(before)


Stack = Callable[[str, Run], None]
STACKS: tuple[Stack, ...] = (
    cast, meta, copies, average, scaler, plain_checkpoint,
    written_by_a_hook, parametrized, functional, offloaded, shared, stepped_in_backward, stepped_too_early,
    overflowing, infinite, penalised, hessian, forces, accumulated, twice_backward, offloaded_activations, forward_mode,
    per_sample, recomputed, recomputed_reentrant, nested,
    autocast_off_inside, dynamic, shaped, empty, inference, frozen, default_dtype,
    encoder, resized, lora, saved_head, copied_with_optimizer,
)  # fmt: skip
#: Stacks that compile or trace a model themselves.
TRACED: tuple[Callable[[str], None], ...] = (compiled, recomputed_in_a_graph, exported, scripted)
OF_PROCESSES: dict[str, str] = {
    "DistributedDataParallel, `sync_amax=True` (losses within 2e-6)": "ddp",
    "FSDP2's `fully_shard`, `sync_amax=True` (losses within 2e-6)": "trained",
    "The same with `gather_codes=True` (losses and weights to the bit as without)": "gathered",
    "DCP: saved by two processes, loaded by two and by four": "saved",
    "`ColwiseParallel`, `RowwiseParallel`": "parallel",
    "`FullyShardedDataParallel` (FSDP1)": "flattened",
    "Random numbers of DistributedDataParallel without `sync_amax`: a stream for each process": "drawn",
}
HOW = {
    "nested": "one checkpoint around the layers",
    "recomputed_in_a_graph": "without `fullgraph`: the checkpoint then runs in eager mode",
    "per_sample": "`model.eval()`, or a recipe that remembers nothing",
    "penalised": "uncompiled, as for torch's own layers; dynamic scaling for the gradient",
    "hessian": "uncompiled, as for torch's own layers; dynamic scaling for the gradient",
    "forward_mode": "reverse mode",
    "gathered": "`fully_shard` without `gather_codes`",
    "parallel": "`fully_shard`",
    "flattened": "`fully_shard`",
    "scripted": "`torch.export.export`, `torch.compile`",
}
#: Parts of the sentences in which something is refused: ours, and torch's where it refuses its own layers too.
SENTENCES = (
    "use one checkpoint", "cannot repeat", "TorchScript (torch.jit.trace", "torch.func has no",
    "take scaling: dynamic for grad",
    "torch.compile with aot_autograd does not currently support double backward",
    "does not implement the jvp function", "forward mode AD",
)  # fmt: skip


def cell_of(stack: Callable[..., None], recipe: str, *run: Run) -> str:
    """Return `WORKS`, or `REFUSED` if that is in one of the `SENTENCES`; raises for anything else."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stack(recipe, *run)
        except REFUSALS as error:
            if any(words in str(error) for words in SENTENCES):
                return REFUSED
            raise
        finally:
            torch._dynamo.reset()
    return WORKS


def joined(cells: dict[str, str]) -> str:
    """Return what the page says of one stack and recipe, whose cells have their way's name."""
    if len(set(cells.values())) == 1:
        return next(iter(cells.values()))
    return "; ".join(f"{way} {cell}" for way, cell in cells.items())


def cell_of_processes(found: dict[int, dict[str, Any]], what: str, recipe: str) -> str:
    """Return the same of what processes found, by the tolerance that the page states."""
    if what == "parallel":
        said = found[4]["parallel"][recipe]
        assert len(said) == 2 and all("nn.Linear" in sentence for sentence in said)
        return REFUSED
    if what == "flattened":
        assert "torch.distributed.fsdp.fully_shard" in found[4][what][recipe]
        return REFUSED
    if what == "drawn":
        outputs, weights = found[4][what][recipe]
        drawn = RECIPES[recipe].get("rounding") == "stochastic"
        assert all(torch.equal(weights[0], w) for w in weights)  # which all processes have alike
        for i, j in itertools.combinations(range(4), 2):
            assert torch.equal(outputs[i], outputs[j]) != drawn
            if drawn:  # independent errors: no more alike than 4096 pairs of independent numbers are
                a, b = (t - sum(outputs) / 4 for t in (outputs[i], outputs[j]))
                assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] < 0
        return WORKS
    for count in (4,) if what in ("ddp", "gathered") else (2, 4):
        several = found[count][what][recipe]
        if isinstance(several, str):
            assert "or leave gather_codes out" in several
            return REFUSED
        if what == "gathered":
            as_they_are = found[count]["trained"][recipe]
            assert several["losses"] == as_they_are["losses"]
            assert all(torch.equal(t, as_they_are["state"][name]) for name, t in several["state"].items())
        elif what == "saved":
            arm = fully_sharded.arm_of(fully_sharded.RESUMED)
            weights = fully_sharded.stepped(fully_sharded.model_of(recipe), arm)["weights"]
            assert all(torch.equal(t, weights[name]) for name, t in several.items())
        else:
            one = fully_sharded.trained(fully_sharded.model_of(recipe))
            assert all(abs(a / b - 1) < 2e-6 for a, b in zip(several["losses"], one["losses"], strict=True))
    return WORKS


def page(found: dict[int, dict[str, Any]]) -> str:
    """Return STACKS.md."""
    rows = []
    for stack in STACKS:
        by_recipe = [joined({way: cell_of(stack, recipe, run) for way, run in WAYS.items()}) for recipe in RECIPES]
        rows.append((stack.__doc__ or "", stack.__name__, by_recipe))
    rows += [(stack.__doc__ or "", stack.__name__, [cell_of(stack, recipe) for recipe in RECIPES]) for stack in TRACED]
    for said, what in OF_PROCESSES.items():
        rows.append((said, what, [cell_of_processes(found, what, recipe) for recipe in RECIPES]))
    table = [["stack", *RECIPES, "instead"], ["---"] * (len(RECIPES) + 2)]
    for said, what, cells in rows:
        table.append([said.rstrip("."), *cells, HOW.get(what, "") if any(REFUSED in cell for cell in cells) else ""])
    return TEXT + "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n"


TEXT = """# Quantized layers in training stacks

What a stack does to a model of `quantize_model`, by the kind of recipe. **works**: outputs and gradients have the bits
that the model has without the stack, unless the row says how far they are apart. **refused**: one sentence says so,
and the last column what to do instead. Each cell is a test, and `python -m tests.model.stacks` writes this page of what
they find on a CPU.

**compiled** is `torch.compile`, and a cell with one word is so both ways.

Hugging Face's Trainer, PEFT, Lightning, torchtitan and Accelerate have
[a page of their own](../integrations/README.md). With FSDP2 quantize the model first and shard it then; optimizers
step the shards to the bit as one process would (`altgrad/optim/sharded.py`). With
`quantize_model(..., gather_codes=True)` it gathers a weight as codes, one byte per element, with a message of four
bytes for the scale whenever it is gathered, also between and inside of compiled graphs; an integer
`reshard_after_forward` and a `shard_placement_fn` are refused for such weights. A compiled block inside of a checkpoint
that is not compiled ends in torch's `CheckpointError`: compile the model around its checkpoints.

"""

if __name__ == "__main__":
    os.environ |= fully_sharded.PRODUCTS
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(page(fully_sharded.run(Path(folder))), encoding="utf-8")
    print(PAGE, file=sys.stderr)
