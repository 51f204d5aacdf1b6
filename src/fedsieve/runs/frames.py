"""A run directory as pandas frames, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsieve.errors import InvalidSetting
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = ("test_accuracy", "test_loss", "train_loss", "score", "seconds")


@dataclass(frozen=True)
class RunFrames:
    """What is in a run directory; `summary` is None while the run is not finished.

    `rounds` has a row per round (its index): accuracies, losses and seconds as in `metrics.jsonl` (`score` is NaN for
    filters without one), how many clients were `sampled`, `kept` and `excluded`, and the share `previous` of the model
    before in the new one; `validation_accuracy` and `validation_loss` of the new model where the algorithm looks at
    validation data; `simulated_seconds` and `simulated_bytes` of the round where clients have devices, and
    `backdoor_success` where there is a backdoor. `clients` has a row per round and sampled client: whether its model
    was `kept` and with which `coefficient` (0 if not), and why it was `excluded` as unusable (missing if it wasn't).
    """

    config: Config
    rounds: pd.DataFrame = field(repr=False)
    clients: pd.DataFrame = field(repr=False)
    summary: dict[str, Any] | None = field(repr=False)


def load_run(path: Path | str) -> RunFrames:
    """The run in a directory as frames; the rounds so far where it is not finished."""
    directory = RunDirectory(path)
    config, rows = directory.config(), directory.rows()
    try:
        summary = directory.summary() if directory.finished else None
        if summary is not None and len(rows) != summary["rounds"]:
            raise ValueError(f"metrics.jsonl has {len(rows)} whole rows, summary.json {summary['rounds']} rounds")
        return RunFrames(config, rounds_frame(rows), clients_frame(rows), summary)
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        problem = f"no {error} in a record" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise InvalidSetting("out", str(path), f"a run directory that is not damaged ({problem})") from None


def rounds_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per round: float64 for what was measured, int64 for what was counted."""
    import pandas as pd

    records = {
        "round": [row["round"] for row in rows],
        **{name: [row[name] for row in rows] for name in NUMBERS},
        **{name: [len(row[name]) for row in rows] for name in ("sampled", "kept", "excluded")},
        "previous": [row["coefficients"]["previous"] for row in rows],
        **_where_known("validation_accuracy", [row.get("validation_accuracy") for row in rows]),
        **_where_known("validation_loss", [row.get("validation_loss") for row in rows]),
        **_where_known("simulated_seconds", [row.get("simulated", {}).get("seconds") for row in rows]),
        **_where_known("simulated_bytes", [row.get("simulated", {}).get("bytes") for row in rows]),
        **_where_known("backdoor_success", [row.get("backdoor_success") for row in rows]),
    }
    counts = ("round", "sampled", "kept", "excluded")
    types = {name: "int64" if name in counts else "float64" for name in records}
    return pd.DataFrame(records).astype(types).set_index("round")


def _where_known(name: str, values: list[Any]) -> dict[str, list[Any]]:
    return {} if None in values or not values else {name: values}


def clients_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row per round and sampled client."""
    import pandas as pd

    records = []
    for row in rows:
        coefficients = dict(zip(row["kept"], row["coefficients"]["clients"], strict=True))
        for client in dict.fromkeys(row["sampled"]):  # who was drawn twice trained once
            reason = row["excluded"].get(str(client))
            records.append((row["round"], client, client in coefficients, coefficients.get(client, 0.0), reason))
    types = {"round": "int64", "client": "int64", "kept": "bool", "coefficient": "float64", "excluded": "string"}
    return pd.DataFrame(records, columns=list(types)).astype(types)
