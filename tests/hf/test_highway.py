"""Beam's and Muse-Spark's residuals are those of transformers' own layers."""

import torch
from transformers.models.beam import modeling_beam as beam
from transformers.models.muse_spark import modeling_muse_spark as muse

import residua
from residua import Plan
from tests.streams.hand import close
from tests.streams.harness import run_stream, toy_sublayers


def ones(*shape, generator):
    return 1 + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)


class Fixed(torch.nn.Module):
    """A sublayer of our own in the place of attention or MLP."""

    def __init__(self, f, several):
        super().__init__()
        self.f, self.several = f, several

    def forward(self, x=None, hidden_states=None, **_):
        y = self.f(x if hidden_states is None else hidden_states)
        return (y, None) if self.several else y


def stacked(layers, sublayers, x):
    for place, layer in enumerate(layers):
        layer.self_attn, layer.mlp = Fixed(sublayers[2 * place], True), Fixed(sublayers[2 * place + 1], False)
        x = layer(x, position_embeddings=None)
    return x


def test_beam_is_the_released_layer():
    """transformers' decoder layers with our sublayers in them give our stream, norms and depth weights included."""
    generator = torch.Generator().manual_seed(0)
    config = beam.BeamConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
        intermediate_size=8, vocab_size=11, layer_types=["full_attention"] * 3, mlp_layer_types=["dense"] * 3,
    )  # fmt: skip
    layers = [beam.BeamDecoderLayer(config, layer).double() for layer in range(3)]
    plan = Plan.regular(8, 3)
    stream = residua.build(f"highway:form=beam,eps={config.rms_norm_eps}", plan).double()
    norms = []
    with torch.no_grad():
        for layer in layers:
            for name, site in (("attention", "attn"), ("feedforward", "mlp")):
                before = layer.input_layernorm if site == "attn" else layer.pre_feedforward_layernorm
                behind = getattr(layer, f"post_{name}_layernorm")
                for norm in (before, behind):
                    norm.weight.copy_(ones(8, generator=generator))
                stream.part(plan.site(f"l{layer.attn_residual_add_idx // 2 - 1}_{site}")).norm.gain.copy_(behind.weight)
                norms.append(before)
    sublayers = toy_sublayers(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    ours = run_stream(stream, x, sublayers, [*norms, lambda one: one])
    # that norm computes in float32 whatever it is given
    assert (ours - stacked(layers, sublayers, x)).abs().max() < 1e-5


def test_muse_is_the_released_layer():
    generator = torch.Generator().manual_seed(0)
    config = muse.MuseSparkTextConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
        intermediate_size=8, vocab_size=11, layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2,
    )  # fmt: skip
    layers = [muse.MuseSparkTextDecoderLayer(config, layer).double() for layer in range(2)]
    plan = Plan.regular(8, 2)
    released = f"temperature={config.residual_gate_temperature},eps={config.post_norm_eps}"
    assert released == "temperature=0.3,eps=1e-08"
    stream = residua.build("highway:form=muse", plan).double()
    norms = []
    with torch.no_grad():
        for place, layer in enumerate(layers):
            attention, mlp = (stream.part(site) for site in plan.block(place))
            for ours, gate in (
                (attention, layer.post_attention_residual_gate),
                (mlp, layer.post_feedforward_residual_gate),
            ):
                gate.gate.copy_(0.5 * torch.randn(8, generator=generator, dtype=torch.float64))
                ours.gate.copy_(gate.gate)
            for norm in (layer.input_layernorm, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm):
                norm.weight.copy_(ones(8, generator=generator) - 1)
            mlp.gain.copy_(1 + layer.post_feedforward_layernorm.weight)
            norms += [layer.input_layernorm, layer.pre_feedforward_layernorm]
    sublayers = toy_sublayers(plan, generator)
    x = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64)
    ours = run_stream(stream, x, sublayers, [*norms, lambda one: one])
    # those norms compute in float32 whatever they are given
    assert (ours - stacked(layers, sublayers, x)).abs().max() < 1e-5


def test_muse_gate_is_the_released_one_to_the_last_bits():
    config = muse.MuseSparkTextConfig(hidden_size=8, num_attention_heads=2)
    gate = muse.MuseSparkResidualGate(config).double()
    stream = residua.build("highway:form=muse", Plan.regular(8, 1)).double()
    part = stream.part(stream.plan.site("l0_attn"))
    values = torch.linspace(-6, 6, 8, dtype=torch.float64)  # into the clamp at the upper end
    h, y = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        gate.gate.copy_(values)
        part.gate.copy_(values)
        assert close(part.mixed(h, y), gate(h, y), 1e-15)
