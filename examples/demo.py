"""Train two residual designs side by side for a minute, on the text that ships with Python itself.

One seed each: a look at the machinery, not a verdict. Run it with `make demo`.
"""

import time
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from residua.model import ModelConfig, Transformer, generate, token_loss

DESIGNS, STEPS, ROWS, TOKENS = ("standard", "delta:blocks=4"), 120, 8, 128
text = torch.tensor(list("".join(topics[key] for key in sorted(topics)).encode()))
train, valid = text[: -len(text) // 20], text[-len(text) // 20 :]


def batch(source: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(source) - TOKENS - 1, (ROWS,), generator=generator)
    rows = torch.stack([source[s : s + TOKENS + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


table = Table("design", "parameters", "of which routing", "bits per byte (valid)", "seconds")
with Progress(
    TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    TextColumn("loss {task.fields[loss]:.3f}"),
) as progress:  # fmt: skip
    for design in DESIGNS:
        model = Transformer(ModelConfig(vocab=256, width=128, depth=6, heads=4, design=design))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        generator, begun = torch.Generator().manual_seed(0), time.perf_counter()
        task = progress.add_task(design, total=STEPS, loss=float("nan"))
        for _ in range(STEPS):
            ids, targets = batch(train, generator)
            loss = token_loss(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, advance=1, loss=loss.item())
        spent, check = time.perf_counter() - begun, torch.Generator().manual_seed(1)
        with torch.no_grad():
            nats = sum(token_loss(model(ids), targets) for ids, targets in (batch(valid, check) for _ in range(8))) / 8
        counts = [sum(p.numel() for p in part.parameters()) for part in (model, model.stream)]
        table.add_row(design, f"{counts[0]:,}", f"{counts[1]:,}", f"{nats / 0.6931:.3f}", f"{spent:.0f}")
console = Console()
console.print(table)
console.print("One seed: differences of a few hundredths are noise.")
prompt = torch.tensor([list(b"The statement ")])
out = generate(model, prompt, 80, temperature=0.7, generator=torch.Generator().manual_seed(0))
console.print(f"{DESIGNS[-1]} continues:", repr(bytes(out[0].tolist()).decode(errors="replace")))
