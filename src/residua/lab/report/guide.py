"""The views of a page, each with one sentence of what to look for, its legend and the paragraph of the documentation.

The page shows all three, the last in its guide, so that a reader without the papers and without a network has them; the
documentation takes its list of views from here (`residua: report_views`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class View:
    """One section of a page."""

    title: str
    look: str
    """What to look for, in one sentence."""
    legend: tuple[tuple[str, str], ...] = field(default_factory=tuple)
    """What is drawn, and what it means."""
    more: str = ""
    """How to use it."""
    optional: bool = False
    """Left out of pages that have nothing for it; the others say why they are empty."""


_WEIGHT = (
    "Colour",
    "how much of it is taken: bright is much, dark is little; signed weights are orange, or purple below 0",
)
_ROW = ("Row", "what reads: l2_attn is the attention of block 2 (blocks count from 0), head is the output layer")
_COLUMN = (
    "Column",
    "what is read: embed is the token embedding, l1_mlp the output of that sublayer, l1 or block1 a sum of several, "
    "partial the sum of a block that is still open",
)
_GREY = ("Grey", "cannot be read there")

VIEWS = {
    "summary": View(
        "Summary",
        "Look at the groups: only rows outside the middle one differ significantly from the baseline.",
        (
            ("Filled dot", "a significant difference"),
            ("Hollow dot", "not significant: these seeds cannot tell it from no difference"),
            (
                "Bar",
                "interval of the mean difference, seed by seed: 95 %, or more where seeds were added until resolved",
            ),
            ("a / b", "in the routing columns: over all sublayers / over the last third of the blocks"),
        ),
        "The table of residua compare, in groups: significantly better than the baseline, not significantly "
        "different, significantly worse. A group is sorted by size and loss, which means nothing where the differences "
        "are noise. Below, the differences from the baseline with their intervals, and in words.",
    ),
    "curves": View(
        "Curves",
        "Look at the right end: where the bands of two designs overlap there, seeds alone may have decided their "
        "order.",
        (
            ("Line", "mean over seeds"),
            ("Band", "lowest to highest seed"),
            ("Loss", "nats per token of the validation text; lower is better"),
        ),
        "Loss or bits per byte against tokens or CPU time. Click a name to hide its series, start later in the run, or "
        "switch to a log scale.",
    ),
    "routing": View(
        "Routing explorer",
        "Look for bright cells far to the left: a sublayer there goes back to something old instead of its neighbour.",
        (_ROW, _COLUMN, _WEIGHT, _GREY),
        "Sites by sources, for any design, seed, lane or head, as a mean or at one token of the prompt. Point at a "
        "cell for its weight. Click a site's name to see what it reads, a source's name to see who reads it, a cell "
        "for both. A second design is shown beside the first, with the difference. The strip below follows the prompt "
        "token by token: every site, the sources of the selected site, or the readers of the selected source.",
    ),
    "paths": View(
        "Paths to a token",
        "Look at the head's row: its numbers add up to the logit of the token; a large one is what made the "
        "prediction.",
        (
            ("Number", "what a source adds to the logit of the chosen token through the read of that row"),
            ("Orange", "raises the logit"),
            ("Purple", "lowers it"),
            ("Row head", "exact: the parts of the sum that the output layer reads, at the scale of its norm"),
            ("Other rows", "to first order: what a small part of the source changes, through all that comes after"),
        ),
        "Direct logit attribution through the depth routing. Choose a token of the prompt and the target: the next "
        "token, or the model's top prediction (after the last token, both are the top prediction). The head's read is "
        "a weighted sum, so each source contributes a part of the logit. An earlier read goes through a sublayer, and "
        "its numbers are first-order: the gradient of the logit with respect to the source's part in that read, times "
        "that part, summed over the tokens of the read.",
    ),
    "knockouts": View(
        "Knock-outs",
        "Look for the darkest orange: without that source at that site the loss rises most; cells near 0 are not "
        "needed.",
        (
            _ROW,
            _COLUMN,
            ("Colour", "change of the loss when the row reads without the column: orange is worse, purple is better"),
            _GREY,
        ),
        "The loss when one source is removed from one read and the other weights are kept; residua report --ablate "
        "runs the models on validation text, one forward pass per cell.",
    ),
    "loops": View(
        "Passes",
        "Look along a row of maps: a block that reads the same in every pass does the same work again.",
        (
            _ROW,
            _COLUMN,
            ("Map", "one pass over the repeated blocks; l1p2_attn is block 1 in its third pass"),
            _WEIGHT,
            _GREY,
        ),
        "For layouts whose blocks repeat: what the same sublayers read in each pass, on one scale.",
        optional=True,
    ),
    "depth": View(
        "Depth",
        "Look at the shaded third: a line that falls to the uniform share there belongs to reads that no longer "
        "choose.",
        (
            ("Shaded", "the last third of the blocks, and the head"),
            ("Dashed lines", "what the Delta paper reports of routing over states and over deltas"),
            ("Share", "|weight| over the sum of them, so that signed and scaled weights compare"),
        ),
        "Largest share, entropy, effective sources, similarity of the sources, RMS and gradient norms from the first "
        "block to the head; the Delta paper's 0.2 and 0.6 as reference lines, and what these runs have instead; the "
        "regimes of DDL's gate.",
    ),
    "axes": View(
        "Two axes",
        "Look at how fast a row fades to the right: fast means that only the newest layers, or the nearest tokens, "
        "count.",
        (
            ("Row", "what reads"),
            ("Column", "how many sources, or tokens, back: 0 is the newest, or the token itself"),
            ("Colour", "mean weight, by the scale below each map"),
            _GREY,
        ),
        "The same number on both axes: the weight of what lies some sources back, and of what lies some tokens back.",
    ),
    "ladder": View(
        "Ladder",
        "Look for bars right of 1x: the baseline would need that many times the compute to reach the same loss.",
        (
            ("Black dots", "the baseline at every size"),
            ("Dashed line", "the curve through them, loss = limit + A / compute to a power"),
            ("Coloured dots", "the other rows: below the line is worth more compute than it took"),
            ("Bar", "95 % interval of the speedup; hollow where it holds 1"),
        ),
        "Effective speedup over the sizes of a comparison: the compute at which the baseline's curve reaches the loss "
        "of a row, over the compute of that row; per token, which ignores the cost of the design itself, and per CPU "
        "second, which includes it.",
        optional=True,
    ),
    "costs": View(
        "Costs",
        "Look at the filled dots: left of the line a design trains slower than the baseline.",
        (
            ("Filled dot", "measured"),
            ("Hollow dots", "predicted from the configuration: by operations, and by bytes moved if caches saved none"),
        ),
        "Measured speed beside its two predictions, by operations and by bytes moved; measured memory beside the "
        "predicted activations. Neither prediction is a bound: caches, threads and a busy machine can move the "
        "measured value past both.",
    ),
    "runs": View(
        "Runs",
        "Look here for how to reproduce every number: commands, configurations, data and versions.",
        (),
        "Configurations, fingerprints, versions, and the commands that reproduce the page.",
    ),
}
"""In the order of the page."""
