"""What a run of `residua train` would be, from its configuration and without its memory: sizes, the rows of a step,
shards and stages, bytes of every rank by part, bytes over links, and time on a given device."""

from __future__ import annotations

import torch

from residua.counting.shapes import unfilled
from residua.lab.common.files import Values
from residua.lab.cost.ranks import predict_ranks
from residua.lab.cost.timeline import Device
from residua.lab.train.config import TrainConfig
from residua.lab.train.reproducible import device_of, memory_of
from residua.lab.train.run import pipes_of
from residua.model import Transformer, measure
from residua.scale.layout import Parallel, Pipes, choose


def foresee(
    config: TrainConfig,
    *,
    parallel: str | None = None,
    pipes: Pipes | None = None,
    device: Device | None = None,
    processes: int | None = None,
) -> Values:
    """The size and cost of a run. A corpus of this machine is prepared for it; one of a hub is not fetched.

    processes: that were started; None: as many as `parallel` asks for.
    """
    vocab, data = _data(config)
    sizes = measure(config.model(vocab), config.context)
    seen = config.steps * config.tokens_per_step
    held, narrow = max(sizes.state_floats.values()), config.dtype == "bfloat16" and not config.fp32_stream
    return {
        "config": config.to_json(),
        "vocab": vocab,
        "fingerprint": data.get("fingerprint"),
        "parameters": sizes.parameters,
        "stream_parameters": sizes.stream_parameters,
        "flops_per_token": sizes.flops_per_token,
        "stream_flops_per_token": sizes.stream_flops_per_token,
        # a backward pass costs two forwards, and recomputation one more
        "training_flops": (4 if config.checkpointed else 3) * sizes.flops_per_token * seen,
        "state_floats_per_token": held,
        "state_bytes_per_batch": held * config.batch * config.context * (2 if narrow else 4),
        "tokens": seen,
        "passes": seen / data["tokens"] if "tokens" in data else None,
        "plan": _plan(config, vocab, parallel, pipes, device or Device(), processes),
    }


def _data(config: TrainConfig) -> tuple[int, Values]:
    """The vocabulary of a run, and what is known of its corpus."""
    from residua.lab.data import prepare
    from residua.lab.data.tokenizer import Bytes, bpe_size, read_folder

    kind = config.tokenizer.partition(":")[0]
    if not config.corpus.startswith("hf:"):
        tokens = prepare(config.corpus, config.tokenizer)
        return tokens.vocab, {"fingerprint": tokens.manifest["fingerprint"], "tokens": len(tokens.train)}
    if kind == "bpe":
        return bpe_size(config.tokenizer), {}
    return (read_folder(config.tokenizer).vocab if kind == "hf" else Bytes.vocab), {}


def _plan(
    config: TrainConfig, vocab: int, text: str | None, pipes: Pipes | None, device: Device, processes: int | None
) -> Values:
    model, why = config.model(vocab), ""
    if text == "auto":
        where, size = device_of(config), processes or 1
        layout, why = choose(model, size, memory_of(where, size), rows=config.batch, context=config.context)
    else:
        layout = Parallel.parse(text or "dp=1")
        layout.check(model, processes or layout.ranks, batch=config.batch, context=config.context)
    settled = pipes_of(config, layout, pipes)
    if layout.tp > 1:
        from residua.scale.split import refuse

        with unfilled():
            refuse(Transformer(model), layout.tp)
    rows = config.batch * config.accumulate // layout.copies
    parts = settled.microbatches if layout.pp > 1 else config.accumulate
    assert parts is not None  # settled
    cost = predict_ranks(
        model,
        layout,
        rows=rows,
        tokens=config.context,
        microbatches=parts,
        schedule=settled.schedule,
        virtual=settled.virtual,
        dtype=torch.bfloat16 if config.dtype == "bfloat16" and not config.fp32_stream else torch.float32,
        checkpointed=config.checkpointed,
        device=device,
    ).to_json()
    seconds = cost["time"]["step"]
    return {
        "layout": str(layout),
        "why": why,
        "pipeline": str(settled) if layout.pp > 1 else None,
        "batch": {
            "rows": config.batch * config.accumulate,
            "copies": layout.copies,
            "rows_of_a_copy": rows,
            "microbatches": parts,
            "rows_of_a_microbatch": rows // parts,
            "context": config.context,
            "tokens": config.tokens_per_step,
            "steps": config.steps,
            "warmup_steps": round(config.warmup_share * config.steps),
        },
        "seconds_a_step": seconds,
        "hours": seconds * config.steps / 3600,
        "tokens_per_second": config.tokens_per_step / seconds,
        **cost,
    }
