"""x = sum_j H_pre[j] H_j; H_i <- sum_j H_res[i, j] H_j + H_post[i] f(norm(x)): mHC, 2512.24880.

H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn(exp(.)), each of alpha rmsnorm(vec H) phi + b.
"""

import torch

EPS = 1e-6


def _mapping(flat, parameters, prefix, size):
    """alpha flat phi + b, as a list of `size` numbers a token; None where the mapping is not built."""
    if prefix + "phi" not in parameters:
        return None
    phi, alpha = parameters[prefix + "phi"], parameters[prefix + "alpha"]
    bias = parameters[prefix + "bias"].reshape(-1)  # the matrix of res is laid out row by row
    return [alpha * (flat * phi[:, m]).sum(-1, keepdim=True) + bias[m] for m in range(size)]


def _sinkhorn(M, iterations):
    """Columns, then rows, of the matrix of numbers M[i][j]."""
    n = len(M)
    for _ in range(iterations):
        columns = [sum(M[i][j] for i in range(n)) for j in range(n)]
        M = [[M[i][j] / columns[j] for j in range(n)] for i in range(n)]
        rows = [sum(M[i][j] for j in range(n)) for i in range(n)]
        M = [[M[i][j] / rows[i] for j in range(n)] for i in range(n)]
    return M


def forward(x, parameters, sublayers, norms, *, layers, layout, streams, iterations, init):
    """The head's input: the norm of the sum of the streams."""
    if init not in ("a6", "random"):
        raise ValueError(f"init={init}")
    n = streams
    H = [x for _ in range(n)]
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            prefix = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            flat = torch.cat(H, -1)
            flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + EPS)
            pre = _mapping(flat, parameters, prefix + "pre.", n)
            post = _mapping(flat, parameters, prefix + "post.", n)
            res = _mapping(flat, parameters, prefix + "res.", n * n)

            if pre is None:  # the first site: the streams are equal, and any of them is the stream
                read = H[0]
            else:
                read = sum(torch.sigmoid(pre[j]) * H[j] for j in range(n))
            y = sublayers[s](norms[s](read))

            if res is None:  # equal streams, or streams that are about to be summed
                kept = H
            else:
                M = _sinkhorn([[torch.exp(res[i * n + j]) for j in range(n)] for i in range(n)], iterations)
                kept = [sum(M[i][j] * H[j] for j in range(n)) for i in range(n)]
            H = [kept[i] + 2 * torch.sigmoid(post[i]) * y for i in range(n)]
            s += 1
    return norms[-1](sum(H))
