"""Batches are a function of the seed and the step: no state, no design, no grouping, every window once a pass."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import residua
from residua.lab.train.sampler import Sampler, checksum, crcs, joined_checksum, permuted
from residua.model.objective import IGNORED
from tests.train.harness import VOCAB, ToyTokens, toy_config, toy_tokens

COUNTING = ToyTokens(np.arange(1000, dtype=np.uint16), np.arange(200, dtype=np.uint16), vocab=1000, mask=999)


def rows(sampler: Sampler, steps: range) -> torch.Tensor:
    return torch.cat([batch.inputs for step in steps for batch in sampler.batches(step)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**62))
def test_permuted_is_a_permutation(count, key):
    assert sorted(permuted(np.arange(count), count, key)) == list(range(count))


def test_permuted_depends_on_the_key_and_looks_random():
    one, two = (permuted(np.arange(1000), 1000, key) for key in (1, 2))
    assert (one == two).mean() < 0.02
    assert abs(np.corrcoef(np.arange(1000), one)[0, 1]) < 0.1
    assert (permuted(np.array([17]), 1000, 1) == one[17]).all()  # one at a time or all at once


def test_sampler_takes_every_window_once_a_pass():
    sampler = Sampler(toy_config(batch=3, context=10), COUNTING)
    assert sampler.windows == 99
    for turn in range(2):
        starts = sampler.starts(turn * 99, 99)
        offset = min(starts)
        assert sorted(starts) == [offset + 10 * i for i in range(99)]
        assert starts != sorted(starts)
    passes = [min(sampler.starts(turn * 99, 99)) for turn in range(20)]
    assert len(set(passes)) > 3  # windows are cut elsewhere in every pass


def test_sampler_goes_through_the_windows_in_another_order_with_every_seed_and_pass():
    """Whatever the offset: two seeds that shared an order would share their luck."""
    orders = set()
    for seed in (3, 4):
        sampler = Sampler(toy_config(context=10, seed=seed), COUNTING)
        for turn in range(2):
            starts = sampler.starts(turn * 99, 99)
            orders.add(tuple((start - min(starts)) // 10 for start in starts))
    assert len(orders) == 4


def test_sampler_targets_are_the_next_tokens():
    for batch in Sampler(toy_config(context=10), COUNTING).batches(7):
        assert (batch.targets == batch.inputs + 1).all()  # in this corpus token i is i
        assert batch.inputs.shape == (4, 10)


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_sampler_needs_no_state(objective):
    config, tokens = toy_config(objective=objective), toy_tokens()
    walked = Sampler(config, tokens)
    for step in range(30):
        last = walked.batches(step)
    jumped = Sampler(config, tokens).batches(29)
    assert checksum(last) == checksum(jumped)


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_sampler_is_the_same_for_every_design_and_differs_by_seed_and_step(objective):
    tokens = toy_tokens()
    sums = {
        checksum(Sampler(toy_config(design=design, objective=objective), tokens).batches(5))
        for design in residua.names()
    }
    assert len(sums) == 1
    others = {
        checksum(Sampler(toy_config(seed=seed, objective=objective), tokens).batches(step))
        for seed in (3, 4)
        for step in (5, 6)
    }
    assert len(others) == 4
    assert sums < others


@pytest.mark.parametrize("objective", ["clm", "mlm"])
def test_sampler_rows_do_not_depend_on_accumulation_or_ranks(objective):
    tokens = toy_tokens()
    whole = rows(Sampler(toy_config(batch=8, objective=objective), tokens), range(3))
    split = rows(Sampler(toy_config(batch=2, accumulate=4, objective=objective), tokens), range(3))
    assert torch.equal(whole, split)
    config = toy_config(batch=8, objective=objective)
    ranked = [Sampler(config, tokens, rank=rank, ranks=4).batches(1)[0].inputs for rank in range(4)]
    assert torch.equal(torch.cat(ranked), Sampler(config, tokens).batches(1)[0].inputs)


def test_sampler_reads_a_memory_map(tmp_path):
    tokens = toy_tokens()
    np.save(tmp_path / "train.npy", tokens.train)
    mapped = ToyTokens(np.load(tmp_path / "train.npy", mmap_mode="r"), tokens.valid)
    assert isinstance(mapped.train, np.memmap)
    assert checksum(Sampler(toy_config(), mapped).batches(2)) == checksum(Sampler(toy_config(), tokens).batches(2))


def test_validation_set_is_fixed():
    tokens = toy_tokens()
    base = [batch.inputs for batch in Sampler(toy_config(), tokens).validation()]
    for changes in ({"seed": 9}, {"design": "mudd"}, {"batch": 3}, {"steps": 99}):
        other = [batch.inputs for batch in Sampler(toy_config(**changes), tokens).validation()]
        assert torch.equal(torch.cat(base), torch.cat(other)), changes
    hidden = [
        torch.cat([b.inputs for b in Sampler(toy_config(objective="mlm", seed=s), tokens).validation()]) for s in (1, 2)
    ]
    assert torch.equal(*hidden)


def test_validation_set_is_spread_and_can_be_everything():
    def firsts(**changes):
        return torch.cat(
            [b.inputs[:, 0] for b in Sampler(toy_config(context=10, **changes), COUNTING).validation()]
        ).tolist()

    assert firsts(eval_windows=0) == [10 * i for i in range(19)]  # 200 tokens hold 19 windows and a next token
    assert firsts(eval_windows=500) == firsts(eval_windows=0)
    few = firsts(eval_windows=4)
    assert len(few) == 4
    assert few[0] < 50
    assert few[-1] > 140


def test_masked_batches_hide_a_share_and_ask_only_for_it():
    batches = [
        batch for step in range(40) for batch in Sampler(toy_config(objective="mlm"), toy_tokens()).batches(step)
    ]
    asked = torch.cat([batch.targets for batch in batches]) != IGNORED
    shown = torch.cat([batch.inputs for batch in batches])
    assert 0.1 < asked.float().mean() < 0.2
    assert 0.6 < (shown[asked] == VOCAB - 1).float().mean() < 0.95
    assert not (shown[~asked] == VOCAB - 1).any()


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({"context": 3000}, toy_tokens(), "train split of pydoc has 3000 tokens"),
        ({"context": 600}, toy_tokens(), "valid split of pydoc has 600 tokens"),
        ({"objective": "mlm"}, ToyTokens(COUNTING.train, COUNTING.valid, mask=None), "needs a mask token"),
    ],
)
def test_sampler_refuses_what_does_not_fit(changes, tokens, message):
    with pytest.raises(ValueError, match=message):
        Sampler(toy_config(**changes), tokens)


@pytest.mark.parametrize(
    ("rank", "ranks", "message"), [(2, 2, "rank 2"), (-1, 2, "rank -1"), (0, 3, "batch 4 does not")]
)
def test_sampler_refuses_impossible_ranks(rank, ranks, message):
    with pytest.raises(ValueError, match=message):
        Sampler(toy_config(), toy_tokens(), rank=rank, ranks=ranks)


@pytest.mark.parametrize("size", [13, 14, 25, 37])
def test_sampler_stays_inside_a_tiny_corpus(size):
    tokens = ToyTokens(np.arange(size, dtype=np.uint16), COUNTING.valid, vocab=1000)
    sampler = Sampler(toy_config(context=12), tokens)
    starts = sampler.starts(0, 50)
    assert min(starts) >= 0
    assert max(starts) + 13 <= size


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checksum_of_a_batch_is_that_of_its_shares_and_of_its_bytes(ranks):
    tokens, config = toy_tokens(), toy_config(accumulate=2)
    whole = Sampler(config, tokens).batches(3)
    shares = [crcs(Sampler(config, tokens, rank=rank, ranks=ranks).batches(3)) for rank in range(ranks)]
    said = joined_checksum([sums for sums, _ in shares], shares[0][1])
    assert said == checksum(whole)
    assert said == f"{zlib.crc32(b''.join(tensor.numpy().tobytes() for batch in whole for tensor in batch)):08x}"
