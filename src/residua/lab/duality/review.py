"""What would settle it: the objections raised against the duality, and where each is answered.

They are those of a machine-written review of the paper and of the simulated rebuttal to it.
"""

from __future__ import annotations

from typing import NamedTuple


class Objection(NamedTuple):
    """A demand of the review, the answer, and the part of the report that shows it."""

    asked: str
    answer: str
    part: str


OBJECTIONS = (
    Objection(
        "Defining equations of the two operators.",
        "z_l = softmax_j(q_l . k_j / sqrt(e)) v_j over l - K < j <= l, with q, k, v = u W_Q, u W_K, u W_V of a stack u "
        "of sources. The paper's section 2.2 has them; they run here as the design depthswa and the sublayer swa.",
        "theorem",
    ),
    Objection(
        "A test that outputs and gradients match.",
        "They do, for every window from one source to all, by stack and by all three matrices, on drawn and on trained "
        "models, in float64 and float32. The reads inside a trained network match as well.",
        "theorem",
    ),
    Objection(
        "A mapping of each method to the operator.",
        "`residua designs --map` gives it. AttnRes and Delta read with one static query a depth, which is the "
        "operator with queries that are not projected from the stack; DenseFormer, DCA, MUDD and ELC-BERT weigh "
        "sources without a softmax over dot products; Hyper-Connections and DDL keep a recurrent state: no instances.",
        "instance",
    ),
    Objection(
        "The conditions under which the equality holds.",
        "A given stack, weights shared over depth, one normaliser, one scale and position term, one mask. Break any "
        "one, and the two sides part.",
        "condition",
    ),
    Objection(
        "That fixed residual addition is itself ShortSWA.",
        "Not claimed, and not so. Addition is unnormalised ones over deltas, or identity attention over states.",
        "reduction",
    ),
    Objection(
        "That it reduces to uniform residual addition when the weights are the identity (the simulated rebuttal).",
        "Identity weights with a window of one give the stream; a uniform softmax gives the mean. Over deltas a norm "
        "turns the mean into the standard network; over states nothing does.",
        "reduction",
    ),
    Objection(
        "That the axes are therefore interchangeable.",
        "The operator is the same and the systems are not: in a network the stack is made by the reads, so depth is "
        "sequential where the sequence is parallel. `residua cost` measures what follows from it.",
        "condition",
    ),
)
