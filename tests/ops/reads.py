"""Depth reads to test: their options and inputs."""

import torch

DEFAULTS = {"eps": 1e-6, "null": None, "heads": 1, "total": False, "centered": False}


def draw(n, shape=(2, 3, 12), dtype=torch.float32, seed=0, grad=True):
    """A query, a null, sources and the gradient of the read."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    query = (0.2 * torch.randn(shape[-1], generator=generator)).to(wide)
    null = torch.tensor([0.3]).to(wide)
    sources = [torch.randn(shape, generator=generator).to(dtype) for _ in range(n)]
    gradient = torch.randn(shape, generator=generator).to(dtype)
    return query.requires_grad_(grad), null.requires_grad_(grad), [x.requires_grad_(grad) for x in sources], gradient
