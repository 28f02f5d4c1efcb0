"""Comparison directories with numbers that are known, written as `residua compare` writes them, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from residua.lab.common.files import json_digest, read_json
from residua.lab.compare import ComparePlan, Size
from residua.plan import Plan

SMALL = Size(width=16, depth=2, heads=2)
RMS = ("stream_rms", "output_rms", "gradient_norm")


def write(path: Path, value: Any) -> None:
    """A JSON file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_plan(out: Path, **settings: Any) -> ComparePlan:
    """The directory of a plan, without runs."""
    plan = ComparePlan(**({"sizes": (SMALL,), "seeds": (0, 1)} | settings))
    write(out / "plan.json", plan.to_json())
    return plan


def write_run(
    folder: Path,
    curve: Sequence[tuple[int, float, float]],
    *,
    peak_memory: int = 1000,
    fingerprint: str = "toy",
    routing: Mapping[str, Any] | None = None,
) -> None:
    """A finished run: (tokens, processor seconds, loss) of every validation; bits per byte are twice the loss.

    What figures must not take for these is there too: training lines and clock seconds.
    """
    lines = []
    for step, (tokens, seconds, loss) in enumerate(curve):
        time = {"seconds": 9 * seconds, "cpu_seconds": seconds, "tokens_per_second": 7.0}
        lines.append({"kind": "train", "step": step, "tokens": tokens, "loss": 99.0, "time": time})
        valid = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": 2 * loss}
        lines.append({"kind": "valid", "step": step, "tokens": tokens, **valid, "time": time})
    tokens, seconds, loss = curve[-1]
    config = folder / "config.json"
    digest = json_digest(read_json(config))[:16] if config.exists() else "0"
    result = {
        "design": "unused", "config": digest, "fingerprint": fingerprint, "parameters": 10, "stream_parameters": 1,
        "steps": len(curve), "tokens": tokens, "passes": 1.0, "loss": loss, "perplexity": math.exp(loss),
        "bits_per_byte": 2 * loss, "checkpoint": "checkpoints/1",
        "time": {"seconds": 9 * seconds, "cpu_seconds": seconds, "tokens_per_second": 7.0, "peak_memory": peak_memory},
    }  # fmt: skip
    write(folder / "result.json", result)
    write(folder / "routing.json", routing or routing_record({}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def routing_record(
    weights: Mapping[str, Mapping[str, float]],
    *,
    plan: Plan | None = None,
    kind: str = "distribution",
    **measured: Sequence[float | None],
) -> dict[str, Any]:
    """`RoutingRecord.summary()` in the fields that figures use, for mean weights by site and source.

    The metrics of a site are those of its mean weights, so that they can be told by hand; `measured` holds lists over
    sites for stream_rms, output_rms and gradient_norm.
    """
    plan = plan or Plan.regular(SMALL.width, SMALL.depth)
    sites = []
    for site in plan.readers:
        own = weights.get(site.name, {})
        found: dict[str, Any] = {
            "site": site.name, "index": site.index, "layer": site.layer, "kind": site.kind, "sources": list(own),
            **{key: measured[key][site.index] if key in measured else None for key in RMS},
        }  # fmt: skip
        if own:
            total = sum(map(abs, own.values()))
            shares = [abs(weight) / total for weight in own.values()]
            entropy = -sum(share * math.log(share) for share in shares if share)
            found["routing"] = {
                "weights": kind,
                "max_weight": max(shares),
                "normalised_entropy": entropy / math.log(len(own)) if len(own) > 1 else None,
                "effective_sources": math.exp(entropy),
            }
        sites.append(found)
    means = dict.fromkeys(("max_weight", "normalised_entropy", "effective_sources", "collapsed_share"))
    return {
        "network": means,
        "deep_third": means,
        "sites": sites,
        "mean_weights": {name: list(own.values()) for name, own in weights.items()},
    }


STANDARD = (
    [(0, 0.0, 4.0), (100, 2.0, 3.0), (200, 4.0, 2.0)],
    [(0, 0.0, 4.2), (100, 4.0, 3.2), (200, 6.0, 2.1)],
)
"""Two seeds: 50 and 33 1/3 tokens per processor second."""
ATTNRES = (
    [(0, 0.0, 5.0), (100, 4.0, 2.5), (200, 8.0, 1.9)],
    [(0, 0.0, 5.5), (100, 4.0, 2.7), (200, 8.0, 1.8)],
)
ATTNRES_WEIGHTS = (
    {"l0_mlp": {"embed": 0.5, "l0_attn": 0.5}, "l1_attn": {"embed": 0.7, "l0_attn": 0.1, "l0_mlp": 0.2}},
    {"l0_mlp": {"embed": 1.0, "l0_attn": 0.0}, "l1_attn": {"embed": 0.5, "l0_attn": 0.3, "l0_mlp": 0.2}},
)
DENSEFORMER_WEIGHTS = {"l1_attn": {"embed": -0.5, "l0": 1.5}, "head": {"embed": 0.25, "l0": -0.25, "l1": 0.5}}


def write_comparison(out: Path, **settings: Any) -> ComparePlan:
    """standard, attnres and denseformer with two seeds each; delta has not run."""
    designs = ("standard", "attnres", "delta", "denseformer")
    plan = write_plan(out, designs=designs, **settings)
    runs = out / "runs"
    for seed in (0, 1):
        rms = [0.5 + seed, 1.0, 2.0, 4.0, 8.0]
        write_run(
            runs / f"standard/seed{seed}",
            STANDARD[seed],
            routing=routing_record({}, stream_rms=rms, output_rms=[1.0, 1.0, 1.0, 1.0, None]),
        )
        write_run(
            runs / f"attnres/seed{seed}",
            ATTNRES[seed],
            peak_memory=1000 + 2000 * seed,
            routing=routing_record(ATTNRES_WEIGHTS[seed], stream_rms=[1.0] * 5),
        )
        write_run(
            runs / f"denseformer/seed{seed}",
            STANDARD[1 - seed],
            routing=routing_record(DENSEFORMER_WEIGHTS, kind="signed", stream_rms=[1.0] * 5),
        )
    return plan
