"""The real line with distances in code steps of a format (rungs), as a geoopt manifold.

A weight's coordinate u is its position in rungs, ``du = dw / S(w)``, so the metric is ``dw^2 / S(w)^2``. The manifold
is flat and one-dimensional per weight. Transport from x to y multiplies by ``S(y) / S(x)``, and geodesics have
constant speed in rungs.
"""

import geoopt
import torch
from torch import Tensor

from altgrad.formats import Format, get_format
from altgrad.optim.stiffness import Stiffness


class FormatManifold(geoopt.Manifold):
    """Weights with the metric ``<u, v>_x = u v / S(x)^2``, element by element; S is the stiffness over ``unit``.

    Points are unrounded real numbers, like master weights. ``projx`` is the identity: geoopt 0.5.1 calls ``projx`` only
    in ``stabilize`` and later versions call it in every step, so rounding there would depend on the version.

    Args:
        fmt: the format, or its name.
        scale: factor that multiplies weights before rounding, 0-d or broadcastable.
        formula: formula of the stiffness; one that needs only weight and scale.
        unit: positive divisor of the stiffness. Set it to RMS(S) to use ordinary learning rates.
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
        """Return S at each weight, divided by ``unit``: positive, with the shape and dtype of ``x``."""
        return self.stiffness_of(x, self.scale.to(x.dtype)) / self.unit.to(x.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
        """Return ``u v / S(x)^2`` (``v`` None: ``v = u``) per weight: each weight is its own point (``ndim`` 0)."""
        return u * (u if v is None else v) / self.stiffness(x).square()

    def egrad2rgrad(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the Riemannian gradient ``S(x)^2 u`` of the Euclidean gradient ``u``."""
        return self.stiffness(x).square() * u

    def retr(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the retraction ``x + u``: the exact geodesic if S is constant between the two points."""
        return x + u

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``x + u``, as `retr` does. This is not the true geodesic, whose speed changes where S jumps."""
        return self.retr(x, u)

    def transp(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return ``v`` transported from ``x`` to ``y``: ``v S(y) / S(x)``, as many code steps as before."""
        return v * (self.stiffness(y) / self.stiffness(x))

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Return ``u``: every direction is tangent."""
        return u

    def projx(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        finite = bool(x.isfinite().all())
        return finite, None if finite else "a weight is not finite"

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        finite = bool(u.isfinite().all())
        return finite, None if finite else "a tangent vector is not finite"
