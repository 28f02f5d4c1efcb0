"""A kind of sublayer is declared once: layouts, models, their costs and, where it can be inserted, hf then know it."""

from typing import get_args, get_type_hints

import pytest
import torch

from residua import plan
from residua.hf import insert
from residua.hf.convert import convert
from residua.lab.cost import predict
from residua.model import ModelConfig, Transformer, sizes_of, sublayers
from residua.model.local import LOCALS
from residua.plan import LANES, Plan, declare
from tests.hf.models import base, ids


@pytest.fixture
def forget():
    """Takes back what a test declares."""
    tables = (plan._lanes, sublayers.SUBLAYERS, insert.KINDS)
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


def test_every_kind_has_a_class_and_every_class_a_kind():
    assert sublayers.SUBLAYERS.keys() == LANES.keys()
    assert insert.KINDS.keys() == LANES.keys() - {"attn", "mlp"}
    local = get_args(get_type_hints(sublayers.Attention.__init__)["local"])
    assert set(local) == {"none", *LOCALS}


def test_new_kind_is_one_class(forget):
    class Scaled(sublayers.Sublayer, kind="scaled", lanes=1):
        """y = by gain x."""

        def __init__(self, config, site, feeds, *, by: float = 1.0):
            super().__init__(config, site, feeds)
            self.by, self.gain = by, torch.nn.Parameter(torch.ones(config.width))

        def forward(self, x, *, context):
            return self.by * self.gain * x

        def flops(self, tokens):
            return 2 * len(self.gain)

    assert [site.name for site in Plan.regular(8, 1, "scaled,mlp").sites] == ["l0_scaled", "l0_mlp"]
    config = ModelConfig(vocab=16, width=8, depth=2, heads=2, layout="scaled:by=0.5,attn,mlp", design="delta")
    model = Transformer(config)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert model.blocks[0].sublayers[0].gain.grad.abs().sum() > 0
    assert sizes_of(config, 4).parameters == predict(config, 4).parameters
    with pytest.raises(TypeError, match=r"layout item scaled:to=2: .*'to'"):
        Transformer(ModelConfig(vocab=16, width=8, depth=1, heads=2, layout="scaled:to=2"))
    with pytest.raises(ValueError, match="there is no scaled here; choose from swa, canon, conv"):
        convert(base("llama"), "standard", layout="scaled,attn,mlp", say=None)

    class InsertedScaled(insert.Inserted, kind="scaled"):
        """y = gain x, nothing at first."""

        def __init__(self, config, site):
            super().__init__(config, site)
            self.by = torch.nn.Parameter(torch.zeros(config.hidden_size))

        def forward(self, *lanes, mask, kept):
            return self.by * lanes[0]

        def writer(self):
            return self.by

    made = convert(base("llama"), "standard", layout="scaled,attn,mlp", say=None)
    made(ids()).logits.sum().backward()
    added = [each for each in made.modules() if isinstance(each, InsertedScaled)]
    assert added
    assert all(each.by.grad.abs().sum() > 0 for each in added)


def test_kind_is_declared_once(forget):
    with pytest.raises(ValueError, match="'swa' takes 3 lanes, not 1"):
        declare("swa", 1)
    with pytest.raises(ValueError, match="is a word and takes at least one lane"):
        declare("two words", 1)
    with pytest.raises(ValueError, match="unknown sublayer 'other'; a new kind also says its lanes"):
        type("Other", (sublayers.Sublayer,), {}, kind="other")
    with pytest.raises(ValueError, match="'mlp' is MLP already"):
        type("Other", (sublayers.Sublayer,), {}, kind="mlp")
