"""A real comparison of a few seconds: every kind of thing that the page shows, trained in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from residua.lab.compare import ComparePlan, Size
from residua.lab.compare.results import collect
from residua.lab.data import load_tokenizer
from residua.lab.diagnose import record_routing
from residua.lab.report.look import look
from residua.lab.train import TrainConfig, load_model, train
from residua.model import ModelConfig, Transformer

DESIGNS = ("standard", "mudd", "ddl", "attnres:heads=2", "delta:blocks=2")
LAYOUT = "swa:window=4,attn,mlp"
TEXT = "Return a list of the words in the string. Return a list of the lines in the string. "


@dataclass(frozen=True)
class ByteTokens:
    """What `residua.lab.data.prepare` gives, in the fields that a run uses."""

    train: np.ndarray
    valid: np.ndarray
    vocab: int = 258
    mask: int = 257
    valid_bytes: int = 900
    tokenizer: Any = field(default_factory=lambda: load_tokenizer('{"name": "bytes"}'))
    manifest: Mapping[str, Any] = field(
        default_factory=lambda: {
            "fingerprint": "f" * 64, "source": "a test", "licence": "none", "tokenizer": {"vocab": 258}
        }
    )  # fmt: skip


def byte_tokens() -> ByteTokens:
    """A text over and over."""
    ids = np.frombuffer((TEXT * 60).encode(), dtype=np.uint8).astype(np.uint16)
    return ByteTokens(ids[:4000], ids[4000:])


def make_comparison(out: Path, *, designs: tuple[str, ...] = DESIGNS, seeds: int = 3, **settings: Any) -> ComparePlan:
    """Train a plan here, look at its runs as `residua compare` does, and write the results."""
    recipe = {"steps": 4, "batch": 2, "context": 24, "eval_every": 2, "eval_windows": 4, "save_every": 4, "lr": 1e-2}
    plan = ComparePlan(
        designs=designs,
        layouts=(LAYOUT,),
        seeds=tuple(range(seeds)),
        sizes=(Size(width=16, depth=2, heads=2),),
        train=recipe | settings,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(plan.to_json()))
    for run in plan.runs({}):
        train_run(out / run.folder, run.config, routing=True)
    (out / "results.json").write_text(json.dumps(collect(plan, out, command=f"residua compare --out {out.name}")))
    return plan


def train_run(folder: Path, config: TrainConfig, *, routing: bool = False) -> None:
    """One run, with or without what a comparison adds to it."""
    tokens = byte_tokens()
    train(config, folder, tokens=tokens)
    if not routing:
        return
    model = load_model(folder)
    ids = torch.from_numpy(tokens.valid[:48].astype("int64")).view(2, 24)
    with torch.no_grad(), record_routing(model) as record:
        model(ids)
    means = {name: weights.mean((0, 2, 3, 4)).tolist() for name, weights in record.weights().items()}
    (folder / "routing.json").write_text(json.dumps(record.summary() | {"mean_weights": means}))


def inspected(design: str = "attnres:heads=2", prompt: str = TEXT[:24], **changes: Any) -> dict[str, Any]:
    """What `residua inspect` finds out about an untrained model."""
    model = Transformer(ModelConfig(vocab=258, width=16, depth=2, heads=2, design=design, layout=LAYOUT))
    found = look(model, torch.tensor([list(prompt.encode())]))
    weights = {site: each.tolist() for site, each in found.weights.items()}
    return {
        "model": "tiny", "design": design, "prompt": prompt, "tokens": [chr(byte) for byte in prompt.encode()],
        "record": found.record, "weights": weights, "attention": found.attention,
    } | changes  # fmt: skip


def large_inspection(sites: int = 100, sources: int = 200, tokens: int = 12) -> dict[str, Any]:
    """A model too large to run here: `sites` sites that read up to `sources` sources."""
    draw = torch.Generator().manual_seed(1)
    names = ["embed", *(f"s{place}" for place in range(1, sources))]
    weights, listed = {}, []
    for place in range(sites):
        reads = names[: max(3, sources * (place + 1) // sites)]
        own = torch.rand(1, len(reads), tokens, 1, generator=draw).pow(8).softmax(1)
        weights[f"l{place}_attn"] = own.tolist()
        listed.append(
            {"site": f"l{place}_attn", "index": place, "layer": place, "kind": "attn", "sources": reads,
             "stream_rms": 1.0 + place, "output_rms": 1.0, "gradient_norm": None, "gates": {},
             "routing": {"weights": "distribution", "max_weight": own.amax(1).mean().item(), "collapsed": False,
                         "normalised_entropy": 0.5, "effective_sources": 2.0}}
        )  # fmt: skip
    return {
        "model": "large", "design": "attnres", "prompt": "x" * tokens, "tokens": ["x"] * tokens,
        "record": {"sites": listed}, "weights": weights,
    }  # fmt: skip
