"""A layer in float32 without its float32 copy: the same numbers as the whole layer's, one wide linear map at a time."""

import copy

import pytest
import torch
from torch import nn

from residua.hf.widened import widened


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, x):
        return x + self.scale * self.down(self.up(self.norm(x)).relu())


class ReadsWeight(Plain):
    def forward(self, x):
        return x + nn.functional.linear(self.up(self.norm(x)), self.down.weight)


class AsksForDtype(Plain):
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).to(self.down.weight.dtype)).to(x.dtype)


def made(kind, dtype):
    torch.manual_seed(0)
    return kind().to(dtype)


def wide_maps(layer):
    return [name for name in ("up", "down") if getattr(layer, name).weight.dtype == torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Plain, ReadsWeight, AsksForDtype])
def test_widened_layer_is_the_layer_in_float32(kind, dtype):
    layer, x = made(kind, dtype), torch.randn(2, 3, 8)
    before = copy.deepcopy(layer.state_dict())
    whole = copy.deepcopy(layer).float()
    with torch.no_grad(), widened(layer, lambda: layer(x)):
        assert torch.equal(layer(x), whole(x))
        assert wide_maps(layer) == ([] if kind is Plain else ["up", "down"])
    assert all(each.dtype == dtype for each in layer.state_dict().values())
    assert all(torch.equal(each, before[name]) for name, each in layer.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def test_one_linear_map_is_wide_at_a_time():
    layer, x, seen = made(Plain, torch.bfloat16), torch.randn(2, 3, 8), []
    with torch.no_grad(), widened(layer, lambda: layer(x)):
        for name in ("up", "down"):
            getattr(layer, name).register_forward_pre_hook(lambda *_: seen.append(wide_maps(layer)))
        layer(x)
    assert seen == [["up"], ["down"]]


def test_layer_is_as_it_was_after_an_error():
    layer, x = made(Plain, torch.bfloat16), torch.randn(2, 3, 8)

    def fails():
        with torch.no_grad(), widened(layer, lambda: layer(x)):
            layer.up(x[..., :5])  # refused while the map is wide

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fails()
    assert all(each.dtype == torch.bfloat16 for each in layer.state_dict().values())


def test_layer_in_float32_is_left_alone():
    layer, ran = made(Plain, torch.float32), []
    with widened(layer, lambda: ran.append(1)):
        assert not ran
    assert all(each.dtype == torch.float32 for each in layer.state_dict().values())
