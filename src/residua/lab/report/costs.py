"""costs(series): what each design was predicted to cost and what it was measured to cost, side by side.

Predicted is `lab.cost.predict` of the run's own configuration and batch: by operations alone, and by bytes moved if
caches saved none of them. Neither bounds the measured speed, which caches, threads and other work move past both.
"""

from __future__ import annotations

from collections.abc import Sequence

from residua.lab.common.files import Record, Values
from residua.lab.cost import predict
from residua.lab.runs import Series, rounded


def costs(shown: Sequence[Series], drawn: Record) -> list[Values | None]:
    """One entry a series, in order; None where a run keeps no configuration."""
    found = {each.slug: _cost(each, drawn["quality"][each.slug]) for each in shown}
    for each in shown:
        own, base = found[each.slug], found.get(each.baseline)
        if own is None or base is None:
            continue
        own["speed_by_operations"] = rounded(base["operations"] / own["operations"])
        own["speed_by_bytes"] = rounded(base["bytes_moved"] / own["bytes_moved"])
        own["extra_memory"] = own["peak_memory"] - base["peak_memory"]
        own["extra_saved"] = own["saved_bytes"] - base["saved_bytes"]
    return list(found.values())


def _cost(series: Series, quality: Record) -> Values | None:
    first = series.seeds[0]
    manifest = first.manifest or {"data": {}}
    vocab = manifest["data"].get("tokenizer", {}).get("vocab")
    if first.settings is None or vocab is None:
        return None
    config, path = first.config, "fused" if manifest.get("kernels") else "reference"
    cost = predict(config.model(vocab), config.context, batch=config.batch, path=path)
    tokens = config.batch * config.context
    return {
        "parameters": cost.parameters,
        "stream_parameters": cost.stream_parameters,
        "operations": rounded(cost.flops / tokens),
        "stream_operations": rounded(cost.stream_flops / tokens),
        "bytes_moved": rounded(cost.bytes_moved / tokens),
        "saved_bytes": cost.saved_bytes,
        "state_bytes": cost.state_bytes // tokens,
        "cache_bytes": cost.cache_bytes // config.batch,
        "path": path,
        "context": config.context,
        "batch": config.batch,
        **dict.fromkeys(("speed_by_operations", "speed_by_bytes", "extra_memory", "extra_saved")),
        **{key: quality[key] for key in ("speed", "memory", "tokens_per_cpu_second")},
        "peak_memory": round(series.memory),
    }
