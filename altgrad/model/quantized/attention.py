"""Attention's two products, ``scores = Q K^T`` and ``values = P V``, plain or in any format.

`QuantizedProduct` computes ``a @ b`` for batches of matrices, and both gradients, from quantized operands:

    y = a_q b_q,  da = g_q b_q^T,  db = a_q^T g_q

Scales of rows and blocks lie along the sum of each product, so each of the two products that a tensor takes part in has
its own. One scale per tensor, or per head over batch and tokens, serves both. Sums, scores and the softmax are in
float32, as in kernels that never store the scores. The softmax and its gradient are not quantized.

`attend` applies the factor 1/sqrt(d) to the product's result: the format sees the queries that the model has.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from altgrad.config.recipe import ROLES, LayerRecipe
from altgrad.model.quantized.linear import QuantizedModule
from altgrad.model.quantized.matmul import MatmulSettings
from altgrad.model.quantized.quantizer import Quantizer

LARGEST_PROBABILITY = 1.0  # of a softmax


class Product(nn.Module):
    """``a @ b`` for ``a`` (..., n, k) and ``b`` (..., k, m), unquantized.

    left_amax: the largest magnitude that ``a`` can have, or 0 if it is unbounded.
    """

    def __init__(self, left_amax: float = 0.0) -> None:
        super().__init__()
        self.left_amax = left_amax

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b``."""
        return a @ b


class QuantizedProduct(QuantizedModule):
    """`Product` from quantized operands: ``a`` is the role ``input``, ``b`` is ``weight``. The result is float32.

    A dynamic scale of ``a`` per tensor or head is that of ``left_amax`` if it is known: of probabilities the amax is 1,
    which no search has to find and which nothing exceeds. In E4M3 the scale is 448, its largest value, so that only
    probabilities up to 2^-10 / 448 become 0. Scales of rows and blocks follow their own amax, and ``scale_to: 1 of
    rms`` the root mean square.
    """

    shared_roles = ROLES

    def __init__(self, recipe: LayerRecipe, left_amax: float = 0.0) -> None:
        super().__init__(recipe)
        self.left_amax, left = left_amax, recipe.input
        dynamic = left is not None and left.scaling == "dynamic" and not left.of_rms
        if left_amax and left is not None and dynamic and left.granularity in ("tensor", "head"):
            self.quantizers["input"] = Quantizer(left.but(granularity="tensor"), known=left_amax)

    def settings(self, compute_dtype: torch.dtype, device: str = "cpu") -> MatmulSettings:
        """Return the settings of a forward pass on a device of type ``device``; results and sums are float32."""
        usual = super().settings(compute_dtype, device)
        dtype = torch.float32 if device == "cpu" else usual.operand_dtype  # a CPU's float32 sums take float32 operands
        return replace(usual, operand_dtype=dtype, output_dtype=torch.float32, accumulate_fp32=True)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b`` in float32 for ``a`` (..., heads, n, k) and ``b`` (..., heads, k, m) of the same batch."""
        return self._product(a, b.mT, self.settings(torch.float32, a.device.type))


def attend(
    products: tuple[nn.Module, nn.Module], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float,
    dropout: float = 0.0, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention's output, float32 (batch, heads, length, d), from the products ``(scores, values)``.

    Args:
        q, k, v: float (batch, heads, length, d); grouped keys and values are repeated to all heads beforehand.
        mask: added to the scores, broadcastable to (batch, heads, length, length); None adds nothing.
        scaling: the factor of the scores, mostly 1/sqrt(d).
        dropout: the share of probabilities set to zero. The others are divided by ``1 - dropout`` after the product,
            so that what is quantized stays below 1.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask.
        sinks: a score per head (heads,) that takes its share of each row's probability and has no value.
    """
    scores, values = products
    with torch.autocast(q.device.type, enabled=False):
        # The extra dimension hides the factor from Inductor, as in `operand.multiplied`.
        s = (scores(q.float(), k.float().mT).unsqueeze(0) * scaling).squeeze(0)
        if softcap is not None:
            s = torch.tanh(s / softcap) * softcap
        if mask is not None:
            s = s + mask
        if sinks is not None:
            s = torch.cat([s, sinks.float().reshape(-1, 1, 1).expand(*s.shape[:-1], 1)], dim=-1)
        p = torch.softmax(s, dim=-1)
        if sinks is not None:
            p = p[..., :-1]
        if not dropout:
            return values(p, v.float())
        return values(F.dropout(p, dropout) * (1 - dropout), v.float()) / (1 - dropout)
