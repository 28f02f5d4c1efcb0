"""The depth read in C, and its stand-in in PyTorch, against the definition: outputs and every gradient, everywhere
that autograd may call them."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from residua import ops
from residua.native import library
from residua.ops.attend import cpu, linear, native, reference
from residua.testing import assert_close, error
from tests.native.table import variants
from tests.ops.reads import DEFAULTS, draw

OPTIONS = [
    {},
    {"heads": 2},
    {"total": True},
    {"centered": True},
    {"null": True},
    {"null": True, "heads": 2, "total": True, "eps": 1e-2},
    {"centered": True, "total": True},
]

SIZES = [(1, (1, 1, 8)), (2, (2, 3, 2)), (3, (1, 7, 30)), (5, (1, 9, 96)), (24, (2, 11, 64)), (70, (1, 5, 18))]


def exactly(query, null, sources, gradient, options):
    """The read and all gradients of the definition in float64."""
    inputs = [x.detach().double().requires_grad_() for x in (query, null, *sources)]
    options = DEFAULTS | options | {"null": inputs[1] if options.get("null") else None}
    read = reference.attend(inputs[0], tuple(inputs[2:]), **options)
    return read, torch.autograd.grad(read, inputs, gradient.double(), allow_unused=True)


def compare(implementation, n, shape, dtype, options, seed=0):
    query, null, sources, gradient = draw(n, shape, dtype, seed)
    given = DEFAULTS | options | {"null": null if options.get("null") else None}
    read = implementation(query, tuple(sources), **given)
    assert read.dtype == dtype
    found = torch.autograd.grad(read, [query, null, *sources], gradient, allow_unused=True)
    expected, gradients = exactly(query, null, sources, gradient, options)
    assert_close(read, expected.to(read.dtype) if dtype == torch.bfloat16 else expected, "read")
    for place, (one, other) in enumerate(zip(found, gradients, strict=True)):
        assert (one is None) == (other is None)
        if one is not None and not (n == 1 and place == 0):  # one source teaches a query nothing but rounding
            assert_close(one, other, f"gradient {place}", gradient=True)


@pytest.mark.parametrize("implementation", [cpu.attend, linear.attend], ids=["native", "linear"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_kernel_equals_the_definition(implementation, dtype, options):
    for n, shape in (
        (1, (1, 1, 8)),
        (2, (2, 3, 2)),
        (3, (1, 7, 30)),
        (5, (1, 9, 96)),
        (24, (2, 11, 64)),
        (70, (1, 5, 18)),
    ):
        compare(implementation, n, shape, dtype, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@variants
def test_every_variant_of_the_attend_kernel_equals_the_definition(dtype, instructions):
    with library.instructions(instructions):
        for options in OPTIONS:
            compare(cpu.attend, 5, (1, 9, 22), dtype, options)
            compare(cpu.attend, 6, (1, 9, 2 * 83), dtype, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_kernel_is_right_where_gradients_pass_the_cache_and_tiles_end(dtype):
    compare(cpu.attend, 9, (3, 1001, 256), dtype, {})  # 27 MB of gradients in float32, 14 in bfloat16


@pytest.mark.parametrize("implementation", [cpu.attend, linear.attend], ids=["native", "linear"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_kernel_passes_gradcheck_twice(implementation, options):
    query, null, sources, _ = draw(3, (1, 2, 4), torch.float64)

    def read(query, null, *sources):
        given = DEFAULTS | options | {"null": null if options.get("null") else None}
        return implementation(query, sources, **given)

    assert torch.autograd.gradcheck(read, (query, null, *sources))
    assert torch.autograd.gradgradcheck(read, (query, null, *sources))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attend_weights_of_the_kernel_are_those_of_the_definition(options, dtype):
    query, null, sources, _ = draw(6, dtype=dtype, grad=False)
    given = DEFAULTS | options | {"null": null if options.get("null") else None}
    found = cpu.attend_weights(query, tuple(sources), **given)
    expected = reference.weights(query, tuple(sources), **given)
    assert found.dtype == expected.dtype
    assert error(found, expected) <= (1e-14 if dtype == torch.float64 else 1e-6)


def test_attend_is_served_by_the_kernel():
    assert ops.kernels()["attend"]["cpu"] == "cpu"
    query, _, sources, _ = draw(4)
    with ops.backend("cpu", strict=True):
        found = ops.attend(query, tuple(sources))
    assert torch.equal(found, cpu.attend(query, tuple(sources), **DEFAULTS))
    assert found.grad_fn is not None
    assert "_Attend" in type(found.grad_fn).__name__


def test_attend_without_the_library_stays_linear_and_says_why(monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: (None, "no C compiler"))
    query, _, sources, gradient = draw(4)
    with ops.backend("auto", strict=True), pytest.raises(RuntimeError, match="no C compiler"):
        ops.attend(query, tuple(sources))
    with ops.backend("auto", strict=False), pytest.warns(UserWarning, match="no C compiler"):
        found = ops.attend(query, tuple(sources))
    expected, gradients = exactly(query, draw(4)[1], sources, gradient, {})
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, sources[2], gradient)[0], gradients[4], gradient=True)


# ---------------------------------------------------------------------------------------------- odd arguments


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], -1)[..., ::2],
        lambda x: x[:, :1].expand_as(x),
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    ],
    ids=["transposed", "strided", "expanded", "misaligned"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attend_kernel_takes_any_view(change, dtype):
    query, null, sources, gradient = draw(5, dtype=dtype)
    views = [change(source) for source in sources]
    read = cpu.attend(query, tuple(views), **DEFAULTS)
    expected, gradients = exactly(query, null, views, gradient, {})
    assert_close(read, expected)
    for view, one, other in zip(views, torch.autograd.grad(read, views, gradient), gradients[2:], strict=True):
        assert_close(one, other, gradient=True)
        assert one.shape == view.shape


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 3, 8), (0, 0, 8)])
def test_attend_kernel_reads_nothing_from_no_tokens(shape):
    query, _, sources, gradient = draw(3, shape)
    read = ops.attend(query, tuple(sources))
    assert read.shape == shape
    of_query, *rest = torch.autograd.grad(read, [query, *sources], gradient)
    assert not of_query.any()
    assert all(one.shape == shape for one in rest)


def test_attend_refuses_no_sources_and_declines_unlike_ones():
    query, _, sources, _ = draw(3)
    with pytest.raises(ValueError, match="at least one source"):
        ops.attend(query, ())
    for odd in (sources[0].double(), sources[0][:, :2], sources[0][..., :8]):
        with pytest.raises(ops.Unsupported, match="unlike the first"):
            cpu.attend(query, (*sources, odd), **DEFAULTS)
    with pytest.raises(ops.Unsupported, match="query of shape"):
        cpu.attend(query[:4], tuple(sources), **DEFAULTS)
    with pytest.raises(ops.Unsupported, match="heads"):
        cpu.attend(query, tuple(sources), **DEFAULTS | {"heads": 5})
    with pytest.raises(ops.Unsupported, match="float16"):
        cpu.attend(query, tuple(source.half() for source in sources), **DEFAULTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attend_kernel_keeps_not_a_number_and_survives_huge_logits(dtype):
    query, _, sources, _ = draw(4, dtype=dtype, grad=False)
    sources[1][0, 1] = float("nan")
    read = cpu.attend(query, tuple(sources), **DEFAULTS)
    assert read[0, 1].isnan().all()
    assert read[0, 0].isfinite().all()
    sources[1][0, 1] = 0
    assert cpu.attend(1e6 * query, tuple(sources), **DEFAULTS).isfinite().all()


# --------------------------------------------------------------------------------------------------- autograd


def test_attend_kernel_gives_gradients_to_a_subset_of_its_inputs():
    query, null, sources, gradient = draw(6)
    _, gradients = exactly(query, null, sources, gradient, {})
    read = ops.attend(query, tuple(sources))
    for place in (0, 3, 5):
        (found,) = torch.autograd.grad(read, sources[place], gradient, retain_graph=True)
        assert_close(found, gradients[2 + place], gradient=True)
    frozen = [source.detach() for source in sources]
    frozen[2].requires_grad_()
    read = ops.attend(query.detach(), tuple(frozen))
    assert_close(torch.autograd.grad(read, frozen[2], gradient)[0], gradients[4], gradient=True)


def test_attend_kernel_graph_can_be_used_twice_and_after_another_forward():
    query, _, sources, gradient = draw(4)
    first = ops.attend(query, tuple(sources))
    second = ops.attend(2 * query, tuple(sources[:3]))
    expected = torch.autograd.grad(ops.attend(query, tuple(sources)), sources, gradient)
    other = torch.autograd.grad(ops.attend(2 * query, tuple(sources[:3])), sources[:3], gradient)
    for _ in range(2):
        for one, same in zip(torch.autograd.grad(first, sources, gradient, retain_graph=True), expected, strict=True):
            assert torch.equal(one, same)
    (first + second).backward(gradient)
    for place, source in enumerate(sources):
        both = expected[place] + other[place] if place < 3 else expected[place]
        assert_close(source.grad, both, gradient=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_attend_kernel_can_be_recomputed(reentrant):
    query, _, sources, gradient = draw(4)
    expected = torch.autograd.grad(ops.attend(query, tuple(sources)), [query, *sources], gradient)
    read = checkpoint(lambda query, *rest: ops.attend(query, rest), query, *sources, use_reentrant=reentrant)
    read.backward(gradient)
    for one, other in zip((query, *sources), expected, strict=True):
        assert torch.equal(one.grad, other)


def test_attend_kernel_gradients_pass_through_hooks_once():
    query, _, sources, gradient = draw(3)
    expected = torch.autograd.grad(ops.attend(query, tuple(sources)), sources, gradient)
    seen = []
    sources[1].register_hook(lambda one: seen.append(one.clone()) or 2 * one)
    ops.attend(query, tuple(sources)).backward(gradient)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected[1])
    assert torch.equal(sources[1].grad, 2 * expected[1])
    assert torch.equal(sources[2].grad, expected[2])


def test_attend_kernel_is_clean_after_an_exception_in_mid_backward():
    query, _, sources, gradient = draw(3)
    middle = [1.0 * source for source in sources]
    read = ops.attend(query, (*middle, ops.attend(query, tuple(middle))))
    expected = torch.autograd.grad(read, [query, *sources], gradient, retain_graph=True)

    def fail(one):
        raise RuntimeError("stop here")

    handle = middle[0].register_hook(fail)
    with pytest.raises(RuntimeError, match="stop here"):
        read.backward(gradient, retain_graph=True)
    handle.remove()
    for one, other in zip(torch.autograd.grad(read, [query, *sources], gradient), expected, strict=True):
        assert torch.equal(one, other)


def test_attend_kernel_serves_two_threads_at_once():
    cases = [draw(4, (1, 257, 64), seed=seed) for seed in range(2)]
    expected = [
        torch.autograd.grad(ops.attend(query, tuple(sources)), [query, *sources], gradient)
        for query, _, sources, gradient in cases
    ]
    wrong = []

    def work(place):
        query, _, sources, gradient = cases[place]
        for _ in range(20):
            found = torch.autograd.grad(ops.attend(query, tuple(sources)), [query, *sources], gradient)
            wrong.extend(not torch.equal(one, other) for one, other in zip(found, expected[place], strict=True))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 200
    assert not any(wrong)


def test_attend_kernel_threads_give_the_same_bits_twice_and_the_right_answer(monkeypatch):
    monkeypatch.setattr(native, "threads", lambda numbers: 3)
    compare(cpu.attend, 5, (1, 101, 40), torch.float32, {})
    compare(cpu.attend, 5, (1, 2, 40), torch.float32, {"heads": 2, "null": True})
    query, _, sources, gradient = draw(5, (1, 101, 40))
    twice = [
        torch.autograd.grad(cpu.attend(query, tuple(sources), **DEFAULTS), [query, *sources], gradient) for _ in "12"
    ]
    assert all(map(torch.equal, *twice))


def test_attend_kernel_saves_no_more_than_its_inputs_its_read_and_a_number_a_token():
    query, _, sources, _ = draw(8, (1, 32, 64))
    kept = {}

    def pack(one):
        kept[one.untyped_storage().data_ptr()] = one.numel()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        read = ops.attend(query, tuple(sources))
    new = set(kept) - {one.untyped_storage().data_ptr() for one in (query, *sources)}
    assert read.untyped_storage().data_ptr() in new
    assert sum(kept[place] for place in new) == read.numel() + 32


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attend_operator_is_the_kernel_for_a_compiler(options):
    """One graph, no break, and the bits of the eager kernel."""
    query, null, sources, gradient = draw(3)
    given = options | ({"null": null} if options.get("null") else {})
    wanted = [query, *sources, *([null] if options.get("null") else [])]
    compiled = torch.compile(lambda query, *rest: ops.attend(query, rest, **given), fullgraph=True, backend="aot_eager")
    reads = compiled(query, *sources), ops.attend(query, tuple(sources), **given)
    for one, other in zip(*([read, *torch.autograd.grad(read, wanted, gradient)] for read in reads), strict=True):
        assert torch.equal(one, other)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"null": True}, {"heads": 2}, {"total": True}, {"centered": True}])
def test_attend_onto_is_the_sum_with_its_gradients(dtype, options):
    query, null, sources, gradient = draw(5, dtype=dtype)
    onto = torch.randn(sources[0].shape, generator=torch.Generator().manual_seed(9)).to(dtype).requires_grad_()
    null = null if options.get("null") else None
    leaves = [query, onto, *sources, *([] if null is None else [null])]
    given = DEFAULTS | options | {"null": null}
    found = ops.attend(query, tuple(sources), **given, onto=onto)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = reference.attend(
        wide[0], tuple(wide[2 : 2 + len(sources)]), **given | {"null": None if null is None else wide[-1]}, onto=wide[1]
    )
    assert_close(found, exact)
    ours = torch.autograd.grad(found, leaves, gradient)
    theirs = torch.autograd.grad(exact, wide, gradient.double())
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(one, other, f"gradient {place}", gradient=True)
    with torch.no_grad():
        assert torch.equal(ops.attend(query, tuple(sources), **given, onto=onto), found)


def test_attend_onto_keeps_nothing_but_what_it_was_given():
    query, _, sources, _ = draw(5)
    onto = torch.randn_like(sources[0]).requires_grad_()
    given, kept = {one.data_ptr() for one in (query, onto, *sources)}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        ops.attend(query, tuple(sources), **DEFAULTS, onto=onto)
    assert {one.data_ptr() for one in kept} <= given


def test_attend_onto_of_another_type_is_added_as_torch_adds():
    query, _, sources, _ = draw(3, dtype=torch.bfloat16)
    onto = torch.randn(sources[0].shape).requires_grad_()
    found = ops.attend(query, tuple(sources), **DEFAULTS, onto=onto)
    assert found.dtype == torch.float32
    assert torch.equal(found, onto + ops.attend(query, tuple(sources), **DEFAULTS))
