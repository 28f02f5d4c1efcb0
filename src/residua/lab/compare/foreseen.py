"""foreseen(plan): what a comparison would run, from the plan alone; and, if asked, what it would take here."""

from __future__ import annotations

from collections.abc import Callable

from residua.lab.common.files import Values
from residua.lab.common.tables import count
from residua.lab.compare.plan import ComparePlan


def foreseen(plan: ComparePlan, timing: Callable[[str], None] | None = None) -> Values:
    """Plain values. timing: time a few updates of every row, and tell of each; without, no hours are given."""
    hours: dict[str, float] = {}
    if timing is not None:
        from residua.lab.compare.estimate import estimate

        hours = {row["label"]: row["hours"] for row in estimate(plan, timing)}
    rows = []
    for variant in plan.variants():
        config = plan.config(variant, plan.seeds[0])
        rows.append(
            {
                "label": variant.label,
                "mlp_width": config.model(256).hidden,
                "steps": config.steps,
                "tokens_per_step": config.tokens_per_step,
                "seeds": len(plan.seeds_of(variant)),
                **({"hours": hours[variant.label]} if hours else {}),
            }
        )
    return {
        "plan": plan.to_json(),
        "digest": plan.digest,
        "baseline": plan.compared_with,
        "tuning_runs": len(plan.tuning()),
        "checking_runs": len(plan.checking({variant.label: {"lr": 1e-3} for variant in plan.variants()})),
        "reported_runs": len(plan.runs({})),
        "looks": [len(look.seeds) for look in plan.looks()],
        "rule": plan.tune.describe(),
        "rows": rows,
        **({"hours": sum(hours.values())} if hours else {}),
    }


def in_lines(found: Values) -> str:
    """The same for a terminal."""
    seeds = sorted({row["seeds"] for row in found["rows"]})
    said = count(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    checks = f", {count(found['checking_runs'], 'run')} to check {found['rule']}" if found["checking_runs"] else ""
    tuning = ("up to " if "close" in found["plan"]["tune"] else "") + count(found["tuning_runs"], "tuning run")
    lines = [
        f"{count(len(found['rows']), 'row')} x {said}, baseline {found['baseline']}",
        f"{tuning}{checks}, then {count(found['reported_runs'], 'reported run')}",
    ]
    if len(found["looks"]) > 1:
        wanted = found["plan"]["until"]["half_width"]
        lines.append(f"then seeds until resolved to {wanted:g}: looks at {', '.join(map(str, found['looks']))} seeds")
    for row in found["rows"]:
        taken = f", {row['hours']:.2f} CPU hours" if "hours" in row else ""
        steps = f"{row['steps']} steps of {row['tokens_per_step']} tokens"
        lines.append(f"  {row['label']:<36} mlp_width {row['mlp_width']}, {steps}{taken}")
    if "hours" in found:
        lines.append(f"in all {found['hours']:.1f} CPU hours, as measured here just now")
    return "\n".join(lines)
