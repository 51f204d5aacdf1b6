"""The field compared: tables of samplers, and of defences under attack."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from fedsieve.attacks import ATTACKS as NAMES_OF_ATTACKS
from fedsieve.parts import SAMPLERS as NAMES_OF_SAMPLERS
from fedsieve.reproduction.field import ASSUMED, DEFENCES, KEEPERS, SHARES, Battle, Choice, can_stand
from fedsieve.reproduction.paper import HETEROGENEITIES
from fedsieve.reproduction.results import Results, mean_of
from fedsieve.reproduction.tables import NOTHING, Table, spread_of
from fedsieve.runs import History, rounds_to

SAID = {"all": "all", "combinatorial": "best subset"}


def samplers_table(heterogeneity: str, results: Results) -> Table:
    """Accuracy, rounds and simulated time to what uniform sampling reaches, and how evenly clients were asked."""
    target = mean_of(results.final(Choice("uniform", "all", heterogeneity)))
    rows = []
    for sampler in NAMES_OF_SAMPLERS:
        for keep in KEEPERS:
            cell = Choice(sampler, keep, heterogeneity)
            runs = results.of(cell)
            reached = [found for run in runs if (found := _way_to(target, run)) is not None]
            rows.append(
                (
                    sampler,
                    SAID[keep],
                    spread_of(results.final(cell).values()),
                    spread_of(results.last_10(cell).values()),
                    spread_of([rounds for rounds, _ in reached]),
                    spread_of([seconds / 60 for _, seconds in reached]),
                    f"{len(reached)} of {len(runs)}" if runs else NOTHING,
                    spread_of([float(run.summary["requests_gini"]) for run in runs], digits=2),
                )
            )
    said = NOTHING if target is None else f"{target:.1f} %"
    return Table(
        f"Ways to choose clients, {heterogeneity} heterogeneity",
        ("Sampler", "Kept", "Accuracy", "Last 10", "Rounds", "Minutes", "Reached", "Gini"),
        rows,
        "Test accuracy in %, of the last round and of the last 10, mean ± standard deviation over seeds. Rounds and "
        f"simulated minutes to {said}, the mean final accuracy of uniform sampling that keeps all, of the seeds that "
        "reached it. Gini: how unevenly clients were asked, from 0, all as often, to almost 1, always the same one. "
        "The best subset with ucb or thompson is FedCM, with uniform FedCA.",
        left=2,
    )


def _way_to(target: float | None, run: History) -> tuple[float, float] | None:
    """Rounds and simulated seconds to an accuracy in %."""
    rounds, seconds = None if target is None else rounds_to(target / 100, run.accuracy), run.simulated("seconds")
    return None if rounds is None or seconds is None else (float(rounds), seconds[rounds - 1])


def attacks_table(share: float, results: Results) -> Table:
    """Accuracy of each defence under each attack."""
    rows = []
    seeds = max(map(len, results.runs.values()), default=0)

    def said(values: Collection[float]) -> str:
        return spread_of(values) + (f" ({len(values)} of {seeds})" if 0 < len(values) < seeds else "")

    for defence in DEFENCES:
        values = [said(results.final(Battle(defence)).values())]
        for attack in NAMES_OF_ATTACKS:
            cell = Battle(defence, attack, share)
            values.append(said(results.final(cell).values()) if can_stand(defence, share) else "can't")
            if attack == "backdoor":
                values.append(said(_fooled(cell, results).values()))
        rows.append((Battle(defence).title, *values))
    fewer = any("(" in value for row in rows for value in row[1:])
    headings = [
        name for attack in NAMES_OF_ATTACKS for name in ([attack, "its success"] if attack == "backdoor" else [attack])
    ]
    return Table(
        f"{100 * share:.0f} % of the clients hostile",
        ("Defence", "nobody", *headings),
        rows,
        "Final test accuracy in %, mean ± standard deviation over seeds; its success: marked images of other classes "
        "that are taken for the backdoor's. Defences assume the true share of liars, and "
        f"{100 * ASSUMED:.0f} % where nobody is hostile. can't: too few honest models for it."
        + " In brackets: of so many seeds. The others are not made yet, or the model diverged."
        * fewer,
        left=1,
        wide=True,
    )


def summary_table(results: Results) -> Table:
    """What each defence costs without an attack, and what is left under the worst."""
    rows = []
    for defence in DEFENCES:
        clean = results.final(Battle(defence))
        cells = [spread_of(clean.values())]
        for share in SHARES:
            lost = {
                attack: mean
                for attack in NAMES_OF_ATTACKS
                if (mean := mean_of(_lost(Battle(defence, attack, share), clean, results))) is not None
            }
            worst = max(lost, key=lost.__getitem__, default=None)
            cells += (
                [f"{sum(lost.values()) / len(lost):.1f}", f"{lost[worst]:.1f} ({worst})"]
                if worst is not None
                else [NOTHING, NOTHING]
            )
        rows.append((Battle(defence).title, *cells))
    heads = [head for share in SHARES for head in (f"lost at {100 * share:.0f} %", f"at worst, {100 * share:.0f} %")]
    return Table(
        "What attacks cost",
        ("Defence", "nobody hostile", *heads),
        rows,
        "Points of final accuracy lost against the same defence and seed with nobody hostile: the mean over all "
        "attacks, and the worst of them. Means over seeds.",
        left=1,
    )


def _lost(cell: Battle, clean: Mapping[int, float], results: Results) -> dict[int, float]:
    attacked = results.final(cell) if cell in results.runs else {}
    return {seed: clean[seed] - attacked[seed] for seed in clean.keys() & attacked.keys()}


def _fooled(cell: Battle, results: Results) -> dict[int, float]:
    """The backdoor's success in the last round in %, by seed."""
    runs = results.runs.get(cell, {})
    return {seed: 100 * float(run.rows[-1]["backdoor_success"]) for seed, run in runs.items()}


SAMPLERS: Sequence[Callable[[Results], Table]] = [partial(samplers_table, where) for where in HETEROGENEITIES]
ATTACKS: Sequence[Callable[[Results], Table]] = [summary_table, *(partial(attacks_table, share) for share in SHARES)]
