"""The real line under the metric that a quantization grid puts on it, as a geoopt manifold.

A weight's coordinate is its place on the quantization grid in rungs, ``du = dw / S(w)``; the metric
``dw^2 / S(w)^2`` is the square of a distance in rungs. The manifold is flat and one-dimensional per weight: transport
along any path is multiplication by ``S(y) / S(x)``, and geodesics have constant speed in rungs.
"""

from __future__ import annotations

import geoopt
import torch
from torch import Tensor

from altgrad.formats import Format, get_format
from altgrad.optim.stiffness import Stiffness


class FormatManifold(geoopt.Manifold):
    """Weights under ``<u, v>_x = u v / S(x)^2``, element by element, S their format's stiffness over ``unit``.

    Points are any real numbers, as master weights are: ``projx`` is the identity, because geoopt 0.5.1 calls it only
    in ``stabilize`` and later versions in every step, and rounding there would mean two things. Who wants weights on
    the quantization grid puts them there explicitly.

    Args:
        fmt: the format.
        scale: what weights are multiplied with before they are rounded, 0-d or broadcastable.
        formula: of the stiffness, one that needs no other input than weight and scale.
        unit: what stiffness is divided by, so that a learning rate can keep its meaning; a positive number or tensor.
    """

    name = "Format"
    ndim = 0
    reversible = False

    def __init__(
        self, fmt: str | Format, scale: float | Tensor = 1.0, formula: str = "ulp", unit: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        self.stiffness_of = Stiffness(get_format(fmt), formula)
        for name, given in (("scale", scale), ("unit", unit)):
            number = given if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.float32)
            self.register_buffer(name, number)

    def stiffness(self, x: Tensor) -> Tensor:
        """Return S at each weight over ``unit``: positive, the shape and dtype of ``x``."""
        return self.stiffness_of(x, self.scale.to(x.dtype)) / self.unit.to(x.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Return ``u v / S(x)^2`` for each weight, which is a point by itself (``ndim`` 0)."""
        return u * (u if v is None else v) / self.stiffness(x).square()

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``S(x)^2 u``: the gradient under the metric."""
        return self.stiffness(x).square() * u

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``x + u``: exact while S does not change on the way."""
        return x + u

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``x + u``, as `retr`; the geodesic bends where S jumps, and the arms use `retr` alone."""
        return self.retr(x, u)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return ``v S(y) / S(x)``: the same number of rungs at ``y``."""
        return v * (self.stiffness(y) / self.stiffness(x))

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``u``: every direction is tangent."""
        return u

    def projx(self, x: Tensor) -> Tensor:
        """Return ``x``; see the class."""
        return x

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        finite = bool(x.isfinite().all())
        return finite, None if finite else "a weight is not finite"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        finite = bool(u.isfinite().all())
        return finite, None if finite else "a tangent vector is not finite"
