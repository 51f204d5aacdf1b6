"""What filters cost in data: the table."""

from __future__ import annotations

from fedsieve.reproduction.results import Results, mean_of
from fedsieve.reproduction.tables import Table, spread_of
from fedsieve.reproduction.validation import EVENED, IMBALANCED, READERS, REFERENCE, SUPPLIES, WRONG, Case

FLAWS = {IMBALANCED: ", uneven", EVENED: ", evened", WRONG: ", wrong"}


def validation_table(results: Results) -> Table:
    """Final accuracy of each algorithm by how much validation data there is, and how good."""
    lines = [[Case(algorithm, supply) for supply in SUPPLIES] for algorithm in (REFERENCE, *READERS)]
    means = [[mean_of(results.final(cell)) for cell in line] for line in lines]
    highest = [max((mean for mean in column if mean is not None), default=None) for column in zip(*means, strict=True)]
    return Table(
        "Accuracy by validation images per class",
        ("Algorithm", *(f"{supply.per_class(results.study)}{FLAWS.get(supply, '')}" for supply in SUPPLIES)),
        [(line[0].title, *(spread_of(results.final(cell).values()) for cell in line)) for line in lines],
        "Final test accuracy in %, mean ± standard deviation over seeds; the best of each column is marked. Uneven: as "
        f"many in all, but the most frequent class has {IMBALANCED.imbalance:g} times as many as the rarest. Evened: "
        "the same, those of rarer classes repeated for who looks at them, who trains on them as a client aside. Wrong: "
        f"{100 * WRONG.errors:g} % of the labels are. Validation data is taken from the training data, so the more "
        "there is, the less clients have. FedPdp never looks at it.",
        left=1,
        best=[
            (line, column + 1)
            for line, values in enumerate(means)
            for column, mean in enumerate(values)
            if mean is not None and mean == highest[column]
        ],
    )
