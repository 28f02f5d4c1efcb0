"""Which parameter is updated how. Every parameter is in one group, and a kind of parameter without a rule is an error.

    group      what                                     rate         decay   optimizer
    matrices   weights of the sublayers' projections    lr           yes     AdamW, or Muon
    head       the output matrix, where untied          lr           yes     AdamW
    plain      embedding, norm gains, conv taps, biases lr           no      AdamW
    stream     all of the residual design's own         residual_lr  no      AdamW

Muon makes updates orthogonal, which means something only for a matrix that maps one space to another: never for
gains, embeddings, taps or what a residual design learns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from residua.lab.common.files import Values
from residua.lab.train.placement import local
from residua.lab.train.recipe import Recipe
from residua.model import Transformer
from residua.model.local import Started
from residua.model.norms import LaneNorm
from residua.model.sublayers import Canon

GROUPS = ("matrices", "head", "plain", "stream")
DECAYED = ("matrices", "head")
MUON_MOMENTUM = 0.95


def group_of(model: nn.Module) -> dict[str, str]:
    """The group of every parameter, by its name."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for own, _ in module.named_parameters(recurse=False):
            name = f"{path}.{own}"
            if name.startswith("stream."):
                found[name] = "stream"
            elif isinstance(model, Transformer) and module is model.head:
                found[name] = "head"
            elif isinstance(module, nn.Linear) and own == "weight":
                found[name] = "matrices"
            elif isinstance(module, nn.Embedding | LaneNorm | Canon | Started):
                found[name] = "plain"
            else:
                raise TypeError(f"no optimizer group for {name} of a {type(module).__name__}; give it one in optim.py")
    return found


def _alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that lie alike on the ranks of a run together: a fused update takes no others in one call."""
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "placements", None), []).append(parameter)
    return list(found.values())


class Optimizers:
    """AdamW, or Muon and AdamW, over the groups; rates are set at every step and never kept."""

    def __init__(
        self, config: Recipe, model: nn.Module, belongs: Mapping[str, str] | None = None, *, fused: bool = True
    ) -> None:
        """`belongs` names the group of every parameter; that of our own models by default."""
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
        belongs = group_of(model) if belongs is None else belongs
        for parameter, name in self.names.items():
            groups[belongs[name]].append(parameter)
        self.sizes = {name: sum(parameter.numel() for parameter in group) for name, group in groups.items()}
        """Parameters in each group."""
        described: list[Values] = [
            {
                "params": alike,
                "name": name,
                "rate": config.residual_rate if name == "stream" else config.lr,
                "weight_decay": config.weight_decay if name in DECAYED else 0.0,
            }
            for name in GROUPS
            for alike in _alike(groups[name])
        ]
        by_muon = ("matrices",) if config.optimizer == "muon" else ()
        muon = [group for group in described if group["name"] in by_muon]
        adamw = [group for group in described if group["name"] not in by_muon]
        self.all: list[torch.optim.Optimizer] = []
        if adamw:
            self.all.append(torch.optim.AdamW(adamw, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused))
        if muon:
            # matched to AdamW's update size, so that one learning rate means the same for both
            self.all.append(
                torch.optim.Muon(muon, lr=config.lr, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, factor: float) -> None:
        """Update every parameter with `factor` of its group's rate, and forget the gradients."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * factor
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # the fused kernel reads a gradient of other strides as if it were dense
                    if parameter.grad is not None and not local(parameter.grad).is_contiguous():
                        parameter.grad = parameter.grad.contiguous()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """All that the optimizers remember, as `parameter/what`."""
        held: dict[str, Tensor] = {}
        for optimizer, parameter in self._each():
            for key, value in optimizer.state[parameter].items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"{type(optimizer).__name__} keeps {key} as a {type(value).__name__}, not a tensor")
                held[f"{self.names[parameter]}/{key}"] = value
        return held

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            belongs, _, key = name.rpartition("/")
            by_name.setdefault(belongs, {})[key] = tensor
        unknown = set(by_name) - set(self.names.values())
        if unknown:
            raise ValueError(f"optimizer state for parameters this model has not: {', '.join(sorted(unknown))}")
        for optimizer, parameter in self._each():
            state = by_name.get(self.names[parameter], {})
            optimizer.state[parameter] = {key: value.to(parameter.device).clone() for key, value in state.items()}

    def room(self) -> dict[str, Tensor]:
        """Tensors like those of `tensors` after an update, whatever was done yet: for a loader to fill."""
        held: dict[str, Tensor] = {}
        for optimizer, parameter in self._each():
            name, like = self.names[parameter], parameter.detach()
            if isinstance(optimizer, torch.optim.AdamW):
                held[f"{name}/step"] = torch.zeros((), dtype=torch.float32)
                held |= {f"{name}/{moment}": torch.zeros_like(like) for moment in ("exp_avg", "exp_avg_sq")}
            else:
                held[f"{name}/momentum_buffer"] = torch.zeros_like(like)
        return held

    def _each(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter
