"""Text as token ids: `prepare(corpus, tokenizer)` gives `Tokens`, from a checked cache or made now."""

from residua.data.source import DataError as DataError
from residua.data.tokenizer import Tokenizer as Tokenizer
from residua.data.tokenizer import load_tokenizer as load_tokenizer
from residua.data.tokens import Tokens as Tokens
from residua.data.tokens import prepare as prepare
