"""A residual design of one's own, held to the laws that every design obeys."""

import torch
from torch import nn

import residua
from residua.testing import LAWS, Case


@residua.register("reminder")
class Reminder(residua.Stream[tuple]):
    """x = h + a e; h <- h + f(norm(x)): every site but the first also reads the embedding, by a learned share."""

    paper, mixes, starts = "none: an example", "the embedding", "standard"

    def __init__(self, plan):
        super().__init__(plan)  # at the first site h is e, and the norm would forget a
        self.each(lambda site: nn.ParameterList([torch.zeros(1)]) if site.index else None)

    def open(self, x, past=None):
        return x, x

    def read(self, state, site, norm):
        h, e = state
        return residua.Read(norm(h + self.part(site)[0].to(h) * e if site.index else h))

    def write(self, state, site, read, y):
        h, e = state
        return h + y, e

    def reset(self, generator=None):
        for a in self.parameters():
            nn.init.zeros_(a)


torch.set_num_threads(1)  # the models are tiny
for layout in ("attn,mlp", "swa:window=3,attn,mlp"):  # `residua.testing.check` takes all layouts, and one_graph too
    for law in LAWS.keys() - {"one_graph"}:
        LAWS[law](Case("reminder", layout))
print(f"reminder obeys {len(LAWS) - 1} laws in 2 layouts")
