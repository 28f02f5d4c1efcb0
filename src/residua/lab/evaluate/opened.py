"""open_model(path): a run of ours, a fine-tuned run, or a Hugging Face directory, as one thing with logits and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from residua.extras import need
from residua.lab.data import Tokenizer, load_tokenizer
from residua.lab.data.tokenizer import Bytes, name_beside, read_folder
from residua.lab.runs import read_if_there


@dataclass(frozen=True)
class Opened:
    """A model to look at, with what turns text into its ids."""

    model: nn.Module
    tokenizer: Tokenizer
    design: str
    """Its residual design, or `base` for a Hugging Face model as it was published."""
    vocab: int
    context: int | None
    """The most tokens it takes at once; None where nothing says so."""
    folder: Path | None = None
    """Where transformers finds the same tokenizer beside a Hugging Face model; None where it would find another."""

    def logits(self, ids: Int[Tensor, "b t"]) -> Float[Tensor, "b t vocab"]:
        """Of every position."""
        if hasattr(self.model, "plan"):
            return self.model(ids)
        return self.model(input_ids=ids, use_cache=False).logits

    def begun(self, prompt: str) -> list[int]:
        """The ids of a text to continue. A published model was trained behind what its tokenizer puts before a text,
        such as <bos>; ours never saw that."""
        return self.tokenizer.encode(prompt) if hasattr(self.model, "plan") else self.tokenizer.begun(prompt)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids that the model made. Vocabularies are padded: an id that the tokenizer lacks is no text."""
        return self.tokenizer.decode([index for index in ids if index < self.tokenizer.vocab])

    def token(self, index: int) -> str:
        """One id to look at: its text, or the name of a special one, such as <bos>."""
        return self.text([index]) or self.tokenizer.special(index)

    def continued(self, ids: Sequence[int], tokens: int, stop: Callable[[str], bool]) -> str:
        """The likeliest text after `ids`: up to `tokens` more, or until `stop` says that the text has ended."""
        made: list[int] = []
        for token in self.steps(torch.tensor([list(ids)]), tokens):
            made.append(token)
            if token == self.tokenizer.end or stop(self.text(made)):
                break
        return self.text([token for token in made if token != self.tokenizer.end])

    def steps(self, ids: Int[Tensor, "1 t"], tokens: int, **options: Any) -> Iterator[int]:
        """The new tokens after `ids`, one by one; options and errors are those of `residua.generate`."""
        from residua.model.generate import stepwise

        model: Any = self.model if hasattr(self.model, "plan") else _Cached(self.model)
        yield from (int(token) for token in stepwise(model, ids, tokens, **options))


class _Cached:
    """A Hugging Face model, called as ours is by what decodes: it keeps its cache itself."""

    def __init__(self, model: Any) -> None:
        self.model, self.kept = model, None

    def __call__(self, ids: Tensor, *, mask: Tensor | None = None, cache: object = None) -> Tensor:
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.kept, use_cache=True)
        self.kept = output.past_key_values
        return output.logits


def open_model(path: Path | str) -> Opened:
    """The model in a directory: `residua train`'s, `residua finetune`'s, or Hugging Face's."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a directory; give a run directory or a model directory")
    if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file() and not (folder / "model").is_dir():
        from residua.lab.train import load_model

        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        own = load_model(folder)
        tokenizer = load_tokenizer((folder / "tokenizer.json").read_text())
        return Opened(own, tokenizer, own.stream.spec, own.config.vocab, None)
    inner = folder / "model"
    if (folder / "manifest.json").is_file() and not (inner / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds a run without a checkpoint; train there first")
    if not any((place / "config.json").is_file() for place in (inner, folder)):
        raise ValueError(f"{folder} holds neither a run nor a model: it has no config.json")
    return _hugging_face(inner if (inner / "config.json").is_file() else folder, folder)


def open_start(path: Path | str) -> Opened:
    """What a run of `residua finetune` started from: its checkpoint, converted if the run converted it, with the run's
    tokenizer."""
    folder = Path(path)
    settings = read_if_there(folder / "config.json") or {}
    if "checkpoint" not in settings:
        raise ValueError(f"{folder} is not a run of residua finetune: it does not say what it started from")
    from residua.hf.convert import convert
    from residua.hf.released.opening import load_causal
    from residua.lab.finetune import design_of

    after, checkpoint = open_model(folder), settings["checkpoint"]
    if settings.get("design") is None:
        model = load_causal(checkpoint, dtype=torch.float32)
    else:
        given = {"layout": settings.get("layout"), "seed": settings.get("seed", 0)}
        model = convert(checkpoint, settings["design"], dtype=torch.float32, say=None, **given)
    return replace(after, model=model.eval(), design=design_of(model))


def _hugging_face(folder: Path, run: Path) -> Opened:
    need("hf", "transformers")
    from residua.hf.storage import check_weights, load_config
    from residua.lab.finetune import design_of

    config = load_config(str(folder))
    check_weights(folder)
    beside = read_folder(f"hf:{folder}") if (folder / "tokenizer.json").is_file() else None
    if run != folder and (run / "tokenizer.json").is_file():  # what it was trained with
        tokenizer = load_tokenizer((run / "tokenizer.json").read_text())
    else:
        name_beside(str(folder))  # one in other files would not be read, and bytes are wrong ids for it
        tokenizer = beside or Bytes()
    from transformers.utils import logging

    from residua.hf.released.opening import load_causal

    logging.disable_progress_bar()
    model = load_causal(str(folder), dtype=torch.float32).eval()
    held = model.get_input_embeddings().weight.shape[0]
    if tokenizer.end >= held:
        raise ValueError(f"{folder} has {held} ids, too few for {tokenizer.name}; put its own tokenizer.json there")
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    same = beside is not None and (beside is tokenizer or beside.hash == tokenizer.hash)
    return Opened(model, tokenizer, design_of(model), held, context, folder if same else None)
