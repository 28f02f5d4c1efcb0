"""How good a model is: bits per byte of a corpus, and tasks of the evaluation harness, for ours and Hugging Face's."""

from residua.evaluate.corpus import corpus_loss as corpus_loss
from residua.evaluate.opened import Opened as Opened
from residua.evaluate.opened import open_model as open_model
