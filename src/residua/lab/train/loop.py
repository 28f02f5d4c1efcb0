"""The recipe: one update, one validation, one state. Every design goes through this and nothing else.

g = sum over batches of grad(nats of the batch) / positions of all batches
parameters <- optimizer(clip(g), lr * factor(step))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from residua.lab.common.files import Values
from residua.lab.train.checkpoint import Checkpoint
from residua.lab.train.config import TrainConfig
from residua.lab.train.meter import Meter
from residua.lab.train.optim import Optimizers
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import device_of, random_states, set_random_states
from residua.lab.train.sampler import Batch, Batches, Sampler, Tokens, checksum
from residua.lab.train.schedule import factor
from residua.lab.train.subject import OwnModel, Subject, autocast
from residua.model import token_loss


class Trainer:
    """A model and what trains it, `step` updates in. Its state is a `Checkpoint`, to the last bit."""

    def __init__(self, config: Recipe, tokens: Tokens | Batches, subject: Subject | None = None) -> None:
        """Train on a corpus, or on batches that are made elsewhere.

        `subject` is by default the model that a `TrainConfig` describes.
        """
        self.config, self.device = config, device_of(config)
        self.sampler = tokens if isinstance(tokens, Batches) else Sampler(config, tokens)
        if subject is None:
            if not isinstance(config, TrainConfig):
                raise TypeError(f"a {type(config).__name__} describes no model; hand its subject to the trainer")
            subject = OwnModel(config, self.sampler.vocab, self.device)
        self.subject, self.model = subject, subject.model
        self.forward: Any = torch.compile(self.model) if config.compile else self.model
        self.optimizers = Optimizers(config, self.model, subject.groups(), fused=subject.fused)
        self.meter = Meter(self.device)
        self.step = 0
        self.valid: Values = {}
        """The last validation."""

    def lines(self) -> Iterator[Values]:
        """Make the updates that are left, and the validations that are due after them; the line of each."""
        while self.step < self.config.steps:
            yield self.update()
            if self.due(self.config.eval_every):
                yield self.validate()

    def due(self, every: int) -> bool:
        """Whether what is done every so many steps, and after the last, is to be done now."""
        return self.step % every == 0 or self.step == self.config.steps

    def update(self) -> Values:
        """One step; its line for the metrics."""
        config, parameters = self.config, list(self.model.parameters())
        with self.meter.running():
            batches = self.sampler.batches(self.step)
            seen = checksum(batches)
            batches = [batch.to(self.device) for batch in batches]
            loss = self._backward(batches)
            if not math.isfinite(loss):
                with autocast(config, self.device):
                    raise self.subject.explain_loss(self.step + 1, loss, batches)
            total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = float(total)
            if not norm <= config.explode:
                raise self.subject.explain_gradient(self.step + 1, norm, config.explode)
            if config.clip:
                torch.nn.utils.clip_grads_with_norm_(parameters, config.clip, total)
            share = factor(config, self.step)
            self.optimizers.step(share)
            self.step += 1
        return {
            "kind": "train", **self._where(), "loss": loss, "gradient_norm": norm, "lr": config.lr * share,
            "residual_lr": config.residual_rate * share, "batch": seen,
            "time": self.meter.reading(config.tokens_per_step),
        }  # fmt: skip

    @torch.no_grad()
    def validate(self) -> Values:
        """The loss on the fixed validation set; its line for the metrics.

        Bits per byte are nats per token in bits, times the tokens per byte of the split: the same unit whatever the
        tokenizer. For an encoder they count the hidden tokens only, given all others.
        """
        config = self.config
        nats, counted, seen = 0.0, 0, Values()
        self.model.eval()
        for batch in (batch.to(self.device) for batch in self.sampler.validation()):
            with autocast(config, self.device):
                logits = self.subject.logits(batch.inputs, self.model)
                loss = float(token_loss(logits, batch.targets))
                if not math.isfinite(loss):
                    raise self.subject.explain_loss(self.step, loss, [batch])
                if not counted:
                    seen = self.subject.look(batch, logits)
            nats, counted = nats + loss * batch.counted, counted + batch.counted
        numbers = loss_numbers(nats / max(1, counted), self.sampler.tokens_per_byte)
        line = {"kind": "valid", **self._where(), **numbers, **seen}
        self.model.train()
        self.valid = line
        return line | {"time": self.meter.reading(config.tokens_per_step)}

    def checkpoint(self) -> Checkpoint:
        """Everything that the next update depends on."""
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizers.tensors(),
            "rng": random_states(),
        }
        info = {
            "config": self.config.to_json(),
            "model": self.subject.describe(),
            "valid": self.valid,
            "seconds": self.meter.seconds,
            "cpu_seconds": self.meter.cpu_seconds,
        }
        return Checkpoint(self.step, tensors, info)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from there."""
        self.model.load_state_dict(checkpoint.tensors["model"])
        self.optimizers.load(checkpoint.tensors["optimizer"])
        set_random_states(checkpoint.tensors["rng"])
        self.step = checkpoint.step
        self.valid = dict(checkpoint.info["valid"])
        self.meter.seconds, self.meter.cpu_seconds = checkpoint.info["seconds"], checkpoint.info["cpu_seconds"]

    def _backward(self, batches: list[Batch]) -> float:
        """Gradients of the mean over every position of the update, however it is split; the mean itself."""
        counts = [batch.counted for batch in batches]
        loss = 0.0
        for batch, count in zip(batches, counts, strict=True):
            with autocast(self.config, self.device):
                logits = self.subject.logits(batch.inputs, self.forward)
            part = token_loss(logits, batch.targets) * (count / max(1, sum(counts)))
            part.backward()
            loss += float(part.detach())
        return loss

    def _where(self) -> Values:
        tokens = self.step * self.config.tokens_per_step
        return {"step": self.step, "tokens": tokens, "passes": self.sampler.passes(tokens)}


def loss_numbers(loss: float, tokens_per_byte: float) -> dict[str, float]:
    """Nats per token, and what they are as perplexity and in bits per byte."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * tokens_per_byte,
    }
