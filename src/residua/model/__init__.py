"""The reference Transformer, a decoder or an encoder; it names no residual design."""

from residua.model.cache import Cache as Cache
from residua.model.config import ModelConfig as ModelConfig
from residua.model.generate import generate as generate
from residua.model.objective import mask_tokens as mask_tokens
from residua.model.objective import token_loss as token_loss
from residua.model.sizes import Sizes as Sizes
from residua.model.sizes import sizes_of as sizes_of
from residua.model.transformer import Transformer as Transformer

measure = sizes_of
"""Its earlier name."""
