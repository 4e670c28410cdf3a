"""What a metric is, and the table of those that more than one package uses.

Training records the metrics of the table, or the report's texts and figures name them.

A metric that only the diagnosis uses has its row beside its function in `altgrad.diagnostics`.

Definitions speak of a tensor x, its scale s and its rounding q; w are weights, w₀ the initial ones, g a gradient.
A format's rungs are the places of its values in order: 0 at zero, +1 for each next one up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

Summarize = Callable[[Sequence[float], Sequence[int]], float]
STRICT_LAYERS = {"*attn.out": "attention outputs", "*head": "the head"}  # held to the tighter limit
BARE = ("1", "ratio", "cosine", "directions", "rank correlation")  # units that a title says already
ROLES = {"input": "inputs", "weight": "weights", "grad": "incoming gradients"}


def mean(values: Sequence[float], _: Sequence[int]) -> float:
    """Return the mean of the layers' ``values``: every layer counts the same."""
    return sum(values) / len(values)


def per_weight(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of the layers' ``values`` weighted by ``weights``, their numbers of weights."""
    return sum(v * n for v, n in zip(values, weights, strict=True)) / sum(weights)


@dataclass(frozen=True)
class Limit:
    """A layer is flagged if its value is above ``value``, or below it if not ``above``.

    ``strict`` takes the place of ``value`` for `STRICT_LAYERS`: attention outputs and the head.
    """

    above: bool
    value: float
    strict: float | None = None

    def of(self, layer: str) -> float:
        strict = any(fnmatchcase(layer, pattern) for pattern in STRICT_LAYERS)
        return self.strict if self.strict is not None and strict else self.value

    def crossed(self, layer: str, value: float) -> bool:
        return value > self.of(layer) if self.above else value < self.of(layer)


@dataclass(frozen=True)
class Metric:
    """The definition of one metric and where it is measured.

    Training measures the metric on tensors of the ``live`` roles. The ``watched`` roles are flagged if any instrumented
    pass is beyond ``limit``. The diagnosis measures it on the role ``offline``. It flags values of the last step and
    joins the layers' values there by ``summary``. A metric with neither role is measured once for a run. ``title`` is
    its name in a table of summaries, by default ``name`` with spaces.
    """

    name: str
    unit: str
    definition: str
    live: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    offline: str | None = None
    summary: Summarize | None = None
    limit: Limit | None = None
    title: str = ""

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)  # the limit as a mapping
        return {name: fields[name] for name in ("unit", "definition", "offline", "limit", "title")}

    @classmethod
    def from_json(cls, name: str, content: dict[str, Any]) -> Self:
        """Return the metric ``name`` from the ``content`` that `to_json` returned, without summary and live roles."""
        limit = content["limit"] and Limit(**content["limit"])
        return cls(name, **content | {"limit": limit})

    @property
    def head(self) -> str:
        """The head of the metric's column in a table of summaries: the title, and the unit if the title lacks it."""
        title = self.title or self.name.replace("_", " ")
        if self.is_share:
            return f"{title}, %"
        return title if self.unit in BARE else f"{title}, {self.unit}"

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("share")

    @property
    def text(self) -> str:
        """The definition and, if the metric has a limit, a sentence such as ``Flagged above 1 %.``"""
        return self.definition if self.limit is None else f"{self.definition} Flagged {self._flagged(self.limit)}."

    @property
    def bound(self) -> Limit:
        assert self.limit is not None
        return self.limit

    def _flagged(self, limit: Limit) -> str:
        flagged = f"{'above' if limit.above else 'below'} {self._level(limit.value)}"
        roles = [*self.watched, *([self.offline] if self.offline else [])]
        if not set(self.live) <= set(roles):
            flagged += f" in {' and '.join(ROLES[role] for role in roles)}"
        if limit.strict is not None:
            flagged += f" ({self._level(limit.strict)} in {' and '.join(STRICT_LAYERS.values())})"
        return flagged

    def _level(self, value: float) -> str:
        if self.is_share:
            return f"{100 * value:g} %"
        return f"{value:g} {self.unit}" if self.unit in ("%", "dB") else f"{value:g}"


TENSORS = ("input", "weight", "grad")
SHARE = "share of weights"

# Healthy training concentrates weights too: after the default 300 steps in bf16 the head keeps 0.61 of
# its initial effective rank, attention outputs 0.70 and more. Only well below that is it a sign.
RANK_KEPT = Limit(above=False, value=0.4, strict=0.5)

ROWS = (
    # Of a tensor, before and after it is rounded to its format.
    Metric("amax", "1", "Largest magnitude of a tensor.", live=TENSORS),
    Metric(
        "nonfinite", "count", "Elements of a tensor that are NaN or infinite.",
        live=TENSORS, watched=TENSORS, limit=Limit(above=True, value=0.0),
    ),
    Metric(
        "scale", "1",
        "The factor s in q(x) = round(x · s) / s; with dynamic scaling s = min(format's maximum, 2^16) / amax of the "
        "tensor. The median where a tensor has several.",
        live=TENSORS,
    ),
    Metric(
        "overflow_frac", "share of elements",
        "Share of the elements whose scaled magnitude exceeds the format's largest value before clamping (overflow).",
        live=TENSORS, watched=("input",), limit=Limit(above=True, value=0.01),
    ),
    Metric(
        "underflow_frac", "share of non-zero elements",
        "Share of the non-zero elements of a tensor that the format rounds to zero (underflow).",
        live=TENSORS, watched=("grad",), offline="weight", summary=per_weight, limit=Limit(above=True, value=0.1),
        title="weights to zero",
    ),
    Metric(
        "sqnr_db", "dB",
        "10 · log10(Σ x² / Σ (x − q(x))²) in dB, of a tensor before and after rounding to its format.",
        live=TENSORS, offline="weight", summary=mean, title="weight SQNR",
    ),
    Metric(
        "kurtosis", "1",
        "Fourth central moment over squared variance, minus 3: 0 for a normal distribution. Of the elements of a "
        "block's output.",
        live=("output",), watched=("output",), limit=Limit(above=True, value=10.0),
    ),
    Metric(
        "attention_entropy", "nat",
        "−Σ p ln p of a position's attention, mean over the heads of a block, the positions and the first 4 sequences "
        "of the batch.",
        live=("output",),
    ),
    Metric(
        "attention_low_heads", "heads", "Heads of a block whose own mean entropy is below 1 nat.",
        live=("output",), watched=("output",), limit=Limit(above=True, value=1.0),
    ),
    Metric(
        "expert_balance", "1",
        "experts · Σ f p over a block's experts: f is the share of the tokens' choices, p the mean probability. 1 if "
        "all experts are chosen alike, at most their number. Times the setting balance it is the load-balancing loss.",
        live=("output",),
    ),
    # Of a tensor with a scale per block.
    Metric(
        "block_saturated_frac", "share of blocks",
        "Share of a tensor's blocks with an element whose scaled magnitude exceeds the format's largest value.",
        live=TENSORS,
    ),
    Metric(
        "block_clamped_frac", "share of magnitude",
        "Share of the sum of the blocks' largest magnitudes that is beyond the format's largest value, and so clamped.",
        live=TENSORS,
    ),
    Metric("block_empty_frac", "share of blocks", "Share of a tensor's blocks that are zero throughout.", live=TENSORS),
    Metric(
        "block_scale_limit_frac", "share of blocks",
        "Share of the blocks that are not zero throughout whose scale is at the end of its range: 2^-126 or 2^127 in "
        "E8M0; under a scale of the tensor, the smallest positive value of the scales' format.",
        live=TENSORS,
    ),
    Metric(
        "block_scale_spread", "binades",
        "log2 of the scales of blocks that are not zero throughout, from the 1st to the 99th percentile.",
        live=TENSORS,
    ),
    # Of a layer's weight gradient, before clipping.
    Metric("l2", "1", "√Σ g² of a layer's weight gradient before clipping.", live=("weight_grad",)),
    Metric("linf", "1", "Largest magnitude in a layer's weight gradient before clipping.", live=("weight_grad",)),
    Metric("mean", "1", "Mean of a layer's weight gradient before clipping.", live=("weight_grad",)),
    Metric("var", "1", "Variance of a layer's weight gradient before clipping.", live=("weight_grad",)),
    Metric(
        "grad_snr_db", "dB",
        "10 · log10(Σ g² / Σ (ĝ − g)²) of a layer's weight gradient on one fixed batch with the final weights, ĝ "
        "through the quantized path and g in float32.",
        offline="weight_grad", summary=mean, title="gradient SNR", limit=Limit(above=False, value=10.0),
    ),
    Metric(
        "grad_cosine", "cosine", "cos(ĝ, g) of the same two gradients.",
        offline="weight_grad", summary=mean, title="gradient cosine",
    ),
    Metric(
        "gradient_to_noise", "ratio",
        "‖g‖ / ‖ĝ − g‖ of a layer's weight gradient on `diagnose.noise_tokens` validation tokens with the "
        "weights of a snapshot, in float32 but for the rounding of what ĝ quantizes. Below about √3, of the expected "
        "gradient, quantized training becomes less effective (Chmiel et al. 2025, arXiv 2505.19115).",
        offline="weight_grad", summary=mean, title="gradient over its noise",
        limit=Limit(above=False, value=math.sqrt(3)),
    ),
    Metric(
        "cosine_exact", "cosine", "cos(ĝ, g) of the two gradients of `gradient_to_noise`.",
        offline="weight_grad", summary=mean, title="cosine with the exact gradient",
    ),
    *(
        Metric(
            f"noise_from_{role}", "share of noise power",
            f"Power of the noise in a layer's weight gradient if only {words} are quantized, as a share of the sum of "
            "three such powers.",
            offline="weight_grad", summary=mean, title=f"noise from {words}",
        )
        for role, words in ROLES.items()
    ),
    # Of an update: of the weights that the optimizer keeps, then in the quantization grid's terms.
    Metric("update_l2", "1", "‖w_new − w_old‖ of a layer's step, its decay included.", live=("update",)),
    Metric("update_size", "ratio", "‖w_new − w_old‖ / ‖w_old‖ of a layer's step.", live=("update",)),
    Metric(
        "rungs", "rungs",
        "|w_new − w_old| / S(w_old), S the ulp at the weight over its scale; also by the binade of |w_old|.",
        live=("update",),
    ),
    Metric(
        "stall_ratio", "share of updates",
        "Share of the weights that a step would move, without rounding, whose code it leaves: with master weights the "
        "code of their quantized view, with quantized weights the code that they are kept in, each at its own scale. "
        "What all codes do when the scale goes to 2^k times what it was is no change.",
        live=("update",),
    ),
    Metric(
        "update_success", "share of code changes",
        "Share of the changes of a code that lower the loss to first order: g · Δq < 0, with Δq by how much the "
        "quantized weight changes and g the gradient that the step was taken on.",
        live=("update",),
    ),
    Metric(
        "representability_gap", "ulp",
        "Mean of |Δw − Δq| / ulp(w_old), Δw what a step wanted before any rounding and Δq what became of the quantized "
        "weight: with master weights, what waits in them; with quantized weights, what is lost.",
        live=("update",),
    ),
    Metric(
        "cosine_adamw", "cosine",
        "cos of the update, weight decay aside, and −m̂/(√v̂ + ε) of AdamW's moments on the same gradients.",
        live=("update",),
    ),
    # Of where the weights lie.
    Metric(
        "log2_magnitude", SHARE,
        "Share of the non-zero weights by log2|w| before scaling, in quarter binades from 2^-40 to 2^8, the outermost "
        "of which take in what lies beyond.",
        offline="weight",
    ),
    Metric(
        "binade_usage", SHARE,
        "Share of all weights by the format's binade that holds |w · s|; below the smallest normal value is one bin.",
        offline="weight",
    ),
    Metric("misalignment", SHARE, "Share of the weights by |w·s − q(w·s)| / ulp(w·s), in 16 bins.", offline="weight"),
    Metric(
        "misalignment_mean", "ulp",
        "|w·s − q(w·s)| / ulp(w·s); 1/4 on average when weights ignore the quantization grid.",
        offline="weight", summary=per_weight, title="misalignment",
    ),
    Metric(
        "boundary_frac", SHARE, "Share of the weights that round to the largest magnitude that scaling uses.",
        offline="weight", summary=per_weight, title="weights at the edge", limit=Limit(above=True, value=0.01),
    ),
    # Of the codes that they use.
    Metric("code_usage", SHARE, "Share of the weights on each rung that occurs.", offline="weight"),
    Metric(
        "code_used_frac", "share of values", "Share of the format's distinct finite values that occur among a layer's "
        "weights.", offline="weight", summary=mean, title="values used",
    ),
    Metric(
        "code_entropy", "bit", "Entropy of the distribution of a layer's weights over the format's values, in bits.",
        offline="weight", summary=mean,
    ),
    Metric(
        "bit_activity", "bit",
        "−p log2 p − (1−p) log2(1−p) of each bit of the code, p the share of weights in which the bit is set.",
        offline="weight",
    ),
    Metric(
        "code_stale_frac", SHARE,
        "Share of the weights whose code is that of the previous snapshot, each at its own scale. With "
        "master weights this is about the quantized view of weights that move all the time.",
        offline="weight", summary=per_weight, title="codes unchanged",
    ),
    # Of how far they moved.
    Metric(
        "init_distance", "ratio", "‖w − w₀‖ / ‖w₀‖ of the master weights.",
        offline="weight", summary=mean, title="moved from init",
    ),
    Metric(
        "init_distance_kept", "ratio",
        "‖q(w) − q(w₀)‖ / ‖w − w₀‖, both at today's scale: near 1 where the format shows the movement, near 0 where it "
        "stays between two values.",
        offline="weight", summary=mean, title="movement kept",
    ),
    Metric(
        "init_distance_rungs", "rungs",
        "Mean number of representable values between a weight and its initial value, both at today's scale.",
        offline="weight", summary=per_weight, title="moved",
    ),
    # Of how many directions they use.
    Metric(
        "stable_rank", "directions", "‖W‖²_F / ‖W‖²₂: 1 if one direction dominates, the full rank if all are equally "
        "strong.", offline="weight", summary=mean,
    ),
    Metric(
        "effective_rank", "directions",
        "exp of the entropy of the singular values divided by their sum (Roy and Vetterli 2007).",
        offline="weight", summary=mean,
    ),
    Metric(
        "effective_rank_kept", "ratio", "The effective rank as a share of the initial weights'.",
        offline="weight", summary=mean, limit=RANK_KEPT,
    ),
    # Of a whole run.
    Metric(
        "clipped_frac", "share of steps",
        "Share of the optimizer steps whose global gradient norm exceeded the clip threshold.",
        limit=Limit(above=True, value=0.5),
    ),
    Metric(
        "gradient_ratio", "ratio",
        "L2 norm of the first layer's weight gradient over the last layer's, or the inverse if that is larger; the "
        "largest of the instrumented steps.",
        limit=Limit(above=True, value=100.0),
    ),
    Metric(
        "val_gap", "%", "100 · (validation loss / the baseline's − 1), the baseline's a median over seeds.",
        limit=Limit(above=True, value=10.0),
    ),
)  # fmt: skip
METRICS = {row.name: row for row in ROWS}
