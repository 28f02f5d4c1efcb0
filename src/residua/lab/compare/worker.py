"""One run of a comparison, in a process of its own: train, then look at the routing. `python -m` runs it.

A process per run keeps peak memory honest, fixes the threads, and lets one run fail alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from residua.lab.common.files import Values, read_json, write_json
from residua.lab.runs import DIVERGED, ROUTING
from residua.lab.train import Diverged, Interrupted, TrainConfig, load_model, train

LOOKED_AT = 8
"""Validation sequences that the routing is averaged over."""


def main() -> None:
    """`worker CONFIG_JSON RUN_FOLDER`."""
    config, folder = TrainConfig.from_json(read_json(Path(sys.argv[1]))), Path(sys.argv[2])
    try:
        train(config, folder)
        if not (folder / ROUTING).exists():
            write_json(folder / ROUTING, look(config, folder))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
    except Diverged as broken:
        write_json(folder / DIVERGED, {"step": broken.step, "site": broken.site, "message": str(broken)})
        print(broken, file=sys.stderr)
    except (ValueError, TypeError, OSError, ArithmeticError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def look(config: TrainConfig, folder: Path) -> Values:
    """The routing of a trained run on the first sequences of the validation set: summary and mean weights."""
    import torch

    from residua.lab.data import prepare
    from residua.lab.diagnose import record_routing

    model = load_model(folder)
    valid = prepare(config.corpus, config.tokenizer).valid
    count = min(LOOKED_AT, len(valid) // config.context)
    ids = torch.from_numpy(valid[: count * config.context].astype("int64")).view(count, config.context)
    with torch.no_grad(), record_routing(model) as record:
        model(ids)
    means = {name: weights.mean((0, 2, 3, 4)).tolist() for name, weights in record.weights().items()}
    return record.summary() | {"mean_weights": means}


if __name__ == "__main__":
    main()
