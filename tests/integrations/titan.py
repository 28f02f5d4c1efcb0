"""On two processes: a network through torchtitan's own contract, against the same network in one. Prints JSON.

What is torchtitan's: the mesh, the order (build on meta, parallelize, make empty, fill), the loss and the optimizer.
Its `Trainer` is not run: it asks a GPU for its memory. The device is set before torchtitan looks for one.
"""

import json
import os

import torch
import torchtitan.tools.utils as tools

tools.device_type, tools.device_module = "cpu", torch.cpu

import torch.distributed as dist  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402

import residua  # noqa: E402
from residua.integrations.torchtitan import model_spec  # noqa: E402
from residua.model import ModelConfig, Transformer  # noqa: E402

STEPS, ROWS, TOKENS = 5, 4, 16
NETWORK = {"vocab": 64, "width": 16, "depth": 2, "heads": 2}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (ROWS, TOKENS + 1), generator=generator) for _ in range(STEPS)]


def losses(design, rank, size):
    """Of five steps, through torchtitan."""
    spec = model_spec(ModelConfig(design=design, **NETWORK))
    parallelism = ParallelismConfig(data_parallel_shard_degree=size, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, size)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"), parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    whole = Transformer(ModelConfig(design=design, **NETWORK)).state_dict()
    start = all(torch.equal(value.full_tensor(), whole[name]) for name, value in model.state_dict().items())
    names = spec.state_dict_adapter(spec.model, None)
    assert names.from_hf(names.to_hf(model.state_dict())).keys() == whole.keys()
    optimizer = default_adamw(lr=1e-2).build(model_parts=[model])
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=64).build(compile_config=CompileConfig())
    found = []
    for batch in batches():
        mine = batch[rank * ROWS // size : (rank + 1) * ROWS // size]
        loss, _ = loss_fn(model(mine[:, :-1]), mine[:, 1:], torch.tensor(float(ROWS * TOKENS)))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # the loss is a sum over all tokens' share: FSDP made means of it
            parameter.grad.mul_(size)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item())
    return start, found


def alone(design):
    """Of five steps, in one process, with torch alone."""
    model = Transformer(ModelConfig(design=design, **NETWORK))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    found = []
    for batch in batches():
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def refused():
    """What is said to a layout that cannot be."""
    spec = model_spec(ModelConfig(design="standard", **NETWORK))
    parallelism = ParallelismConfig(pipeline_parallel_degree=2, spmd_backend="partial_dtensor")
    try:
        spec.parallelize_fn(
            None, parallel_dims=ParallelDims.from_config(parallelism, 2), training=TrainingConfig(),
            parallelism=parallelism, compile_config=CompileConfig(enable=True), ac_config=None, dump_folder="",
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = {"refused": refused()}
    for design in residua.names():
        start, sharded = losses(design, rank, size)
        told[design] = {"start": start, "sharded": sharded, "alone": alone(design)}
    if rank == 0:
        print(json.dumps(told))
    dist.destroy_process_group()
