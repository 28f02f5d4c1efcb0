"""The laws: functions of a `Case` that raise AssertionError where a design breaks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from residua.model import Cache, ModelConfig, Transformer, sizes_of, token_loss
from residua.native.library import counted
from residua.plan import Site
from residua.registry import build
from residua.runner import Flow, Observer, Runner, observed
from residua.stream import Norm, Read, State, Stream
from residua.testing.cases import GROUPED, PLAIN, Case, assert_close, error, ids

Law = Callable[[Case], None]
LAWS: dict[str, Law] = {}


def law(check: Law) -> Law:
    """Add a function of a `Case` to the laws."""
    LAWS[check.__name__.removeprefix("law_")] = check
    return check


def walk(model: Transformer, tokens: Tensor) -> Iterator[tuple[Site, State, Norm]]:
    """Every (site, state before its read, norm) of one forward, the head last."""
    norms = {index: each.norm for index, each in model.at_sites().items()}
    for step in model.walk(tokens):
        yield step.site, step.state, norms.get(step.site.index, model.norm)


def _gradients(model: nn.Module, tokens: Tensor, **options: bool) -> dict[str, Tensor]:
    model.zero_grad()
    token_loss(model(tokens, **options), tokens.roll(-1, 1)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, f"gradient of {name}", gradient=True)


@law
def law_shapes_and_types(case: Case) -> None:
    """A read returns `feeds(site)` lanes of the embedding's shape and type, and the state keeps that type: in
    float32, in bfloat16, and in bfloat16 with the design's own parameters left in float32."""
    for dtype, own in ((torch.float32, torch.float32), (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        model = case.model(dtype=dtype)
        model.stream.to(own)
        with observed(model.stream, _Shapes(model.stream, dtype)):
            model(ids())


class _Shapes(Observer):
    """Judges every read before its sublayer sees it."""

    def __init__(self, stream: Stream, dtype: torch.dtype) -> None:
        self.stream, self.dtype = stream, dtype

    def read(self, state: State, site: Site, lanes: tuple[Tensor, ...], read: Read) -> None:
        fed, dtype = self.stream.feeds(site), self.dtype
        assert len(read.lanes) == fed, f"{site.name}: read gave {len(read.lanes)} lanes, feeds says {fed}"
        assert fed in (1, site.lanes), f"{site.name} takes 1 or {site.lanes} lanes, not {fed}"
        for lane in read.lanes:
            assert lane.shape == (*ids().shape, 16), f"{site.name}: a lane of shape {tuple(lane.shape)}"
            assert lane.dtype == dtype, f"{site.name}: a {lane.dtype} lane from a {dtype} stream"
        for leaf in pytree.tree_leaves(state):
            assert leaf.dtype in (dtype, torch.long), f"{site.name}: {leaf.dtype} in the state of a {dtype} stream"


@law
def law_state_is_tensors(case: Case) -> None:
    """The state is tensors in NamedTuples and tuples: no None, list, dict or number."""

    def look(node: object, where: str) -> None:
        if isinstance(node, tuple):
            for place, child in enumerate(node):
                look(child, f"{where}[{place}]")
        else:
            assert isinstance(node, Tensor), f"{where} is a {type(node).__name__}, not a tensor"

    model = case.model()
    for site, state, norm in walk(model, ids()):
        look(state, f"state before {site.name}")
        look(model.stream.read(state, site, norm).carry, f"carry of {site.name}")


@law
def law_pure(case: Case) -> None:
    """A second call gives the same bits, inputs stay as they were, and the modules remember nothing."""
    model = case.model()
    attributes, weights = set(vars(model.stream)), {k: v.clone() for k, v in model.state_dict().items()}
    for site, state, norm in walk(model, ids()):
        leaves = pytree.tree_leaves(state)
        kept, versions = [leaf.clone() for leaf in leaves], [leaf._version for leaf in leaves]
        first, second = (model.stream.read(state, site, norm) for _ in range(2))
        for one, other in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
            assert torch.equal(one, other), f"{site.name}: reading twice gave different bits"
        if site.kind != "head":
            y = nn.functional.pad(first.lanes[0], (0, model.stream.extra(site)))
            pair = [model.stream.write(state, site, first, y) for _ in range(2)]
            for one, other in zip(*map(pytree.tree_leaves, pair), strict=True):
                assert torch.equal(one, other), f"{site.name}: writing twice gave different bits"
        assert versions == [leaf._version for leaf in leaves], f"{site.name} changed its state in place"
        assert all(map(torch.equal, leaves, kept)), f"{site.name} changed its state in place"
    assert set(vars(model.stream)) == attributes, "the stream grew an attribute during a forward"
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), f"a forward changed {key}"


@law
def law_checkpointing(case: Case) -> None:
    """Gradients are the same when blocks are recomputed in the backward pass."""
    model = case.model()
    plain = _gradients(model, ids())
    _assert_same(_gradients(model, ids(), checkpointed=True), plain)


@law
def law_cut_anywhere(case: Case) -> None:
    """The state, taken to pieces and rebuilt from copies after any write, gives the same logits: a pipeline may
    cut there."""
    model = case.model()
    whole = model(ids())

    def rebuilt(flow: Flow) -> Flow:
        return Flow(pytree.tree_map(torch.clone, Runner.cut(flow)))

    for model.execution in (PLAIN, GROUPED):
        *_, head = model.walk(ids(), between=rebuilt)
        assert_close(model.logits(head.read.lanes[0]), whole, "logits after cuts")


@law
def law_execution(case: Case) -> None:
    """However its reads are executed, singly or several in one pass, the network and its gradients are the same."""
    model = case.model()
    model.execution = PLAIN
    whole, plain = model(ids()), _gradients(model, ids())
    ways = (GROUPED, replace(GROUPED, group=3)) if model.stream.attends else ()
    for model.execution in ways:
        with torch.no_grad():
            assert_close(model(ids()), whole, "logits without gradients")
        for checkpointed in (False, True):
            _assert_same(_gradients(model, ids(), checkpointed=checkpointed), plain)


@law
def law_gradient_mode(case: Case) -> None:
    """Gradients may be switched off and on at any site (a frozen lower half, features taken from the middle): those
    that are wanted are the same however reads are executed."""
    model, tokens = case.model(), ids()
    count = len(model.plan.sites)
    patterns = [lambda site, first=first: site.index >= first for first in range(1, count)]
    patterns += [lambda site, odd=odd: site.kind == "head" or site.index % 2 == odd for odd in (0, 1)]

    def gradients(graded: Callable[[Site], bool]) -> dict[str, Tensor]:
        readers = iter(model.plan.readers)

        def switched(flow: Flow) -> Flow:
            torch.set_grad_enabled(graded(next(readers)))
            return flow

        model.zero_grad()
        with torch.enable_grad():  # and as it was, afterwards
            *_, head = model.walk(tokens, between=switched)
            token_loss(model.logits(head.read.lanes[0]), tokens.roll(-1, 1)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for pattern in patterns if model.stream.attends else patterns[:1]:
        model.execution = PLAIN
        plain = gradients(pattern)
        model.execution = GROUPED
        found = gradients(pattern)
        for name, parameter in model.named_parameters():
            # a query that a pass was begun with, and whose site then ran without gradients, has zeros and not None
            none = torch.zeros_like(parameter)
            assert name not in plain or name in found, f"{name} has lost its gradient"
            assert_close(found.get(name, none), plain.get(name, none), f"gradient of {name}", gradient=True)


@law
def law_decode(case: Case) -> None:
    """Token by token, and in chunks, with a cache: the logits of the full forward. An encoder refuses."""
    model, tokens = case.model(), ids()
    kept = model.stream.past(list(walk(model, tokens))[-1][1])
    assert (kept is not None) == model.stream.mixes_tokens, "a design keeps a past if and only if it mixes tokens"
    if not case.causal:
        try:
            with torch.no_grad():
                model(tokens, cache=Cache())
        except ValueError:
            return
        raise AssertionError("an encoder took a cache")
    with torch.no_grad():
        whole = model(tokens)
        for chunks in ([1] * 9, [2, 1, 5, 1], [7, 2], [6, 3]):
            cache = Cache()
            parts = [model(part, cache=cache) for part in tokens.split(chunks, 1)]
            assert_close(torch.cat(parts, 1), whole, f"logits decoded in chunks of {chunks}")


@law
def law_causal(case: Case) -> None:
    """A token changes no logit before it, and some from it on; in an encoder it changes some before it."""
    model, tokens = case.model(), ids()
    with torch.no_grad():
        whole = model(tokens)
        for place in (0, 4, 8):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 23
            gap = (model(changed) - whole).abs().amax((0, 2))
            assert gap[place:].max() > 1e-9, f"token {place} changes nothing"
            if case.causal:
                assert not place or gap[:place].max() == 0, f"token {place} changes logits before it"
            else:
                assert not place or gap[:place].max() > 1e-9, f"token {place} is unseen by an encoder's earlier tokens"


@law
def law_every_parameter_learns(case: Case) -> None:
    """Three optimizer steps from the declared start move every parameter (a zero gate first, its query after),
    by gradients that are no rounding noise; so a parameter that cannot move does not exist."""
    model = case.model(moved=False, eps=1e-30)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    felt = dict.fromkeys(start, 0.0)
    for _ in range(3):
        for name, gradient in _gradients(model, ids()).items():
            felt[name] = max(felt[name], gradient.abs().max().item())
        optimizer.step()
    largest = max(felt.values())
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, start[name]), f"{name} has not moved"
        assert felt[name] > 1e-12 * largest, f"{name} is moved by rounding alone: gradient {felt[name]:.1g}"


@law
def law_weights_reproduce_the_read(case: Case) -> None:
    """base + scale * sum_n weights[n] values[n] is what `read` hands to the norm, with one weight per source."""
    model = case.model()
    for site, state, _ in walk(model, ids()):
        routing, sources = model.stream.routing(state, site), model.stream.sources(site)
        weights = model.stream.weights(state, site)
        if routing is None:
            assert not sources, f"{site.name} names sources but has no routing"
            assert weights is None
            continue
        assert len(sources) == len(set(sources)), f"{site.name} names a source twice: {sources}"
        counts = len(sources), len(routing.values), routing.weights.shape[1]
        assert len(set(counts)) == 1, f"{site.name}: {counts} names, values and weights"
        assert routing.weights.shape[2:4] == ids().shape, (
            f"{site.name}: weights of shape {tuple(routing.weights.shape)}"
        )
        assert weights is not None, f"{site.name} has a routing but no weights"
        assert torch.equal(weights, routing.weights)
        raw = torch.stack(model.stream.read(state, site, lambda *lanes: lanes).lanes)
        assert_close(routing.mixed(), raw, f"the read of {site.name} from its weights")


@law
def law_starts_as_declared(case: Case) -> None:
    """Untrained, the design is the standard network, or is up to eps, or is not: exactly as `starts` says."""
    starts = case.model(moved=False).stream.starts
    settings: dict[str, Any] = {"eps": 1e-30} if starts == "eps" else {}
    own = case.model(moved=False, **settings)(ids())
    plain = Case("standard", case.layout, case.causal).model(moved=False, **settings)(ids())
    gap = error(own, plain)
    if starts == "no":
        assert gap > 1e-6, f"declared not to start as the standard network, but is within {gap:.1g} of it"
    else:
        assert gap < 1e-12, f"declared to start as the standard network ({starts}), but is {gap:.3g} off"


@law
def law_start_survives_a_framework(case: Case) -> None:
    """`reset` restores the start whatever was done to the parameters, and a blanket re-initialisation of linear
    layers and embeddings never touches them."""
    model = Transformer(case.config())
    fresh = {k: v.clone() for k, v in model.stream.state_dict().items()}

    def blanket(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight)

    model.apply(blanket)
    for key, value in model.stream.state_dict().items():
        assert torch.equal(value, fresh[key]), f"re-initialising linear layers changed stream.{key}"
    with torch.no_grad():
        for parameter in model.stream.parameters():
            parameter.normal_()
    model.initialise(0)
    for key, value in model.stream.state_dict().items():
        assert torch.equal(value, fresh[key]), f"reset did not restore stream.{key}"


@law
def law_configuration_round_trips(case: Case) -> None:
    """The spec string and the JSON form both build the same design again."""
    stream = case.model().stream
    for again in (build(stream.spec, stream.plan), build(stream.config, stream.plan)):
        assert again.config == stream.config, f"{stream.config} came back as {again.config}"
        assert again.spec == stream.spec
        assert again.state_dict().keys() == stream.state_dict().keys()
    changed = ModelConfig.from_json(case.config().to_json())
    assert changed == case.config()


@law
def law_sizes_are_true(case: Case) -> None:
    """Counted from the plan without allocating: the parameters, state and cache that a real forward has."""
    model, sizes = case.model(dtype=torch.float32), sizes_of(case.config(), tokens=9)
    assert sizes.parameters == sum(p.numel() for p in model.parameters())
    assert sizes.stream_parameters == sum(p.numel() for p in model.stream.parameters())
    tokens = ids()
    for model.execution in (PLAIN, GROUPED):
        for step in model.walk(tokens):
            unique = {id(leaf): leaf for leaf in pytree.tree_leaves(step.after)}
            found = sum(leaf.numel() for leaf in unique.values() if leaf.shape[1] == tokens.shape[1])
            if step.y is not None:
                assert sizes.state_floats[step.site.name] * tokens.numel() == found, f"state after {step.site.name}"
    if case.causal:
        cache = Cache()
        with torch.no_grad():
            model(tokens, cache=cache)
        positions = sum(memory.positions.nbytes for memory in cache._slots.values() if hasattr(memory, "positions"))
        assert sizes.cache_floats * 4 * len(tokens) == cache.nbytes - positions, "decode cache"


@law
def law_bfloat16(case: Case) -> None:
    """bfloat16 loses 16 bits against float32 and nothing else: its error is 2^16 times float32's, and gradients stay
    finite. A fixed bound would judge the conditioning of a network and not its code: deep DDL stacks magnify any
    rounding a hundredfold. Measured over all cases: 0.09 to 2.05 times 2^16; 4 is allowed.
    """
    exact = case.model()(ids())
    narrow = case.model(dtype=torch.bfloat16)
    lost, float32 = error(narrow(ids()), exact), error(case.model(dtype=torch.float32)(ids()), exact)
    assert lost <= 4 * 2**16 * float32, f"error {lost:.3g} in bfloat16 against {float32:.3g} in float32"
    for name, gradient in _gradients(narrow, ids()).items():
        assert gradient.isfinite().all(), f"gradient of {name} is not finite in bfloat16"


def _in_graphs(entry: str) -> bool:
    """Whether an entry point of the native library is that of an operator of compiled code."""
    op = entry.removeprefix("residua_").removesuffix("_backward").removesuffix("_gradient")
    return hasattr(torch.ops.residua, op)


@law
def law_one_graph(case: Case) -> None:
    """torch.compile sees the whole model as one graph with no break, forward and backward, with equal results; the
    graph calls the kernels that eager code calls, but for those that a compiler is to fuse itself."""
    import torch._dynamo

    # float64: in float32 an ill-conditioned gradient (MUDD's W1 and W2) is 0.5 to 2.5 % off whichever form of an op
    # computes it, and eager kernels and compiled references round apart
    model = case.model(depth=2)  # tracing takes seconds a block
    with counted() as eager:
        plain = _gradients(model, ids())
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")  # a module, typed as a function
    assert_close(compiled(ids()), model(ids()), "compiled logits")
    with counted() as graph:
        found = _gradients(compiled, ids())
    called, expected = ({name: count for name, count in calls.items() if _in_graphs(name)} for calls in (graph, eager))
    assert called == expected, f"kernels called {called}, in eager code {expected}"
    _assert_same({name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}, plain)
    torch._dynamo.reset()
