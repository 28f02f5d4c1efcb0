"""A converted model in HF's Trainer, and under `fully_shard` in a plain loop: on as many processes as there are.

`python -m tests.integrations.on_ranks OUT` runs it in one, `torchrun` in several, on the same four rows a step. Rank 0
leaves the trained weights in OUT, as `save_pretrained` writes them.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from tests.hf.models import converted, ids

DESIGNS = ("standard", "attnres", "delta:blocks=2", "mudd", "hyper")
STEPS, ROWS = 5, 4


def rows():
    return ids(STEPS * ROWS, 8, seed=3)


def trained(design, out, ranks):
    """By Trainer, which wraps the model in DDP where there are several processes."""
    model = converted("llama", design, moved=True).double()
    arguments = TrainingArguments(
        str(out / "work"), max_steps=STEPS, per_device_train_batch_size=ROWS // ranks, learning_rate=1e-3, seed=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": line, "labels": line} for line in rows()]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(str(out / "trainer"))
    return type(trainer.model_wrapped).__name__


def sharded(design, out, rank, ranks):
    """By FSDP2: a layer a unit, the stream and the rest in the root."""
    model = converted("llama", design, moved=True).double()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in rows().chunk(STEPS):
        mine = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        model(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(out / "sharded", state_dict=whole)


def main():
    out, rank, ranks = Path(sys.argv[1]), int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    for place, design in enumerate(DESIGNS):
        wrapped = trained(design, out / str(place), ranks)
        sharded(design, out / str(place), rank, ranks)
        if rank == 0:
            (out / str(place) / "wrapped").write_text(wrapped)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
