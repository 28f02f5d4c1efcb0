"""What `NUMERICS` promises: while the number stands, a config has the loss that records of it hold."""

import pytest

from residua.lab.train.loop import Trainer
from residua.lab.train.numerics import NUMERICS
from residua.lab.train.reproducible import reproducible
from tests.train.harness import toy_config, toy_tokens

LOSSES = {"standard": 2.296897, "delta": 2.294975, "mhc": 2.288985, "denseformer": 2.293255}


@pytest.mark.parametrize("design", LOSSES)
def test_loss_of_a_small_run_is_that_of_this_number(design):
    """Twelve updates at a high rate: a change of start, batches, schedule or arithmetic shows in the third digit, and
    what another processor rounds otherwise does not. If this fails on purpose, count `NUMERICS` up."""
    config = toy_config(design=design, threads=1)
    with reproducible(config):
        trainer = Trainer(config, toy_tokens())
        losses = [line["loss"] for line in trainer.lines() if line["kind"] == "valid"]
    assert NUMERICS == 2
    assert losses[-1] == pytest.approx(LOSSES[design], abs=1e-4)
