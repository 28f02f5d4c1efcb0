"""How good a model is: bits per byte of a corpus, and tasks of the evaluation harness, for ours and Hugging Face's."""

from residua.lab.evaluate.corpus import corpus_loss as corpus_loss
from residua.lab.evaluate.opened import Opened as Opened
from residua.lab.evaluate.opened import open_model as open_model
