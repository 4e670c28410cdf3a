"""Gradients of every kind, shapes, dtypes and modes; models and optimizers of other libraries."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from altgrad.optim import Arm, build_optimizer
from tests.model.stacks.setup import INPUTS, Run, eager, passes, plain, quantized, recipe_of, require_same


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


# --- shapes, dtypes and modes ---------------------------------------------------------------------------------------


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


# --- other libraries ------------------------------------------------------------------------------------------------


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


TOKENS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(4))


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


def lora(recipe: str, run: Run) -> None:
    """PEFT's LoRA around quantized layers, whose adapters begin at zero."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations.peft import lora_config

    model = run(get_peft_model(quantized(recipe), lora_config(LoraConfig(target_modules=["0", "2"]))))
    expected = quantized(recipe)
    require_same([model(x).detach() for x in INPUTS], [expected(x).detach() for x in INPUTS])
    model(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
