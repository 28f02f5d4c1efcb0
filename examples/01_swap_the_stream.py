"""One model, every residual design: the same sublayer weights, the same text, a few steps of training.

The losses say that every design trains. They do not rank designs: the model is tiny, one learning rate serves
all, and there is one seed.
"""

from pydoc_data.topics import topics

import torch

import residua
from residua.model import ModelConfig, Transformer, token_loss

STEPS, ROWS, TOKENS = 16, 8, 48
torch.set_num_threads(1)  # the model is tiny
text = torch.tensor(list("\n".join(topics.values()).encode()))  # Python's own help texts, as bytes


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - TOKENS, (ROWS,), generator=generator)
        window = torch.stack([text[start : start + TOKENS + 1] for start in starts])
        yield window[:, :-1], window[:, 1:]


print(f"{'design':<12} {'added':>6}  loss at the start and after {STEPS} steps")
for name in residua.names():
    model = Transformer(ModelConfig(vocab=256, width=48, depth=3, heads=4, design=name), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in batches():
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    added = sum(parameter.numel() for parameter in model.stream.parameters())
    print(f"{name:<12} {added:>6,}  {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
