"""What a run must hold at least, by hand; and what made its updates, where that changed on the way."""

import pytest

from residua import ops
from residua.lab.train import TrainConfig
from residua.lab.train.fits import check_fits, least_bytes, least_vocab
from tests.train.harness import Stop, run, stop_after

CONFIG = TrainConfig(width=16, depth=2, heads=2, mlp_width=24, batch=4, context=8)


def test_bytes_by_hand():
    parameters = 258 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert least_bytes(CONFIG, 258) == {
        "parameters": 16 * parameters, "logits": 4 * 32 * 258, "activations": 4 * 32 * 16 * 4
    }  # fmt: skip


@pytest.mark.parametrize(("tokenizer", "ids"), [("bytes", 258), ("bpe:4096", 4096), ("hf:somewhere", 2), ("bpe:x", 2)])
def test_ids_by_the_name_of_a_tokenizer(tokenizer, ids):
    assert least_vocab(tokenizer) == ids


def test_run_that_cannot_be_held_is_refused_with_its_figure(monkeypatch):
    check_fits(CONFIG)
    needed = sum(least_bytes(CONFIG, 258).values())
    monkeypatch.setattr("residua.lab.train.fits.memory_of", lambda device, processes: needed - 1)
    with pytest.raises(ValueError, match=r"this run needs at least 0\.0 GiB \(parameters 0\.0, logits 0\.0"):
        check_fits(CONFIG)


def test_result_says_what_made_the_updates(tmp_path):
    """A run that goes on with other kernels than it began with is the run of no single machine, and says so."""
    told = []
    with pytest.raises(Stop):
        run(tmp_path / "mixed", on_event=stop_after("saved", 4))
    with ops.backend("reference"):
        mixed = run(tmp_path / "mixed", on_event=told.append)
    plain = run(tmp_path / "plain")
    assert len(plain.execution) == 1
    assert len(mixed.execution) == 2
    assert mixed.execution[0] == plain.execution[0]
    assert mixed.execution[1].startswith("backend reference")
    assert any("it began with backend auto" in event["text"] for event in told if event["kind"] == "data")
