"""The forward of a converted model: Hugging Face's own loop, whose `hidden_states` is the stream's state.

    hidden_states = layer(hidden_states, ...)      the layer reads and writes the state; the loop never looks inside
    hidden_states = norm(hidden_states)            the final norm is the head's read

Layers and the final norm keep their modules, and so their keys: only their classes are swapped for subclasses that
run the parts of its anatomy. The stream is a module of the backbone, and its parameters lie under `stream`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.utils.output_capturing import capture_outputs

from residua.hf.anatomy import PREFIX, Anatomy, Argument, Block, Class, Config, Model
from residua.hf.cache import memory_of
from residua.hf.lanes import LaneHooks
from residua.hf.made import made
from residua.hf.owner import Owner
from residua.hf.placing import placed
from residua.hf.program import Frame, Program, child, first, path, program
from residua.hf.told import DOCUMENTS, MASK, TOKENS
from residua.hf.values import replaced
from residua.plan import Site
from residua.runner import Execution, Flow, Runner
from residua.stream import Answer, Read, State, Stream

WIDE = Execution(dtype=torch.float32)
"""How the stream of a layer with `residual_in_fp32` runs."""
BEHIND = frozenset({"falcon_mamba", "mamba", "mamba2"})
"""Types that list what their layers leave as hidden states: there entry i is what block i + 1 reads, or the head."""


class Named:
    """Of a class that is made from another: pickled by the two that it is made of, wherever they are."""

    def __reduce_ex__(self, protocol: Argument) -> tuple[Argument, ...]:
        mixin, base = type(self).__bases__
        return (_blank, (base, mixin), *super().__reduce_ex__(protocol)[2:])


class Tap(nn.Module):
    """x -> x: where Hugging Face records a hidden state."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def defaults(forward: Callable[..., object]) -> Mapping[str, Argument]:
    """What may follow the first argument of a layer's forward by name, with what it is where it is not given."""
    given, plain = inspect.signature(forward).parameters, inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [each for each in given.values() if each.kind in (plain, inspect.Parameter.KEYWORD_ONLY)][2:]
    return {each.name: None if each.default is inspect.Parameter.empty else each.default for each in named}


def positional(forward: Callable[..., object]) -> tuple[str, ...]:
    """The names of what may follow the first argument of a forward without a keyword."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in inspect.signature(forward).parameters.items() if each.kind in kinds]
    return tuple(names[2:])  # self, and the first argument


class Ready(NamedTuple):
    """One part of a layer, read from its anatomy."""

    sublayer: tuple[str, ...]
    norm: tuple[str, ...] | None
    answer: Program
    attends: bool
    """Whether its q, k and v can have inputs of their own."""


def ready(block: Block) -> tuple[Ready, ...]:
    """The parts of one kind of layer."""
    return tuple(
        Ready(path(part.sublayer), path(part.norm) if part.norm else None, program(part.line), part is block.attention)
        for part in block.parts
    )


class OnStreamLayer(Named):
    """state -> state: the parts of one decoder layer, and what was inserted between them, on the stream."""

    anatomy: Anatomy
    block: Block
    """The kind of layer that this one is."""
    sites: tuple[Site, ...]
    tap: Tap
    ready: tuple[Ready, ...]
    """Its sites, ready to run."""
    returned: tuple[Program, ...] | None
    """What it returns behind the state; None where it returns the state alone."""
    inserted: nn.ModuleDict
    _modules: dict[str, Model]
    lanes: LaneHooks | None
    owner: Owner
    after_state: tuple[str, ...]
    defaults: Mapping[str, Argument]
    """What its forward takes for arguments that it is not handed."""
    gradient_checkpointing: bool = False
    training: bool

    def __call__(self, *args: Argument, **kwargs: Argument) -> State:
        # The loop may have handed on what is told, or not; a checkpoint keeps the keywords that it has here.
        return super().__call__(*args, **{**(self.owner.told.now or {}), **kwargs})  # type: ignore[misc]

    def forward(self, hidden_states: State, *args: Argument, **kwargs: Argument) -> State:
        kwargs.update(zip(self.after_state, args, strict=False))
        backbone = self.owner.backbone
        stream, mask, ids = backbone.stream, kwargs.pop(MASK, None), kwargs.pop(TOKENS, None)
        documents = kwargs.pop(DOCUMENTS, None)
        cuts = self.gradient_checkpointing and self.training
        wide = self.wide(hidden_states)
        runner = Runner(stream, WIDE if wide else backbone.execution, blockwise=cuts)
        cache = kwargs.get(self.anatomy.cache)
        kept = memory_of(cache) if cache is not None and backbone.remembers else None
        flow, tap = placed(self, stream, self.sites, hidden_states), self.tap
        if not self.sites[0].index:
            flow = runner.open(unpadded(flow, mask), past=None if kept is None else kept.opening(), ids=ids)
        elif not isinstance(flow, Flow):  # a checkpoint kept the state alone
            flow = Flow(flow)
        parts, between = iter(self.ready), self.inserted._modules
        frame = Frame(self, {}, kwargs, self.defaults)
        for site in self.sites:
            inserted: Model = between.get(site.name)
            part = next(parts) if inserted is None else None
            norm: Model = inserted.norm if part is None else part.norm and child(self, part.norm)
            if wide and norm is not None:
                norm = narrowed(norm, inserted.gain if part is None else norm.weight)
            raw: State = None

            def normed(
                lane: Tensor, *others: Tensor, norm: Model = norm, tap: Model = tap if site.first else None
            ) -> State:
                nonlocal raw
                raw = lane if tap is None else tap(lane)
                return (raw, *others) if norm is None else (norm(raw), *map(norm, others))

            read = runner.read(flow, site, normed)
            shared: list[Tensor] = []
            if part is None:
                apart = {} if documents is None else {"documents": documents}
                y = inserted(*read.lanes, mask=mask, kept=kept, **apart)
            elif stream.sided and part.attends:
                y, *shared = self._sided(part, site, read, raw, frame)
            else:
                y = self._answer(part, read.lanes, raw, frame)
            y = y if mask is None else unpadded(y, mask)
            flow = runner.write(flow, site, read, Answer(y, *shared) if shared else y)
        if kept is not None and self.sites[-1].layer == stream.plan.depth - 1:
            kept.advance(runner.past(flow), mask, documents, y[..., 0].long())
        flow = runner.cut(flow) if cuts else flow
        if self.returned is None:
            return flow
        return (flow, *(each(frame) for each in self.returned))

    def wide(self, state: State) -> bool:
        """Whether the layer keeps its residual stream in float32, whatever its sublayers compute in."""
        return bool(self.__dict__.get("residual_in_fp32")) and pytree.tree_leaves(state)[0].dtype != torch.float64

    def _sided(self, part: Ready, site: Site, read: Read, raw: Tensor, frame: Frame) -> tuple[Tensor, ...]:
        """The same where the design shares values of attention: with those that it keeps, and mixing what it gives."""
        backbone = self.owner.backbone
        plan, kept = backbone.stream.plan, backbone.stream.values(site).kept
        if not kept and not read.values:
            return (self._answer(part, read.lanes, raw, frame),)
        with replaced(child(self, part.sublayer), self.block, backbone.config, read.values, plan.kv[0]) as made:
            y = self._answer(part, read.lanes, raw, frame)
        return (y, *made) if kept else (y,)

    def _answer(self, part: Ready, lanes: tuple[Tensor, ...], raw: Tensor, frame: Frame) -> Tensor:
        """What a part makes of its lanes, as it is written."""
        frame.values.update(x=lanes[0], lanes=lanes[0], raw=raw)
        if len(lanes) > 1:
            assert self.lanes is not None  # `install` made hooks for every attention that is fed three lanes
            self.lanes.attach(child(self, part.sublayer))
            frame.values["lanes"] = torch.cat(lanes, -1)
        return first(part.answer(frame))


class OnStreamNorm(Named):
    """state -> the head's read, normalised: the final norm of a converted backbone."""

    owner: Owner
    tap: Tap

    def forward(self, hidden_states: State) -> Tensor:
        stream = self.owner.backbone.stream
        normalise = super().forward  # type: ignore[misc]
        flow = placed(self, stream, (stream.plan.head,), hidden_states)
        runner, flow = Runner(stream, self.owner.backbone.execution), flow if isinstance(flow, Flow) else Flow(flow)
        (x,) = runner.read(flow, stream.plan.head, lambda lane: (normalise(self.tap(lane)),)).lanes
        return x


class OnStreamBackbone:
    """Embedding, layers and final norm of the base; beside them, the stream."""

    stream: Stream
    execution: Execution
    remembers: bool
    """Whether decoding needs more than keys and values: the design mixes tokens, or a sublayer was inserted."""
    config: Config
    owner: Owner
    lists: bool
    """Whether the base lists hidden states itself, and does not let transformers record them."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Argument) -> Argument:
        if self.remembers and str(self.config._attn_implementation).startswith("paged|"):
            raise ValueError(
                f"{self.stream.name} with layout {self.config.layout or 'as the base'} keeps more than keys and values "
                "between tokens, and the pages of continuous batching hold those alone; generate without it"
            )
        kwargs |= self.owner.told.now or {}  # where the loop hands keywords on, whoever calls a layer again has them
        chosen = kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False))
        if self.lists:
            return self._listed(input_ids, **kwargs)
        if isinstance(chosen, bool) or not chosen:
            return super().forward(input_ids, **kwargs)  # type: ignore[misc]
        # Chosen layers are counted by their outputs, and the taps stand at the inputs: the output of layer i is
        # what tap i + 1 sees.
        as_dict = kwargs.pop("return_dict", getattr(self.config, "return_dict", True))
        kwargs |= {"output_hidden_states": {each + 1 for each in chosen}, "return_dict": True}
        output = super().forward(input_ids, **kwargs)  # type: ignore[misc]
        output.hidden_states = output.hidden_states[1:]
        return output.to_tuple() if as_dict is False else output

    def _listed(self, input_ids: Tensor | None, **kwargs: Argument) -> Argument:
        """The same of a base that lists hidden states itself: in its list, what taps saw in place of states."""
        asked = {name: kwargs.pop(name, None) for name in ("output_hidden_states", "return_dict")}
        hidden, as_dict = (getattr(self.config, name) if each is None else each for name, each in asked.items())
        if not hidden:
            return super().forward(input_ids, return_dict=as_dict, **kwargs)  # type: ignore[misc]
        output = self._tapped(input_ids, output_hidden_states=True, **kwargs)
        seen = output.hidden_states
        reads = seen[1:] if str(self.config.model_type).removeprefix(PREFIX) in BEHIND else seen[:-1]
        output.hidden_states = (*reads, output.last_hidden_state)
        return output if as_dict else output.to_tuple()

    @capture_outputs(tie_last_hidden_states=False)
    def _tapped(self, input_ids: Tensor | None, **kwargs: Argument) -> Argument:
        """Its output, with what every tap saw for hidden states: the blocks', then the head's before the norm."""
        return super().forward(input_ids, return_dict=True, **kwargs)  # type: ignore[misc]


@cache
def on_stream(base: Class, mixin: Class) -> Class:
    """The class of a layer or a final norm, with the mixin before it."""
    named = {"after_state": positional(base.forward), "defaults": defaults(base.forward)}
    body: dict[str, object] = {**named} if mixin is OnStreamLayer else {}
    return made(f"Residua{base.__name__}", (mixin, base), body)


def _blank(base: Class, mixin: Class) -> Model:
    """An object of such a class, whose state comes after it."""
    cls = on_stream(base, mixin)
    return cls.__new__(cls)


def narrowed(norm: Callable[[Tensor], Tensor], gain: Tensor) -> Callable[[Tensor], Tensor]:
    """A norm of what is read in the type of its gain, in which its sublayer computes."""
    return lambda x: norm(x.to(gain.dtype))


def unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros where a token is padding: a stream that mixes tokens then sees there what it sees before a sequence."""
    return x if mask is None else x * mask[..., None].to(x.dtype)
