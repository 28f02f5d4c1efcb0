"""Every task: answers that an independent solver finds too, no constant guess above chance, and seeds that hold."""

from __future__ import annotations

import collections

import pytest
import torch

from residua.lab import tasks
from residua.lab.tasks.task import IGNORED, Task
from residua.model import ModelConfig, Transformer
from residua.options import options_of

SPECS = (
    "mqar", "mqar:pairs=6,queries=2,gap=5,keys=7,values=3", "mqar:pairs=1,queries=1",
    "khop", "khop:hops=1,facts=2,entities=2", "khop:hops=4,facts=5,distractors=3,entities=9",
    "early-recall", "early-recall:chain=1,payloads=1,modulus=3", "early-recall:chain=12,modulus=11,trace=false",
    "route-switch", "route-switch:ops=2,queries=1,modulus=3", "route-switch:ops=5,queries=8,modulus=13",
    "delim", "delim:reach=1,slack=0,length=7,symbols=2", "delim:rule=sum,reach=3,slack=2,symbols=5,length=30",
    "parity", "parity:length=2", "parity:length=40,last=true",
    "s3", "s3:length=2", "s3:length=31,last=true",
    "overwrite", "overwrite:slots=3,writes=3,queries=1", "overwrite:slots=2,writes=20,queries=2,values=5",
)  # fmt: skip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# The solvers read a row of ids as a person would, left to right, and know nothing but the knobs and the docstrings.


def solve_mqar(task, row):
    told = dict(zip(row[: 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2], strict=True))
    assert len(told) == task.pairs
    return {place: told[row[place]] for place in range(2 * task.pairs + task.gap, len(row))}


def solve_khop(task, row):
    end = 2 * (task.facts + task.distractors)
    leads = dict(zip(row[:end:2], row[1:end:2], strict=True))
    assert len(leads) == task.facts + task.distractors
    answers, asked = {}, set()
    for place in range(end, len(row), 2):
        entity, hops = row[place], row[place + 1] - task.entities + 1
        start = entity
        for _ in range(hops):
            entity = leads[entity]
            assert entity != start
        answers[place + 1] = entity
        asked.add(hops)
    assert asked == set(range(1, task.hops + 1))
    return answers


def step(token, x, p):
    """Steps in the order of the docstring: + 1 ... + (p - 1), then * 2 ... * (p - 1)."""
    every = [lambda x, c=c: (x + c) % p for c in range(1, p)] + [lambda x, a=a: (a * x) % p for a in range(2, p)]
    return every[token](x)


def solve_early_recall(task, row):
    p, x, answers = task.modulus, row[0], {}
    for place, token in enumerate(row[1:], start=1):
        if token >= 2 * p:
            x = step(token - 2 * p, x, p)
            if task.trace:
                answers[place] = x
        else:
            answers[place] = (x + token - p) % p
    return answers


def solve_route_switch(task, row):
    p, answers = task.modulus, {}
    pipeline = [token - p for token in row[: task.ops]]
    for place in range(task.ops, len(row), 2):
        x, flag = row[place], row[place + 1] - p - (2 * p - 3) + 1
        for token in pipeline[:flag]:
            x = step(token, x, p)
        answers[place + 1] = x
    return answers


def solve_delim(task, row):
    answers, run = {}, []
    for place, token in enumerate(row):
        if token < task.answers:
            run.append(token)
            continue
        assert task.reach <= len(run) <= task.reach + task.slack
        last = run[-task.reach :]
        answers[place] = last[0] if task.rule == "copy" else sum(last) % task.answers
        run = []
    assert len(run) <= task.reach + task.slack
    return answers


def solve_parity(task, row):
    answers, odd = {}, False
    for place, bit in enumerate(row):
        odd = not odd if bit else odd
        if not task.last or place == len(row) - 1:
            answers[place] = int(odd)
    return answers


def solve_s3(task, row):
    """Move three letters about: element e sends the letter in place i to place e[i]."""
    order = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    answers, where = {}, [0, 1, 2]
    for place, token in enumerate(row):
        where = [order[token][spot] for spot in where]
        if not task.last or place == len(row) - 1:
            answers[place] = order.index(tuple(where))
    return answers


def solve_overwrite(task, row):
    mark, memory = row.index(0), {}
    for place in range(0, mark, 2):
        memory[row[place]] = row[place + 1]
    assert len(memory) == task.slots
    return {place: memory[row[place]] for place in range(mark + 1, len(row))}


SOLVERS = {
    name.removeprefix("solve_").replace("_", "-"): solve
    for name, solve in globals().items()
    if name.startswith("solve_")
}


def test_every_task_has_a_solver_and_cases_for_every_knob():
    assert set(SOLVERS) == set(tasks.names())
    for name in tasks.names():
        built = [tasks.build(spec) for spec in SPECS if spec.partition(":")[0] == name]
        assert built
        written = " ".join(spec for spec in SPECS if spec.partition(":")[0] == name)
        for knob in options_of(tasks.get(name)):
            assert f"{knob}=" in written, f"no case of {name} sets {knob}"


@pytest.mark.parametrize("spec", SPECS)
def test_answers_are_those_of_an_independent_solver(spec):
    task = tasks.build(spec)
    ids, targets, _ = task.batch(64, seeded(1))
    for row, answers in zip(ids.tolist(), targets.tolist(), strict=True):
        expected = SOLVERS[task.name](task, row)
        assert expected
        assert answers == [expected.get(place, IGNORED) for place in range(len(row))]


@pytest.mark.parametrize("spec", SPECS)
def test_batch_shapes_types_and_range(spec):
    task = tasks.build(spec)
    ids, targets, extra = task.batch(5, seeded(2))
    assert ids.shape == targets.shape == (5, task.length)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.min() >= 0
    assert max(ids.max(), targets.max()) < task.vocab
    assert all(value.shape == ids.shape for value in extra.values())


@pytest.mark.parametrize("spec", SPECS)
def test_symbols_are_all_used(spec):
    task = tasks.build(spec)
    used = set(task.batch(2000, seeded(3)).ids.unique().tolist())
    fillers = {0} if task.name == "mqar" and not task.gap else set()
    assert used == set(range(task.vocab)) - fillers


@pytest.mark.parametrize("spec", SPECS)
def test_no_constant_guess_beats_chance(spec):
    """Over all questions, and at every position that is asked alone: the most common answer is one of many."""
    task = tasks.build(spec)
    _, targets, _ = task.batch(4000, seeded(4))
    asked = targets[targets != IGNORED]
    counts = asked.bincount(minlength=task.vocab)
    assert (counts > 0).sum() == task.answers
    bound = 5 * (task.chance * (1 - task.chance) / 4000) ** 0.5  # five standard errors of 4000 rows
    assert counts.max() / len(asked) < task.chance + bound
    for column in targets.unbind(1):
        one = column[column != IGNORED]
        if len(one) == 4000:
            assert one.bincount().max() / 4000 < task.chance + bound


@pytest.mark.parametrize(
    ("spec", "shortcut"),
    [
        ("khop", lambda task, row, place: row[place - 1]),  # the start itself
        ("khop", lambda task, row, place: row[row.index(row[place - 1]) ^ 1]),  # its neighbour in the text
        ("route-switch", lambda task, row, place: row[place - 1]),  # x untouched
        ("early-recall", lambda task, row, place: row[0]),  # the start
        ("overwrite", lambda task, row, place: row[row.index(row[place]) + 1]),  # the first write
        ("overwrite", lambda task, row, place: row[row.index(0) - 1]),  # the last write of any slot
        ("delim", lambda task, row, place: row[place - 1]),  # the nearest symbol
        ("s3", lambda task, row, place: row[place]),  # the newest factor
        ("parity", lambda task, row, place: row[place]),  # the newest bit
        ("mqar", lambda task, row, place: row[2 * task.pairs - 1]),  # the newest value
    ],
)
def test_shallow_shortcuts_stay_far_from_solving(spec, shortcut):
    """Guesses that skip the work: above chance they may be, but nowhere near right."""
    task = tasks.build(spec)
    ids, targets, _ = task.batch(500, seeded(5))
    right = [
        shortcut(task, row, place) == answer
        for row, answers in zip(ids.tolist(), targets.tolist(), strict=True)
        for place, answer in enumerate(answers)
        if answer != IGNORED
    ]
    assert sum(right) / len(right) < 0.6


@pytest.mark.parametrize("spec", SPECS)
def test_batch_is_decided_by_its_seed(spec):
    task = tasks.build(spec)
    one, same, other = task.batch(64, seeded(6)), tasks.build(spec).batch(64, seeded(6)), task.batch(64, seeded(7))
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.targets, same.targets)
    assert one.extra.keys() == same.extra.keys()
    assert all(torch.equal(one.extra[key], same.extra[key]) for key in one.extra)
    assert not torch.equal(one.ids, other.ids)
    generator = seeded(6)
    first, second = task.batch(64, generator), task.batch(64, generator)
    assert torch.equal(first.ids, one.ids)
    assert not torch.equal(first.ids, second.ids)


def test_batch_takes_nothing_from_the_global_generator():
    state = torch.get_rng_state()
    for name in tasks.names():
        tasks.get(name)().batch(3, seeded())
    assert torch.equal(torch.get_rng_state(), state)


def test_extra_says_what_it_documents():
    task = tasks.build("khop:hops=3,facts=5")
    ids, targets, extra = task.batch(50, seeded())
    assert torch.equal(extra["hops"] > 0, targets != IGNORED)
    assert torch.equal(extra["hops"][extra["hops"] > 0], ids[extra["hops"] > 0] - task.entities + 1)

    task = tasks.build("mqar:gap=3")
    ids, targets, extra = task.batch(50, seeded())
    row, place = (extra["distance"] > 0).nonzero(as_tuple=True)
    assert torch.equal(ids[row, place - extra["distance"][row, place]], targets[row, place])

    task = tasks.build("early-recall")
    ids, targets, extra = task.batch(50, seeded())
    assert torch.equal(extra["recall"] == 1, (ids >= task.modulus) & (ids < 2 * task.modulus))

    task = tasks.build("route-switch")
    ids, targets, extra = task.batch(50, seeded())
    assert torch.equal(extra["route"] >= 0, targets != IGNORED)
    assert torch.equal(extra["route"][extra["route"] >= 0], ids[extra["route"] >= 0] - (task.vocab - task.ops))

    task = tasks.build("overwrite")
    ids, targets, extra = task.batch(50, seeded())
    for row, counts in zip(ids.tolist(), extra["writes"].tolist(), strict=True):
        seen = collections.Counter(row[: 2 * task.writes : 2])
        assert [counts[place] for place in range(-task.queries, 0)] == [seen[slot] for slot in row[-task.queries :]]

    task = tasks.build("delim")
    ids, targets, extra = task.batch(50, seeded())
    assert torch.equal(extra["run"] > 0, ids == task.answers)
    assert set(extra["run"].unique().tolist()) == {0, *range(task.reach, task.reach + task.slack + 1)}


@pytest.mark.parametrize("window", [4, 5])
def test_delim_is_in_reach_of_a_window_that_is_longer(window):
    """One layer that sees the last w tokens: the symbol that is asked for changes its logits iff w > reach."""
    task = tasks.build("delim:reach=4")
    config = ModelConfig(vocab=task.vocab, width=16, depth=1, heads=2, layout=f"swa:window={window},mlp")
    model = Transformer(config)
    ids, _, extra = task.batch(8, seeded())
    row, place = extra["run"].nonzero(as_tuple=True)
    changed = ids.clone()
    changed[row, place - task.reach] = (changed[row, place - task.reach] + 1) % task.answers
    with torch.no_grad():
        gap = (model(changed) - model(ids))[row, place].abs().amax(1)
    assert (gap > 0).all() if window > task.reach else (gap == 0).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mqar:pairs=0", "pairs must be at least 1"),
        ("mqar:queries=5,pairs=4", "queries=5 is more than 4"),
        ("mqar:pairs=17", "pairs=17 is more than 16"),
        ("mqar:gap=-1", "gap must be at least 0"),
        ("mqar:values=1", "values must be at least 2"),
        ("khop:hops=6,facts=6", "hops=6 is more than 5"),
        ("khop:hops=0", "hops must be at least 1"),
        ("khop:distractors=1", "one distractor"),
        ("khop:facts=10,distractors=7", "need 17 entities"),
        ("early-recall:modulus=6", "must be a prime"),
        ("early-recall:modulus=2", "must be a prime"),
        ("early-recall:chain=0", "chain must be at least 1"),
        ("early-recall:payloads=0", "payloads must be at least 1"),
        ("route-switch:ops=1", "ops must be at least 2"),
        ("route-switch:modulus=9", "must be a prime"),
        ("route-switch:queries=0", "queries must be at least 1"),
        ("delim:length=8", "length must be at least 9"),
        ("delim:reach=0", "reach must be at least 1"),
        ("delim:slack=-1", "slack must be at least 0"),
        ("delim:symbols=1", "symbols must be at least 2"),
        ("delim:rule=product", "rule takes copy|sum"),
        ("parity:length=1", "length must be at least 2"),
        ("parity:last=3", "last takes true|false"),
        ("s3:length=0", "length must be at least 2"),
        ("overwrite:writes=3", "writes must be at least 4"),
        ("overwrite:queries=5", "queries=5 is more than 4"),
        ("overwrite:slots=0,queries=0", "slots must be at least 1"),
        ("overwrite:values=1", "values must be at least 2"),
        ("parity:length=2.5", "length takes whole number"),
    ],
)
def test_wrong_knobs_are_one_clear_error(spec, message):
    with pytest.raises(ValueError) as failure:
        tasks.build(spec)
    assert message in str(failure.value)
    assert str(failure.value).startswith(spec.partition(":")[0])
    assert "\n" not in str(failure.value)


def test_unknown_names_and_knobs_say_what_is_known():
    with pytest.raises(ValueError, match=r"unknown task 'k-hop': did you mean 'khop'\? choose from mqar, khop"):
        tasks.get("k-hop")
    with pytest.raises(TypeError, match="khop has no option 'hop'; did you mean 'hops'"):
        tasks.build("khop:hop=3")
    with pytest.raises(ValueError, match="rule is copy or sum"):
        tasks.Delim(rule="product")
    for size in (0, -2):
        with pytest.raises(ValueError, match="parity: a batch needs at least 1 row"):
            tasks.Parity().batch(size, seeded())


def test_register_refuses_a_task_that_does_not_explain_itself():
    with pytest.raises(ValueError, match="registered already, by MQAR"):
        tasks.register("mqar")(tasks.KHop)
    with pytest.raises(ValueError, match="needs a docstring"):
        tasks.register("bare")(type("Bare", (Task,), {"separates": "nothing"}))
    with pytest.raises(ValueError, match="needs `separates`"):
        tasks.register("bare")(type("Bare", (Task,), {"__doc__": "A row."}))
    assert "bare" not in tasks.names()


def test_names_and_specs_agree():
    assert tasks.names() == ("mqar", "khop", "early-recall", "route-switch", "delim", "parity", "s3", "overwrite")
    for name in tasks.names():
        assert tasks.get(name).name == name
        assert type(tasks.build({"name": name})) is tasks.get(name)
        assert "ypothesis" in (tasks.get(name).__doc__ or "") or name == "mqar"  # mqar is the control
