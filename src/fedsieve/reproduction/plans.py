"""What `fedsieve reproduce` can make: the paper, our own method, and three comparisons with a setting of their own."""

from __future__ import annotations

from collections.abc import Sequence

from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.reproduction import (
    field,
    field_pictures,
    field_tables,
    ours,
    paper,
    pictures,
    tables,
    validation,
    validation_pictures,
    validation_tables,
)
from fedsieve.reproduction.study import Plan, Target

PAPER = Plan(
    "paper",
    "The paper's tables and figures",
    {
        "table2": Target("Table 2: sampling ratio and α", paper.TABLE_2, 2, [tables.table2]),
        "table3": Target("Table 3: combinatorial averaging on FedProx, FedPdp", paper.TABLE_3, 3, [tables.table3]),
        "table4": Target("Table 4: all algorithms", paper.TABLE_4, 3, [tables.table4]),
        "table5": Target("Table 5: rounds to FedAvg's final accuracy", paper.TABLE_4, 3, [tables.table5]),
        "claims": Target("The paper's claims", [*paper.TABLE_4, paper.SERVER_ONLY], 3, [tables.claims]),
        "readings": Target(
            "As printed, and as we read it", [*paper.READINGS, *paper.READINGS.values()], 1, [tables.readings]
        ),
        "figure1": Target("Figure 1: data per client", [], 0, figure=pictures.figure1),
        "figure2": Target("Figure 2: combinatorial averaging", paper.TABLE_3, 3, figure=pictures.figure2),
        "figure3": Target("Figure 3: bandits", paper.FIGURE_3, 3, figure=pictures.figure3),
        "figure5": Target(
            "Figure 5: accuracy per class of each client's model", paper.FIGURE_5, 1, figure=pictures.figure5
        ),
        "figure6": Target("Figure 6: convergence by α", paper.FIGURE_6, 1, figure=pictures.figure6),
    },
    paper.FULL,
    paper.QUICK,
    {"cifar10": paper.SETTLED},
)
OURS = Plan(
    "ours",
    "Averaging that learns its weights",
    {
        "ours": Target("FedSieve and its rivals", ours.RIVALS, 5, ours.TABLES, ours.ours_figure),
        "baselines": Target("What it has to beat", ours.BASELINES, 3),
        "overfitting": Target(
            "Validation and test accuracy over rounds", ours.RIVALS, 5, figure=ours.overfitting_figure
        ),
        "unsmoothed": Target("What counts if it is there", ours.UNSMOOTHED, 0),
    },
    paper.FULL,
    paper.QUICK,
    {"cifar10": paper.SETTLED},
    quick_seeds=1,
)
FIELD = Plan(
    "field",
    "Ways to choose clients",
    {
        "field": Target(
            "Samplers with and without the combinatorial filter",
            field.CHOICES,
            3,
            field_tables.SAMPLERS,
            field_pictures.samplers_figure,
        )
    },
    field.SAMPLERS_FULL,
    field.SAMPLERS_QUICK,
    {"cifar10": field.CNN},
    quick_seeds=1,
    page=False,
    prepare=field.teach_favor,
)
ATTACKS = Plan(
    "attacks",
    "Defences against clients that lie",
    {"attacks": Target("Accuracy under attack", field.BATTLES, 3, field_tables.ATTACKS, field_pictures.attacks_figure)},
    field.ATTACKS_FULL,
    field.ATTACKS_QUICK,
    {"cifar10": field.CNN},
    quick_seeds=1,
    page=False,
)
VALIDATION = Plan(
    "validation",
    "What it costs in validation data",
    {
        "validation": Target(
            "Accuracy by validation data",
            validation.CASES,
            3,
            [validation_tables.validation_table],
            validation_pictures.validation_figure,
        ),
        "overfitting": Target(
            "Validation and test accuracy over rounds",
            validation.CASES,
            3,
            figure=validation_pictures.overfitting_figure,
        ),
    },
    validation.FULL,
    validation.QUICK,
    {"cifar10": field.CNN, "fashion-mnist": validation.MLP},
    quick_seeds=1,
    page=False,
)
PLANS = {"ours": OURS, "field": FIELD, "attacks": ATTACKS, "validation": VALIDATION}


def find_plan(targets: Sequence[str]) -> Plan:
    """The plan that has all these targets."""
    known = [*PAPER.targets, "all", *PLANS]
    for target in targets:
        if target not in known:
            raise unknown_name("target", target, known)
        if target in PLANS and set(targets) != {target}:
            raise InvalidSetting("target", " ".join(targets), f"{target} alone: its runs have a setting of their own")
    return PLANS.get(targets[0], PAPER)
