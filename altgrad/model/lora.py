"""LoRA on frozen weights in any format: ``y = x W^T + alpha / rank * (x A^T) B^T``, where A and B alone are trained.

Hu et al. 2021 (arXiv:2106.09685): A (rank, in) is Gaussian and B (out, rank) zero, so that a model begins as it was.
Dettmers et al. 2023 (arXiv:2305.14314, QLoRA) adapt all linear layers of the blocks and keep W in 4 bits; here W is in
what the recipe says of it, by the same products as in training. W does not change, and neither do its codes: it is
rounded to nearest by its own amax. Its float32 values stay in memory, so this says what such weights do to a result and
saves no memory. Adapters compute in the dtype of the layer's output.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.config.models import Lora
from altgrad.model.gpt import GPT
from altgrad.model.quantized.linear import QuantizedLinear

NAME = "lora"  # of a layer's adapter, among its modules


class Adapter(nn.Module):
    """A and B of one layer, and what they add to its output."""

    def __init__(self, outputs: int, inputs: int, lora: Lora, device: torch.device) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(lora.rank, inputs).mul_(1 / lora.rank).to(device))  # PEFT's size of it
        self.b = nn.Parameter(torch.zeros(outputs, lora.rank, device=device))
        self.scale = lora.alpha / lora.rank

    def add(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Return the output (..., out) of ``layer`` for ``inputs``, one tensor (..., in), with the adapter's share."""
        return output + (self.scale * F.linear(F.linear(inputs[0], self.a), self.b)).to(output.dtype)


def attach(layer: nn.Module, adapter: Adapter) -> None:
    """Have ``adapter`` add to what ``layer`` returns."""
    setattr(layer, NAME, adapter)
    layer.register_forward_hook(adapter.add)


def adapter_of(layer: nn.Module) -> Adapter | None:
    """Return the adapter of a layer."""
    return cast("Adapter | None", layer._modules.get(NAME))


def add_adapters(model: GPT, lora: Lora | None) -> GPT:
    """Freeze all of ``model`` but a classifier's head, and adapt the linear layers of its blocks; return it.

    In place, after the model was quantized; without ``lora`` nothing changes. The global generator draws A.
    """
    if lora is None:
        return model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(model.config.labels) and name == "head.weight")
    for layer in list(model.blocks.modules()):
        if isinstance(layer, nn.Linear | QuantizedLinear):
            attach(layer, Adapter(layer.out_features, layer.in_features, lora, layer.weight.device))
    return model


def adapter_weights(model: nn.Module) -> set[Any]:
    """Return A and B of all layers."""
    return {p for module in model.modules() if isinstance(module, Adapter) for p in module.parameters()}
