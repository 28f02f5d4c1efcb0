"""A model laid out as a converted Hugging Face model is: layers own the loop, the first opens the stream inside its
(possibly checkpointed) forward, and the output is an object with logits."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn
from torch.utils.checkpoint import checkpoint

from residua.runner import Flow, Runner
from residua.testing import Case


class Layer(nn.Module):
    def __init__(self, model, block):
        super().__init__()
        self.block = block
        self.stream_of = [model.stream]  # in a list, so that it is registered once, at the top
        self.first = block.sites[0].index == 0

    def forward(self, state, context):
        runner = Runner(self.stream_of[0], blockwise=True)
        return runner.cut(self.block(runner.open(state) if self.first else Flow(state), runner, context))


class Hosted(nn.Module):
    """`reentrant`: None for no checkpointing, else which kind."""

    def __init__(self, spec, reentrant=None):
        super().__init__()
        self.inner = Case(spec).model()
        self.reentrant = reentrant

    def forward(self, input_ids):
        context, state = self.inner.context(input_ids), self.inner.embed(input_ids)
        for block in self.inner.blocks:
            layer = Layer(self.inner, block)
            if self.reentrant is None:
                state = layer(state, context)
            else:
                state = checkpoint(layer, state, context, use_reentrant=self.reentrant)
        (x,) = Runner(self.inner.stream).read(Flow(state), self.inner.plan.head, self.inner.norm).lanes
        return SimpleNamespace(logits=x @ self.inner.embed.weight.T)
