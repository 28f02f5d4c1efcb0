"""Every form of an op computes the same op, gradients included."""

import pytest
import torch

from residua.lab.bench.cases import GRIDS, OPS, OURS, cases, compiles, parse_shape
from residua.lab.bench.ops import AGREEMENT, growth, measure
from residua.lab.bench.stack import ours, public
from residua.testing import error

COUNTS = {"window_attend": 16}


@pytest.mark.parametrize("op", OPS)
def test_forms_agree_on_output_and_weight_gradients(op):
    (case,) = cases(op, ["64x64"], [COUNTS.get(op, 3)], torch.float32, compile=False)
    output = {form: case.same.get(form, lambda y: y)(run()) for form, run in case.forms.items()}
    slope = torch.randn(output[OURS].shape, generator=torch.Generator().manual_seed(1))
    gradient = {form: torch.autograd.grad(output[form], case.inputs[form][0], slope)[0] for form in output}
    for form in output:
        assert error(output[form], output[OURS]) < AGREEMENT[torch.float32], form
        mine = gradient[OURS].transpose(-1, -2) if gradient[form].shape != gradient[OURS].shape else gradient[OURS]
        assert error(gradient[form], mine) < 1e-5, form


@pytest.mark.slow
def test_compiled_form_agrees():
    (case,) = cases("attend", ["16x32"], [2], torch.float32, compile=True)
    assert error(case.forms["compiled"](), case.forms[OURS]()) < 1e-5


def test_measure_refuses_another_op():
    (case,) = cases("attend", ["16x32"], [2], torch.float32, compile=False)
    case.forms["public"] = lambda: 2 * case.forms[OURS]()
    with pytest.raises(RuntimeError, match="not the same op"):
        measure(case, 0.01)


def test_measure_reports_every_form_and_both_phases():
    (case,) = cases("attend", ["64x32"], [3], torch.float32, compile=False)
    row = measure(case, 0.02)
    for phase in ("forward", "both"):
        assert set(row[phase]["seconds"]) == {"residua", "public", "pytorch"}
        assert set(row[phase]["ratios"]) == {"public", "pytorch"}
    assert row["bandwidth"]["forward_share"] > 0


def test_growth_fits_rows_that_differ_in_one_size():
    def row(tokens, n):
        return {"tokens": tokens, "width": 8, "n": n} | {p: {"seconds": {OURS: 2.0 * n}} for p in ("forward", "both")}

    rows = [row(16, 4), row(16, 8), row(64, 4), row(64, 8)]
    assert growth(rows, "n") == pytest.approx({"forward": 1.0, "both": 1.0})
    assert growth(rows, "tokens") == pytest.approx({"forward": 0.0, "both": 0.0})
    assert growth(rows[:1], "n") is None
    assert growth(rows, "streams") is None


def test_public_stack_is_the_delta_design():
    """With zero queries both read the mean of the same sources: equal gradients of the input."""
    mine, theirs = ours("delta", 2, 16, 8, moved=0.0), public(2, 16, 8, scale=0.0)
    assert error(mine()[0], theirs()[0]) < 1e-5
    moved = ours("delta", 2, 16, 8)
    assert error(moved()[0], theirs()[0]) > 1e-3


@pytest.mark.parametrize("text", ["2048", "x256", "0x4", "ax2", "1x2x3"])
def test_shape_is_refused(text):
    with pytest.raises(ValueError, match="TOKENSxWIDTH"):
        parse_shape(text)


def test_grids_name_the_ops_and_compile_each_once_at_least():
    assert GRIDS.keys() == OPS.keys()
    for op, (shapes, counts) in GRIDS.items():
        wanted = {(shape, n): compiles(op, parse_shape(shape)[0], n) for shape in shapes for n in counts}
        assert any(wanted.values())
    assert compiles("attend", 4096, 24)
    assert not compiles("attend", 4096, 64)
    assert not compiles("window_attend", 8192, 128)


def test_full_run_compiles_what_the_grid_says():
    at = {n: "compiled" in case.forms for n in (2, 4) for case in cases("attend", ["8x8"], [n], torch.float32, None)}
    assert at == {2: False, 4: True}
