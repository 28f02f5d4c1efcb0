"""The recipe: one update, one validation, one state. Every design goes through this and nothing else.

g = sum over batches of grad(nats of the batch) / positions of all batches
parameters <- optimizer(clip(g), lr * factor(step))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from residua.lab.common.allocator import keep_pages
from residua.lab.common.files import Record, Values
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.checkpoint import Checkpoint, CheckpointError
from residua.lab.train.config import TrainConfig
from residua.lab.train.meter import Meter
from residua.lab.train.optim import Optimizers
from residua.lab.train.ranks import ALONE, Ranks
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import device_of, random_states, set_random_states
from residua.lab.train.sampler import Batch, Batches, Sampler, Tokens, crcs, joined_checksum
from residua.lab.train.schedule import factor
from residua.lab.train.subject import OwnModel, Subject, autocast


class Trainer:
    """A model and what trains it, `step` updates in. Its state is a `Checkpoint`, to the last bit."""

    def __init__(
        self, config: Recipe, tokens: Tokens | Batches, subject: Subject | None = None, ranks: Ranks = ALONE
    ) -> None:
        """Train on a corpus, or on batches that are made elsewhere.

        subject: by default the model that a `TrainConfig` describes.
        ranks:   the processes of the run, of which each has its share of the rows.
        """
        keep_pages()
        self.config, self.device, self.ranks = config, device_of(config), ranks
        if isinstance(tokens, Batches):
            self.sampler = tokens
        else:
            self.sampler = Sampler(config, tokens, rank=ranks.copy, ranks=ranks.parallel.copies)
        if subject is None:
            if not isinstance(config, TrainConfig):
                raise TypeError(f"a {type(config).__name__} describes no model; hand its subject to the trainer")
            subject = own_model(config, self.sampler.vocab, self.device, ranks)
        self.subject, self.model = subject, subject.model
        self.placement = subject.place(config)
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
        config = self.config
        with self.meter.running():
            batches = self.sampler.batches(self.step)
            sums, sizes = crcs(batches)
            batches = [batch.to(self.device) for batch in batches]
            loss, counted = self._backward(batches)
            said = self.ranks.say([loss, counted, self.ranks.caught() or 0, *sums])
            self.ranks.signal = int(max(row[2] for row in said)) or None
            loss, seen = self._agreed(self.ranks.copies(said), sizes)
            if not math.isfinite(loss):
                with autocast(config, self.device):
                    raise self.subject.explain_loss(self.step + 1, loss, batches)
            parameters = list(self.model.parameters())
            total = self.placement.norm(parameters)
            norm = float(total)
            if not norm <= config.explode:
                raise self.subject.explain_gradient(self.step + 1, norm, config.explode)
            if config.clip:
                self.placement.clip(parameters, config.clip, total)
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
        nats, counted, seen, shown = 0.0, 0, Values(), list[Batch]()
        self.model.eval()
        for batch in (share.to(self.device) for share in self.placement.shares(self.sampler.validation())):
            with autocast(config, self.device):
                loss, logits = self.placement.evaluate(self.subject.logits, batch)
                if not math.isfinite(loss) and self.ranks.alone:
                    raise self.subject.explain_loss(self.step, loss, [batch])
                if not shown:
                    seen = self.subject.look(batch, logits)
            nats, counted = nats + loss * batch.counted, counted + batch.counted
            shown.append(batch)
        if not self.ranks.alone:
            nats, counted = map(sum, zip(*self.ranks.copies(self.ranks.say([nats, counted])), strict=True))
            if not math.isfinite(nats):
                with autocast(config, self.device):
                    raise self.subject.explain_loss(self.step, nats, shown)
        numbers = loss_numbers(nats / max(1, counted), self.sampler.tokens_per_byte)
        line = {"kind": "valid", **self._where(), **numbers, **seen}
        self.model.train()
        self.placement.at_rest()
        self.valid = line
        return line | {"time": self.meter.reading(config.tokens_per_step)}

    def checkpoint(self) -> Checkpoint:
        """Everything that the next update depends on; of tensors in pieces, this rank's."""
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
        self._resume(checkpoint.tensors["rng"], checkpoint.step, checkpoint.info)

    def restore_pieces(self, path: Path) -> None:
        """Go on from a checkpoint of which this rank reads its pieces alone."""
        from residua.lab.train import pieces, sharded

        state = checkpoints.read_state(path)
        parameters, held = self.model.state_dict(), self.optimizers.room()
        filled = sharded.fill(path, {**parameters, **held})  # those of the model in place
        if missing := sorted(parameters.keys() - filled.keys()):
            raise CheckpointError(f"{path}: {missing[0]} is not there; the checkpoint is of another model")
        self.optimizers.load({name: tensor for name, tensor in filled.items() if name in held})
        self._resume(pieces.random_states_of(path), state["step"], state["info"])

    def _resume(self, random: Mapping[str, Tensor], step: int, info: Record) -> None:
        set_random_states(random)
        self.step = step
        self.valid = dict(info["valid"])
        self.meter.seconds, self.meter.cpu_seconds = info["seconds"], info["cpu_seconds"]

    def _backward(self, batches: list[Batch]) -> tuple[float, int]:
        """Gradients of the mean over every position of the update, however it is split; this rank's part of that mean,
        and how many of the positions it has.

        A rank of several does not know yet how many positions count in all, and divides by all that there are.
        """
        counted = sum(batch.counted for batch in batches)
        positions = max(1, counted) if self.ranks.alone else self.config.tokens_per_step
        around = partial(autocast, self.config, self.device)
        return self.placement.backward(self.subject.loss, batches, positions, around), counted

    def _agreed(self, said: list[list[float]], sizes: list[int]) -> tuple[float, str]:
        """The loss of the whole update and the checksum of its rows, from what all ranks said; its gradients."""
        shares = [[int(crc) for crc in row[3:]] for row in said]
        loss, counted = sum(row[0] for row in said), sum(row[1] for row in said)
        scale = 1.0 if self.ranks.alone else self.config.tokens_per_step / max(1, counted)
        self.placement.gradients_ready(scale)
        return loss * scale, joined_checksum(shares, sizes)

    def _where(self) -> Values:
        tokens = self.step * self.config.tokens_per_step
        return {"step": self.step, "tokens": tokens, "passes": self.sampler.passes(tokens)}


def own_model(config: TrainConfig, vocab: int, device: torch.device, ranks: Ranks) -> OwnModel:
    """The model that a config describes, or what this rank has of it."""
    if ranks.parallel.pp > 1:
        from residua.lab.train.piped import PipedModel  # whose engines take seconds to load

        return PipedModel(config, vocab, device, ranks)
    return OwnModel(config, vocab, device, ranks)


def loss_numbers(loss: float, tokens_per_byte: float) -> dict[str, float]:
    """Nats per token, and what they are as perplexity and in bits per byte."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * tokens_per_byte,
    }
