"""find(model): the anatomy of a decoder, by running its layers on random states; what is found is proved.

    1. a forward of the backbone shows which list holds the decoder layers, and the norm behind the last of them
    2. every layer is watched (`trace.py`) and read (`parts.py`), its q, k and v are looked for (`projections.py`)
    3. the sites are run in its place, on a prompt and on a token after it: the same states, or the next reading is
       tried, or the model is refused (`proof.py`)

The first layer of every kind is read and proved in float32 (`widened.py`), one at a time, and nothing else is allocated
but a few tokens' states. A layer of a known kind, with the same modules, sizes and settings, is proved in its own
precision: what was found for the kind gives its own output to the last bit, or it is read in float32 as if it were the
first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import AutoModel

from residua.hf.anatomy import Anatomy, Argument, Block, Model
from residua.hf.backbone import backbone_of
from residua.hf.parts import mixes, read, segments
from residua.hf.projections import projections
from residua.hf.proof import Proof, same
from residua.hf.released.rows import ROWS as RELEASED
from residua.hf.trace import Trace, Unnamed, trace
from residua.hf.widened import HALVES, widened

ROWS, TOKENS = 2, 6
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What a model's own code raises where it cannot run as it is run here. A machine without memory or disk (MemoryError,
OSError) says nothing about the model, and is told as what it is."""


class NotFound(ValueError):
    """A model without an anatomy, and why."""


@dataclass(slots=True)
class Place:
    """Where the layers of a backbone are."""

    layers: str
    norm: str


@dataclass(slots=True)
class Found:
    """What is known of one layer."""

    block: Block
    proof: Proof
    cache: str | None
    kind: Kind
    sure: bool
    """Whether it adds as the layer does, so that bits that agreed on random states agree on all."""
    known: bool = False
    """Whether it was proved to be as an earlier layer of its kind, in its own precision."""


Kind = tuple[tuple[str, type, tuple[Argument, ...]], ...]
"""What a layer is made of: path, class, and sizes and settings of every module."""


def find(model: Model) -> Anatomy:
    """The anatomy of a model; ValueError with what was found and what differs where there is none."""
    backbone, name = backbone_of(model), str(model.config.model_type)
    if name in RELEASED:
        raise NotFound(
            f"{name} has a residual stream of its own, which is one of our designs already: use open_released"
        )
    if AutoModel._model_mapping.get(type(model.config), None) is not type(backbone):
        raise NotFound(f"{type(backbone).__name__} is the decoder of an encoder-decoder, and no model of its own")
    with _quiet(model):
        place = locate(backbone, name)
        _refuse_lookahead(backbone, name)
        layers = backbone.get_submodule(place.layers)
        try:
            found = _watch_all(backbone, layers, name)
        except NotFound:
            raise
        except REFUSALS as error:
            raise NotFound(f"{name} does not run on token ids and a cache alone ({_line(error)})") from error
    blocks: list[Block] = []
    order = []
    for each in found:
        if each.block not in blocks:
            blocks.append(each.block)
        order.append(blocks.index(each.block))
    cache = next((each.cache for each in found if each.cache), "past_key_values")
    exact = all(each.proof.exact and each.sure for each in found)
    depth = None if len(found) == backbone.config.num_hidden_layers else len(found)
    kinds = tuple(order) if len(blocks) > 1 else ()
    return Anatomy(tuple(blocks), kinds, place.layers, place.norm, cache, exact, depth)


@contextmanager
def _quiet(model: Model) -> Iterator[None]:
    """In evaluation, without gradients, and with random numbers as they were afterwards."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            yield
    finally:
        for module, mode in training:
            module.training = mode


def _inputs(backbone: Model, *, padded: bool = True) -> dict[str, Argument]:
    vocab = backbone.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (ROWS, TOKENS), generator=generator).to(backbone.device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0  # so that no mask is left out, and none is another's equal
    return {"input_ids": ids, "attention_mask": mask}


def locate(backbone: Model, name: str) -> Place:
    """The list of decoder layers, which run one after the other, each on what the one before it made."""
    ran: list[tuple[str, Tensor | None, list[Tensor]]] = []

    def watch(path: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: tuple[Argument, ...], kwargs: dict[str, Argument], made: Argument) -> None:
            handed = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            gives = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
            ran.append((path, handed[0] if handed else None, gives[:1]))

        return hook

    handles = [
        module.register_forward_hook(watch(path), with_kwargs=True) for path, module in backbone.named_modules() if path
    ]
    try:
        backbone(**_inputs(backbone), use_cache=False)
    except REFUSALS as error:
        raise NotFound(
            f"{name} does not run on token ids alone ({_line(error)}), so its anatomy is not found"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    lists = [path for path, module in backbone.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    calls = {path: (handed, gives) for path, handed, gives in ran}
    best: tuple[str, Tensor] | None = None
    reason = "no list of layers runs in order"
    for path in sorted(lists, key=lambda each: each.count(".")):
        members = [f"{path}.{place}" for place in range(len(backbone.get_submodule(path)))]
        if not all(member in calls and calls[member][1] for member in members):
            continue
        if best is not None and path.startswith(f"{best[0]}."):
            continue  # inside the layers
        if any(sum(each == member for each, _, _ in ran) > 1 for member in members):
            reason = f"the layers in {path} run more than once"
            continue
        states = [(calls[member][0], calls[member][1][0]) for member in members]
        shape = states[0][1].shape
        if len(shape) != 3 or any(
            made.shape != shape or (handed is not None and handed.shape != shape) for handed, made in states
        ):
            reason = f"the layers in {path} carry states of another shape than [batch, token, width]"
            continue
        if any(before[1] is not after[0] for before, after in pairwise(states)):
            reason = f"between the layers in {path} the model changes the stream"
            continue
        if best is None:
            best = (path, states[-1][1])
    if best is None:
        raise NotFound(f"the decoder layers of {name} are not found: {reason}")
    layers, last = best
    norm = next((path for path, handed, _ in ran if handed is last and not path.startswith(f"{layers}.")), None)
    if norm is None:
        raise NotFound(f"{name} has no norm behind its layers, where the head would read the stream")
    if sum(path == norm for path, _, _ in ran) > 1:
        raise NotFound(f"{name} uses its last norm elsewhere too, and the head cannot read the stream there alone")
    return Place(layers, norm)


def _refuse_lookahead(backbone: Model, name: str) -> None:
    """An encoder is no decoder: a later token must not change what an earlier one becomes."""
    inputs = _inputs(backbone, padded=False)
    changed = inputs | {"input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, -1] = (changed["input_ids"][:, -1] + 1) % backbone.get_input_embeddings().weight.shape[0]
    one, other = (backbone(**each, use_cache=False)[0] for each in (inputs, changed))
    if (one - other)[:, : TOKENS - 1].abs().max() > 1e-3 * one.abs().max():
        raise NotFound(f"{name} is no decoder as it is configured: a later token changes what an earlier one becomes")


def _watch_all(backbone: Model, layers: nn.ModuleList, name: str) -> list[Found]:
    """What every layer is, proved on a prompt with padding, one without, and a token after it."""
    found: list[Found] = []

    def first(
        place: int, layer: Model, forward: Argument, args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> None:
        kind = _kind(layer)
        like = next((each for each in found if each.kind == kind and each.proof.exact), None)
        if like is not None and _as_it_is(like.block, layer, forward, args, kwargs):
            found.append(replace(like, known=True))
        else:
            found.append(_read(layer, kind, forward, args, kwargs, place, name, backbone.config))

    def again(
        place: int, layer: Model, forward: Argument, args: tuple[Argument, ...], kwargs: dict[str, Argument]
    ) -> None:
        each = found[place]
        if each.known and _as_it_is(each.block, layer, forward, args, kwargs):
            return
        state, keywords = _handed(forward, args, kwargs)
        with widened(layer, lambda: forward(state.clone(), **copy.deepcopy(keywords))):
            proof = same(each.block, layer, forward, state, keywords)
            if not proof.holds:
                raise NotFound(proof.error(name, place, each.block))
            found[place] = replace_proof(each, proof)

    with _instead(layers, name, first):
        backbone(**_inputs(backbone), use_cache=True)
    inputs = _inputs(backbone, padded=False)
    with _instead(layers, name, again):
        made = backbone(**inputs, use_cache=True)
        key = next((each for each in ("past_key_values", "cache_params") if each in made), None)
        if key is None:
            raise NotFound(f"{name} hands out no cache, so that what it does in decoding cannot be proved")
        token = inputs["input_ids"][:, -1:]
        mask = torch.ones(ROWS, TOKENS + 1, dtype=torch.long, device=token.device)
        backbone(input_ids=token, attention_mask=mask, use_cache=True, **{key: made[key]})
    return found


def replace_proof(found: Found, proof: Proof) -> Found:
    """It, as exact as the least exact run of it."""
    return replace(found, proof=proof if found.proof.exact else found.proof)


@contextmanager
def _instead(layers: nn.ModuleList, name: str, run: Argument) -> Iterator[None]:
    """Inside, every layer first lets `run` look at it and at what it is handed, and then does as it does."""
    with ExitStack() as stack:
        for place, layer in enumerate(layers):
            forward = layer.forward

            def looked_at(
                *args: Argument,
                layer: Model = layer,
                forward: Argument = forward,
                place: int = place,
                **kwargs: Argument,
            ) -> Argument:
                try:
                    run(place, layer, forward, args, kwargs)
                except NotFound:
                    raise
                except REFUSALS as error:  # of the layer or of what looks at it: which, the chained error shows
                    raise NotFound(
                        f"the anatomy of {name} is not found: looking at layer {place} ended in "
                        f"{type(error).__name__}: {_line(error)}"
                    ) from error
                return forward(*args, **kwargs)

            layer.forward = looked_at
            stack.callback(layer.__dict__.pop, "forward")
        yield


def _kind(layer: nn.Module) -> Kind:
    """What a layer is made of. Two layers of one kind may still differ, by their number in a list of the config."""
    return tuple(
        (
            path,
            type(module),
            (
                *((name, each.shape, each.dtype) for name, each in module.named_parameters(recurse=False)),
                *((name, each) for name, each in vars(module).items() if _setting(name, each)),
            ),
        )
        for path, module in layer.named_modules()
    )


def _setting(name: str, value: Argument) -> bool:
    return name != "layer_idx" and (value is None or isinstance(value, bool | int | float | str))


def _as_it_is(
    block: Block, layer: Model, forward: Argument, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> bool:
    """Whether an anatomy gives the layer's own output to the last bit, in the precision that the layer has."""
    return same(block, layer, forward, *_handed(forward, args, kwargs, wide=False)).exact


def _handed(
    forward: Argument, args: tuple[Argument, ...], kwargs: dict[str, Argument], *, wide: bool = True
) -> tuple[Tensor, dict[str, Argument]]:
    """A random state in place of the layer's, and its other arguments by name, copied; wide: in float32."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    more = next(
        (each.name for each in inspect.signature(forward).parameters.values() if each.kind is each.VAR_KEYWORD), None
    )
    extra = given.pop(more, {}) if more else {}
    state_name = next(iter(given))
    state = given.pop(state_name)
    random = torch.randn(state.shape, generator=torch.Generator().manual_seed(1)).to(state.device)
    keywords = copy.deepcopy({**given, **extra})
    if not wide or state.dtype not in HALVES:
        return random.to(state.dtype), keywords
    keywords = pytree.tree_map_only(Tensor, lambda each: each.float() if each.dtype in HALVES else each, keywords)
    return random, keywords


def _read(
    layer: Model, kind: Kind, forward: Argument, args: tuple[Argument, ...], kwargs: dict[str, Argument], place: int,
    name: str, config: Argument,
) -> Found:  # fmt: skip
    """The first reading of a layer that holds."""
    state, keywords = _handed(forward, args, kwargs)
    with widened(layer, lambda: forward(state.clone(), **copy.deepcopy(keywords))):
        seen, _ = trace(layer, forward, state, copy.deepcopy(keywords))
        cache = next((key for key, each in keywords.items() if _is_cache(each)), None)
        named = tuple(list(inspect.signature(forward).parameters)[1:])
        more = [each.name for each in inspect.signature(forward).parameters.values() if each.kind is each.VAR_KEYWORD]
        named = tuple(each for each in named if each not in more)
        made, beside, attention = _projections(seen, cache or "past_key_values", config)
        failed: Proof | None = None
        tried: Block | None = None
        try:
            after = [each for _, end in segments(seen) if isinstance(each := seen.made[end], Tensor)]
            for block, sure in read(seen, named, cache or "past_key_values", attention):
                proof = same(block, layer, forward, state, keywords, after)
                if proof.holds:
                    return Found(replace(block, projections=made, beside=beside), proof, cache, kind, sure)
                failed, tried = failed or proof, tried or block
        except Unnamed as error:
            if failed is None:
                raise NotFound(f"the anatomy of {name} is not found: in layer {place}, {error}") from None
    assert failed is not None
    assert tried is not None
    raise NotFound(failed.error(name, place, tried))


def _projections(seen: Trace, cache: str, config: Argument) -> tuple[Argument, tuple[str, ...], str | None]:
    """q, k and v of the first attention of a layer that has them, and its path."""
    for node in seen.nodes:
        if not mixes(node, cache):
            continue
        args, kwargs = (pytree.tree_map(lambda each: each, part) for part in node.given)
        kwargs = {key: None if _is_cache(each) else each for key, each in kwargs.items()}
        args = tuple(None if _is_cache(each) else each for each in args)
        x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 3), None)
        if x is None or node.module is None:
            continue
        made, beside = projections(node.module, args, kwargs, x, config)
        if made is not None:
            return made, beside, node.path
    return None, (), None


def _is_cache(value: Argument) -> bool:
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
