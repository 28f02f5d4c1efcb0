"""Three harness tasks made from a corpus, for machines without a hub: choose, compress, copy.

residua_cloze   which of four continuations follows a passage of the validation split (three are from elsewhere)
residua_bits    bits per byte of validation passages
residua_copy    a line seen twice, to be given a third time
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from residua.lab.common.files import Values
from residua.lab.data import Tokens

NAMES = ("residua_cloze", "residua_bits", "residua_copy")
LONG, SHORT = 160, 60
"""Characters of a passage and of a continuation."""


def write_tasks(folder: Path, tokens: Tokens, *, count: int = 64, seed: int = 0) -> None:
    """The task files and their data, the same for the same corpus, count and seed."""
    passages = _passages(tokens, count, random.Random(seed))
    if len(passages) < 4:
        raise ValueError("the validation split is too small for harness tasks: four passages of some lines are needed")
    folder.mkdir(parents=True, exist_ok=True)
    made = {"residua_cloze": _cloze, "residua_bits": _bits, "residua_copy": _copy}
    for name, make in made.items():
        settings, documents = make(passages, random.Random(seed + 1))
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
            "test_split": "test", "metadata": {"version": 1}, **settings,
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2))  # JSON is YAML


def _passages(tokens: Tokens, count: int, chance: random.Random) -> list[str]:
    """Passages of the validation split that start at a line, spread over it."""
    ids, need = tokens.valid, 4 * (LONG + SHORT)
    found = []
    for start in sorted(chance.sample(range(max(1, len(ids) - need)), k=min(4 * count, max(1, len(ids) - need)))):
        text = tokens.decode(ids[start : start + need].tolist()).split("\n", 1)[-1]
        if len(text) >= LONG + SHORT and text[:LONG].strip() and text[LONG : LONG + SHORT].strip():
            found.append(text[: LONG + SHORT])
    return found if len(found) <= count else chance.sample(found, k=count)


def _cloze(passages: list[str], chance: random.Random) -> tuple[Values, list[Values]]:
    documents = []
    for place, passage in enumerate(passages):
        others = chance.sample([other[LONG:] for i, other in enumerate(passages) if i != place], k=3)
        target = chance.randrange(4)
        others.insert(target, passage[LONG:])
        documents.append({"text": passage[:LONG], "choices": others, "target": target})
    settings = {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "target", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    return settings, documents


def _bits(passages: list[str], chance: random.Random) -> tuple[Values, list[Values]]:
    settings = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    }  # fmt: skip
    return settings, [{"text": passage} for passage in passages]


def _copy(passages: list[str], chance: random.Random) -> tuple[Values, list[Values]]:
    documents = []
    for passage in passages:
        words = [word for word in passage.split() if word.isascii()][:4]
        line = " ".join(words)
        if line:
            documents.append({"prompt": f"{line}\n{line}\n", "answer": line})
    settings = {
        "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    return settings, documents
