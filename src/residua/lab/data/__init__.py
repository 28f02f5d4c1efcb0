"""Text as token ids: `prepare(corpus, tokenizer)` gives `Tokens`, from a checked cache or made now."""

from residua.lab.data.source import DataError as DataError
from residua.lab.data.tokenizer import Tokenizer as Tokenizer
from residua.lab.data.tokenizer import load_tokenizer as load_tokenizer
from residua.lab.data.tokens import Tokens as Tokens
from residua.lab.data.tokens import check_data as check_data
from residua.lab.data.tokens import prepare as prepare
