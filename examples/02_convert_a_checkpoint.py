"""A Hugging Face model on another residual design: the same logits, and then ordinary fine-tuning.

A small Llama with random weights stands for your checkpoint; `residua.convert` also takes a directory or a hub name.
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import residua

torch.set_num_threads(1)  # the model is tiny
torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).eval()
ids = torch.randint(300, (2, 24))
with torch.no_grad():
    before = base(ids).logits

model = residua.convert(base, "delta:blocks=4")  # changes the model and returns it
with torch.no_grad():
    assert torch.equal(model(ids).logits, before)

added = {name: each for name, each in model.named_parameters() if ".stream." in name}
others = [each for name, each in model.named_parameters() if name not in added]
optimizer = torch.optim.AdamW([{"params": list(added.values()), "lr": 5e-3}, {"params": others, "lr": 1e-3}])
losses = []
for _ in range(10):
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{sum(each.numel() for each in added.values())} parameters added, loss {losses[0]:.4f} -> {losses[-1]:.4f}")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # an ordinary Hugging Face directory
    again = AutoModelForCausalLM.from_pretrained(folder)
print(f"loaded {type(again).__name__}, generated {again.generate(ids[:1], max_new_tokens=4, do_sample=False).shape}")
