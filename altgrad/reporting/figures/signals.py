"""What flows back through the network: gradients over their quantization noise."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from altgrad.metrics import METRICS
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import course
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, panels
from altgrad.reporting.load import Study

NEAR = 2  # times the level at which a gradient is lost in its quantization noise


@in_report(
    section="signals", order=15,
    alt="Norm of the weight gradient over that of its quantization noise, and its cosine, by step, for {formats}",
    caption="Norm of the weight gradient over that of its quantization noise on one batch, and the cosine of the "
    "gradient with that noise and without it (`{optimizer}`, mean over layers and seeds) at each snapshot. Dotted: "
    "√3, below which Chmiel et al. 2025 (arXiv 2505.19115) find that quantized training becomes less effective.",
)  # fmt: skip
def gradient_noise(study: Study, comparison: Comparison) -> Figure | None:
    """How far the gradient is above its quantization noise at each snapshot, and how it turns it, mean over layers.

    None where no gradient comes near its noise.
    """
    over, cosine = (course(study, comparison, name) for name in ("gradient_to_noise", "cosine_exact"))
    limit = METRICS["gradient_to_noise"].bound.value
    if len(over.columns) < 2 or not over.min().min() < NEAR * limit:
        return None
    styles = looks(study.formats)
    figure, axes = panels(1, 2, 3.0)
    for axis, table in zip(axes[0], (over, cosine), strict=True):
        for name, values in table.iterrows():
            axis.plot(values.index, values, **styles[name].line())
        axis.set_xlabel("optimizer step")
    size, direction = axes[0]
    size.axhline(limit, color="black", linewidth=0.9, linestyle=":")
    size.set(yscale="log", ylabel="gradient over its noise")
    size.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    size.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    size.yaxis.set_minor_locator(NullLocator())
    direction.set_ylabel("cosine with the exact gradient")
    legend(figure, styles, list(over.index))
    return figure
