"""Who trains together: what they agree on at every step, and how the failure of one ends all.

`torchrun` starts the processes and tells each its rank. Rank 0 alone prints and writes. Once a step every rank says its
loss, its count, the signal it caught and the checksum of its rows, in one collective, and all draw the same conclusion.
A rank that fails leaves its message in the store that `torchrun` keeps, and ends: the others then end with that
message, and not after the timeout of a collective.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

import residua
from residua.lab.common.files import Record, Values, json_digest, tree_digest, versions
from residua.scale.layout import Parallel, Pipes

PATIENCE = 5.0
"""Seconds in which a rank that waits for a failed one may still leave by itself."""
Row = TypeVar("Row")
T = TypeVar("T")
ARRIVAL = timedelta(minutes=10)
"""In which all ranks must have said what they are about to run."""


class Agreed(Exception):
    """Of an error that all ranks raise together, with the same message."""


class RankFailed(RuntimeError):
    """Another rank failed; the message is that rank's."""


@dataclass
class Ranks:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    parallel: Parallel = field(default_factory=Parallel)
    why: str = ""
    """Of a layout that was chosen for the user."""
    pipes: Pipes = field(default_factory=Pipes)
    """Of the stages, where there are several."""
    offload: bool = False
    """Whether pieces, their gradients and moments lie in the memory of the host."""
    mesh: Any = None
    """Of `Parallel.mesh`; None in a run of one process."""
    caught: Callable[[], int | None] = lambda: None
    """The signal that this rank has caught, if any."""
    signal: int | None = None
    """The signal that some rank had caught at the last step: all ranks know it."""

    @property
    def alone(self) -> bool:
        """Whether this is a run of one process."""
        return self.mesh is None

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """Processes in all."""
        return self.parallel.ranks

    def laid(self) -> Values:
        """How the processes are laid out, in plain values."""
        stages = {"pipeline": str(self.pipes)} if self.parallel.pp > 1 else {}
        host = {"offload": True} if self.offload else {}
        return {"processes": self.size, "parallel": str(self.parallel), **stages, **host}

    @property
    def copy(self) -> int:
        """Which share of every batch is this rank's."""
        return self.parallel.copy_of(self.rank)

    def say(self, row: Sequence[float]) -> list[list[float]]:
        """The rows of numbers of all ranks, in order: one collective. Rows are equally long."""
        return self._gathered(torch.tensor(row, dtype=torch.float64)).tolist()

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks, as rows."""
        if self.alone:
            return mine[None]
        import torch.distributed as dist

        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return torch.stack(every)

    def copies(self, rows: list[Row]) -> list[Row]:
        """Of what all ranks said, one row for every share of the batch: ranks that share a copy say the same."""
        layout = self.parallel
        return rows[: layout.copies * layout.tp : layout.tp]  # the first stage's: `pp` is the outermost axis

    def tell(self, value: object) -> list[Any]:
        """Plain values of all ranks, in order."""
        if self.alone:
            return [value]
        text = json.dumps(value).encode()
        length = int(max(row[0] for row in self.say([len(text)])))
        rows = self._gathered(torch.tensor(list(text.ljust(length)), dtype=torch.uint8))
        return [json.loads(bytes(row.tolist())) for row in rows]

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks: plain values."""
        return self.tell(make() if self.first else None)[0]

    def in_turn(self, make: Callable[[], T]) -> T:
        """What every rank makes, but the first of each machine before the others there: it fills their cache."""
        early = self.alone or int(os.environ.get("LOCAL_RANK", "0")) == 0
        made = [make()] if early else []
        self.say([0.0])
        return made[0] if early else make()

    def check_same(self, what: Record) -> None:
        """Refuse to start where ranks are about to run different things."""
        said = self.tell(dict(what))
        differing = [
            f"{key} is {said[0].get(key)!r} on rank 0 and {other.get(key)!r} on rank {rank}"
            for rank, other in enumerate(said)
            for key in sorted(said[0].keys() | other.keys())
            if said[0].get(key) != other.get(key)
        ]
        if differing:
            raise ValueError(f"the ranks do not run the same thing: {'; '.join(differing[:4])}")


def launched() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined(layout: Callable[[int], tuple[Parallel, str]], device: torch.device) -> Iterator[Ranks]:
    """Inside, this process is one of those that `torchrun` started, laid out as `layout` says for their number.

    An exception that leaves the `with` on one rank, and then the process, reaches every other as a `RankFailed` with
    its message; one that does not come out of a collective in `PATIENCE` seconds is ended.
    """
    import torch.distributed as dist

    # the stream never changes a tensor in place, which is what this warns of, once a block
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    global _runs
    _runs += 1  # what an earlier run of these processes left in the store is not this one's
    store, rank, size = _store(), int(os.environ["RANK"]), launched()
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(over,), daemon=True)
    watcher.start()
    try:
        parallel, why = layout(size)
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=ARRIVAL)
        yield Ranks(rank, parallel, why, mesh=parallel.mesh(device.type))
    except BaseException as error:
        failed = _failure(store, rank, error)
        # one that all ranks agreed on is every rank's own
        if failed is not None and failed["rank"] != rank and failed["text"] != str(error):
            raise RankFailed(f"rank {failed['rank']}: {failed['text']}") from error
        raise
    finally:
        over.set()
        with suppress(Exception):  # a group that is broken already
            dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """After the groups of a run are gone: torch 2.13 takes up what it planned for tensors on an equal mesh, and in the
    next run of these processes would send to groups that have the old one's names."""
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


@contextmanager
def one_voice() -> Iterator[None]:
    """For a command under `torchrun`: what goes wrong is told once, by the rank it happened to, and ends the process
    with a code: 128 and the number of a signal, 2 for wrong input, else 1. Without `torchrun`: nothing."""
    if launched() == 1:
        yield
        return
    rank = int(os.environ["RANK"])
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        store = _store()
        failed = _failure(store, rank, error)
        if failed is not None and failed["rank"] == rank and store.add("told", 1) == 1:
            if os.environ.get("RESIDUA_TRACEBACK"):
                import traceback

                traceback.print_exc()
            whose = "" if isinstance(error, Agreed) else f"rank {rank}: "
            print(f"residua: {whose}{error}", file=sys.stderr, flush=True)
        else:
            time.sleep(0.3)  # torchrun ends all at the first exit: the one that speaks goes first
        code = getattr(error, "exit_code", 2 if isinstance(error, ValueError | TypeError | OSError) else 1)
        raise SystemExit(code) from None


def _store() -> Any:
    """The store that `torchrun` keeps for all processes, a part of it for every start of theirs and every run."""
    dist: Any = importlib.import_module("torch.distributed")  # whose stores have no declared names

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    kept = dist.TCPStore(
        address, port, launched(), not agent and os.environ["RANK"] == "0", timeout=ARRIVAL, wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"residua/{start}/{_runs}", kept)


def _failure(store: Any, rank: int, error: BaseException) -> Values | None:
    """The first failure of all: this one, if no other was there before; None where the store is gone."""
    try:
        if store.add("failures", 1) == 1:
            store.set("failed", json.dumps({"rank": rank, "text": str(error) or type(error).__name__}))
        deadline = time.monotonic() + PATIENCE
        while not store.check(["failed"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return json.loads(store.get("failed"))
    except (RuntimeError, ValueError):
        return None


def _watch(over: threading.Event) -> None:
    """End a process that waits for a failed one and does not notice: a collective of its device may wait for long."""
    with suppress(RuntimeError):
        store = _store()  # a connection of its own: the other may be waiting
        while not over.wait(0.5):
            if store.check(["failed"]):
                if not over.wait(PATIENCE):
                    os._exit(1)
                return


def identity(config: Record, ranks: Ranks) -> Values:
    """What must be the same on all ranks before anything starts."""
    return {
        "config": json_digest(dict(config))[:16],
        **ranks.laid(),
        "source": tree_digest(Path(residua.__file__).parent, "**/*.py")[:16],  # one version may have different files
        **versions(),
    }


_runs = 0

ALONE = Ranks()
"""A run of one process."""
