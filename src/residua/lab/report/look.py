"""look(model, ids): what a trained model does on one prompt: every token's weights, gradients, attention by offset.

The routing of a comparison is a mean over validation text. Here the tokens are kept apart, and the gradient of the
prompt's own loss is sent back once. The process is set so that the numbers are the same on every machine of a kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from residua import ops
from residua.lab.common.files import Values
from residua.lab.diagnose import Ablation, record_routing
from residua.lab.diagnose.attention import attention_by_offset
from residua.lab.diagnose.inspect import paths_of
from residua.lab.train import TrainConfig
from residua.lab.train.reproducible import reproducible
from residua.model import Transformer, token_loss


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    record: Values
    """As `residua compare` keeps it of a run: the summary, with gradients, and the mean weights by site."""
    weights: dict[str, Float[Tensor, "lane n t group"]]
    attention: dict[str, list[float]]
    """Site of an attention sublayer -> mean weight 0, 1, 2, ... tokens back."""
    paths: Values | None = None
    """As `residua.lab.diagnose.inspect.paths_of` has them."""
    ablation: Ablation | None = None


def look(model: Transformer, ids: Int[Tensor, "1 t"], *, named: Callable[[int], str] | None = None) -> Look:
    """Run one prompt forward and back; with names for tokens, once more for what reached the logit of each."""
    with (
        # the same sums whatever the process is set to, and the definitions of the ops
        reproducible(TrainConfig(threads=1)),
        ops.backend("reference"),
        attention_by_offset(model) as attention,
        record_routing(model, gradients=True) as record,
    ):
        logits = model(ids)
        # a decoder is asked for the next token; an encoder, which sees it, for the token itself
        loss = token_loss(logits[:, :-1], ids[:, 1:]) if model.config.causal else token_loss(logits, ids)
        if ids.shape[1] > 1 or not model.config.causal:
            loss.backward()
    model.zero_grad(set_to_none=True)
    weights = {name: each.detach()[:, :, 0] for name, each in record.weights().items()}
    means = {name: each.mean((0, 2, 3)).tolist() for name, each in weights.items()}
    found = None
    if named is not None and weights and model.config.causal:
        with reproducible(TrainConfig(threads=1)), ops.backend("reference"):
            found = paths_of(model, ids[0], named)
    return Look(record.summary() | {"mean_weights": means}, weights, attention, found)
