"""A model spread over devices: the state follows the layers, and a site's parameters lie where its layer is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from residua.hf.anatomy import Model
from residua.plan import Site
from residua.stream import State, Stream


def placed(module: Model, stream: Stream, sites: tuple[Site, ...], state: State) -> State:
    """The state on the device of a module that accelerate has placed; elsewhere the state itself.

    The verbs of a stream are no `forward`, so accelerate's hooks never see them: the parameters of these sites are
    moved here, once.
    """
    hook = module.__dict__.get("_hf_hook")  # a module's own attribute: asking for a missing one by name is slow
    device = None if hook is None else getattr(hook, "execution_device", None)
    if device is None:
        if not torch.compiler.is_compiling():
            bring_in(module, stream, sites, state)
        return state
    device = torch.device(device)  # a number is one of the machine's accelerators
    if module.__dict__.get("settled") != (device, id(stream)):
        fetch(stream, device)
        for inserted in getattr(module, "inserted", {}).values():
            fetch(inserted, device, recurse=False)  # the gain of its norm, which is no module
        settle(stream, sites, device)
        module.__dict__["settled"] = (device, id(stream))
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), state)


def bring_in(module: Model, stream: Stream, sites: tuple[Site, ...], state: State) -> None:
    """Fetch what `accelerate.cpu_offload` took away: it has hooks at modules with parameters, and none at layers.

    Of the stream before the first site, and of what is inserted in a layer; they run where the state is.
    """
    inserted = module._modules.get("inserted") or {}
    for each in (*(() if sites[0].index else (stream,)), *inserted.values()):
        own = next(each.parameters(), None)
        if own is not None and own.device.type == "meta":
            device = pytree.tree_leaves(state)[0].device
            if device.type != "meta":  # there all is shapes alone
                fetch(each, device, recurse=each is stream)


def fetch(module: Model, device: torch.device, *, recurse: bool = True) -> None:
    """Bring in for good what accelerate has offloaded of a module and, with `recurse`, of those inside it.

    Of a stream and of what an inserted sublayer holds itself: both are small, and used outside a `forward`.
    """
    away = [name for name, each in module.named_parameters(recurse=recurse) if each.device.type == "meta"]
    if not away:
        return
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device
    from transformers.integrations.accelerate import load_offloaded_parameter

    values = {name: load_offloaded_parameter(module, name) for name in away}
    remove_hook_from_module(module, recurse=recurse)
    for name, value in values.items():
        set_module_tensor_to_device(module, name, device, value=value)


def settle(stream: Stream, sites: tuple[Site, ...], device: torch.device) -> None:
    """Move the parameters of some sites to a device; what all sites share must be there already."""
    own = {id(each) for part in stream.at.values() for each in part.parameters()}
    for name, parameter in stream.named_parameters():
        if id(parameter) not in own and parameter.device != device:
            raise ValueError(
                f"{stream.spec} shares stream.{name} between all layers, which lie on several devices; "
                "put the model on one device, or choose options without shared parameters"
            )
    for site in sites:
        part = stream.part(site)
        if part is not None and any(each.device != device for each in part.parameters()):
            part.to(device)
