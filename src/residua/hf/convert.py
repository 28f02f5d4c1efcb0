"""convert(model_or_name, "delta:blocks=4"): a Hugging Face decoder on another residual stream, with the same function.

The weights stay, under their names; the design's parameters are added under `stream` and start so that no logit
moves. That is checked before the model is handed back: a conversion that changes the model raises and saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from residua.hf.anatomy import ANATOMY, Class, Config, Model, Tokenizer, anatomy_of, probe, to_json
from residua.hf.defaults import enterable, entry
from residua.plan import LANES, Plan
from residua.spec import Spec, Value
from residua.stream import Conversion

Stored = Mapping[str, Any] | None
"""An anatomy as a config keeps it, where it was found."""


def convert(
    model: Model,
    design: Spec,
    *,
    layout: str | None = None,
    tokenizer: Tokenizer = None,
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    check: bool = True,
    seed: int = 0,
    say: Callable[[str], None] | None = print,
) -> Model:
    """The model on the residual stream of `design`, with the same logits.

    model:      a transformers model, which is changed and returned; or a directory or hub name to load.
    layout:     the model's own sublayers with others inserted, as in "swa:window=16,attn,mlp".
    tokenizer:  makes the text of the identity check; found beside a directory by itself.
    dtype:      of a model that is loaded; "auto" is the checkpoint's own.
    revision:   branch, tag or commit of a hub name.
    check:      False leaves the identity check out: for models too large to run here.
    seed:       of the queries that start at random.
    say:        called with the options that were filled in and the result of the check; None for silence.

    The anatomy of the decoder is a row of `hf/anatomy.py`, or is found by running its layers and proved (`hf/find.py`).

    Raises ValueError for an architecture that is not found, a quantised or already converted model, a design that
    cannot start as the base network, and logits that differ by more than the bound; the model is then unchanged.
    """
    from residua.hf.backbone import backbone_of
    from residua.hf.card import licence_of
    from residua.hf.find import find
    from residua.hf.insert import insert
    from residua.hf.proof import shown
    from residua.hf.storage import load_base, load_tokenizer, refuse_converted

    enterable(design)  # before gigabytes are read
    if isinstance(model, str | Path):
        source = str(model)
        model = load_base(source, dtype=dtype, revision=revision)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source, revision=revision)
        model.config.license = licence_of(Path(source))
    config = model.config
    refuse_converted(config)
    say = say or (lambda line: None)
    anatomy = anatomy_of(config)
    refuse(model)
    if anatomy is None:
        if model.device.type == "meta":
            raise ValueError(
                f"the anatomy of {config.model_type} is found by running its layers, and on the meta device they have "
                "no numbers; convert a model that has, and set model.config.anatomy to what its config then holds"
            )
        anatomy = find(model)
        say(f"anatomy of {config.model_type}, found and proved: {'; '.join(map(shown, anatomy.blocks))}")
    probe(backbone_of(model), anatomy)
    plan = anatomy.plan(config, layout)
    with torch.device("meta"):  # a trial that allocates nothing: the model is not touched before all of this is right
        refuse_lanes(design, plan, str(config.model_type))
        stream, expected = entry(design, plan)
        insert(config, anatomy.slots(layout), plan.block(0), stream)
    expected = replace(expected, exact=expected.exact and anatomy.exact)
    kept = to_json(anatomy) if getattr(config, "anatomy", None) or config.model_type not in ANATOMY else None
    if check and model.device.type == "meta":
        raise ValueError(
            "this model is on the meta device and has no numbers to check; load its weights first, or convert with "
            "check=False and load them into the result"
        )
    say(f"{config.model_type} -> {stream.spec}" + (f", layout {layout}" if layout else ""))
    if not check:
        _install(model, stream.config, layout, kept, seed)
        say("identity: not checked")
        return model
    return _checked(model, stream.config, layout, kept, tokenizer, expected, seed, say)


def refuse_lanes(design: Spec, plan: Plan, name: str) -> None:
    """Refuse a design that gives q, k and v inputs of their own where no attention has projections for them."""
    if any(site.lanes > 1 for site in plan.sites if site.kind == "attn"):
        return
    wide = replace(plan, sites=tuple(replace(site, lanes=LANES[site.kind]) for site in plan.sites))
    stream, _ = entry(design, wide)
    if any(stream.feeds(site) > 1 for site in wide.sites if site.kind == "attn"):
        raise ValueError(
            f"{stream.spec} gives q, k and v inputs of their own, and no attention of {name} has one projection for "
            "each; choose a design that reads one input, such as delta"
        )


def refuse(model: Model) -> None:
    """What cannot be converted though its architecture could."""
    quantised = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    if quantised is not None:
        raise ValueError(
            "this model is quantised: its identity cannot be checked in float32, and its weights cannot be trained; "
            "convert the full-precision model and quantise the result"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError("this model is compiled; convert first, and compile the result")
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            "this model has an adapter, and saving it would leave out the stream; merge the adapter first (peft's "
            "merge_and_unload), or convert the base and add the adapter then"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("convert outside torch.inference_mode(): parameters made in it could never be trained")
    if model.device.type != "meta" and torch.is_autocast_enabled(model.device.type):
        raise ValueError("convert outside torch.autocast(): it would round the check that the logits stay the same")
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise ValueError("convert a model that lies on one device, save it, and load it with a device_map")


def _checked(
    model: Model,
    config: Config,
    layout: str | None,
    anatomy: Stored,
    tokenizer: Tokenizer,
    expected: Conversion,
    seed: int,
    say: Callable[[str], None],
) -> Model:
    from residua.hf.backbone import backbone_of
    from residua.hf.identity import answers, batches, compare, in_float32
    from residua.hf.insert import Inserted
    from residua.hf.install import remove

    ids, base, dtype = batches(model, tokenizer), model.config, model.dtype
    classes = model.__class__, backbone_of(model).__class__
    with in_float32(model):
        before = answers(model, ids)
        _install(model, config, layout, anatomy, seed)
        try:
            report = compare(model, before, ids, expected)
        except (AttributeError, TypeError, RuntimeError) as error:
            remove(model, classes)
            _reconfigure(model, model.config, base)
            raise ValueError(
                f"{base.model_type} does something with its residual stream outside its layers, and cannot run on "
                f"another: {(str(error).splitlines() or [''])[0]}"
            ) from error
    for module in model.modules():
        if isinstance(module, Inserted):
            module.to(dtype)
    gaps = ", ".join(f"{name} {gap:.2g}" for name, gap in report["batches"].items())
    line = f"identity: max |logit difference| / rms {report['max_gap']:.2g}, bound {report['bound']:.2g} ({gaps})"
    if not report["same"]:
        remove(model, classes)
        _reconfigure(model, model.config, base)
        raise ValueError(
            f"{line}: not the base network any more, so nothing is kept. The norms of this model may not forget the "
            "scale of the stream, or their eps may show; use a design with a zero gate, such as delta"
        )
    say(line)
    model.config.identity = report
    return model


def _install(model: Model, stream: Mapping[str, Value], layout: str | None, anatomy: Stored, seed: int) -> None:
    """Give a live model its converted config and classes, and start its stream."""
    from residua.hf.backbone import backbone_of
    from residua.hf.classes import config_class, model_class
    from residua.hf.install import install

    base, backbone = model.config, backbone_of(model)
    made = config_class(base.model_type)
    values = {key: value for key, value in base.to_dict().items() if key not in ("model_type", "transformers_version")}
    config = made.from_dict({**values, "stream": dict(stream), "layout": layout, "anatomy": anatomy, "identity": None})
    config._attn_implementation = base._attn_implementation
    config._experts_implementation = base._experts_implementation
    config._name_or_path = base._name_or_path
    config.base = _public(str(base._name_or_path or ""))
    made_of: Class = type(model)
    model.__class__ = model_class(made_of)
    _reconfigure(model, base, config)
    model.__dict__.pop("_weight_conversions", None)  # of the base's checkpoint; saving finds those of the new type
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        install(model)
        if backbone.device.type != "meta":  # there nothing has a start, before a checkpoint or `_init_weights` fills it
            backbone.stream.reset(torch.Generator(backbone.device).manual_seed(seed))
    _collect(model)


def _reconfigure(model: Model, old: Config, new: Config) -> None:
    """Give every module that has a config the new one."""
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def _public(name: str) -> str:
    """A hub name as it is; of a directory its own name alone, for a model is shown to others."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _collect(model: Model) -> None:
    """What `post_init` gathers from the classes, for classes that came later."""
    for module in {id(each): each for each in (model.base_model, model)}.values():
        module._no_split_modules = {*module._no_split_modules, *type(module)._no_split_modules}
        kept = type(module)._keep_in_fp32_modules_strict
        module._keep_in_fp32_modules_strict = {*(module._keep_in_fp32_modules_strict or ()), *kept}
