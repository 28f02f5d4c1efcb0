"""Lightning Fabric trains a sharded model: its ModelParallelStrategy takes `shard` and `materialise` as they are.

`python examples/07_fabric.py 2` starts two processes, on CPUs; devices are an argument of Fabric. The model is built on
meta, sharded and only then filled, with the numbers that an unsharded one has.
"""

import os
import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from residua import ModelConfig, Transformer
from residua.scale.shard import shard
from residua.scale.start import materialise

config = ModelConfig(vocab=64, width=32, depth=2, heads=2, design="attnres")
processes = int(sys.argv[1])
os.environ.setdefault("OMP_NUM_THREADS", "1")
strategy = ModelParallelStrategy(
    lambda model, mesh: materialise(shard(model, mesh["data_parallel"]), seed=0),
    data_parallel_size=processes, tensor_parallel_size=1,
)  # fmt: skip
fabric = Fabric(accelerator="cpu", devices=processes, strategy=strategy)
fabric.launch()
with torch.device("meta"):
    network = Transformer(config)
model = fabric.setup_module(network)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=2e-3))

data = torch.Generator().manual_seed(0)
for step in range(5):
    ids = torch.randint(64, (4, 17), generator=data)  # the batch of all, of which each takes its rows
    mine = ids.chunk(processes)[fabric.global_rank]
    loss = torch.nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()).item():.6f}")
