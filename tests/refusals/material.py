"""The folder that the commands of the table run in: text, settings that are wrong in some way, and one finished run."""

from __future__ import annotations

import json
import random
from pathlib import Path

from residua.lab.train import TrainConfig, train

SMALL = {
    "width": 16, "depth": 2, "heads": 2, "steps": 2, "batch": 2, "context": 16, "eval_windows": 2, "threads": 1,
    "design": "denseformer",
}  # fmt: skip
WORDS = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1}, "unk_token": "[UNK]"},
}  # fmt: skip


def lay(folder: Path, **files: str | bytes) -> None:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_bytes(text if isinstance(text, bytes) else text.encode())


def make(folder: Path) -> None:
    """Everything the table names."""
    chance = random.Random(0)
    texts = ["".join(chance.choices("abcdefghij \n", k=3000)) for _ in range(4)]
    lay(folder / "corpus", **{f"{name}_txt": text for name, text in zip("abcd", texts, strict=True)})
    lay(folder / "empty")
    lay(folder / "blank", a_txt="  \n", b_txt="\n\n")
    lay(folder / "single", a_txt="one document")
    lay(folder / "binary", a_bin=b"\xff\xfe\x00\x01", b_bin=b"\x00\xff")
    lay(folder / "broken", tokenizer_json="{")
    lay(folder / "nameless", tokenizer_json="{}")
    lay(folder / "words", tokenizer_json=json.dumps(WORDS))
    lay(folder / "wrong" / "a", results_json="{}")
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0, "vocab_size": 9}
    config |= {"num_hidden_layers": 2, "intermediate_size": 8}
    written = {
        "text.txt": "text", "broken.json": "{", "list.json": "[]", "number.json": "3", "deep.json": "[" * 100_000,
        "broken.toml": "designs = [", "unknown.json": '{"banana": 1}', "kinds.json": '{"width": "16"}',
        "null.json": '{"width": null}', "plan.toml": 'designs = ["standard"]',
        "model.json": json.dumps(config | {"hidden_size": "64"}), "headless.json": json.dumps(config),
    }  # fmt: skip
    for name, text in written.items():
        (folder / name).write_text(text)
    train(TrainConfig(corpus=f"dir:{folder / 'corpus'}", **SMALL), folder / "run")
