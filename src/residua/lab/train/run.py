"""train(config, out): one run in one directory, from wherever it was left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from residua.lab.common.files import Listener, Record, read_json, write_json
from residua.lab.common.locks import locked
from residua.lab.train import checkpoint as checkpoints
from residua.lab.train.config import TrainConfig
from residua.lab.train.fits import check_fits
from residua.lab.train.folder import Resume, RunFolder
from residua.lab.train.interrupt import Interrupted, Interrupts
from residua.lab.train.loop import Trainer
from residua.lab.train.ranks import ALONE, Ranks, identity, joined, launched
from residua.lab.train.recipe import Recipe
from residua.lab.train.reproducible import device_of, memory_of, reproducible
from residua.lab.train.result import Result as Result
from residua.lab.train.sampler import Tokens
from residua.lab.train.sinks import make_sinks
from residua.lab.train.subject import Subject
from residua.model import ModelConfig, Transformer
from residua.scale.layout import Parallel, Pipes, choose

if TYPE_CHECKING:
    from residua.lab.train.sharded import Saver


ONE_PROCESS = (
    "a Hugging Face model is fine-tuned on one process here: start it without torchrun and --parallel, or use "
    "transformers' Trainer under torchrun, which takes converted models as they are (docs/scale.md)"
)
"""Why what is no model of our own is refused on several ranks."""


def train(
    config: Recipe,
    out: Path | str,
    *,
    tokens: Tokens | None = None,
    subject: Callable[[Tokens], Subject] | None = None,
    resume: Resume = "auto",
    track: Sequence[str] = (),
    on_event: Listener | None = None,
    parallel: str | None = None,
    pipes: Pipes | None = None,
    offload: bool = False,
) -> Result:
    """Train in directory `out`, or go on from what is there; the result, at once if it is there already.

    tokens:   a prepared corpus; by default `residua.lab.data.prepare` makes it from the config.
    subject:  makes what is trained; by default the model that a `TrainConfig` describes.
    resume:   auto resumes a run of the same config, or starts one; never only starts; must only resumes.
    track:    tensorboard, trackio, wandb: where else the metrics go.
    on_event: called with everything that happens: objects with a `kind` (data, ranks, start, resumed, damaged, train,
              valid, saved, done) and a `step`. Of several ranks, on rank 0 alone.
    parallel: under `torchrun`, how the processes share the work: `dp=2,fsdp=4`, or `auto`. Network, initialisation and
              batches do not depend on it; sums are taken in another order.
    pipes:    with `pp`: the schedule, the micro-batches of a step and the stages per rank.
    offload:  with `fsdp`: keep parameter shards, gradients and optimizer state in host memory.

    Raises `Interrupted` after SIGINT or SIGTERM, `Diverged` when the numbers break, `RunLocked` when another process
    is at work there, `DiskFull` when there is no room; in each case the last checkpoint is whole. What one rank raises
    ends all: the others raise `RankFailed` with its message.
    """

    def on(ranks: Ranks) -> Result:
        return _train(config, out, tokens, subject, resume, track, on_event if ranks.first else None, ranks)

    if launched() == 1 and parallel is None:
        pipes_of(config, Parallel(), pipes)
        _check_offload(Parallel(), offload)
        return on(ALONE)
    if not isinstance(config, TrainConfig) or subject is not None:
        raise ValueError(ONE_PROCESS)
    return _together(config, parallel, pipes, offload, on)


def _together(
    config: TrainConfig, parallel: str | None, pipes: Pipes | None, offload: bool, on: Callable[[Ranks], Result]
) -> Result:
    """A run on the ranks that `torchrun` started, or on one process with a layout of one."""
    if parallel is None:
        raise ValueError(
            f"torchrun started {launched()} processes; say how they share the work: --parallel dp={launched()} or "
            "--parallel auto"
        )
    device = device_of(config)

    settled: list[Pipes] = []

    def layout(size: int) -> tuple[Parallel, str]:
        if parallel == "auto":
            found, why = choose(
                config.model(2), size, memory_of(device, size), rows=config.batch, context=config.context
            )
        else:
            found, why = Parallel.parse(parallel), ""
            found.check(config.model(2), size, batch=config.batch, context=config.context)
        settled.append(pipes_of(config, found, pipes))
        _check_offload(found, offload)
        return found, why

    if launched() == 1:
        if parallel != "auto" and Parallel.parse(parallel).ranks > 1:
            count = Parallel.parse(parallel).ranks
            raise ValueError(
                f"parallel {parallel} takes {count} processes; start them with torchrun --nproc-per-node {count} "
                "-m residua train ..."
            )
        pipes_of(config, Parallel(), pipes)
        _check_offload(Parallel(), offload)
        return on(ALONE)
    with joined(layout, device) as ranks:
        (ranks.pipes,), ranks.offload = settled, offload
        ranks.check_same(identity(config.to_json(), ranks))
        return on(ranks)


def _check_offload(parallel: Parallel, offload: bool) -> None:
    if offload and (parallel.fsdp == 1 or parallel.pp > 1):
        raise ValueError(f"parallel {parallel}: offload keeps the pieces of fsdp on the host, and goes with no stages")


def pipes_of(config: Recipe, parallel: Parallel, pipes: Pipes | None) -> Pipes:
    """How a step of this run goes through the stages of a layout: all that is in it, on one copy, in one go."""
    if parallel.pp == 1:
        if pipes is not None:
            raise ValueError(f"parallel {parallel} has no stages: a pipeline's schedule and micro-batches need pp=N")
        return Pipes()
    from residua.scale.schedules import settled

    assert isinstance(config, TrainConfig)  # only models of our own have stages
    rows = config.batch * config.accumulate // parallel.copies
    return settled(config.model(2), parallel.pp, pipes or Pipes(), rows)


def _train(
    config: Recipe,
    out: Path | str,
    tokens: Tokens | None,
    subject: Callable[[Tokens], Subject] | None,
    resume: Resume,
    track: Sequence[str],
    on_event: Listener | None,
    ranks: Ranks,
) -> Result:
    if not str(out):
        raise ValueError("out is empty: give the directory of the run, such as runs/a")
    folder, listen = RunFolder(Path(out)), on_event or (lambda event: None)
    folder.check(config, resume)
    if ranks.from_first(folder.result.exists):
        return _finished(folder, config, listen)
    if ranks.alone and isinstance(config, TrainConfig) and subject is None:
        if tokens is None:
            from residua.lab.data import check_data

            check_data(config.corpus, config.tokenizer)
        check_fits(config)
    if ranks.why:
        listen({"kind": "data", "step": 0, "text": ranks.why})
    if tokens is None:
        from residua.lab.data import prepare

        tokens = ranks.in_turn(
            lambda: prepare(
                config.corpus, config.tokenizer, progress=lambda text: listen({"kind": "data", "step": 0, "text": text})
            )
        )
    assert tokens is not None
    ranks.check_same({"data": str(tokens.manifest.get("fingerprint"))})
    with ExitStack() as stack:
        stack.enter_context(reproducible(config))
        trainer = Trainer(config, tokens, None if subject is None else subject(tokens), ranks)
        sinks = [stack.enter_context(sink) for sink in make_sinks(track if ranks.first else (), folder.path, config)]
        if ranks.first:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            folder.check(config, resume)  # again, now that nobody else can write
        if ranks.from_first(folder.result.exists):
            return _finished(folder, config, listen)
        tokenizer = getattr(tokens, "tokenizer", None)  # ids made elsewhere may come without one
        before: Record | None = None
        if ranks.first:
            before = folder.start(
                config, tokens.manifest, trainer.device, None if tokenizer is None else json.loads(tokenizer.dump()),
                None if ranks.alone else ranks.laid(),
            )  # fmt: skip
        ranks.from_first(lambda: True)  # the folder is there

        def tell(event: Record) -> None:
            for sink in sinks:
                sink.take(event)
            listen(event)

        run = _Run(folder, trainer, str(tokens.manifest.get("fingerprint")), tell, before)
        stack.callback(run.close)
        return run.finish()


def _finished(folder: RunFolder, config: Recipe, listen: Listener) -> Result:
    result = Result.from_json(read_json(folder.result), folder.result)
    if result.config != config.digest:
        raise ValueError(
            f"{folder.result} is the result of another configuration ({result.config}, not {config.digest}); move it "
            "away, or give another directory"
        )
    listen({"kind": "done", "step": result.steps, **result.to_json()})
    return result


def load_model(out: Path | str) -> Transformer:
    """The model of a run, as its newest whole checkpoint has it."""
    folder = RunFolder(Path(out))
    found, _ = checkpoints.newest(folder.checkpoints)
    if found is None:
        raise FileNotFoundError(f"{out} holds no checkpoint; train there first")
    if folder.config.is_file():
        checkpoints.check_belongs(
            folder.checkpoints / checkpoints.name(found.step), found.info, read_json(folder.config)
        )
    model = Transformer(ModelConfig.from_json(found.info["model"]), trained=True)
    model.load_state_dict(found.tensors["model"])
    return model.eval()


class _Run:
    """The loop around the trainer: lines, checkpoints, signals."""

    def __init__(
        self, folder: RunFolder, trainer: Trainer, fingerprint: str, tell: Listener, before: Record | None = None
    ) -> None:
        """before: the layout of ranks that the run had until now, if it was another."""
        self.folder, self.trainer, self.config, self.ranks = folder, trainer, trainer.config, trainer.ranks
        self.fingerprint, self.tell, self.before = fingerprint, tell, before
        self.saved: int | None = None
        self.saver: Saver | None = None
        if self.ranks.parallel.sharded:
            from residua.lab.train.sharded import Saver

            self.saver = Saver(folder.checkpoints, self.ranks, self.config.keep)

    def close(self) -> None:
        """Let go of what a run holds beside its files."""
        if self.saver is not None:
            self.saver.close()

    def finish(self) -> Result:
        """Make every update that is left."""
        trainer, config = self.trainer, self.config
        with Interrupts() as interrupts:
            self.ranks.caught = lambda: interrupts.caught
            self._begin()
            self._stop_if_asked(interrupts)
            for line in trainer.lines():
                valid = line["kind"] == "valid"
                if valid or trainer.due(config.log_every):
                    self._log(line)
                if valid or not trainer.due(config.eval_every):  # the step is over
                    self._report_saved(wait=False)
                    if trainer.due(config.save_every):
                        self._save()
                    self._stop_if_asked(interrupts)
            self._report_saved(wait=True)
            result = self._result()
            if self.ranks.first:
                trainer.subject.finish(self.folder.path)
                write_json(self.folder.result, result.to_json())
        self.tell({"kind": "done", "step": trainer.step, **result.to_json()})
        return result

    def _begin(self) -> None:
        """Take up the newest checkpoint, or validate the untrained model."""
        damaged, found = self._take_up()
        sizes = self.trainer.subject.sizes()
        layout = {} if self.ranks.alone else {"ranks": self.ranks.size, "parallel": str(self.ranks.parallel)}
        self.tell(
            {
                "kind": "resumed" if found else "start",
                "step": self.trainer.step,
                "steps": self.config.steps,
                "design": self.trainer.subject.design,
                "parameters": sum(sizes.values()),
                "stream_parameters": sizes["stream"],
                "tokens_per_step": self.config.tokens_per_step,
                "passes": self.trainer.sampler.passes(self.config.steps * self.config.tokens_per_step),
                "out": str(self.folder.path),
                **layout,
            }
        )
        if self.before is not None and found:
            now = self.ranks.laid()
            self.tell({"kind": "relaid", "step": self.trainer.step, "before": dict(self.before), "now": now})
        if found and self.ranks.first and len(made := self.folder.made_by()) > 1:
            text = f"resumed with {made[-1]}; it began with {made[0]}"
            self.tell({"kind": "data", "step": self.trainer.step, "text": text})
        for path, reason in damaged.items():
            self.tell({"kind": "damaged", "step": self.trainer.step, "checkpoint": path.name, "reason": reason})
        if not found:
            self._log(self.trainer.validate())

    def _take_up(self) -> tuple[dict[Path, str], bool]:
        """Go on from the newest checkpoint that is whole; the damaged ones before it, and whether there was one."""
        folder, trainer = self.folder.checkpoints, self.trainer
        if self.ranks.first:
            checkpoints.tidy(folder, self.config.keep)
        if self.ranks.alone:
            found, damaged = checkpoints.newest(folder)
            if found is not None:
                self._check_belongs(folder / checkpoints.name(found.step), found.info)
                trainer.restore(found)
                self.saved = found.step
        else:
            from residua.lab.train import sharded

            path, damaged = sharded.newest(folder, self.ranks)
            if path is not None:
                self._check_belongs(path, checkpoints.read_state(path)["info"])
                if self.ranks.parallel.sharded:
                    trainer.restore_pieces(path)
                else:
                    trainer.restore(checkpoints.load(path))
                self.saved = trainer.step
        self.ranks.from_first(lambda: True)  # all have read; now things may be moved
        if self.ranks.first:
            checkpoints.set_aside(damaged)
            self.folder.metrics.cut(-1 if self.saved is None else self.saved)
        return damaged, self.saved is not None

    def _check_belongs(self, path: Path, info: Record) -> None:
        checkpoints.check_belongs(path, info, self.config.to_json())

    def _stop_if_asked(self, interrupts: Interrupts) -> None:
        """Save and leave, if a signal came, to any rank, and there is more to do."""
        caught = interrupts.caught if self.ranks.alone else self.ranks.signal
        if caught is not None and self.trainer.step < self.config.steps:
            where = self._save()
            self._report_saved(wait=True)
            raise Interrupted(caught, self.trainer.step, self.config.steps, str(where))

    def _log(self, line: Record) -> None:
        if self.ranks.first:
            self.folder.metrics.append(line)
        self.tell(line)

    def _save(self) -> Path:
        """A checkpoint of this step, unless there is one: written when this returns, or, of pieces, being written."""
        step, folder = self.trainer.step, self.folder.checkpoints
        if self.saved != step:
            if self.ranks.first:
                self.folder.metrics.sync()
            self.saved = step
            if self.saver is not None:
                self._report_saved(wait=True)
                self.saver.begin(self.trainer.checkpoint())
            elif self.ranks.first:
                checkpoints.save(folder, self.trainer.checkpoint())
                checkpoints.tidy(folder, self.config.keep)
                self._tell_saved(step)
        return folder / checkpoints.name(step)

    def _report_saved(self, *, wait: bool) -> None:
        """Tell of a checkpoint that was being written and now is."""
        step = None if self.saver is None else self.saver.finished(wait=wait)
        if step is not None:
            self._tell_saved(step)

    def _tell_saved(self, step: int) -> None:
        self.tell({"kind": "saved", "step": step, "checkpoint": checkpoints.name(step)})

    def _result(self) -> Result:
        trainer, config = self.trainer, self.config
        valid, sizes, meter = trainer.valid, trainer.subject.sizes(), trainer.meter
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
            execution=self.folder.made_by() if self.ranks.first else (),
        )
