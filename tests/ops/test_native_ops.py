"""Every kernel in C against its reference: answers, gradients, types, layouts, threads, transforms."""

import threading

import pytest
import torch

from residua import ops
from residua.native import library
from residua.testing import TOLERANCE, assert_close, error
from tests.native.table import OPS, SIZES, gradients, projection, variants

ops_table = pytest.mark.parametrize("op", OPS, ids=str)
KERNEL = {"name": "cpu", "strict": True}


def both(op, inputs):
    """Answers and gradients of the kernel on `inputs` and of the reference on the same numbers in float64."""
    exact = [one.detach().double().requires_grad_(one.requires_grad) for one in inputs]
    with ops.backend("reference"):
        expected = gradients(op, exact)
    with ops.backend(**KERNEL):
        return gradients(op, inputs), expected


def agree(op, inputs):
    (outputs, slopes), (expected, expected_slopes) = both(op, inputs)
    for one, other in zip(outputs, expected, strict=True):
        assert one.dtype == (torch.float32 if op.wide and one.dtype != torch.float64 else inputs[0].dtype)
        assert_close(one, other, f"{op}", gradient=False)
    for position, (one, other) in enumerate(zip(slopes, expected_slopes, strict=True)):
        assert (one.dtype, one.shape) == (inputs[position].dtype, other.shape)
        if one.numel():
            assert_close(one, other, f"{op}: gradient {position}", gradient=True)


@variants
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@ops_table
def test_native_equals_the_reference(op, size, dtype, instructions):
    inputs = op.draw(*size, dtype=dtype, grad=True)
    with library.instructions(instructions):
        assert library.status()["instructions"] == instructions
        agree(op, inputs)


@ops_table
def test_native_float32_error_is_within_the_bar(op):
    """2e-6 against float64, over many tokens, where sums are long; gradients too."""
    (outputs, slopes), (expected, expected_slopes) = both(op, op.draw(2, 300, 64, torch.float32, grad=True))
    for one, other in zip((*outputs, *slopes), (*expected, *expected_slopes), strict=True):
        assert not one.numel() or error(one, other) <= 2e-6


@ops_table
def test_native_gradients_are_exact(op):
    with ops.backend(**KERNEL):
        assert torch.autograd.gradcheck(op.call, op.draw(2, 3, 5, grad=True))


@ops_table
def test_native_second_derivatives_are_exact(op):
    with ops.backend(**KERNEL):
        assert torch.autograd.gradgradcheck(op.call, op.draw(1, 2, 3, grad=True))


@ops_table
def test_native_without_gradients_gives_the_same_bits(op):
    inputs = op.draw(2, 3, 19, torch.float32, grad=True)
    with ops.backend(**KERNEL):
        expected = op.run(*inputs)
        with torch.no_grad():
            assert all(map(torch.equal, op.run(*inputs), expected))
        with torch.inference_mode():
            assert all(map(torch.equal, op.run(*inputs), expected))


@ops_table
def test_native_makes_only_the_gradients_that_are_wanted(op):
    inputs = op.draw(2, 3, 19, torch.float32, grad=True)
    with ops.backend(**KERNEL):
        _, every = gradients(op, inputs)
        for position in range(len(inputs)):
            alone = [one.detach().requires_grad_(place == position) for place, one in enumerate(inputs)]
            outputs = op.run(*alone)
            (slope,) = torch.autograd.grad(outputs, alone[position], projection(outputs))
            assert torch.equal(slope, every[position])


def strided(tensor):
    """The same numbers with every stride changed."""
    wide = torch.full([2 * size + 1 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def misaligned(tensor):
    """The same numbers at an address that is no multiple of their size."""
    raw = bytearray(tensor.numel() * tensor.element_size() + 8)
    start = next(at for at in range(8) if torch.frombuffer(raw, dtype=torch.uint8, offset=at).data_ptr() % 2)
    view = torch.frombuffer(raw, dtype=torch.uint8, offset=start)[: tensor.numel() * tensor.element_size()]
    view = torch.frombuffer(raw, dtype=tensor.dtype, offset=start, count=tensor.numel()).view(tensor.shape)
    view.copy_(tensor)
    assert tensor.numel() == 0 or view.data_ptr() % tensor.element_size()
    return view


@pytest.mark.parametrize("change", [strided, misaligned])
@ops_table
def test_native_reads_any_layout(op, change):
    inputs = op.draw(2, 3, 19, torch.float32)
    changed = [change(one) if one.numel() else one for one in inputs]
    with ops.backend(**KERNEL):
        expected = gradients(op, [one.requires_grad_() for one in inputs])
        found = gradients(op, [one.requires_grad_() for one in changed])
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [(2, 0, 5), (0, 3, 5), (0, 0, 5)], ids=str)
@ops_table
def test_native_of_no_tokens_is_nothing(op, size):
    inputs = op.draw(*size, dtype=torch.float32, grad=True)
    with ops.backend("reference"):
        expected, expected_slopes = gradients(op, inputs)
    with ops.backend(**KERNEL):
        found, slopes = gradients(op, inputs)
    assert [one.shape for one in found] == [one.shape for one in expected]
    for one, other in zip(slopes, expected_slopes, strict=True):
        assert torch.equal(one, other if other is not None else torch.zeros_like(one))


@ops_table
def test_native_gives_the_same_answer_on_any_number_of_threads(op, monkeypatch):
    monkeypatch.setattr(library, "GRAIN", 1)
    inputs = op.draw(2, 37, 19, torch.float32, grad=True)
    with ops.backend(**KERNEL):
        expected, expected_slopes = gradients(op, inputs)
        for threads in (2, 5, 100):
            torch.set_num_threads(threads)
            assert library.threads(10**9) == threads
            found, slopes = gradients(op, inputs)
            assert all(map(torch.equal, found, expected))
            for one, other in zip(slopes, expected_slopes, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@ops_table
def test_native_serves_two_python_threads_at_once(op):
    inputs = op.draw(2, 37, 19, torch.float32)
    with ops.backend(**KERNEL):
        expected = gradients(op, [one.requires_grad_() for one in inputs])
        wrong = []

        def work():
            for _ in range(5):
                found = gradients(op, [one.detach().requires_grad_() for one in inputs])
                if not all(map(torch.equal, (*found[0], *found[1]), (*expected[0], *expected[1]))):
                    wrong.append(found)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


@pytest.mark.parametrize("op", [op for op in OPS if not op.made], ids=str)
def test_native_keeps_no_more_than_what_flows_anyway(op):
    """Between forward and backward: the inputs, or an output."""
    inputs, kept = op.draw(2, 3, 19, torch.float32, grad=True), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with ops.backend(**KERNEL), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = op.run(*inputs)
    known = {one.untyped_storage().data_ptr() for one in (*inputs, *outputs)}
    assert all(one.untyped_storage().data_ptr() in known for one in kept)


@ops_table
def test_native_backward_runs_twice(op):
    inputs = op.draw(2, 3, 19, torch.float32, grad=True)
    with ops.backend(**KERNEL):
        total = sum(one.sum() for one in op.run(*inputs))
        first = torch.autograd.grad(total, inputs, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(total, inputs)))


@ops_table
def test_native_serves_half_precision_in_float32(op):
    inputs = op.draw(2, 3, 19, torch.float16)
    with ops.backend(**KERNEL):
        for one, other in zip(op.run(*inputs), op.run(*(one.float() for one in inputs)), strict=True):
            assert torch.equal(one, other.to(one.dtype))


@ops_table
def test_native_leaves_transforms_to_torch(op):
    """jacrev and vmap look into torch's operations, where C would be a hole."""
    inputs = op.draw(1, 2, 3)
    with ops.backend(**KERNEL):
        by_rows = torch.func.jacrev(lambda one: op.run(one, *inputs[1:])[0])(inputs[0])
        copied = torch.func.vmap(lambda one: op.run(one, *inputs[1:])[0])(torch.stack([inputs[0]] * 2))
        expected = op.run(*inputs)[0]
        slow = torch.autograd.functional.jacobian(lambda one: op.run(one, *inputs[1:])[0], inputs[0])
    assert_close(by_rows, slow, gradient=True)
    assert_close(copied, torch.stack([expected] * 2))


@pytest.mark.slow
@ops_table
def test_native_is_one_graph_to_a_compiler(op):
    torch._dynamo.reset()  # the ops share the code of `run`, and a compiler gives up on code with too many guises
    inputs = op.draw(2, 3, 19, torch.float32, grad=True)
    with ops.backend(**KERNEL):
        expected = op.run(*inputs)
        found = torch.compile(op.run, fullgraph=True, backend="aot_eager")(*inputs)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.mix(torch.ones(0), ()), "at least one source"),
        (lambda x: ops.mix(torch.ones(2), (x, x[:, :1])), "sources of one shape"),
        (lambda x: ops.mix(torch.ones(1, 1, 1, 1, 1), (x,)), "weights"),
        (lambda x: ops.mix(torch.ones(3), (x,)), "expand"),
        (lambda x: ops.delta_write(x[:, :, None], x[:, :1], x[..., :1], x[..., 0], eps=1.0), "k is"),
        (lambda x: ops.remix(x, x[..., None]), "remix takes"),
        (lambda x: ops.sinkhorn(x), "square"),
        (lambda x: ops.shortconv(x, x, torch.ones(2, 4)), "tail of 1 tokens"),
        (lambda x: ops.shortconv(x, x[:, :1], torch.ones(2, 3)), "taps"),
        (lambda x: ops.rms_norm(x, 1e-6, torch.ones(3)), "gain"),
        (lambda x: ops.token_attend(x, x, x[:, :1], width=2), "token_attend takes"),
        (lambda x: ops.token_attend(x[..., :2], x, x, width=2), "multiple of the 2"),
    ],
)
def test_native_refuses_shapes_that_do_not_fit(call, message):
    with ops.backend(**KERNEL), pytest.raises((ValueError, RuntimeError), match=message):
        call(torch.ones(2, 3, 4))


@pytest.mark.parametrize("wrong", [torch.ones(1, 2, 3, dtype=torch.int64), torch.ones(1, 2, 3).to_sparse()])
def test_native_declines_what_it_cannot_read(wrong):
    with ops.backend(**KERNEL), pytest.raises(RuntimeError, match=r"int64 has no kernel|sparse"):
        ops.mix(torch.ones(1), (wrong,))


def test_native_promotes_mixed_types():
    narrow, wide = torch.ones(1, 2, 3, dtype=torch.bfloat16), torch.full((1, 2, 3), 2**-10)
    with ops.backend(**KERNEL):
        assert ops.mix(torch.ones(2), (narrow, wide)).unique().tolist() == [1 + 2**-10]
        assert ops.shortconv(narrow, narrow[:, :0], wide[0, :1]).dtype == torch.float32


def test_native_delta_write_repeats_a_shared_row():
    """The first write of a design with several channels: one embedding row stands for all of them."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    rest = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.rand(2, 3)
    with ops.backend(**KERNEL):
        shared = ops.delta_write(x.unsqueeze(2).expand(-1, -1, 4, -1), *rest, eps=1e-5)
        copied = ops.delta_write(x.unsqueeze(2).repeat(1, 1, 4, 1), *rest, eps=1e-5)
    assert torch.equal(shared, copied)
    slopes = [torch.autograd.grad(one.square().sum(), x)[0] for one in (shared, copied)]
    assert torch.equal(*slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [40.0, 90.0, 400.0, 1000.0])
def test_native_sinkhorn_survives_logits_that_underflow(spread, dtype):
    """exp(-90) is 0 in float32 and exp(-1000) in float64: such matrices are done in logarithms."""
    logits = (torch.randn(9, 4, 4, generator=torch.Generator().manual_seed(1)) * spread).to(dtype).requires_grad_()
    weights = torch.randn(9, 4, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = ops.sinkhorn(logits, iterations=12)
    with ops.backend("reference"):
        exact = logits.detach().double().requires_grad_()
        expected = ops.sinkhorn(exact, iterations=12)
    assert found.isfinite().all()
    assert_close(found, expected)
    (slope,) = torch.autograd.grad(found, logits, weights)
    (expected_slope,) = torch.autograd.grad(expected, exact, weights.double())
    assert (slope - expected_slope).abs().max() < (1e-5 if dtype == torch.float32 else 1e-12)


def test_native_streams_large_gradients_past_the_cache():
    """Above 8 MiB of gradients the stores change, not the numbers."""
    from residua.ops.mix.native import STREAM

    sources = tuple(torch.randn(1, 1100, 512, requires_grad=True) for _ in range(4))
    assert sum(source.nbytes for source in sources) > STREAM
    weights = torch.randn(4, 1, 1100, requires_grad=True)
    found = torch.autograd.grad(ops.mix(weights, sources).square().sum(), (weights, *sources))
    with ops.backend("reference"):
        expected = torch.autograd.grad(ops.mix(weights, sources).square().sum(), (weights, *sources))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, gradient=True)
