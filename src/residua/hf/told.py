"""What a forward tells all of its layers beside the state: which tokens are padding, whose document, which tokens.

    told  = {token_mask, packed_documents, token_ids}      of what the outermost converted model is handed
    layer(state, **kwargs)  is  layer(state, **told, **kwargs)

Most of Hugging Face's loops hand on whatever keywords they are given, and some only those that they name; a head may
keep keywords to itself, or call a part of its backbone. So what is told is there while a forward runs, for its thread
alone, and gone with it: a layer takes it with the keywords of its call, before a checkpoint keeps these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from residua.hf.anatomy import Argument, Model, known
from residua.hf.owner import Owner, adopt_replica
from residua.stream import Stream

MASK = "token_mask"
"""The keyword that carries which tokens are no padding to every layer."""
DOCUMENTS = "packed_documents"
"""The keyword that carries which document of a packed row every token belongs to."""
TOKENS = "token_ids"
"""The keyword that carries the tokens to the first layer, for a design that looks them up."""


class Telling:
    """Mixed into every converted model, before its base: the outermost of a forward says what its layers are told."""

    base_model: Model
    after_input: tuple[str, ...]
    """The names of what may follow the first argument of its forward."""

    def forward(self, input_ids: Tensor | None = None, *args: Argument, **kwargs: Argument) -> Argument:
        kwargs.update(zip(self.after_input, args, strict=False))
        owner = owner_of(self.base_model)
        if owner.told.now is not None:
            return super().forward(input_ids, **kwargs)  # type: ignore[misc]
        owner.told.now = said(owner.backbone, input_ids, kwargs)
        try:
            return super().forward(input_ids, **kwargs)  # type: ignore[misc]
        finally:
            owner.told.now = None


def owner_of(backbone: Model) -> Owner:
    """What the layers of a backbone ask; a replica of DataParallel is a copy whose layers ask the original still."""
    if backbone.__dict__.get("_is_replica") and backbone.owner.backbone is not backbone:
        adopt_replica(backbone, known(backbone.config))
    owner: Owner = backbone.owner
    return owner


def said(backbone: Model, input_ids: Tensor | None, given: dict[str, Argument]) -> dict[str, Tensor]:
    """What layers are told, of what a model is handed; what its stream has no use for is not said."""
    made: dict[str, Tensor | None] = {}
    tokens = input_ids if input_ids is not None else given.get("inputs_embeds")
    if backbone.remembers and tokens is not None:
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        mask = mask if given.get(MASK) is None else given[MASK]
        if isinstance(mask, Tensor) and mask.ndim == 2:
            # longer where a cache has tokens already, shorter where prompt tuning has put its own before them
            made[MASK] = F.pad(mask, (tokens.shape[1] - mask.shape[1], 0), value=1)
        elif mask is None and isinstance(positions, Tensor):
            # three axes are time, height and width, which no document can be told by; a fourth before them is the text
            positions = positions[0] if positions.ndim == 3 and len(positions) == 4 else positions
            if positions.ndim < 3:
                made[DOCUMENTS] = packed(backbone.stream, positions.expand(len(tokens), -1))
    if backbone.stream.takes_ids:
        made[TOKENS] = input_ids
    return {name: each for name, each in made.items() if each is not None}


def packed(stream: Stream, positions: Tensor) -> Tensor | None:
    """The document of every token of rows [b t], told by positions that do not go on; None where all rows are one.

    It is the rule by which transformers keeps documents apart in its attention masks.
    """
    documents = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    several = documents[:, -1].any()
    refused = (
        f"{stream.name} mixes tokens in its stream, and documents that position_ids tell apart would leak into each "
        "other; give every document a row of its own, with an attention_mask"
    )
    if torch.compiler.is_compiling():  # what the positions say is not known yet
        if stream.mixes_tokens:
            torch._assert_async(~several, refused)
        return documents
    if not several:
        return None
    if stream.mixes_tokens:
        raise ValueError(refused)
    return documents
