"""Runs with known losses, as a comparison would leave them: for tests of what is made of them."""

import json

NONE = dict.fromkeys(("max_weight", "normalised_entropy", "effective_sources", "collapsed_share"))


def leave(
    folder, config, loss, *, seconds=10.0, norm=1.0, vocab=258, kind="CPU", native="abc AVX2", fingerprint="f" * 64
):
    """Everything that a finished run leaves but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = config.steps * config.tokens_per_step
    result = {
        "design": config.design, "config": config.digest, "fingerprint": fingerprint, "parameters": 7,
        "steps": config.steps, "stream_parameters": 1, "tokens": tokens, "passes": 0.5, "loss": loss,
        "perplexity": 2 * loss, "bits_per_byte": 1.5 * loss, "checkpoint": "none",
        "time": {"cpu_seconds": seconds, "seconds": seconds, "peak_memory": 100, "tokens_per_second": 1.0},
    }  # fmt: skip
    manifest = {
        "data": {"fingerprint": fingerprint, "tokenizer": {"vocab": vocab}}, "versions": {"torch": "2"},
        "native": native, "machine": "Linux x86_64",
    }  # fmt: skip
    files = {
        "result": result, "manifest": manifest, "config": config.to_json(), "hardware": {"kinds": [kind]},
        "routing": {"network": NONE, "deep_third": NONE, "sites": [], "mean_weights": {}},
    }  # fmt: skip
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    lines = [
        {
            "kind": "train",
            "step": 1,
            "loss": loss + 1,
            "gradient_norm": norm,
            "batch": f"{config.steps} updates of {fingerprint}",
        }
    ]
    for step, share in ((0, 0.0), (config.steps, 1.0)):
        lines.append({"kind": "valid", "step": step, "tokens": int(share * tokens), "loss": loss + 1 - share,
                      "bits_per_byte": 1.5 * loss, "time": {"cpu_seconds": share * seconds}})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def break_run(folder, step=3):
    """A run that diverged."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diverged.json").write_text(json.dumps({"step": step, "site": "l0_mlp", "message": f"step {step}: nan"}))
