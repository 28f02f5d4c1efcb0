"""What the scripts share that run on several processes: tiny models, the run of one process, and how far a run is off.

A test file starts its ranks once; they check everything and rank 0 leaves a JSON file, which the tests read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor, nn

import residua
from residua.lab.train import TrainConfig
from residua.lab.train.optim import Optimizers
from residua.model import ModelConfig, Transformer, token_loss
from residua.scale.layout import Pipes

Made = TypeVar("Made")
VOCAB, ROWS, TOKENS, STEPS = 24, 4, 8, 20
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-10
RUNS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "encoder": {"objective": "mlm", "design": "mudd", "accumulate": 2, "eval_windows": 5, "stream_rms": True},
    "bfloat16": {
        "dtype": "bfloat16", "fp32_stream": True, "stream_rms": True, "checkpointed": True, "steps": 8, "lr": 4e-3,
    },
}  # fmt: skip
"""What is changed in the toy recipe. Rounding to bfloat16 alone moves a loss by 2e-3 at the toy's high rate."""
DOUBLE: Mapping[str, tuple[str, Pipes | None]] = {
    "dp=2": ("dp=2", None),
    "fsdp=2": ("fsdp=2", None),
    "tp=2": ("tp=2", None),
    "pp=2": ("pp=2", None),
    **{name: ("pp=2", Pipes(schedule=name)) for name in ("gpipe", "interleaved", "zero_bubble")},
}
"""Layouts on two processes, which run a recipe of four blocks in float64."""
FOUR: Mapping[str, tuple[str, Pipes | None]] = {
    "dp=2,fsdp=2": ("dp=2,fsdp=2", None),
    "dp=2,tp=2": ("dp=2,tp=2", None),
    "fsdp=2,tp=2": ("fsdp=2,tp=2", None),
    "pp=4": ("pp=4", None),
    "pp=2,dp=2": ("pp=2,dp=2", Pipes(schedule="interleaved")),
    "pp=2,fsdp=2": ("pp=2,fsdp=2", Pipes(schedule="interleaved")),
    "pp=2,fsdp=2 zero bubble": ("pp=2,fsdp=2", Pipes(schedule="zero_bubble")),
}
"""On four."""
DEEP: Mapping[str, Any] = {"depth": 4, "batch": 8, "design": "attnres", "stream_rms": True, "steps": 4, "clip": 0.5}
BROKEN: Mapping[str, Mapping[str, Any]] = {
    "exploding": {"lr": 1e6, "explode": 1e3, "steps": 40},
    "broken": {"lr": 1e38, "explode": 1e300},
    "overflowing": {"lr": 1e30, "explode": 1e300},
    "large": {"explode": 1e-2},
}
"""Recipes that diverge: in a gradient, in a parameter, in the forward pass, and by a limit that all gradients pass."""
RECIPE = TrainConfig(width=8, depth=1, heads=1, lr=1e-3)


def launch(script: str, processes: int, out: Path, *arguments: str, timeout: float = 400) -> dict[str, Any]:
    """Run a script of this folder on several processes, and read what rank 0 wrote."""
    path = out / f"{script}.json"
    done = subprocess.run(
        [*ranks(processes), f"tests.scale.{script}", str(path), *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(path.read_text())


def once(factory: Any, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` filled, once for all workers of a session of tests."""
    base: Path = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / f"scale-{name}"
    with FileLock(root / f"scale-{name}.lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


def found_by(factory: Any, script: str, processes: int) -> dict[str, Any]:
    """What a script found, which is run once a session."""
    folder = once(factory, script, lambda out: launch(script, processes, out))
    return json.loads((folder / f"{script}.json").read_text())


def ranks(processes: int) -> list[str]:
    """The command that runs a module on processes which know each other, forked from one."""
    return [sys.executable, "-m", "tests.scale.ranks", str(processes)]


def torchrun(processes: int, *more: str) -> list[str]:
    """The same by torch's own launcher: `-m` and the module come next."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *more]


def environment(**more: str) -> dict[str, str]:
    """That of a process of a test, which imports the residua that is imported here."""
    code = str(Path(residua.__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([code, str(ROOT)]), **more}


def begin() -> tuple[int, int]:
    """Join the others: this rank, and how many there are."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return dist.get_rank(), dist.get_world_size()


def end(found: Mapping[str, Any]) -> None:
    """Leave, with what was found written by rank 0."""
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def attempted(check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a check found, or the error that it ended with: the other checks go on."""
    try:
        return check(*arguments, **options)
    except Exception as error:
        import traceback

        return {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}


def described(design: str, **other: Any) -> ModelConfig:
    """A tiny model of a design."""
    return ModelConfig(
        **({"vocab": VOCAB, "width": 16, "depth": 3, "heads": 4, "mlp_width": 16, "design": design} | other)
    )


def built(design: str, dtype: torch.dtype = torch.float64, **other: Any) -> Transformer:
    """The model, whole. Designs that start at zeros are moved from there: zeros agree too easily."""
    return moved(Transformer(described(design, **other), seed=0).to(dtype))


@torch.no_grad()
def moved(model: Transformer) -> Transformer:
    """The design's parameters a little off their start, each by its name."""
    for place, parameter in enumerate(model.stream.parameters()):
        generator = torch.Generator().manual_seed(place)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_((0.05 * noise).to(parameter.dtype))
    return model


def batch(step: int, rows: int = ROWS, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    ids = torch.randint(VOCAB, (rows, tokens + 1), generator=torch.Generator().manual_seed(1000 + step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its pieces are."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Story:
    """What a run left: the first logits and gradients, and the loss of every step."""

    def __init__(self) -> None:
        self.logits: Tensor = torch.empty(0)
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def take(self, model: nn.Module) -> None:
        """The gradients, whole."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.gradients[name.removeprefix("module.")] = whole(parameter.grad.detach()).clone()

    def off(self, right: Story) -> dict[str, Any]:
        """How far this is from the right one, worst of all."""
        where, gradient = furthest(self.gradients, right.gradients)
        return {
            "logits": float((self.logits - right.logits).abs().max() / right.logits.abs().max()),
            "gradient": gradient,
            "where": where,
            "loss": max(abs(a - b) for a, b in zip(self.losses, right.losses, strict=False)),
            "steps": len(self.losses),
        }


def furthest(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor], terms: Mapping[str, float] | None = None
) -> tuple[str, float]:
    """The tensor with the largest relative error, by its largest entry. Below a millionth of the largest of all, a
    gradient is the rounding of a sum that is zero.

    terms: the size of what each gradient is the sum of: where that cancels, it is what rounding is relative to.
    """
    if found.keys() != right.keys():
        return f"names differ: {sorted(found.keys() ^ right.keys())[:3]}", float("inf")
    floor = 1e-6 * max(float(each.abs().max()) for each in right.values())
    gaps = {
        name: float((found[name] - each).abs().max())
        / max(float(each.abs().max()), floor, (terms or {}).get(name, 0.0))
        for name, each in right.items()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return worst, gaps[worst]


def from_first(make: Callable[[], Made]) -> Made:
    """What rank 0 makes, for all; an error there is an error everywhere, and nobody waits."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except Exception as error:
            made = [error]
    dist.broadcast_object_list(made)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def alone(design: str, *, steps: int = STEPS, parts: int = 1, **other: Any) -> Story:
    """The run of one process; parts: into which every batch is split."""
    return from_first(lambda: _alone(design, steps, parts, **other))


def _alone(design: str, steps: int, parts: int, **other: Any) -> Story:
    model, story = built(design, **other), Story()
    optimizers = Optimizers(RECIPE, model)
    for step in range(steps):
        loss, logits = 0.0, []
        for inputs, targets in pieces(step, parts):
            logits.append(model(inputs))
            part = token_loss(logits[-1], targets) / parts
            part.backward()
            loss += float(part.detach())
        if step == 0:
            story.logits = torch.cat(logits).detach()
            story.take(model)
        story.losses.append(loss)
        optimizers.step(1.0)
    return story


def pieces(step: int, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a step in equal parts."""
    inputs, targets = batch(step)
    return zip(inputs.chunk(parts), targets.chunk(parts), strict=True)


def gathered(logits: Tensor) -> Tensor:
    """The logits of all ranks, row after row."""
    every = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(every, logits.detach().contiguous())
    return torch.cat(every)


@contextmanager
def in_float64() -> Iterator[None]:
    """Models are built in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def near(off: dict[str, Any], steps: int) -> None:
    """A run of so many steps on several processes, judged by the one of one process."""
    assert "error" not in off, off
    assert off["steps"] == steps
    assert max(off["logits"], off["gradient"], off["loss"]) <= TOLERANCE, off
