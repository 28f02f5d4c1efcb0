"""q, k and v from inputs of their own: the lanes ride side by side through an attention that expects one input.

The attention is handed torch.cat((q, k, v), -1); hooks on its projections give each its lane. A fused projection
takes the three lanes as three batches, and from each of its answers the lane's own third is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from residua.hf.anatomy import Block, Config, Fused


class LaneHooks:
    """The hooks on the projections of one attention, put on again where a projection was replaced (as peft does)."""

    def __init__(self, attention: nn.Module, block: Block, config: Config) -> None:
        assert block.projections is not None  # `plan` gave this attention three lanes
        projections, self.width = block.projections, int(config.hidden_size)
        self.fused = projections.name if isinstance(projections, Fused) else None
        self.sizes = projections.layout(config)[0] if isinstance(projections, Fused) else (0, 0, 0)
        names = (projections.name,) if isinstance(projections, Fused) else projections
        self.lane = {name: lane for lane, name in enumerate(names)} | dict.fromkeys(block.beside, 0)
        self.hooked: dict[str, nn.Module] = {}
        self.handles: dict[str, list[RemovableHandle]] = {}
        self.attach(attention)

    def attach(self, attention: nn.Module) -> None:
        """Make sure that the hooks are on the modules that will be called."""
        for name, lane in self.lane.items():
            module = attention.get_submodule(name)
            if self.hooked.get(name) is module:
                continue
            for handle in self.handles.get(name, ()):
                handle.remove()
            self.hooked[name] = module
            _drop_copies(module)
            if name == self.fused:
                self.handles[name] = [
                    module.register_forward_pre_hook(self.lanes_as_batches),
                    module.register_forward_hook(self.own_thirds),
                ]
            else:
                self.handles[name] = [module.register_forward_pre_hook(OwnLane(lane, self.width))]

    # What torch.compiler.assume_constant_result marks, without loading a compiler for it: while a graph is traced this
    # runs as it is, and the projections are traced with the hooks that it has put on.
    attach._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in (each for handles in self.handles.values() for each in handles):
            handle.remove()
        self.hooked, self.handles = {}, {}

    def lanes_as_batches(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """[b, t, 3 d] as [3 b, t, d]."""
        return (torch.cat(args[0].split(self.width, -1)), *args[1:])

    def own_thirds(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """From the answers to q, k and v, the parts that are q, k and v."""
        answers = output.unflatten(-1, (-1, sum(self.sizes))).chunk(3)  # all groups, or those of one rank of several
        return torch.cat([answer.split(self.sizes, -1)[lane] for lane, answer in enumerate(answers)], -1).flatten(-2)


def _drop_copies(module: nn.Module) -> None:
    """Take off what a quantised projection has copied from the one that it stands for: it would take a lane's lane."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, OwnLane) or isinstance(getattr(hook, "__self__", None), LaneHooks):
                del hooks[key]


class OwnLane:
    """A pre-hook that leaves one lane of the three."""

    def __init__(self, lane: int, width: int) -> None:
        self.lane, self.width = lane, width

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].split(self.width, -1)[self.lane], *args[1:])
