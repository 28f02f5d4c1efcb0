"""train(config, out): one run in one directory, from wherever it was left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from residua.lab.common.files import Listener, Record, Values, read_json, write_json
from residua.lab.common.locks import locked
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.folder import Resume, RunFolder
from residua.lab.train.interrupt import Interrupted, Interrupts
from residua.lab.train.loop import Trainer
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import reproducible
from residua.lab.train.sampler import Tokens
from residua.lab.train.sinks import make_sinks
from residua.lab.train.subject import Subject
from residua.model import ModelConfig, Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out. Everything but `time` is the same for every run of the config on one machine."""

    design: str
    config: str
    """The config's digest."""
    fingerprint: str
    """Of the data."""
    parameters: int
    stream_parameters: int
    """Those of the residual design."""
    steps: int
    tokens: int
    passes: float
    """How often the tokens seen are the training split."""
    loss: float
    """Nats per token of the validation set, as are the next two."""
    perplexity: float
    bits_per_byte: float
    checkpoint: str
    """The last one, below the run directory."""
    time: Mapping[str, float]
    """Seconds and processor seconds of all updates, tokens per second over them, bytes of memory at the peak."""

    def to_json(self) -> Values:
        """Plain values."""
        return asdict(self)


def train(
    config: Recipe,
    out: Path | str,
    *,
    tokens: Tokens | None = None,
    subject: Callable[[Tokens], Subject] | None = None,
    resume: Resume = "auto",
    track: Sequence[str] = (),
    on_event: Listener | None = None,
) -> Result:
    """Train in directory `out`, or go on from what is there; the result, at once if it is there already.

    tokens:   a prepared corpus; by default `residua.lab.data.prepare` makes it from the config.
    subject:  makes what is trained; by default the model that a `TrainConfig` describes.
    resume:   auto continues a run of the same config; never and must refuse to, and insist.
    track:    tensorboard, trackio, wandb: where else the metrics go.
    on_event: called with everything that happens: objects with a `kind` (data, start, resumed, damaged, train, valid,
              saved, done) and a `step`.

    Raises `Interrupted` after SIGINT or SIGTERM, `Diverged` when the numbers break, `RunLocked` when another process
    is at work there, `DiskFull` when there is no room; in each case the last checkpoint is whole.
    """
    folder, listen = RunFolder(Path(out)), on_event or (lambda event: None)
    folder.check(config, resume)
    if folder.result.exists():
        return _finished(folder, listen)
    if tokens is None:
        from residua.lab.data import prepare

        tokens = prepare(
            config.corpus, config.tokenizer, progress=lambda text: listen({"kind": "data", "step": 0, "text": text})
        )
    with ExitStack() as stack:
        stack.enter_context(reproducible(config))
        trainer = Trainer(config, tokens, None if subject is None else subject(tokens))
        sinks = [stack.enter_context(sink) for sink in make_sinks(track, folder.path, config)]
        folder.path.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(folder.path))
        folder.check(config, resume)  # again, now that nobody else can write
        if folder.result.exists():
            return _finished(folder, listen)
        tokenizer = getattr(tokens, "tokenizer", None)  # ids made elsewhere may come without one
        folder.start(
            config, tokens.manifest, trainer.device, None if tokenizer is None else json.loads(tokenizer.dump())
        )

        def tell(event: Record) -> None:
            for sink in sinks:
                sink.take(event)
            listen(event)

        return _Run(folder, trainer, str(tokens.manifest.get("fingerprint")), tell).finish()


def _finished(folder: RunFolder, listen: Listener) -> Result:
    result = Result(**read_json(folder.result))
    listen({"kind": "done", "step": result.steps, **result.to_json()})
    return result


def load_model(out: Path | str) -> Transformer:
    """The model of a run, as its newest whole checkpoint has it."""
    found, _ = checkpoints.newest(RunFolder(Path(out)).checkpoints)
    if found is None:
        raise FileNotFoundError(f"{out} holds no checkpoint; train there first")
    model = Transformer(ModelConfig.from_json(found.info["model"]), trained=True)
    model.load_state_dict(found.tensors["model"])
    return model.eval()


class _Run:
    """The loop around the trainer: lines, checkpoints, signals."""

    def __init__(self, folder: RunFolder, trainer: Trainer, fingerprint: str, tell: Listener) -> None:
        self.folder, self.trainer, self.config = folder, trainer, trainer.config
        self.fingerprint, self.tell = fingerprint, tell
        self.saved: int | None = None

    def finish(self) -> Result:
        """Make every update that is left."""
        trainer, config = self.trainer, self.config
        with Interrupts() as interrupts:
            self._begin()
            self._stop_if_asked(interrupts)
            for line in trainer.lines():
                valid = line["kind"] == "valid"
                if valid or trainer.due(config.log_every):
                    self._log(line)
                if valid or not trainer.due(config.eval_every):  # the step is over
                    if trainer.due(config.save_every):
                        self._save()
                    self._stop_if_asked(interrupts)
            trainer.subject.finish(self.folder.path)
            result = self._result()
            write_json(self.folder.result, result.to_json())
        self.tell({"kind": "done", "step": trainer.step, **result.to_json()})
        return result

    def _begin(self) -> None:
        """Take up the newest checkpoint, or validate the untrained model."""
        checkpoints.tidy(self.folder.checkpoints, self.config.keep)
        found, damaged = checkpoints.newest(self.folder.checkpoints)
        checkpoints.set_aside(damaged)
        self.folder.metrics.cut(-1 if found is None else found.step)
        if found is not None:
            self.trainer.restore(found)
            self.saved = found.step
        sizes = self.trainer.optimizers.sizes
        self.tell(
            {
                "kind": "start" if found is None else "resumed",
                "step": self.trainer.step,
                "steps": self.config.steps,
                "design": self.trainer.subject.design,
                "parameters": sum(sizes.values()),
                "stream_parameters": sizes["stream"],
                "tokens_per_step": self.config.tokens_per_step,
                "passes": self.trainer.sampler.passes(self.config.steps * self.config.tokens_per_step),
                "out": str(self.folder.path),
            }
        )
        for path, reason in damaged.items():
            self.tell({"kind": "damaged", "step": self.trainer.step, "checkpoint": path.name, "reason": reason})
        if found is None:
            self._log(self.trainer.validate())

    def _stop_if_asked(self, interrupts: Interrupts) -> None:
        """Save and leave, if a signal came and there is more to do."""
        if interrupts.caught is not None and self.trainer.step < self.config.steps:
            where = self._save()
            raise Interrupted(interrupts.caught, self.trainer.step, self.config.steps, str(where))

    def _log(self, line: Record) -> None:
        self.folder.metrics.append(line)
        self.tell(line)

    def _save(self) -> Path:
        """A checkpoint of this step, unless there is one."""
        step, folder = self.trainer.step, self.folder.checkpoints
        if self.saved != step:
            self.folder.metrics.sync()
            checkpoints.save(folder, self.trainer.checkpoint())
            self.saved = step
            checkpoints.tidy(folder, self.config.keep)
            self.tell({"kind": "saved", "step": step, "checkpoint": checkpoints.name(step)})
        return folder / checkpoints.name(step)

    def _result(self) -> Result:
        trainer, config = self.trainer, self.config
        valid, sizes, meter = trainer.valid, trainer.optimizers.sizes, trainer.meter
        return Result(
            design=trainer.subject.design,
            config=config.digest,
            fingerprint=self.fingerprint,
            parameters=sum(sizes.values()),
            stream_parameters=sizes["stream"],
            steps=trainer.step,
            **{key: valid[key] for key in ("tokens", "passes", "loss", "perplexity", "bits_per_byte")},
            checkpoint=f"{self.folder.checkpoints.name}/{checkpoints.name(trainer.step)}",
            time={
                "seconds": meter.seconds,
                "cpu_seconds": meter.cpu_seconds,
                "tokens_per_second": valid["tokens"] / meter.seconds if meter.seconds else 0.0,
                "peak_memory": meter.peak_memory(),
            },
        )
