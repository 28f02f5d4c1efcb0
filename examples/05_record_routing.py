"""Which earlier layers does each sublayer read? Record the routing of a forward pass, print it, and draw it.

The picture goes to the file named on the command line: python 05_record_routing.py routing.png
"""

import sys
from pathlib import Path

import torch

from residua.lab.diagnose import record_routing
from residua.lab.diagnose.inspect import draw, inspect_ids
from residua.model import ModelConfig, Transformer, token_loss

torch.set_num_threads(1)  # the model is tiny
text = torch.tensor(list(b"the residual stream carries a state from layer to layer, and every layer adds to it. "))
model = Transformer(ModelConfig(vocab=256, width=32, depth=3, heads=4, design="attnres"), seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(30):  # untrained, AttnRes weighs all sources alike
    loss = token_loss(model(text[None, :-1]), text[None, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad(), record_routing(model) as record:
    model(text[None])
print(record.table())

weights = record.weights()["head"]  # lane, source, batch, token, slice of the width
mean = dict(zip(record["head"].sources, weights.mean((0, 2, 3, 4)).tolist(), strict=True))
print("the head reads " + ", ".join(f"{name} {weight:.2f}" for name, weight in mean.items()))

if len(sys.argv) > 1:
    draw(inspect_ids(model, text, tokens=[chr(byte) for byte in text]), Path(sys.argv[1]))
