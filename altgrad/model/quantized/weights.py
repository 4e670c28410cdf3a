"""The operands of all of a model's weights, made together when its forward pass begins.

Weights are many and small: quantized one by one, most would keep a single thread busy, and each call costs as much
as 50 thousand elements. A layer that is called by itself quantizes its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from altgrad.model.quantized.data_parallel import is_sharded
from altgrad.model.quantized.gathered import find_largest, is_gathered, require_gatherable_again
from altgrad.model.quantized.linear import QuantizedLinear, ready_weights
from altgrad.model.quantized.recompute import in_backward
from altgrad.model.quantized.transforms import transformed

COMPUTE_DTYPES = torch.bfloat16, torch.float32


class WeightsTogether:
    """Two hooks on a model: one gives its quantized layers their weights' operands, the other takes them away."""

    def __init__(self, model: nn.Module) -> None:
        alike: dict[tuple[Any, ...], list[QuantizedLinear]] = {}
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear) and "weight" in layer.quantizers:
                quantizer = layer.quantizers["weight"]
                dtypes = [layer.settings(dtype).operand_dtype for dtype in COMPUTE_DTYPES]
                alike.setdefault((quantizer.scaling, quantizer.learns, *dtypes), []).append(layer)
        self._alike = list(alike.values())
        self._hooks = (
            model.register_forward_pre_hook(self.make), model.register_forward_hook(self.drop, always_call=True)
        )  # fmt: skip

    def make(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Quantize the weights of all layers, before the first of them is called.

        The dtype of the operands must be known by then. It is under autocast, and where it does not depend on the
        dtype of the input; other layers quantize their own weight when they are called, as all do when a checkpoint
        runs the model again.
        """
        if transformed():
            return  # wrapped tensors, which each layer's product takes as they are
        if not torch.compiler.is_compiling() and in_backward():
            return
        layers = [layer for alike in self._alike for layer in alike]
        if any(layer.largest_of_parts is not None for layer in layers):
            require_gatherable_again(model)
            find_largest(layers)
        for alike in self._alike:
            device = alike[0].weight.device.type
            autocast = torch.is_autocast_enabled(device)
            if not autocast and len({alike[0].settings(dtype).operand_dtype for dtype in COMPUTE_DTYPES}) > 1:
                continue
            # Layers may be in different modes, and of weights on their quantization grids one that an embedding shares
            # has no history.
            groups: dict[tuple[bool, bool], list[QuantizedLinear]] = {}
            for layer in alike:
                if is_sharded(layer.weight) or is_gathered(layer.weight):
                    continue  # until the layer's own turn
                groups.setdefault((layer.training, layer.quantizers["weight"].history is None), []).append(layer)
            for layers in groups.values():
                settings = layers[0].settings(torch.get_autocast_dtype(device) if autocast else torch.float32)
                for layer, ready in zip(layers, ready_weights(layers, settings), strict=True):
                    layer.ready = ready

    def drop(self, model: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        """Forget the operands, which the weights' next update outdates."""
        for layers in self._alike:
            for layer in layers:
                layer.ready = None
                if layer.largest_of_parts is not None:
                    layer.largest_of_parts.known = False

    def stop(self) -> None:
        """Leave the layers alone from now on: they are no longer the model's."""
        for hook in self._hooks:
            hook.remove()
