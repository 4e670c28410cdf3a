"""Definitions of every quantity that the report shows, so that a reader can check what a number means."""

from __future__ import annotations

# A term on a line of its own, its definition indented below it.
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
    controls. What null arms gain by themselves is exploratory and never a finding.
p, adjusted
    The smallest share of false sentences in all of the report's questions together at which this one is answered:
    Holm's step-down over the primary questions, the controls of a gain behind it with the gain's share (graphical
    procedure of Bretz et al. 2009). Of exploratory gains, Holm's step-down within the arm.
reading
    better, worse: adjusted p up to 0.05, at least 5 paired seeds, and learning rates that were not chosen on these
    seeds. (indication): adjusted p up to 0.1, or one of the other two conditions not met. (exploratory): of a null
    arm. not told apart: anything else; it does not mean equal. identical: equal to the last bit.
val gap, train gap
    100 · (loss / baseline's loss − 1), mean over paired seeds; flagged above 10 % (validation) and 5 %
    (training).
perplexity
    exp(mean validation loss). Comparable only at the same tokenizer and vocabulary.
gain
    Final validation loss of the plain arm minus that of the geometry-aware arm, same format and seed, each arm at
    its best learning rate. Above zero the geometry-aware arm is better. The plain arm has the same base (AdamW, or
    SGD) and weights of the same kind: float32 masters, or values on the grid.
null arm
    An arm whose stiffness carries no information about the weight: its mean over the tensor, or a shuffle of it. A
    gain that a null arm shows too does not come from the geometry.
foreign geometry
    The same arm with the stiffness of another format: a question of its own, whether the geometry has to be that of
    the format that is trained in. Foreign stiffness correlates with the format's own.
virtual twin, beyond the virtual twin
    The entry that lends an arm the format's geometry and quantizes nothing. The gain of the format is what the arm
    gains in the format beyond what it gains there, paired by seed: a difference of two gains.
at AdamW's update size
    The same arm with each tensor's update rescaled to the root mean square of AdamW's on the same gradients.
bracketed
    The best learning rate has a worse one on either side in the grid.
outcome, signature
    A run diverges when its loss or gradient is not finite (nonfinite), jumps and stays (spike), rises over many
    steps (drift) or does either after more than 1 % of a tensor overflowed (saturation); stall: gradients
    non-zero, loss flat, codes unchanged. A diverged run is an outcome and enters no mean.
steps clipped
    Share of the optimizer steps whose global gradient norm exceeded the clip threshold; flagged above half.
SQNR
    10 · log10(Σ x² / Σ (x − q(x))²) in dB, of a tensor before and after rounding to its format.
rounded to zero
    Share of the non-zero elements of a tensor that the format rounds to zero (underflow).
beyond the maximum
    Share of the elements whose scaled magnitude exceeds the format's largest value before clamping (overflow).
scale
    The factor s in q(x) = round(x · s) / s; with dynamic scaling s = min(format's maximum, 2^16) / amax of the
    tensor.
excess kurtosis
    Fourth central moment over squared variance, minus 3: 0 for a normal distribution.
L2 norm of the weight gradient
    √Σ g² of a layer's weight gradient before clipping, mean over the instrumented steps of the second half of the
    run.
gradient SNR, gradient cosine
    Of a layer's weight gradient on one fixed batch with the final weights: 10 · log10(Σ g² / Σ (ĝ − g)²) and
    cos(ĝ, g), ĝ through the quantized path and g in float32; flagged below 10 dB.
rung
    Signed index of a representable value: 0 at zero, +1 for each next one up.
rungs per step
    |w_new − w_old| / S(w_old), S the ulp at the weight over its scale; also by the binade of |w_old|.
cosine with AdamW's update
    cos of the update, weight decay aside, and −m̂/(√v̂ + ε) of AdamW's moments on the same gradients.
ulp, local spacing
    Distance between neighbouring representable values at the weight's magnitude; below the smallest normal value
    it no longer shrinks.
misalignment
    |w·s − q(w·s)| / ulp(w·s); 1/4 on average when weights ignore the grid.
significant bits
    M + 1 within the normal range, one less for each binade below it, 0 where values round to zero.
weights at the edge
    Share of the weights that round to the largest magnitude that scaling uses; flagged above 1 %.
values used, code entropy
    Share of the format's distinct finite values that occur among a layer's weights, and the entropy of their
    distribution in bits.
codes unchanged
    Share of the weights whose code is that of the previous snapshot, each on the grid of its own scale. With
    master weights this is about the quantized view of weights that move all the time.
moved from init, movement kept, moved in rungs
    ‖w − w₀‖ / ‖w₀‖ of the master weights; ‖q(w) − q(w₀)‖ / ‖w − w₀‖, both on today's grid; mean number of
    representable values between a weight and its initial value.
stable rank, effective rank, kept
    ‖W‖²_F / ‖W‖²₂; exp of the entropy of the singular values divided by their sum; the latter as a share of the
    initial weights', flagged below 0.8 (0.9 for attention output and head).
bit entropy
    −p log2 p − (1−p) log2(1−p), p the share of weights in which the bit is set.
KL divergence
    Σ p log2(p / q) over quarter-binade bins of log2|w| before scaling, p the format's run and q the baseline's,
    with a millionth of p mixed into q so that an empty bin is not infinite.
binade
    An interval [2^k, 2^(k+1)); a format spaces its values evenly within one.
"""


def glossary() -> dict[str, str]:
    """Return the definition of each term, in the order in which the report uses them."""
    terms: dict[str, list[str]] = {}
    for line in TEXT.strip().splitlines():
        if line.startswith(" "):
            next(reversed(terms.values())).append(line.strip())
        else:
            terms[line] = []
    return {term: " ".join(lines) for term, lines in terms.items()}
