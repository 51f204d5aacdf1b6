"""Runs in TensorBoard, MLflow and Weights & Biases: callbacks for those who have `pip install 'fedsieve[track]'`.

Every tracker gets the whole configuration as parameters, the numbers of each round at step = round, and the numbers of
the summary at the last step. One tracker can be shared by runs one after the other and by runs in several threads, as
in `compare`: a run is tracked in the thread that plays it.

A run that goes on after an interruption goes on in its tracker; rounds that were done before are not logged again. For
this a tracker keeps, in its folder, a small file per configuration with the tracker's name for the run. Rounds are only
ever logged twice when a run had to go back behind its last checkpoint: TensorBoard then hides the older points, MLflow
keeps both, and W&B ignores steps before its last (offline, each part of the run keeps its own). A run that is finished
and only read again is not tracked.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from threading import Lock, local
from typing import Any
from uuid import uuid4

from fedsieve.errors import InvalidSetting, unknown_name
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import PLACE, Config
from fedsieve.runs.experiment import VALIDATED

OPEN: dict[str, Any] = {}
"""The runs that are being tracked in this process, by name."""


class Tracker(Callback):
    """What the three have in common. `folder` is where they write, and remember which runs they have begun."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            allowed = f"a folder that can be written to ({error.strerror})"
            raise InvalidSetting("track", str(self.folder), allowed) from None
        self.turn = Lock()
        self.here = local()

    def create(self, config: Config) -> str:
        """Begin a new run; its name, which is kept for when the run goes on after an interruption."""
        raise NotImplementedError

    def open(self, name: str, config: Config, done: int) -> Any:
        """The run of that name, `done` rounds having been made before: what `log` and `close` are given."""
        raise NotImplementedError

    def log(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Write numbers of a round."""
        raise NotImplementedError

    def close(self, run: Any, finished: bool) -> None:
        """The last call about a run, which came to its end or failed."""
        raise NotImplementedError

    def on_start(self, config: Config, done: int) -> None:
        """A run begins or goes on in this thread."""
        with self.turn:
            self._close(getattr(self.here, "name", ""), finished=False)  # if a run in this thread failed
            self.here.name = ""
            if done == config.rounds:
                return
            same = hashlib.sha256(config.model_dump_json(exclude=set(PLACE)).encode()).hexdigest()[:12]
            note = self.folder / f"{same}.run"
            known = note.read_text(encoding="utf-8") if done and note.exists() else ""
            try:
                name = known or self.create(config)
                note.write_text(name, encoding="utf-8")
                self._close(name, finished=False)  # if it failed in this process a moment ago
                OPEN[name] = self.open(name, config, done)
            except Exception as error:  # of packages of others, and servers that may not be there
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                allowed = f"trackers that can be written to ({reason})"
                raise InvalidSetting("track", self.folder.name, allowed) from None
            self.here.name = name

    def on_round(self, row: Mapping[str, Any]) -> None:
        """A round is done."""
        numbers = {name: row[name] for name in ("test_accuracy", "test_loss", "train_loss", "score", "seconds")}
        numbers |= {name: row[name] for name in VALIDATED if name in row}
        numbers |= {"kept": len(row["kept"]), "excluded": len(row["excluded"])}
        self.log(OPEN[self.here.name], _numbers(numbers), row["round"])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """A run is done."""
        if self.here.name:
            self.log(OPEN[self.here.name], _numbers(summary), summary["rounds"])
            self._close(self.here.name, finished=True)
            self.here.name = ""

    def _close(self, name: str, finished: bool) -> None:
        if name in OPEN:
            self.close(OPEN.pop(name), finished)


class TensorBoardTracker(Tracker):
    """A folder of event files per run, for `tensorboard --logdir FOLDER`; parameters are under HPARAMS."""

    def __init__(self, folder: Path | str) -> None:
        self.tensorboard = _package("torch.utils.tensorboard", "tensorboard")
        super().__init__(folder)

    def create(self, config: Config) -> str:
        """A folder's name."""
        return f"{config.algorithm}-seed-{config.seed}-{uuid4().hex[:8]}"

    def open(self, name: str, config: Config, done: int) -> Any:
        """A writer; what an earlier one wrote of rounds after `done` is hidden."""
        writer = self.tensorboard.SummaryWriter(str(self.folder / name), purge_step=done + 1)
        parameters = {field: "None" if value is None else value for field, value in _parameters(config).items()}
        experiment, start, _ = self.tensorboard.summary.hparams(parameters, {"test_accuracy": 0.0, "test_loss": 0.0})
        writer.file_writer.add_summary(experiment)
        writer.file_writer.add_summary(start)
        return writer

    def log(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Points, on disk at once."""
        for name, value in numbers.items():
            run.add_scalar(name, value, step)
        run.flush()

    def close(self, run: Any, finished: bool) -> None:
        """Close the file."""
        if finished:
            run.file_writer.add_summary(self.tensorboard.summary.hparams({}, {})[2])
        run.close()


class MLflowTracker(Tracker):
    """Runs of an MLflow experiment, kept in `folder` unless `uri` or `MLFLOW_TRACKING_URI` names another store.

    MLflow wants to be asked for its file store: `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER`
    shows it (that needs all of `mlflow`; to write, `mlflow-skinny` is enough). For a store in `folder` this is set,
    and MLflow's reports to its makers are off.
    """

    def __init__(self, folder: Path | str, uri: str | None = None, experiment: str = "fedsieve") -> None:
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = Path(folder).absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.mlflow = _package("mlflow", "mlflow")
        super().__init__(folder)
        self.experiment = experiment
        self.client = self.mlflow.MlflowClient(tracking_uri=uri)

    def create(self, config: Config) -> str:
        """The id of a new run, which has the parameters: MLflow lets nobody change them later."""
        known = self.client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self.client.create_experiment(self.experiment)
        run = self.client.create_run(experiment, run_name=f"{config.algorithm}, seed {config.seed}")
        Param = self.mlflow.entities.Param
        parameters = [Param(field, str(value)) for field, value in _parameters(config).items()]
        self.client.log_batch(run.info.run_id, params=parameters)
        return str(run.info.run_id)

    def open(self, name: str, config: Config, done: int) -> Any:
        """The run's id."""
        self.client.update_run(name, status="RUNNING")
        return name

    def log(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Metrics with the time of now."""
        now, Metric = int(time.time() * 1000), self.mlflow.entities.Metric
        self.client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])

    def close(self, run: Any, finished: bool) -> None:
        """Say how it ended."""
        self.client.set_terminated(run, "FINISHED" if finished else "FAILED")


class WandbTracker(Tracker):
    """Runs of a W&B project, offline unless `WANDB_MODE` says otherwise.

    `wandb sync FOLDER/wandb/offline-run-*` uploads them; the parts of an interrupted run have one id, under which W&B
    joins them. W&B writes every 15 seconds: a kill takes what was logged since, while a run that fails loses nothing.
    Offline, W&B's reports of its own errors to its makers are off.
    """

    def __init__(self, folder: Path | str, project: str | None = None) -> None:
        self.project = project or os.environ.get("WANDB_PROJECT", "fedsieve")
        self.mode = os.environ.get("WANDB_MODE", "offline")
        if self.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.wandb = _package("wandb", "wandb")
        super().__init__(folder)

    def create(self, config: Config) -> str:
        """A new id."""
        return uuid4().hex[:12]

    def open(self, name: str, config: Config, done: int) -> Any:
        """The part of the run that begins now."""
        return self.wandb.init(
            id=name,
            name=f"{config.algorithm}, seed {config.seed}",
            project=self.project,
            config=_parameters(config),
            dir=str(self.folder),
            mode=self.mode,
            resume="allow" if done else None,
            allow_val_change=True,
            reinit="create_new",
            settings=self.wandb.Settings(console="off", silent=self.mode == "offline"),
        )

    def log(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        """A row of the history; what is logged at the same step joins it."""
        run.log(dict(numbers), step=step)

    def close(self, run: Any, finished: bool) -> None:
        """Write what is not written yet."""
        run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, type[TensorBoardTracker | MLflowTracker | WandbTracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}


def tracker(name: str, folder: Path | str) -> Tracker:
    """The tracker of that name, writing under `folder`."""
    if name not in TRACKERS:
        raise unknown_name("track", name, TRACKERS)
    return TRACKERS[name](Path(folder) / name)


def _parameters(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _package(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        problem = " ".join(str(error).split())
        raise InvalidSetting("track", name, f"pip install 'fedsieve[track]' first ({problem})") from None
