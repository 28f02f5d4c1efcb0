"""restore(model): the base of a converted model whose stream does nothing, under its own type and keys again.

A design at its start is the base network; one that training left there, or brought back, still is. That is checked as a
conversion is, and a model whose logits would move is refused.
"""

from __future__ import annotations

import torch

from residua.hf.anatomy import PREFIX, Config, Model, Tokenizer
from residua.hf.defaults import BOUND

ADDED = (
    "model_type",
    "transformers_version",
    "architectures",
    "auto_map",
    "stream",
    "layout",
    "anatomy",
    "identity",
    "base",
)
"""What a converted config has of its own, or says otherwise than the base's."""


def restore(model: Model, *, tokenizer: Tokenizer = None) -> Model:
    """The base network of a converted model, which shares its tensors; the model itself stays as it is.

    Raises ValueError where the logits differ by more than the bound under which the model was converted.
    """
    from residua.hf.identity import answers, batches, in_float32

    if not str(model.config.model_type).startswith(PREFIX):
        raise ValueError(f"this model is a plain {model.config.model_type}; there is no stream to take out of it")
    plain = _without_stream(model)
    ids = batches(model, tokenizer)
    with in_float32(model):
        plain.eval()
        before, after = answers(model, ids), answers(plain, ids)
    plain.train(model.training)
    gap = max(
        ((after[name] - before[name]).abs().max() / before[name].square().mean().sqrt().clamp_min(1e-30)).item()
        for name in ids
    )
    bound = max(BOUND, (model.config.identity or {}).get("bound", 0.0))
    if not gap <= bound:
        raise ValueError(
            f"without its stream, {model.base_model.stream.spec}, this model is another network: "
            f"max |logit difference| / rms {gap:.2g}, bound {bound:.2g}; nothing is kept"
        )
    return plain


def _without_stream(model: Model) -> Model:
    """A model of the base's class, on the tensors of this one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = model.config
    values = {key: value for key, value in config.to_dict().items() if key not in ADDED}
    made: Config = CONFIG_MAPPING[config.model_type.removeprefix(PREFIX)].from_dict(values)
    made._attn_implementation, made._experts_implementation = (
        config._attn_implementation,
        config._experts_implementation,
    )
    with torch.device("meta"):
        plain: Model = type(model).__bases__[-1](made)
    tensors = model.state_dict(keep_vars=True)
    plain.load_state_dict({name: tensors[name] for name in plain.state_dict()}, assign=True)
    theirs = dict(model.named_modules())
    for name, module in plain.named_modules():
        module._buffers.update(theirs[name]._buffers)  # those that no state holds, such as the angles of positions
    plain.generation_config = getattr(model, "generation_config", None)
    return plain
