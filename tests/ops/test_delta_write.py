"""delta_write is X + beta k (v' - k'X): hand values, and the geometry of I - beta k k'."""

import math

import pytest
import torch

from residua import ops

BETAS = (0.0, 0.3, 0.5, 1.0, 1.5, 2.0)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def write(X, k, value, beta, eps=1e-12):
    """One token: X [v, d], k [d], value [v]; eps far below every hand value's digits."""
    X, k, value = (torch.as_tensor(one, dtype=torch.float64) for one in (X, k, value))
    beta = torch.tensor([[beta]], dtype=torch.float64)
    return ops.delta_write(X[None, None], k[None, None], value[None, None], beta, eps=eps)[0, 0]


def shortcut(k, beta):
    """A = I - beta k k', read off by writing the value 0 into the rows of I (A is symmetric)."""
    d = len(k)
    return write(torch.eye(d), k, torch.zeros(d), beta)


def close(a, b, tolerance=1e-12):
    b = torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    assert (a - b).abs().max().item() < tolerance, (a, b)


@pytest.mark.parametrize(
    ("X", "value", "beta", "expected"),
    [
        ([[1, 2]], [5], 0.0, [[1, 2]]),
        ([[1, 2]], [5], 0.5, [[1.84, 3.12]]),
        ([[1, 2]], [5], 1.0, [[2.68, 4.24]]),
        ([[1, 2]], [5], 1.5, [[3.52, 5.36]]),
        ([[1, 2]], [5], 2.0, [[4.36, 6.48]]),
        # [[1, 0], [2, -1]] in the paper's [d, v] layout
        ([[1, 2], [0, -1]], [5, 1], 0.5, [[1.84, 3.12], [0.54, -0.28]]),
        ([[1, 2], [0, -1]], [5, 1], 1.0, [[2.68, 4.24], [1.08, 0.44]]),
    ],
)
def test_delta_write_hand_values(X, value, beta, expected):
    close(write(X, [3, 4], value, beta), expected)


def test_delta_write_replaces_what_is_held_at_one():
    new = write([[1, 2], [0, -1]], [3, 4], [5, 1], 1.0)
    close(new @ torch.tensor([0.6, 0.8], dtype=torch.float64), [5, 1])


def test_delta_write_reflection_hand_value():
    close(shortcut([3.0, 4.0], 2.0), [[0.28, -0.96], [-0.96, -0.28]])


@pytest.mark.parametrize("beta", BETAS)
def test_delta_write_shortcut_spectrum(beta):
    A = shortcut(draw(6), beta)
    close(torch.linalg.eigvalsh(A).sort().values, sorted([1.0] * 5 + [1 - beta]))
    close(torch.linalg.det(A), 1 - beta)
    close(torch.linalg.matrix_norm(A, 2), 1.0)


def test_delta_write_shortcut_is_identity_projector_reflection():
    k, eye = draw(6), torch.eye(6, dtype=torch.float64)
    close(shortcut(k, 0.0), eye)
    close(shortcut(k, 1.0) @ shortcut(k, 1.0), shortcut(k, 1.0))
    close(shortcut(k, 2.0) @ shortcut(k, 2.0), eye)
    close(shortcut(k, 2.0) @ shortcut(k, 2.0).T, eye)


@pytest.mark.parametrize("beta", BETAS)
def test_delta_write_contracts_the_error_and_keeps_the_rest(beta):
    X, k, value = draw(3, 6), draw(6, seed=1), draw(3, seed=2)
    unit = k / k.norm()
    new = write(X, k, value, beta)
    close(new @ unit - value, (1 - beta) * (X @ unit - value))
    rest = torch.eye(6, dtype=torch.float64) - torch.outer(unit, unit)
    close(new @ rest, X @ rest)


def test_delta_write_is_idempotent_at_one_and_an_involution_at_two():
    X, k, value = draw(3, 6), draw(6, seed=1), draw(3, seed=2)
    once = write(X, k, value, 1.0)
    close(write(once, k, value, 1.0), once)
    close(write(write(X, k, value, 2.0), k, value, 2.0), X)


@pytest.mark.parametrize("beta", BETAS)
def test_delta_write_norm_identity(beta):
    x, k, value = draw(1, 6), draw(6, seed=1), draw(1, seed=2)
    held = (x[0] @ k) / k.norm()
    new = write(x, k, value, beta)
    close((new**2).sum() - (x**2).sum(), ((1 - beta) * held + beta * value[0]) ** 2 - held**2)


@pytest.mark.parametrize("beta", BETAS[1:])
def test_delta_write_recovers_the_residual_with_the_right_target(beta):
    x, h = draw(1, 6), draw(6, seed=1)
    target = (x[0] @ h) / h.norm() + h.norm() / beta
    close(write(x, h, target[None], beta), x + h)


def test_delta_write_channels_are_independent():
    X, k, value = draw(3, 6), draw(6, seed=1), draw(3, seed=2)
    apart = torch.cat([write(X[j : j + 1], k, value[j : j + 1], 0.7) for j in range(3)])
    close(write(X, k, value, 0.7), apart)
    # the same as one matrix on vec X, channel after channel: I_v (x) A
    kron = torch.kron(torch.eye(3, dtype=torch.float64), shortcut(k, 0.7))
    close(write(X, k, torch.zeros(3), 0.7).flatten(), kron @ X.flatten())


def test_delta_write_adds_eps_to_the_squared_length_once():
    # the released kernel adds d eps^2 instead, which would give 3 / sqrt(27) = 0.5774
    new = write(torch.zeros(1, 2), [3e-5, 4e-5], [1.0], 1.0, eps=1e-5)
    close(new[0, 0], 3 / math.sqrt(26))
    assert round(new[0, 0].item(), 4) == 0.5883


@pytest.mark.parametrize("length", [0.0, 1e-4, 1e-2, 1.0])
def test_delta_write_gradient_of_the_direction_is_finite_and_at_most_one_over_eps(length):
    def unit(k):
        return write(torch.zeros(1, 3), k, [1.0], 1.0, eps=1e-5)[0]  # writes k itself

    k = torch.tensor([length, 0.0, 0.0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(unit, k)
    assert jacobian.isfinite().all()
    bound = 1 / math.sqrt(length**2 + 1e-10)  # across k; along it the gradient is smaller
    close(torch.linalg.matrix_norm(jacobian, 2) / bound, 1.0)
    assert bound <= 1e5 * (1 + 1e-12)


def test_delta_write_zero_direction_writes_nothing():
    X = draw(2, 4)
    assert torch.equal(write(X, torch.zeros(4), [5.0, 1.0], 1.3, eps=1e-5), X)


def test_delta_write_gradcheck():
    arguments = [draw(2, 3, 2, 4), draw(2, 3, 4, seed=1), draw(2, 3, 2, seed=2), draw(2, 3, seed=3)]
    arguments = [one.requires_grad_() for one in arguments]
    assert torch.autograd.gradcheck(lambda *a: ops.delta_write(*a, eps=1e-3), arguments)


def test_delta_write_narrow_types_are_added_up_in_float32():
    X, k, value, beta = draw(2, 3, 2, 64), draw(2, 3, 64), draw(2, 3, 2), draw(2, 3).sigmoid()
    narrow = [one.bfloat16() for one in (X, k, value, beta)]
    out = ops.delta_write(*narrow, eps=1e-5)
    assert out.dtype == torch.bfloat16
    exact = ops.delta_write(*(one.double() for one in narrow), eps=1e-5)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()  # one rounding, at the end


def test_delta_write_no_tokens():
    out = ops.delta_write(draw(2, 0, 3, 4), draw(2, 0, 4), draw(2, 0, 3), draw(2, 0), eps=1e-5)
    assert out.shape == (2, 0, 3, 4)
