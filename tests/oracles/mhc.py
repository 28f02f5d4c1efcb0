"""x = sum_j H_pre[j] H_j; H_i <- sum_j H_res[i, j] H_j + H_post[i] f(norm(x)): mHC, 2512.24880, and its released forms.

H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn(exp(.)), each of alpha rmsnorm(vec H) phi + b.
"""

import itertools

import torch


def _mapping(flat, parameters, prefix):
    """alpha flat phi + b, as a list of numbers a token; None where the mapping is not built."""
    if prefix + "phi" not in parameters:
        return None
    phi, alpha = parameters[prefix + "phi"], parameters[prefix + "alpha"]
    bias = parameters[prefix + "bias"].reshape(-1)  # the matrix of res is laid out row by row
    return [alpha * (flat * phi[:, m]).sum(-1, keepdim=True) + bias[m] for m in range(len(bias))]


def _sinkhorn(M, iterations):
    """Columns, then rows, of the matrix of numbers M[i][j]."""
    n = len(M)
    for _ in range(iterations):
        columns = [sum(M[i][j] for i in range(n)) for j in range(n)]
        M = [[M[i][j] / columns[j] for j in range(n)] for i in range(n)]
        rows = [sum(M[i][j] for j in range(n)) for i in range(n)]
        M = [[M[i][j] / rows[i] for j in range(n)] for i in range(n)]
    return M


def _released_sinkhorn(logits, iterations, eps):
    """C[j][k], from stream j to stream k, as DeepSeek-V4 has it: a softmax over targets, then sums over sources, over
    targets and so on, every sum with an eps."""
    n = len(logits)
    C = []
    for j in range(n):
        total = sum(torch.exp(value) for value in logits[j])
        C.append([torch.exp(value) / total + eps for value in logits[j]])
    for turn in range(iterations):
        if turn:
            C = [[value / (sum(row) + eps) for value in row] for row in C]
        sums = [sum(C[j][k] for j in range(n)) for k in range(n)]
        C = [[C[j][k] / (sums[k] + eps) for k in range(n)] for j in range(n)]
    return C


def _softmax(values):
    total = sum(torch.exp(value) for value in values)
    return [torch.exp(value) / total for value in values]


def _matrix(kind, values, n, iterations, eps):
    """M[i][j]: what the new stream i gets of stream j."""
    if kind == "sinkhorn":
        if not eps:
            return _sinkhorn([[torch.exp(values[i * n + j]) for j in range(n)] for i in range(n)], iterations)
        C = _released_sinkhorn([[values[i * n + j] for i in range(n)] for j in range(n)], iterations, eps)
        return [[C[j][i] for j in range(n)] for i in range(n)]
    M = [[torch.zeros_like(values[0]) for _ in range(n)] for _ in range(n)]
    if kind == "krom":
        p, bits = [torch.sigmoid(value) for value in values], len(values)
        for i in range(n):
            for j in range(n):
                M[i][j] = M[i][j] + 1
                for bit in range(bits):  # the first factor is the highest bit
                    same = not ((i ^ j) >> (bits - 1 - bit)) & 1
                    M[i][j] = M[i][j] * (p[bit] if same else 1 - p[bit])
        return M
    shares = _softmax(values)
    if kind == "lite":
        moves = list(itertools.permutations(range(n)))
    else:
        moves = [[(j + turn) % n for j in range(n)] for turn in range(n)]
    for share, move in zip(shares, moves, strict=True):
        for j in range(n):
            M[move[j]][j] = M[move[j]][j] + share
    return M


def forward(
    x, parameters, sublayers, norms, *, layers, layout, streams, iterations, init, head, res, eps, norm_eps, reads, post
):
    """The head's input: the norm of what the head makes of the streams."""
    if init not in ("a6", "random", "hy-v4", "kromhc"):
        raise ValueError(f"init={init}")
    n, previous, factor = streams, reads == "previous", post
    H = [x for _ in range(n)]

    def seen():
        flat = torch.cat(H, -1)
        return flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + norm_eps)

    def collapsed(weights):
        return sum(weights[j] * H[j] for j in range(n))

    passed = [1.0, *[0.0] * (n - 1)]
    s = 0
    for layer in range(layers):
        for place, kind in enumerate(layout):
            turn = layout[:place].count(kind)
            prefix = f"at.l{layer}_{kind}{turn + 1 if turn else ''}."
            flat = seen()
            values = _mapping(flat, parameters, prefix + "pre.")
            pre = None if values is None else [torch.sigmoid(value) + eps for value in values]
            written = [factor * torch.sigmoid(value) for value in _mapping(flat, parameters, prefix + "post.")]
            if res == "identity":
                written = [value + eps for value in written]

            if previous:
                read, passed = collapsed(passed), pre
            elif pre is None:  # the first site: the streams are equal, and any of them is the stream
                read = H[0]
            else:
                read = collapsed(pre)
            y = sublayers[s](norms[s](read))

            values = _mapping(flat, parameters, prefix + "res.")
            if values is None:  # the identity, equal streams, or streams that are about to be summed
                kept = H
            else:
                M = _matrix(res, values, n, iterations, eps)
                kept = [sum(M[i][j] * H[j] for j in range(n)) for i in range(n)]
            H = [kept[i] + written[i] * y for i in range(n)]
            s += 1
    if head == "sum":
        return norms[-1](sum(H))
    if head == "mean":
        return norms[-1](sum(H) / n)
    if not previous:
        passed = [torch.sigmoid(value) + eps for value in _mapping(seen(), parameters, "at.head.pre.")]
    return norms[-1](collapsed(passed))
