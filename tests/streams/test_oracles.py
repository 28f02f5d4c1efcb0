"""Every design, with every case of its options, equals its paper written again as straight-line loops."""

import pytest

from tests.streams.harness import compare, specs


@pytest.mark.parametrize("layout", [("attn", "mlp"), ("mlp", "attn", "conv")], ids=",".join)
@pytest.mark.parametrize("spec", specs())
def test_design_equals_its_oracle(spec, layout):
    errors = compare(spec, layout)
    assert max(errors.values()) < 1e-10, errors
