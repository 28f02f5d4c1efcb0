"""The authors' released Delta code as the methods page (6.2 to 6.7, and 5.2 for its AttnRes modes) describes it.

    r = sum_i softmax_i(w . (s_i / sqrt(mean(s_i^2) + eps)) g) s_i         a read over the list of sources
    delta, delta_block   x = gated(h, h + r); h <- h + f(x); the list is pushed to inside the layer
    block, full          x = r over the blocks and the open one; no stream is kept; a last read before the final norm

Straight-line, one layer after the other; imports nothing from residua.
"""

import torch


def read(sources, query, gain, eps):
    logits = [((s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * gain) * query).sum(-1) for s in sources]
    weights = torch.stack(logits).softmax(0)
    return sum(weights[i].unsqueeze(-1) * s for i, s in enumerate(sources))


def gated(h, y, kind, site):
    """6.5: y is the read with h in it."""
    if kind == "bias":
        return y
    if kind == "sigmoid_scalar":
        g = torch.sigmoid(site["res_gate_logit"])
    elif kind == "sigmoid_vector":
        g = torch.sigmoid(h @ site["res_gate_proj.weight"].T + site["res_gate_proj.bias"])
    elif kind == "learnable_alpha":
        g = site["res_alpha"]
    return (1 - g) * h + g * y


def enriched(h, sources, site, gate, null, eps):
    """The input of a sublayer in the additive modes."""
    listed = [site["null_source"].expand_as(h), *sources] if null else sources
    if not listed:
        return h
    r = read(listed, site["res_proj.weight"].reshape(-1), site["res_norm.weight"], eps)
    return gated(h, h + r, gate, site)


def additive(e, layers, sites, *, gate, null, span, eps):
    """6.2 (span 0: mode delta) and 6.3 (span layers a block: mode delta_block, with its recurrence)."""
    h, sources = e, []
    for number, (attention, mlp) in enumerate(layers):
        a = attention(enriched(h, sources, sites[number]["attn"], gate, null, eps))
        if span == 0:
            if not sources:
                sources = [h]
            h = h + a
            sources = [*sources, a]
        else:
            if number % span == 0:
                # the previous *source* is subtracted, not the stream at the previous boundary
                sources = [*sources, h if not sources else h - sources[-1]]
            h = h + a
        m = mlp(enriched(h, sources, sites[number]["mlp"], gate, null, eps))
        h = h + m
        if span == 0:
            sources = [*sources, m]
    return h


def replacing(e, layers, sites, final, *, span, eps):
    """5.2: `span` layers a block; span 0 is mode full, a block a sublayer."""
    done, partial = [e], None
    for number, sublayers in enumerate(layers):
        for place, sublayer in enumerate(sublayers):
            opens = (span == 0) or (place == 0 and number % span == 0)
            if opens and partial is not None:
                done, partial = [*done, partial], None
            listed = done if partial is None else [*done, partial]
            site = sites[number][("attn", "mlp")[place]]
            x = read(listed, site["res_proj.weight"].reshape(-1), site["res_norm.weight"], eps)
            o = sublayer(x)
            partial = o if partial is None else partial + o
    return read([*done, partial], final["res_proj.weight"].reshape(-1), final["res_norm.weight"], eps)
