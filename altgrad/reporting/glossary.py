"""Definitions of every quantity that the report shows, so that a reader can check what a number means."""

from __future__ import annotations

import re
from collections.abc import Iterable

from altgrad.metrics import METRICS, Metric

# A term on a line of its own, its definition indented below it. {name} is the definition and limit of that metric,
# {name.level} the limit alone.
TEXT = """
validation loss
    Mean cross-entropy in nats per token on the fixed validation sample, at the end of the full schedule. The
    primary metric, named before any run.
± sd
    Standard deviation of the final validation loss over seeds (n − 1).
minus baseline
    Mean over seeds of the format's final validation loss minus the baseline's with the same seed, optimizer and
    learning rate. Above zero is worse.
95 % interval
    Mean ± t(0.975, d0 + n − 1) · √((d0·s0² + (n − 1)·s²) / (d0 + n − 1)) / √n: the interval of one comparison by
    itself, by the moderated t statistic (Smyth 2004). s is the standard deviation of the n paired differences; s0 and
    d0 say what all comparisons of a kind know together of their spread and for how many degrees of freedom that
    counts. A difference that spreads much more than the others (s² / s0² beyond the 95 % point of F) is read by its
    own spread, with n − 1 degrees of freedom.
A/A noise floor
    The largest mean difference over n paired seeds that two equal arms show 19 times in 20, one comparison by
    itself: t(0.975) · s0 / √n.
question
    What the report asks of the losses, fixed before they are read: the cost of each format under the plain arm; the
    gain of each arm that is neither plain nor a control, in each format; and of each gain, once it is answered, its
    controls. What null arms and profile controls gain by themselves is exploratory and never a finding.
p, adjusted
    The smallest share of false sentences in all of the report's questions together at which this one is answered:
    Holm's step-down over the primary questions, the controls of a gain behind it with the gain's share (graphical
    procedure of Bretz et al. 2009). Of exploratory gains, Holm's step-down within the arm.
reading
    better, worse: adjusted p up to 0.05, at least 5 paired seeds, and learning rates that were not chosen on these
    seeds. (indication): adjusted p up to 0.1, or one of the other two conditions not met. (exploratory): of a
    control. not told apart: anything else; it does not mean equal. identical: equal to the last bit.
val gap, train gap
    {val_gap} {train_gap}
perplexity
    exp(mean validation loss). Comparable only at the same tokenizer and vocabulary.
gain
    Final validation loss of the plain arm minus that of the geometry-aware arm, same format and seed, each arm at
    its best learning rate. Above zero the geometry-aware arm is better. The plain arm has the same base (AdamW, or
    SGD) and weights of the same kind: float32 masters, or values on the quantization grid.
null arm
    An arm whose stiffness carries no information about the weight: its mean over the tensor, or a shuffle of it. A
    gain that a null arm shows too does not come from the geometry.
foreign geometry
    The same arm with the stiffness of another format: a question of its own, whether the geometry has to be that of
    the format that is trained in. Foreign stiffness correlates with the format's own.
profile control
    An arm whose steps follow the sizes of the weights and look at no format. A gain that it shows too comes from larger
    steps for larger weights, and not from the format's quantization grid.
virtual twin, beyond the virtual twin
    The entry that lends an arm the format's geometry and quantizes nothing. The gain of the format is what the arm
    gains in the format beyond what it gains there, paired by seed: a difference of two gains.
at AdamW's update size
    The same arm with each tensor's update rescaled to the root mean square of AdamW's on the same gradients.
bracketed
    The best learning rate has a worse one on either side in the grid.
outcome, signature
    A run diverges when its loss or gradient is not finite (nonfinite), jumps and stays (spike), rises over many
    steps (drift) or does either after more than {overflow_frac.level} of a tensor overflowed (saturation); stall:
    gradients non-zero, loss flat, codes unchanged. A diverged run is an outcome and enters no mean.
first cause
    The earliest tensor and metric that left its band no later than the loss left its own. A band is the median of
    healthy runs of the same arm at that step, give or take a multiple of their pooled spread that was chosen on runs
    with planted faults. Healthy runs completed, and their validation loss is not flagged.
steps clipped
    {clipped_frac}
SQNR
    {sqnr_db}
rounded to zero
    {underflow_frac}
beyond the maximum
    {overflow_frac}
not finite
    {nonfinite}
scale
    {scale}
excess kurtosis
    {kurtosis}
L2 norm of the weight gradient
    {l2} Shown is the mean over the instrumented steps of the second half of the run.
first layer's gradient against the last
    {gradient_ratio}
gradient SNR, gradient cosine
    {grad_snr_db} {grad_cosine}
gradient over its quantization noise, cosine with the exact gradient, noise from weights, inputs, incoming gradients
    {gradient_to_noise} {cosine_exact} {noise_from_weight} {noise_from_input} {noise_from_grad}
rung
    Signed index of a representable value: 0 at zero, +1 for each next one up.
rungs per step
    {rungs}
cosine with AdamW's update
    {cosine_adamw}
updates that leave the code
    {stall_ratio}
L2 norm and relative size of an update, its rounded part, code changes that descend
    {update_l2} {update_size} {representability_gap} {update_success}
ulp, local spacing
    Distance between neighbouring representable values at the weight's magnitude; below the smallest normal value
    it no longer shrinks.
misalignment
    {misalignment_mean}
significant bits
    M + 1 within the normal range, one less for each binade below it, 0 where values round to zero.
weights at the edge
    {boundary_frac}
values used, code entropy
    {code_used_frac} {code_entropy}
codes unchanged
    {code_stale_frac}
moved from init, movement kept, moved in rungs
    {init_distance} {init_distance_kept} {init_distance_rungs}
stable rank, effective rank, kept
    {stable_rank} {effective_rank} {effective_rank_kept}
bit entropy
    {bit_activity}
KL divergence
    Σ p log2(p / q) over quarter-binade bins of log2|w| before scaling, p the format's run and q the baseline's,
    with a millionth of p mixed into q so that an empty bin is not infinite.
binade
    An interval [2^k, 2^(k+1)); a format spaces its values evenly within one.
"""


def glossary(diagnosed: Iterable[Metric] = ()) -> dict[str, str]:
    """Return the definition of each term, in the order in which the report uses them.

    Behind them come metrics that no text here speaks of: those that are flagged while a cell trains, and ``diagnosed``,
    which the report shows of the diagnoses.
    """
    terms: dict[str, list[str]] = {}
    for line in TEXT.strip().splitlines():
        if line.startswith(" "):
            next(reversed(terms.values())).append(line.strip())
        else:
            terms[line] = []
    texts = {term: re.sub(r"\{(\w+)(\.level)?\}", _of_metric, " ".join(lines)) for term, lines in terms.items()}
    spoken_of = set(re.findall(r"\{(\w+)", TEXT))
    watched = [metric for metric in METRICS.values() if metric.watched and metric.name not in spoken_of]
    return texts | {metric.title or metric.name: metric.text for metric in [*watched, *diagnosed]}


def _of_metric(match: re.Match[str]) -> str:
    metric = METRICS[match[1]]
    return metric.level if match[2] else metric.text
