"""finetune(config, out): a Hugging Face checkpoint through the loop of `residua train`.

The same batches, schedule, checkpoints, resume and safety; two rates, because what conversion added starts from
nothing and what it kept does not (the official fine-tune: 5e-5 and 5e-3). The run leaves a Hugging Face directory,
`model/`, that `from_pretrained` loads. A checkpoint that was not converted trains by its own network: the base
beside which a conversion is judged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.hf.defaults import enterable
from residua.hf.released.loans import lenders
from residua.hf.storage import check_weights, load_config, load_tokenizer, refuse_converted
from residua.lab.common.files import Listener, Values
from residua.lab.finetune_config import MODEL as MODEL
from residua.lab.finetune_config import FinetuneConfig as FinetuneConfig
from residua.lab.train import Result, train
from residua.lab.train.diverge import Diverged, explain_parameters, finite
from residua.lab.train.folder import Resume
from residua.lab.train.ranks import launched
from residua.lab.train.reproducible import device_of
from residua.lab.train.run import ONE_PROCESS
from residua.lab.train.sampler import Batch, Tokens
from residua.lab.train.subject import Subject
from residua.stream import Stream


def finetune(
    config: FinetuneConfig,
    out: Path | str,
    *,
    tokens: Tokens | None = None,
    resume: Resume = "auto",
    track: tuple[str, ...] = (),
    on_event: Listener | None = None,
) -> Result:
    """Fine-tune in directory `out`, or go on from what is there. Arguments and errors are those of `train`."""
    if launched() > 1:
        raise ValueError(ONE_PROCESS)
    found = load_config(config.checkpoint)  # what is wrong is said before a corpus is read
    if config.design is not None:
        enterable(config.design)
        refuse_converted(found)
    text = found.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    learned = getattr(text, "rope_parameters", None) is None  # rotations go on behind the longest text so far
    if learned and most is not None and config.context > most:
        raise ValueError(f"the model takes {most} tokens at most; choose a context up to that, not {config.context}")
    if Path(config.checkpoint).is_dir():
        check_weights(Path(config.checkpoint))
    listen = on_event or (lambda event: None)

    def say(line: str) -> None:
        listen({"kind": "data", "step": 0, "text": line})

    return train(
        config, out, tokens=tokens, resume=resume, track=track, on_event=on_event,
        subject=lambda made: Converted(config, made, say),
    )  # fmt: skip


class Converted(Subject):
    """A causal language model of transformers, converted or not."""

    def __init__(self, config: FinetuneConfig, tokens: Tokens, say: Callable[[str], None]) -> None:
        self.config, self.tokens = config, tokens
        kind, _, source = config.tokenizer.partition(":")
        # one that cannot be read is an error now, not after the training
        self.tokenizer = load_tokenizer(source) if kind == "hf" else None
        self.model: Any = _load(config, say).to(device_of(config))
        held = self.model.get_input_embeddings().weight.shape[0]
        used = 1 + max(int(tokens.train.max()), int(tokens.valid.max()))  # a mask token, never shown, may lie above
        if used > held:
            raise ValueError(f"tokenizer {config.tokenizer} uses {used} ids and the model has {held}; use its own")
        self.design = design_of(self.model)
        if config.freeze and self.design == "base":
            raise ValueError("freeze leaves nothing to train in a checkpoint that was not converted; name a --design")
        trained = of_stream(self.model)
        for name, parameter in self.model.named_parameters() if config.freeze else ():
            parameter.requires_grad_(is_added(name) or id(parameter) in trained)
        if config.checkpointed:
            self.model.gradient_checkpointing_enable()
        self.model.train()

    def logits(self, ids: Tensor, forward: nn.Module) -> Tensor:
        return forward(input_ids=ids, use_cache=False).logits

    def groups(self) -> Mapping[str, str]:
        return group_of(self.model)

    def describe(self) -> Values:
        return {"checkpoint": self.config.checkpoint, "design": self.design}

    def look(self, batch: Batch, logits: Tensor) -> Values:
        """How the reads are routed now: the means over sites that `compare` reports."""
        if self.design == "base":
            return {}
        from residua.lab.diagnose import record_routing

        with torch.no_grad(), record_routing(self.model, weights=False, similarity=False) as record:
            self.model(input_ids=batch.inputs, use_cache=False)
        return {"routing": record.summary()}

    def explain_loss(self, step: int, loss: float, batches: list[Batch]) -> Diverged:
        if broken := explain_parameters(self.model, step, loss):
            return broken
        where = _first_broken(self.model, batches)
        return Diverged(step, where, f"the loss is {loss}: first not finite is the output of {where}")

    def finish(self, folder: Path) -> None:
        """Leave a directory that `from_pretrained` loads, with the tokenizer it was trained with beside it."""
        scratch, target = folder / f".{MODEL}.writing", folder / MODEL
        shutil.rmtree(scratch, ignore_errors=True)
        self.model.save_pretrained(scratch)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)


def design_of(model: Any) -> str:
    """The residual design of a transformers model as a spec string; `base` for one on no stream of ours."""
    return next((module.spec for module in model.modules() if isinstance(module, Stream)), "base")


def is_added(name: str) -> bool:
    """Whether conversion added a parameter: the design's own, and inserted sublayers."""
    return "stream" in name.split(".") or "inserted" in name.split(".")


def of_stream(model: nn.Module) -> set[int]:
    """The parameters of a released model that its stream uses where they lie, by identity."""
    streams = [module for module in model.modules() if isinstance(module, Stream)]
    return {id(parameter) for stream in streams for lender in lenders(stream) for parameter in lender.parameters()}


def group_of(model: nn.Module) -> dict[str, str]:
    """The optimizer group of every parameter of a transformers model, by its name.

    The stream of a released model was trained with the rest: it goes on at the rate of the base, without decay.
    """
    head, trained = getattr(model, "get_output_embeddings", lambda: None)(), of_stream(model)
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if is_added(name):
                found[name] = "stream"
            elif module is head:
                found[name] = "head"
            elif parameter.ndim >= 2 and not isinstance(module, nn.Embedding) and id(parameter) not in trained:
                found[name] = "matrices"
            else:
                found[name] = "plain"
    return found


def _load(config: FinetuneConfig, say: Callable[[str], None]) -> Any:
    from residua.hf.released.opening import load_causal

    if config.design is not None:
        from residua.hf.convert import convert

        return convert(
            config.checkpoint, config.design, layout=config.layout, dtype=torch.float32, seed=config.seed, say=say
        )
    return load_causal(config.checkpoint, dtype=torch.float32)


def _first_broken(model: nn.Module, batches: list[Batch]) -> str:
    """The first module of a forward pass whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) and output else output
            if isinstance(tensor, Tensor) and not finite(tensor):
                found.append(name)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch.inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the cross entropy"
