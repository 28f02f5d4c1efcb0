"""What the backbone owes every design: lanes that reach their own projections, and a start that does not grow."""

import pytest
import torch
from torch.nn import functional as F

from residua.model import ModelConfig, Transformer
from residua.testing import assert_close


@pytest.mark.parametrize("kind", ["attn", "swa:window=9:position=none"])
def test_lane_goes_through_the_projection_of_its_name(kind):
    """y = softmax(W_q q . W_k k / sqrt(e)) W_v v W_o for three inputs that are not alike."""
    config = ModelConfig(vocab=7, width=16, depth=2, heads=2, layout=f"{kind},mlp", design="mudd", init_std=0.3)
    model = Transformer(config).double()
    attention = model.blocks[1].sublayers[0]
    attention.rotary = False  # what positions do is another test's
    generator = torch.Generator().manual_seed(0)
    lanes = torch.randn(3, 2, 5, 16, generator=generator, dtype=torch.float64)
    q, k, v = (
        (lane @ projection.weight.T).unflatten(-1, (2, 8)).transpose(1, 2)
        for lane, projection in zip(lanes, (attention.q, attention.k, attention.v), strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    found = attention(*lanes, context=model.context(torch.zeros(2, 5, dtype=torch.long)))
    assert_close(found, mixed @ attention.o.weight.T, "the answer to three lanes")


@pytest.mark.parametrize("depth", [1, 8])
def test_matrices_that_write_start_smaller_by_the_root_of_their_number(depth):
    """So that the variance of what all sublayers add does not depend on the depth."""
    model = Transformer(ModelConfig(vocab=7, width=64, depth=depth, heads=2, init_std=0.3))
    for block in model.blocks:
        attention, mlp = block.sublayers
        for matrix in (attention.q, attention.k, attention.v, mlp.gate, mlp.up):
            assert abs(matrix.weight.std().item() / 0.3 - 1) < 0.05
        for matrix in (attention.o, mlp.down):
            assert abs(matrix.weight.std().item() * (2 * depth) ** 0.5 / 0.3 - 1) < 0.05
