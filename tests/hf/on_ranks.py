"""Two processes load converted models by the plans of their bases, tensor parallel and sharded; rank 0 says how far
they are from one process. Run by test_ranks.py: `tests.hf.on_ranks MODELS OUT`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import residua  # noqa: F401  the Auto classes then know converted models
from residua.testing import error
from tests.hf.models import ids

GREEDY = {"max_new_tokens": 3, "do_sample": False}
SPLIT, SHARDED = DistributedConfig(tp_plan="auto", tp_size=2), DistributedConfig(fsdp_size=2)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gaps(folder, how, scratch):
    """Logits, all gradients as one vector, greedy tokens, and what a save and a load bring back."""
    alone = AutoModelForCausalLM.from_pretrained(folder).train()
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how).train()
    pieces = sum(hasattr(each, "full_tensor") for each in model.parameters()) / len(list(model.parameters()))
    answers = [each(ids(), labels=ids(), use_cache=False) for each in (model, alone)]
    for each in answers:
        each.loss.backward()
    gradients = [torch.cat([whole(each.grad).flatten() for each in one.parameters()]) for one in (model, alone)]
    model.save_pretrained(scratch)
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(scratch).state_dict()
    found = {
        "logits": error(whole(answers[0].logits), answers[1].logits),
        "gradients": error(*gradients),
        "tokens": torch.equal(model.eval().generate(ids(), **GREEDY), alone.eval().generate(ids(), **GREEDY)),
        "saved": all(torch.equal(value, again[name]) for name, value in alone.state_dict().items()),
        "pieces": pieces,
    }
    return model, alone, found


def sharding(model, alone, scratch):
    """Which modules are sharded, and a checkpoint in pieces that goes out and comes back."""
    names = sorted(name for name, each in model.named_modules() if isinstance(each, FSDPModule))
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=str(scratch))
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=str(scratch))
    set_model_state_dict(model, state)
    with torch.no_grad():
        back = torch.equal(model(ids()).logits, alone(ids()).logits)
    return {"units": names, "checkpoint": back}


def refused(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=SPLIT)
    try:
        model(ids())
    except ValueError as problem:
        return str(problem)
    return "nothing"


def main():
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = {}
    for name in ("llama", "gpt_neox", "swa", "mixtral"):
        found[f"split {name}"] = gaps(models / name, SPLIT, out / f"split-{name}")[2]
    for name in ("swa", "mixtral"):
        found[f"sharded {name}"] = gaps(models / name, SHARDED, out / f"sharded-{name}")[2]
    model, alone, found["sharded llama"] = gaps(models / "llama", SHARDED, out / "sharded")
    found["sharding"] = sharding(model, alone, out / "pieces")
    found["refused"] = refused(models / "values")
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
