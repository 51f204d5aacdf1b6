"""One run, from its configuration to its history."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch import Tensor, nn

from fedsieve import algorithms
from fedsieve.averaging import Scheme
from fedsieve.data import Dataset
from fedsieve.engines import Engine
from fedsieve.engines.hostile import HostileEngine
from fedsieve.errors import InvalidSetting
from fedsieve.federation import Federation, Round, RoundLost
from fedsieve.filtering import ModelFilter, accuracy, log_likelihood
from fedsieve.runs.assembly import assemble
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config
from fedsieve.runs.directory import SMOOTHED, VELOCITY, RunDirectory
from fedsieve.runs.environment import environment
from fedsieve.runs.participation import gini, requests
from fedsieve.sampling import ClientSampler
from fedsieve.smoothing import Smoothing

if TYPE_CHECKING:
    import pandas as pd

FEW_CLIENTS = 200
"""Up to so many, a row has details of each."""

Simulated = Literal["seconds", "bytes"]
SIMULATED: tuple[Simulated, ...] = get_args(Simulated)

log = logging.getLogger("fedsieve")

MOST_LOST = 10
"""A run ends once so many rounds in a row brought too few usable models, or all of a shorter one."""

VALIDATED = ("validation_accuracy", "validation_loss")
"""Of the model that is handed out, on rows of runs in which the algorithm or its filter looks at validation data."""

RESULTS = ("final_accuracy", "best_accuracy", "mean_last_10")
"""What every summary has, beside how many rounds there were."""


@dataclass(frozen=True)
class History:
    """What a run left: its rows (as in `metrics.jsonl`), its summary and the model [size] that it hands out.

    `profile` has the seconds of each phase of the rounds that were played now, not read.
    """

    config: Config
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    model: Tensor | None = field(default=None, repr=False)
    profile: list[dict[str, float]] = field(default_factory=list, repr=False)

    @property
    def accuracy(self) -> list[float]:
        """Test accuracy after each round."""
        return [float(row["test_accuracy"]) for row in self.rows]

    @property
    def unsmoothed_accuracy(self) -> list[float]:
        """That of the model that clients go on from, which is another where an average over rounds is handed out."""
        return [float(row.get("unsmoothed_accuracy", row["test_accuracy"])) for row in self.rows]

    def simulated(self, what: Simulated) -> list[float] | None:
        """Simulated seconds, or bytes sent, from the start to the end of each round; None without a system."""
        if not all("simulated" in row for row in self.rows):
            return None
        return list(accumulate(float(row["simulated"][what]) for row in self.rows))

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas frame indexed by round."""
        import pandas as pd

        return pd.DataFrame(self.rows).set_index("round")


def run(
    config: Config | None = None,
    *,
    sampler: ClientSampler | None = None,
    filter: ModelFilter | None = None,
    averaging: Scheme | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    save_every: float = 0.0,
) -> History:
    """Run one experiment.

    The parts given replace those that `config.algorithm`, `config.model` and `config.dataset` name. With `out` the
    run is written there, and with `resume` it goes on from what is there; without `out` nothing is written.

    `save_every` is the least number of seconds between checkpoints; with 0 there is one after each round. Rounds after
    the last checkpoint are lost in a kill and played again on `resume`, with the same result.
    """
    if not isinstance(config, Config | None):
        raise InvalidSetting("config", config, "a Config, such as Config(rounds=10); Config.load reads one from a file")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InvalidSetting("callbacks", callback, "objects of classes made from Callback")
    config = config or Config()
    parts = {"sampler": sampler, "filter": filter, "averaging": averaging, "model": model, "dataset": dataset}
    if out is None:
        return run_in(None, config, parts, resume, callbacks, save_every)
    directory = RunDirectory(out)
    with directory.sole_writer():
        return run_in(directory, config, parts, resume, callbacks, save_every)


def run_in(
    directory: RunDirectory | None,
    config: Config,
    parts: Mapping[str, Any],
    resume: bool,
    callbacks: Sequence[Callback],
    save_every: float,
) -> History:
    """What `run` does, in a directory that nobody else writes to."""
    own_parts = {name: _name(part) for name, part in parts.items() if part is not None}
    dataset = parts.get("dataset")
    if isinstance(dataset, Dataset) and dataset.name == config.dataset:  # it was only loaded elsewhere
        del own_parts["dataset"]
    if directory is not None and directory.exists:
        check_same_run(directory, config, resume, own_parts)
        if directory.finished:
            history = load(directory.path)
            for callback in callbacks:
                callback.on_start(config, len(history.rows))
                callback.on_end(history.summary)
            return history
    federation, engine = assemble(config, **parts)
    trains = algorithms.find(config.algorithm).trains_on_validation
    validated = trains or federation.sieve.filter.looks_at_validation
    rows: list[dict[str, Any]] = []
    smoothing = Smoothing(config.smoothing)
    if directory is not None:
        if directory.exists:
            checkpoint, rows = directory.latest()
            if checkpoint is not None:
                federation.model = checkpoint.model(engine.layout).to(federation.model.device)
                smoothing.average = _there(federation.model, checkpoint.beside(engine.layout, SMOOTHED))
                federation.momentum.velocity = _there(federation.model, checkpoint.beside(engine.layout, VELOCITY))
                federation.sampler.load_state_dict(checkpoint.sampler)
        else:
            directory.create(config, own_parts)

    for callback in callbacks:
        callback.on_start(config, len(rows))
    saved = time.monotonic()
    try:
        for number in range(len(rows) + 1, config.rounds + 1):
            began = time.perf_counter()
            played = _play(federation, number, rows, min(MOST_LOST, config.rounds))
            with federation.stopwatch.phase("evaluate"):
                new = federation.model
                model = smoothing.latest(new) if played.lost else smoothing.hand_out(new, number)
                row = _row(played, engine, model, validated, began)
                if config.smoothing:
                    row["unsmoothed_accuracy"] = _on_test(engine, federation.model)["test_accuracy"]
            phases = federation.stopwatch.rounds[-1]
            row["phases"] = {phase: round(phases[phase], 5) for phase in phases if phase != "write"}
            rows.append(row)
            if directory is not None:
                with federation.stopwatch.phase("write"):
                    directory.append(row)
                    if number == config.rounds or time.monotonic() - saved >= save_every:
                        state = federation.sampler.state_dict()
                        beside = {SMOOTHED: smoothing.average, VELOCITY: federation.momentum.velocity}
                        directory.save(number, federation.model, engine.layout, state, beside)
                        saved = time.monotonic()
            for callback in callbacks:
                callback.on_round(row)
    finally:
        engine.close()

    summary = _summary(config, rows, federation) | ({"own_parts": own_parts} if own_parts else {})
    if isinstance(engine, HostileEngine):
        summary["hostile"] = sorted(engine.hostile)
    if directory is not None:
        directory.finish(summary)
    for callback in callbacks:
        callback.on_end(summary)
    return History(config, rows, summary, smoothing.latest(federation.model), federation.stopwatch.rounds)


def _play(federation: Federation, number: int, rows: Sequence[Mapping[str, Any]], most: int) -> Round:
    """A round, which may be lost, unless the last ones, `most` with this, were all lost."""
    try:
        return federation.play(number)
    except RoundLost as problem:
        before = sum(1 for _ in takewhile(lambda row: "lost" in row, reversed(rows)))
        if before + 1 >= most:
            raise
        log.warning("%s; the model stays as it was", problem)
        return problem.round


def load(path: Path | str) -> History:
    """A finished run from its directory (without its model)."""
    try:
        return read_whole(path)
    except InvalidSetting:  # which says what of
        raise
    except ValueError as problem:
        raise InvalidSetting("out", str(path), f"a run directory that is not damaged ({problem})") from None


def read_whole(path: Path | str) -> History:
    """As `load`; of what is missing there speaks a ValueError."""
    directory = RunDirectory(path)
    history = History(directory.config(), directory.rows(), directory.summary())
    if missing := [name for name in ("rounds", *RESULTS) if name not in history.summary]:
        raise ValueError(f"no {missing[0]} in its summary")
    if len(history.rows) != history.summary["rounds"]:
        raise ValueError(f"{len(history.rows)} whole rows of {history.summary['rounds']}")
    return history


def check_same_run(directory: RunDirectory, config: Config, resume: bool, own_parts: Mapping[str, str] = {}) -> None:
    """Raise unless the run in `directory` may be gone on with under `config` and with these parts of the user's own."""
    if not resume:
        raise InvalidSetting("out", str(directory.path), "a folder that holds no run yet, or --resume to go on with it")
    saved = directory.config()
    different = saved.differences(config)
    if different:
        name = different[0]
        raise InvalidSetting(
            name, getattr(config, name), f"{getattr(saved, name)!r}, as in the run in {directory.path}"
        )
    before = directory.own_parts()
    for name in sorted(before.keys() | own_parts.keys()):
        if before.get(name) != own_parts.get(name):
            own = f"your {before[name]}" if name in before else "none of your own"
            raise InvalidSetting(name, own_parts.get(name), f"{own}, as in the run in {directory.path}")


def _there(model: Tensor, vector: Tensor | None) -> Tensor | None:
    """A vector where the model is."""
    return None if vector is None else vector.to(model.device)


def _row(played: Round, engine: Engine, model: Tensor, validated: bool, began: float) -> dict[str, Any]:
    return {
        "round": played.round,
        "sampled": played.sampled,
        "kept": played.kept,
        "coefficients": {
            "previous": played.coefficients.previous,
            "clients": [float(coefficient) for coefficient in played.coefficients.clients],
        },
        "score": played.score,
        "search": played.search,
        **_on_test(engine, model),
        **(_on_validation(engine, model) if validated else {}),
        "train_loss": played.train_loss,
        "excluded": {str(client): reason for client, reason in played.excluded.items()},
        **({} if played.simulated is None else {"simulated": played.simulated}),
        **_details(played),
        **({} if played.lost is None else {"lost": played.lost}),
        "seconds": round(time.perf_counter() - began, 4),
    }


def _on_test(engine: Engine, model: Tensor) -> dict[str, float]:
    logits, labels = engine.logits([model], "test")[0], engine.labels("test")
    clean = engine.clean if isinstance(engine, HostileEngine) else len(labels)
    found = {
        "test_accuracy": float(accuracy(logits[:clean], labels[:clean])),
        "test_loss": -float(log_likelihood(logits[:clean], labels[:clean])),
    }
    if len(labels) > clean:
        found["backdoor_success"] = float(accuracy(logits[clean:], labels[clean:]))
    return found


def _on_validation(engine: Engine, model: Tensor) -> dict[str, float]:
    logits, labels = engine.logits([model], "validation")[0], engine.labels("validation")
    found = (float(accuracy(logits, labels)), -float(log_likelihood(logits, labels)))
    return dict(zip(VALIDATED, found, strict=True))


def _details(played: Round) -> dict[str, Any]:
    """What is worth keeping of a round with few clients: per-class accuracies of models, and the bandit's beliefs."""
    details: dict[str, Any] = {}
    if played.per_class is not None and len(played.per_class) <= FEW_CLIENTS:
        details["per_class"] = {
            str(client): [round(share, 4) for share in shares] for client, shares in played.per_class.items()
        }
    beliefs = played.beliefs
    if beliefs is not None and len(beliefs.clients) <= FEW_CLIENTS:
        details["bandit"] = {
            "clients": beliefs.clients.tolist(),
            "mean": beliefs.mean.round(4).tolist(),
            "low": (beliefs.mean - beliefs.width).round(4).tolist(),
            "high": (beliefs.mean + beliefs.width).round(4).tolist(),
        }
    return details


def _summary(config: Config, rows: Sequence[Mapping[str, Any]], federation: Federation) -> dict[str, Any]:
    reached = [float(row["test_accuracy"]) for row in rows]
    return {
        "algorithm": config.algorithm,
        "seed": config.seed,
        "rounds": len(rows),
        "final_accuracy": reached[-1],
        "best_accuracy": max(reached),
        "mean_last_10": float(np.mean(reached[-10:])),
        "duration": round(sum(float(row["seconds"]) for row in rows), 3),
        **_simulated(rows),
        "requests_gini": round(gini(requests(rows, federation.clients.tolist())), 4),
        **environment(federation.model.device),
    }


def _simulated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All the time that a run's devices would have taken, and the bytes they would have sent."""
    if "simulated" not in rows[-1]:
        return {}
    return {"simulated": {what: sum(row["simulated"][what] for row in rows) for what in SIMULATED}}


def _name(part: object) -> str:
    return getattr(part, "__name__", None) or type(part).__name__
