"""Refusals of the Python API: the call, and words of the error. The doors check what the command line does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import residua
from residua import ComparePlan, ModelConfig, Plan, TrainConfig, Transformer, ops
from residua.cache import cache_root
from residua.lab.compare import Size, Tune, compare
from residua.lab.cost.targets import from_hugging_face, sized
from residua.lab.data import prepare
from residua.lab.evaluate import corpus_loss
from residua.lab.train import load_model, read_metrics, train
from residua.lab.train.result import Result
from residua.native.library import _open
from residua.ops import _backend
from residua.spec import parse

SHAPE = {"vocab": 9, "width": 16, "depth": 2, "heads": 2}
IDS = torch.zeros(1, 3, dtype=torch.long)


def model(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: ModelConfig(**SHAPE | changes)


def recipe(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: TrainConfig(**changes)


def plan(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: ComparePlan(**{"designs": ("standard",)} | changes)


def sampled(**options: Any) -> Callable[[Path], object]:
    return lambda folder: residua.generate(Transformer(ModelConfig(**SHAPE)), IDS, 1, **options)


def built(spec: Any, width: Any = 8, depth: Any = 2) -> Callable[[Path], object]:
    return lambda folder: residua.build(spec, Plan.regular(width, depth))


def entered(name: str) -> Callable[[Path], object]:
    def enter(folder: Path) -> None:
        with ops.backend(name):
            pass

    return enter


ROWS: list[tuple[str, Callable[[Path], object], str]] = [
    ("width of a model", model(width=0), "width must be at least 1"),
    ("width as text", model(width="16"), "width is a whole number, not '16'"),
    ("width as a fraction", model(width=16.0), "width is a whole number, not 16.0"),
    ("width as a truth", model(width=True), "width is a whole number, not True"),
    ("width as nothing", model(width=None), "width is a whole number, not None"),
    ("far too wide", model(width=10**7), "parameters; at most 1e+13"),
    ("far too deep", model(depth=10**6), "2,000,000 sublayers"),
    ("far too many ids", model(vocab=10**13), "parameters; at most 1e+13"),
    ("no heads", model(heads=0), "heads must be at least 1"),
    ("heads as text", model(heads="2"), "heads is a whole number"),
    ("no ids", model(vocab=0), "vocab must be at least 1"),
    ("MLP as text", model(mlp_width="wide"), "mlp_width is a whole number"),
    ("eps nan", model(eps=math.nan), "eps is a finite number, not nan"),
    ("eps inf", model(eps=math.inf), "eps is a finite number"),
    ("eps as text", model(eps="small"), "eps is a finite number"),
    ("eps below zero", model(eps=-1.0), "eps must not be negative"),
    ("init_std nan", model(init_std=math.nan), "init_std is a finite number"),
    ("init_std zero", model(init_std=0.0), "init_std must be positive"),
    ("rope_base nan", model(rope_base=math.nan), "rope_base is a finite number"),
    ("rope_base zero", model(rope_base=0), "rope_base must be a positive number"),
    ("causal as text", model(causal="yes"), "causal is true or false"),
    ("tied as a number", model(tied=1), "tied is true or false"),
    ("layout as a list", model(layout=["attn"]), "layout is text"),
    ("design as a number", model(design=3), "design is text"),
    ("unknown norm", model(lane_norms="other"), "lane_norms must be shared or separate"),
    ("unknown field of a model", lambda folder: ModelConfig.from_json(SHAPE | {"banana": 1}), "banana"),
    ("plan of no width", lambda folder: Plan.regular(0, 2), "width of at least 1"),
    ("plan of text", lambda folder: Plan.regular("8", 2), "width is a whole number"),
    ("plan of half a block", lambda folder: Plan.regular(8, 1.5), "depth is a whole number"),
    ("plan of a million blocks", lambda folder: Plan.regular(8, 10**6), "2,000,000 sublayers"),
    ("plan of a million passes", lambda folder: Plan.regular(8, 2, passes=10**6), "4,000,000 sublayers"),
    ("design without a name", lambda folder: parse({"blocks": 2}), 'needs a "name"'),
    ("option that is a list", lambda folder: parse({"name": "delta", "blocks": [2]}), "numbers, booleans or words"),
    ("unknown design", built("detla"), "did you mean 'delta'?"),
    ("unknown option", built("delta:banana=1"), "no option 'banana'"),
    ("eps nan of a design", built("attnres:eps=nan"), "eps must be finite"),
    ("eps nan in JSON", built({"name": "attnres", "eps": math.nan}), "eps must be finite"),
    ("rounds without end", built("mhc:iterations=1000000000"), "iterations is at most 1,000"),
    ("window without end", built("depthswa:window=99999999999"), "window is at most"),
    ("backend of another name", entered("banana"), "there is no such backend"),
    ("temperature nan", sampled(temperature=math.nan), "temperature=nan"),
    ("temperature below zero", sampled(temperature=-1.0), "temperature=-1.0"),
    ("top_p nan", sampled(temperature=1.0, top_p=math.nan), "top_p=nan"),
    ("top_k zero", sampled(temperature=1.0, top_k=0), "top_k=0"),
    ("chunk zero", sampled(chunk=0), "chunk=0"),
    ("empty prompt", lambda folder: residua.generate(Transformer(ModelConfig(**SHAPE)), IDS[:, :0], 1), "at least one"),
    ("steps as text", recipe(steps="5"), "steps takes whole number"),
    ("steps as a truth", recipe(steps=True), "steps takes whole number"),
    ("lr nan", recipe(lr=math.nan), "lr must be finite"),
    ("eps of a recipe nan", recipe(eps=math.nan), "eps must be finite"),
    ("many threads", recipe(threads=100_000), "threads must be at most 1,024"),
    ("large batch", recipe(batch=10**9), "batch must be at most"),
    ("unknown field of a recipe", lambda folder: TrainConfig.from_json({"banana": 1}), "training fields: banana"),
    ("number as a field", lambda folder: TrainConfig.from_json({1: 1}), "unknown training fields: 1"),
    ("run nowhere", lambda folder: train(TrainConfig(), ""), "out is empty"),
    ("run too large", lambda folder: train(TrainConfig(batch=2**20, context=2**20), folder / "new"), "GiB (parameters"),
    ("run with a strange resume", lambda folder: train(TrainConfig(), folder / "new", resume="x"), "resume is auto"),
    ("run on no corpus", lambda folder: train(TrainConfig(corpus="x"), folder / "new"), "unknown corpus 'x'"),
    ("model of no run", lambda folder: load_model(folder / "new"), "holds no checkpoint"),
    ("corpus of no kind", lambda folder: prepare("banana"), "unknown corpus"),
    ("tokenizer of no kind", lambda folder: prepare(f"dir:{folder}/corpus", "banana"), "unknown tokenizer"),
    ("evaluation of no rows", lambda folder: corpus_loss(None, None, context=4, batch=0), "batch=0 must be at least 1"),
    ("evaluation of less than none", lambda folder: corpus_loss(None, None, context=4, windows=-1), "not negative"),
    ("metrics that are none", lambda folder: list(read_metrics(folder / "broken.json.lines")), "line 1 is not JSON"),
    ("result of nothing", lambda folder: Result.from_json({}), "has no design"),
    ("plan of no designs", plan(designs=()), "at least one of designs"),
    ("plan of numbers", plan(designs=(1,)), "designs are texts"),
    ("plan of one layout that is none", plan(layouts=(3,)), "layouts are texts"),
    ("plan of a size that is none", plan(sizes=({"depth": 2},)), "sizes are tables"),
    ("plan of a tuning that is none", plan(tune={"lr": (1,)}), "tune is a table"),
    ("plan with a rate that is none", plan(tune=Tune(lr=(math.inf,))), "tune.lr are positive numbers"),
    ("plan with a tuning seed twice", plan(tune=Tune(lr=(1e-3,), seeds=(9, 9))), "tune.seeds names one twice"),
    ("plan of many seeds", plan(seeds=tuple(range(10_001))), "at most 10,000 seeds"),
    ("plan that is a list", lambda folder: ComparePlan.from_json([]), "a plan is a table"),
    ("comparison nowhere", lambda folder: compare(ComparePlan(designs=("standard",)), ""), "out is empty"),
    ("comparison of no jobs", lambda folder: compare(ComparePlan(designs=("standard",)), "new", jobs=0), "jobs must"),
    ("comparison too large",
     lambda folder: compare(ComparePlan(designs=("standard",), sizes=(Size(width=200_000, heads=1000),),
                                        train={"corpus": f"dir:{folder}/corpus"}), folder / "new"), "GiB"),
    ("model to cost of no size", lambda folder: sized("banana"), "banana"),
    ("model to cost of text", lambda folder: from_hugging_face(folder / "model.json"), 'hidden_size is "64"'),
]  # fmt: skip

ENVIRONMENT: list[tuple[str, str, Callable[[], object], str]] = [
    ("RESIDUA_BACKEND", "banana", _backend.check_environment, "RESIDUA_BACKEND='banana': there is no such backend"),
    ("RESIDUA_BACKEND", " ", _backend.check_environment, "there is no such backend"),
    ("RESIDUA_STRICT", "yes", _backend.check_environment, "RESIDUA_STRICT='yes': it is 0 or 1"),
    ("RESIDUA_STRICT", "true", _backend.check_environment, "it is 0 or 1"),
    ("RESIDUA_CACHE", "~nosuchuser/x", cache_root, "there is no such home folder"),
    ("RESIDUA_NATIVE", "/nosuch/kernels.so", _open, "cannot be opened"),
    ("RESIDUA_NATIVE", torch.__file__, _open, "no library of residua"),
    ("RESIDUA_NATIVE", "/", _open, "is not a file"),
]
"""A variable, what it holds, who reads it, and words of the error."""
