"""h_0 = e; x_s = h_s; o_s = f_s(norm(x_s)); h_{s+1} = h_s + o_s; out = norm(h_M).

norm=post: h <- norm(h + f(h)), each norm held by the reader of its result (the first by the embedding's).
"""

from torch import Tensor


def forward(x, parameters, sublayers, norms, *, layers, layout, norm="pre") -> Tensor:
    """The head's normalised input."""
    if norm not in ("pre", "post"):
        raise ValueError(f"norm={norm!r}")
    if parameters:
        raise ValueError("the standard stream has no parameters")
    h = x
    for s in range(layers * len(layout)):
        if norm == "pre":
            h = h + sublayers[s](norms[s](h))
        else:
            h = norms[s](h)
            h = h + sublayers[s](h)
    return norms[-1](h)
