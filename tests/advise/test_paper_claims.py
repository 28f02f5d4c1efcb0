"""Claims of papers are judged by what the files say, and by both halves of the seeds."""

import json
from dataclasses import replace

import pytest

from residua.lab.advise import Situation, advise
from residua.lab.advise.evidence import measured, results_folder
from residua.lab.advise.paper_claims import PaperClaim, judge, paper_claims
from residua.lab.common.halves import kept
from residua.lab.cost.targets import sized
from residua.plan import Plan
from residua.registry import build

CLAIM = PaperClaim(claim="It is better", who="a paper", results="main", own="mhc")


def write(folder, rows, *, key="loss", diverged=(), owed=(), check=()):
    """A results file: rows of design, size and the values of its seeds, the baseline of a size first."""
    made, runs, bases = [], [], {}
    for design, size, values in rows:
        base, label = bases.setdefault(size, values), f"{design} | {size}"
        gap = sum(a - b for a, b in zip(values, base, strict=True)) / len(values)
        made.append(
            {"label": label, "design": design, "layout": "attn,mlp", "size": size, "baseline": base is values,
             "parameters": 1000, "speed": 1.0,
             "difference": None if base is values else
             {"mean": gap, "low": gap - 0.1, "high": gap + 0.1, "significant": True, "seeds": len(values)}}
        )  # fmt: skip
        runs += [{"label": label, "folder": f"runs/x/seed{seed}", key: value} for seed, value in enumerate(values)]
    (folder / "main").mkdir(parents=True, exist_ok=True)
    found = {"rows": made, "runs": runs, "command": "residua compare", "diverged": list(diverged), "notes": []}
    if owed:
        rows = [
            {
                "label": f"{design} | {size}",
                "design": design,
                "layout": "attn,mlp",
                "size": size,
                "seeds": seeds,
                "of": 5,
            }
            for design, size, seeds in owed
        ]
        found |= {"unfinished": {"runs": 1, "of": 9, "rows": rows}}
        found |= {"plan": {"designs": ["standard", "mhc"], "baseline": None, "layouts": ["attn,mlp"]}}
    if check:
        found["ladder"] = {
            "tuned_at": "2x8",
            "check": [{"label": label, "holds": lost == 0, "lost": lost} for label, lost in check],
        }
    (folder / "main" / "results.json").write_text(json.dumps(found))
    return folder


PLAIN = ("standard", "4x8", [2.0, 2.01, 1.99, 2.0])


@pytest.mark.parametrize(
    ("losses", "expect", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0], "lower", "holds"),
        ([1.0, 1.01, 0.99, 1.0], "higher", "contradicted"),
        ([3.0, 3.01, 2.99, 3.0], "lower", "contradicted"),
        ([2.2, 1.81, 2.19, 1.8], "lower", "does not show"),
    ],
)
def test_verdict_is_that_of_the_interval(tmp_path, losses, expect, verdict):
    folder = write(tmp_path, [PLAIN, ("mhc", "4x8", losses)])
    (one,) = judge(folder, [replace(CLAIM, expect=expect)])
    assert one.verdict == verdict
    assert one.interval().count("to") == 1
    assert "4 seeds" in one.measured()
    assert (one.source, one.command) == (f"{tmp_path.name}/main/results.json", "residua compare")


def test_halves_that_disagree_leave_it_undecided():
    assert kept([-1.0, -1.0, -1.0, -1.0], True)
    assert not kept([-5.0, 0.1, -5.0, 0.1], True)
    assert kept([0.1, -0.1, 0.2, -0.3, -0.1, 0.2], False)
    assert not kept([1.0, -1.0, 1.01, -1.01, 0.99, -0.99], False)  # each half by itself is sure, and of the contrary
    assert not kept([1.0, 1.0], None)


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([1.9, 1.6, 1.89, 1.9, 1.91, 2.3], "not significant (p 0.40), but one half of the seeds would be"),
        ([1.0, 2.01, 1.1, 2.02, 0.9, 2.0, 1.0, 2.0, 1.0, 2.0], "halves of the seeds disagree, -1.0000 and +0.0060"),
    ],
)
def test_verdict_says_what_the_halves_did_not_bear_out(tmp_path, losses, told):
    folder = write(tmp_path, [("standard", "4x8", [2.0] * len(losses)), ("mhc", "4x8", losses)])
    (one,) = judge(folder, [CLAIM])
    assert (one.verdict, one.doubt) == ("undecided", told)


def test_claim_about_many_is_harder_to_win(tmp_path):
    """One claim in four of the same file: its p-value is multiplied."""
    noisy = [1.9, 1.98, 1.93, 1.97]
    folder = write(tmp_path, [PLAIN, ("mhc", "4x8", noisy), ("ddl", "4x8", [2.2, 1.8, 2.1, 1.9])])
    (alone,) = judge(folder, [CLAIM])
    assert (alone.verdict, alone.doubt) == ("holds", "")
    others = [replace(CLAIM, own="ddl")] * 4
    among = judge(folder, [*others, CLAIM])[-1]
    assert among.verdict == "does not show"
    assert among.difference.high < 0  # the interval is that of the one claim: what else was weighed is said beside it
    assert among.measured().endswith("; not significant among 5 claims (p 0.23)")


def test_trend_is_the_slope_over_doublings(tmp_path):
    rows = []
    for depth, gain in ((2, 0.0), (4, 0.1), (8, 0.2)):
        size = f"{depth}x8"
        rows += [("standard", size, [2.0, 2.1, 2.2]), ("mhc", size, [2.0 - gain, 2.101 - gain, 2.199 - gain])]
    (one,) = judge(write(tmp_path, rows), [replace(CLAIM, size="depth")])
    assert one.verdict == "holds"
    assert one.difference.mean == pytest.approx(-0.1)
    assert "-0.1000 nats a doubling" in one.measured()


@pytest.mark.parametrize(
    ("size", "lost", "verdict"),
    [
        ("depth", 0.0, "holds"),
        ("depth", 0.1, "holds"),  # from 2 to 8 blocks the difference changes by 0.2
        ("depth", 0.3, "undecided"),
        ("depth", None, "undecided"),  # the carried rate diverged
        ("8x8", 0.3, "undecided"),
        ("4x8", 0.3, "holds"),  # checked elsewhere
        ("2x8", 0.3, "does not show"),  # tuned there
    ],
)
def test_rates_that_lost_more_than_the_claim_leave_it_undecided(tmp_path, size, lost, verdict):
    rows = []
    for depth, gain in ((2, 0.0), (4, 0.1), (8, 0.2)):
        at = f"{depth}x8"
        rows += [("standard", at, [2.0, 2.1, 2.2]), ("mhc", at, [2.0 - gain, 2.101 - gain, 2.199 - gain])]
    folder = write(tmp_path, rows, check=[("standard | 8x8", lost)])
    (one,) = judge(folder, [replace(CLAIM, size=size)])
    assert one.verdict == verdict
    assert ("the carried rates lost more than that: standard | 8x8" in one.measured()) == (verdict == "undecided")


def test_weights_of_two_rows_are_compared(tmp_path):
    folder = write(
        tmp_path, [("standard", "4x8", [0.2, 0.21, 0.2]), ("mhc", "4x8", [0.6, 0.62, 0.61])], key="deep_max_weight"
    )
    (one,) = judge(folder, [replace(CLAIM, measure="weight", against="standard", expect="higher")])
    assert one.verdict == "holds"


def test_row_that_diverged_is_undecided_and_one_that_never_was_is_an_error(tmp_path):
    folder = write(tmp_path, [PLAIN], diverged=[{"label": "mhc", "folder": "runs/mhc/seed1"}])
    (one,) = judge(folder, [CLAIM])
    assert (one.verdict, one.measured()) == ("undecided", "a seed diverged")
    with pytest.raises(ValueError, match=r"results\.json does not answer its claims: no row 'ddl'"):
        judge(folder, [replace(CLAIM, own="ddl")])


def test_row_that_broke_has_the_largest_gradient(tmp_path):
    """Of two rows one diverged at one of two sizes: that decides there, and the norms do at the other."""
    claim = replace(CLAIM, own="mhc", against="ddl", measure="gradient", expect="higher", size="8x8")
    rows = [
        ("standard", "4x8", [1.0, 1.1, 1.0]),
        ("mhc", "4x8", [900.0, 1000.0, 1100.0]),
        ("ddl", "4x8", [9.0, 10.0, 11.0]),
    ]
    folder = write(
        tmp_path, rows, key="gradient_norm", diverged=[{"label": "mhc | 8x8", "folder": "runs/mhc-8x8/seed1"}]
    )
    broke, turned, measured_at = judge(
        folder, [claim, replace(claim, own="ddl", against="mhc"), replace(claim, size="4x8")]
    )
    assert (broke.verdict, broke.measured()) == ("holds", "a seed diverged")
    assert turned.verdict == "contradicted"
    assert measured_at.verdict == "holds"
    assert measured_at.measured() == "+2.0000 decades of the gradient norm at 4x8, 3 seeds"


def test_unfinished_file_answers_what_it_can_and_says_what_is_missing(tmp_path):
    """Three of five seeds are judged, as one of all the claims that the file is to answer; none of five are not."""
    rows = [PLAIN, ("mhc", "4x8", [1.0, 1.01, 0.99, 1.0])]
    owed = [("standard", "4x8", 4), ("mhc", "4x8", 4), ("mhc", "8x8", 0), ("standard", "8x8", 2)]
    here, higher, deeper = (replace(CLAIM, size=size) for size in ("4x8", "8x8", "depth"))
    found = judge(write(tmp_path, rows, owed=owed), [here, higher, deeper])
    assert [one.verdict for one in found] == ["holds", "not run yet", "not run yet"]
    assert found[0].measured() == "-1.0000 nats at 4x8, 4 seeds so far, of 5"
    assert found[1].measured() == "unfinished: mhc | 8x8 0 of 5 seeds, standard | 8x8 2 of 5 seeds"
    assert found[1].source.endswith("main/results.json")
    noisy = [PLAIN, ("mhc", "4x8", [1.9, 1.98, 1.93, 1.97])]
    assert judge(write(tmp_path, noisy, owed=owed), [here])[0].verdict == "holds"
    assert judge(write(tmp_path, noisy, owed=owed), [here, *[higher] * 4])[0].verdict == "does not show"
    assert judge(write(tmp_path, rows), [here])[0].measured() == "-1.0000 nats at 4x8, 4 seeds"


def test_what_was_not_run_and_what_cannot_be_say_so(tmp_path):
    first, second = judge(tmp_path, [CLAIM, PaperClaim(claim="At 7B", who="a paper", note="no machine")])
    assert (first.verdict, first.measured()) == ("not run yet", "recipes/main.toml")
    assert (second.verdict, second.measured()) == ("cannot be tested here", "no machine")


def test_committed_claims_are_about_designs_and_files_that_are_there():
    """Every entry builds, and every results file that is committed has the rows that are asked of it."""
    for claim in paper_claims():
        for name in filter(None, (claim.own, claim.against)):
            design, _, layout = name.partition(" in ")
            build(design, Plan.regular(32, 8, layout=layout or "attn,mlp"))
    assert len(judge(results_folder())) == len(paper_claims())


@pytest.mark.slow
def test_advice_cites_the_verdict_and_doubts_what_halves_do_not_bear_out(tmp_path, monkeypatch):
    folder = write(tmp_path, [PLAIN, ("mhc", "4x8", [1.0, 1.01, 0.99, 1.0])])
    monkeypatch.setattr("residua.lab.advise.paper_claims.paper_claims", lambda: [CLAIM])
    answer = advise(Situation(target=sized("220M"), tokens=64), folder)
    (mhc,) = (one for one in answer.ranked if one.design == "mhc")
    assert any("holds in our runs (-1.0000 nats" in reason and "It is better" in reason for reason in mhc.reasons)
    write(tmp_path, [PLAIN, ("mhc", "4x8", [1.0, 2.02, 0.99, 2.01])])
    assert [one.verdict for one in measured(folder)] == ["no difference seen"]
