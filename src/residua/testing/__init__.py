"""The laws that every residual design must obey, and the tolerances they are judged by.

Shipped with the library: a design that lives in another package gets all of them with

    from residua.testing import check
    check("mine:option=3")                # every law, every layout; raises on the first that fails

and with `cases`, `LAWS` and a parametrised test each shows up under a name of its own.
"""

from __future__ import annotations

from residua.testing.cases import GROUPED as GROUPED
from residua.testing.cases import LAYOUTS as LAYOUTS
from residua.testing.cases import PLAIN as PLAIN
from residua.testing.cases import TOLERANCE as TOLERANCE
from residua.testing.cases import Case as Case
from residua.testing.cases import assert_close as assert_close
from residua.testing.cases import cases as cases
from residua.testing.cases import error as error
from residua.testing.cases import ids as ids
from residua.testing.cases import meeting as meeting
from residua.testing.cases import specs as specs
from residua.testing.cases import uncovered as uncovered
from residua.testing.laws import LAWS as LAWS
from residua.testing.laws import Law as Law
from residua.testing.laws import law as law
from residua.testing.laws import walk as walk


def check(spec: str, layouts: tuple[tuple[str, bool], ...] = LAYOUTS) -> None:
    """Hold one design to every law in every layout."""
    for layout, causal in layouts:
        for name, one in LAWS.items():
            try:
                one(Case(spec, layout, causal))
            except AssertionError as failure:
                raise AssertionError(f"{spec} in {layout} breaks the law {name}: {failure}") from failure
