"""torchtitan: a model converter, which quantizes the model and has nothing to do after the optimizer's step."""

from __future__ import annotations

from typing import Any

from torch import nn

from altgrad.model import Recipe, quantize_model


class QuantizeConverter:
    """What torchtitan's `ModelConverter` protocol asks for, without an import of torchtitan.

    ``convert`` may find a model on the ``meta`` device: scales and constants are made where the model gets its memory.
    """

    def __init__(self, recipe: Recipe, *, seed: int = 0) -> None:
        self._recipe, self._seed = recipe, seed

    def build(self, **_: Any) -> QuantizeConverter:
        """Return the converter itself, where torchtitan takes what ``build`` makes; the rest does not matter to it."""
        return self

    def convert(self, model: nn.Module) -> None:
        """Quantize ``model`` in place.

        Raises ``TypeError`` for a configuration in the place of a model, which later versions of torchtitan convert.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"expected a model to quantize, got {type(model).__name__}; where torchtitan converts configurations, "
                "call quantize_model on the model that it builds, before it is sharded"
            )
        quantize_model(model, self._recipe, seed=self._seed)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: each forward pass takes the scales of the weights as they then are."""

    def key_filter(self) -> None:
        """Return nothing: weights keep their names, and histories of scales are saved with the model."""

    state_dict_transform = format_adapter = key_filter
