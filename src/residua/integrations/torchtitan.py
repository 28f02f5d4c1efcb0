"""The backbone, with any design, as a model of torchtitan.

    from residua.integrations.torchtitan import model_spec
    config = Trainer.Config(model_spec=model_spec(ModelConfig(design="attnres:blocks=8", ...)), ...)

A function that returns such a config, in a module of yours, is what torchtitan's `--module` and `--config` name.
`parallelize` is `residua.scale.shard` over torchtitan's mesh: FSDP2 and HSDP. Every parameter starts with the bits that
`Transformer(config, seed=...)` has, however the model is sharded, and keeps its name.

Refused: tensor, context and pipeline parallelism of torchtitan, and its compiler. They reach into the modules of a
decoder of torchtitan's; the pipeline also calls an argument of `step` that torch 2.13 does not have.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from residua.model import ModelConfig, Transformer, sizes_of
from residua.scale.shard import shard
from residua.scale.start import materialise

TYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What `training.mixed_precision_param` may name."""


class Network(Transformer, BaseModel):
    """A `Transformer` that torchtitan builds on meta, shards and then fills."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What it is built from."""

        network: ModelConfig
        seed: int = 0

        def update_from_config(self, *, config: Any, **kwargs: object) -> None:
            """The seed of the job is the seed of the numbers."""
            self.seed = config.debug.seed or 0

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and operations for a token of training: a backward pass is two forward ones."""
            sizes = sizes_of(self.network, seq_len)
            return sizes.parameters, int(3 * sizes.flops_per_token)

    def __init__(self, config: Config) -> None:
        super().__init__(config.network, seed=config.seed)
        self.seed, self.checkpointed = config.seed, False
        self.dtype: torch.dtype | None = None

    def forward(self, ids: Tensor, *, positions: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Logits. positions: of tokens in their documents; a new document begins wherever they are 0."""
        documents = None if positions is None else (positions == 0).cumsum(1)
        narrow = nullcontext() if self.dtype is None else torch.autocast(ids.device.type, self.dtype)
        with narrow:
            return super().forward(ids, documents=documents, checkpointed=self.checkpointed)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """The numbers of `Transformer(config, seed=...)`; there are no buffers."""
        materialise(self, self.seed, next(self.parameters()).device)

    def verify_module_protocol(self) -> None:
        """Our modules are plain ones: `init_states` above fills them all."""


class Names(BaseStateDictAdapter):
    """The names of our own checkpoints, which are those of the model: a file of `residua train` loads into shards."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = None, hf_assets_path

    def to_hf(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """As it is."""
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """As it is."""
        return hf_state_dict

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """Of safetensors."""
        if from_quantized:
            raise ValueError("our checkpoints are not quantized")
        return HuggingFaceStorageReader(path)


def parallelize(
    model: Network,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> Network:
    """`shard` over torchtitan's data-parallel mesh, with its mixed precision, offload and activation checkpoints."""
    unable = {
        "tensor parallelism": parallel_dims.tp_enabled,
        "context parallelism": parallel_dims.cp_enabled,
        "pipeline parallelism": parallel_dims.pp_enabled,
        "torchtitan's compiler": compile_config.enable,
        f"spmd_backend={parallelism.spmd_backend}": parallelism.spmd_backend != "partial_dtensor",
        f"mixed_precision_param={training.mixed_precision_param}": training.mixed_precision_param not in TYPES,
        f"mixed_precision_reduce={training.mixed_precision_reduce}": training.mixed_precision_reduce != "float32",
    }
    if asked := [name for name, wanted in unable.items() if wanted]:
        raise ValueError(f"torchtitan with this model cannot do {', '.join(asked)}; spmd_backend is partial_dtensor")
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    model.dtype = TYPES[training.mixed_precision_param]
    model.checkpointed = ac_config is not None
    reshard = parallelism.fsdp_reshard_after_forward != "never"
    mesh = parallel_dims.get_mesh(names)
    return shard(model, mesh, dtype=model.dtype, reshard=reshard, offload=training.enable_cpu_offload)  # type: ignore[return-value]


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of a backbone: what `Trainer.Config(model_spec=...)` takes."""
    return ModelSpec(
        name="residua",
        flavor=config.design,
        model=Network.Config(network=config),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Names,
    )
