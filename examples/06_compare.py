"""Compare designs from Python: what `residua compare` does, with the results as a dictionary.

Two designs, three seeds, a few steps of a tiny model: enough to see the machinery, too little to rank anything.
"""

import tempfile

from residua.lab.compare import ComparePlan, compare

plan = ComparePlan.from_json(
    {
        "designs": ["standard", "delta:blocks=2"],  # the first is the baseline
        "sizes": [{"depth": 2, "width": 16, "heads": 2}],
        "seeds": [0, 1, 2],
        "match": "params",  # narrow the MLP until all rows have as many parameters
        "train": {"corpus": "pydoc", "steps": 10, "batch": 2, "context": 32, "eval_windows": 4, "lr": 4e-3},
    }
)
with tempfile.TemporaryDirectory() as folder:  # give it a folder that stays: the same call resumes there
    results = compare(plan, folder, jobs=2, draw=False)

for row in results["rows"]:
    loss, gap = row["loss"], row["difference"]
    told = "baseline" if gap is None else f"{gap['mean']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}]"
    print(f"{row['design']:<16} {row['parameters']:>6,} parameters  loss {loss['mean']:.4f}  {told}")
for note in results["notes"]:
    print(f"note: {note}")
