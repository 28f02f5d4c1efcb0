"""Depth reads with logits from 1 to 2e8: as exact as the definition in the same type, output and every gradient."""

import pytest
import torch

from residua.native import library
from residua.ops.attend import cpu, reference
from residua.testing import TOLERANCE
from tests.native.table import variants
from tests.ops.reads import DEFAULTS

MAGNITUDES = [1, 30, 300, 2e3, 3e5, 2e8]
OPTIONS = [{}, {"null": True}, {"heads": 2}, {"total": True}, {"centered": True}, {"onto": True}]
widths = pytest.mark.parametrize("width", [18, 64])


def random(magnitude, width, sources=7):
    """A query, a null and sources whose logits are of that size: at large ones a single source has all the weight."""
    generator = torch.Generator().manual_seed(3)
    query = magnitude * torch.randn(width, generator=generator)
    return (
        query,
        torch.tensor([0.3 * magnitude]),
        [torch.randn(2, 9, width, generator=generator) for _ in range(sources)],
    )


def tied(magnitude, width):
    """As `random`, but the first two sources, and the last two, have the same logits to the last bit in any order of
    summation: whole numbers, and channels that were swapped where the query has twice the same number."""
    generator = torch.Generator().manual_seed(4)
    step = 2.0 ** round(torch.tensor(magnitude / 4).log2().item())
    query = step * torch.randint(1, 4, (width // 2,), generator=generator).float().repeat_interleave(2)
    value = torch.randint(-2, 3, (2, 9, width), generator=generator).float()
    value = value * (value @ query).sign().where((value @ query) != 0, torch.ones(())).unsqueeze(-1)
    swapped = value.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return query, torch.zeros(1), [value, swapped, -value, -swapped]


def run(read, inputs, gradient):
    """What `read` gives, and the gradients of all inputs."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    found = read(*inputs)
    return found, *torch.autograd.grad(found, inputs, gradient.to(found.dtype), allow_unused=True)


def agrees(ours, plain, inputs, what):
    """No error but such as the definition has in float32 itself, relative to the results and those at logits of zero:
    where one source has all the weight a gradient is 0, or 1e-40."""
    gradient = torch.randn(inputs[-1].shape, generator=torch.Generator().manual_seed(5))
    exact = run(plain, [one.double() for one in inputs], gradient)
    calm = run(plain, [one.double() * (place > 1) for place, one in enumerate(inputs)], gradient)
    definition, found = run(plain, inputs, gradient), run(ours, inputs, gradient)
    errors = []
    for one, other, truth, small in zip(found, definition, exact, calm, strict=True):
        assert (one is None) == (truth is None)
        if one is not None:
            errors.append([((answer - truth).norm() / (truth.norm() + small.norm())).item() for answer in (one, other)])
    inherent = max(error for _, error in errors)
    for place, (wrong, _) in enumerate(errors):
        allowed = TOLERANCE[torch.float32][place > 0] + 8 * inherent
        assert wrong <= allowed, f"{what}, result {place}: {wrong:.2g}, allowed {allowed:.2g}"


@variants
@widths
@pytest.mark.parametrize("draw", [random, tied])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_attend_is_exact_at_large_logits(magnitude, options, draw, width, instructions):
    query, null, sources = draw(magnitude, width)

    def by(attend):
        def read(query, null, *sources):
            given = DEFAULTS | options | {"null": null if options.get("null") else None}
            return attend(query, sources, **given | ({"onto": torch.zeros_like(sources[0])} if "onto" in given else {}))

        return read

    with library.instructions(instructions):
        agrees(by(cpu.attend), by(reference.attend), [query, null, *sources], f"{options}")


@variants
@widths
@pytest.mark.parametrize("draw", [random, tied])
@pytest.mark.parametrize("old", [1, 2, 3])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_attend_in_groups_is_exact_at_large_logits(magnitude, old, draw, width, instructions):
    """Two queries share a pass over the old sources; the second, twice as large, is read with those that came since."""
    query, null, sources = draw(magnitude, width)

    def ours(query, null, *sources):
        carries, same = cpu.ahead(torch.stack([query, 2 * query]), sources[:old], null.expand(2), eps=1e-6)
        merged = cpu.merge(carries[1], 2 * query, sources[old:], eps=1e-6, scale=3)
        return merged + carries[0].value + cpu.attend(query, same, **DEFAULTS)

    def plain(query, null, *sources):
        given = DEFAULTS | {"null": null}
        merged = 3 * reference.attend(2 * query, sources, **given)
        return (
            merged
            + reference.attend(query, sources[:old], **given)
            + reference.attend(query, sources[:old], **DEFAULTS)
        )

    with library.instructions(instructions):
        agrees(ours, plain, [query, null, *sources], f"{old} old sources")
