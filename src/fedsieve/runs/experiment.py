"""One run, from its configuration to its history."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsieve import algorithms, attacks, data, models
from fedsieve.attacks import Attack
from fedsieve.averaging import Scheme
from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset
from fedsieve.engines import Engine, LanesEngine, SequentialEngine, WorkersEngine
from fedsieve.engines.hostile import HostileEngine
from fedsieve.errors import InvalidSetting
from fedsieve.federation import Federation, Round, ServerClient
from fedsieve.filtering import ModelFilter, accuracy, log_likelihood
from fedsieve.parts import FILTERS, SAMPLERS, Part, check_needs
from fedsieve.randomness import torch_draws
from fedsieve.runs.callback import Callback
from fedsieve.runs.config import Config, check_device
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.environment import environment
from fedsieve.runs.participation import gini, requests
from fedsieve.sampling import ClientSampler
from fedsieve.system import SystemModel

if TYPE_CHECKING:
    import pandas as pd

    from fedsieve.engines.ray import RayEngine

FEW_CLIENTS = 200
"""Up to so many, a row has details of each."""

Simulated = Literal["seconds", "bytes"]
SIMULATED: tuple[Simulated, ...] = get_args(Simulated)

VALIDATED = ("validation_accuracy", "validation_loss")
"""Of the new model, on rows of runs in which the algorithm or its filter looks at validation data."""

log = logging.getLogger("fedsieve")


@dataclass(frozen=True)
class History:
    """What a run left: its rows (as in `metrics.jsonl`), its summary and its final model [size].

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
) -> History:
    """Run one experiment.

    The parts given replace those that `config.algorithm`, `config.model` and `config.dataset` name. With `out` the
    run is written there, and with `resume` it goes on from what is there; without `out` nothing is written.
    """
    config = config or Config()
    directory = None if out is None else RunDirectory(out)
    if directory is not None and directory.exists:
        check_same_run(directory, config, resume)
        if directory.finished:
            history = load(directory.path)
            for callback in callbacks:
                callback.on_start(config, len(history.rows))
                callback.on_end(history.summary)
            return history
    federation, engine = assemble(config, sampler, filter, averaging, model, dataset)
    given = {"sampler": sampler, "filter": filter, "averaging": averaging, "model": model, "dataset": dataset}
    own_parts = {name: _name(part) for name, part in given.items() if part is not None}
    if dataset is not None and dataset.name == config.dataset:  # it was only loaded elsewhere
        del own_parts["dataset"]

    validated = _looks_at_validation(config, federation.sieve.filter)
    rows: list[dict[str, Any]] = []
    if directory is not None:
        if directory.exists:
            checkpoint, rows = directory.latest()
            if checkpoint is not None:
                federation.model = checkpoint.model(engine.layout).to(federation.model.device)
                federation.sampler.load_state_dict(checkpoint.sampler)
        else:
            directory.create(config)

    for callback in callbacks:
        callback.on_start(config, len(rows))
    try:
        for number in range(len(rows) + 1, config.rounds + 1):
            began = time.perf_counter()
            played = federation.play(number)
            with federation.stopwatch.phase("evaluate"):
                row = _row(played, engine, federation.model, validated, began)
            phases = federation.stopwatch.rounds[-1]
            row["phases"] = {phase: round(phases[phase], 5) for phase in phases if phase != "write"}
            rows.append(row)
            if directory is not None:
                with federation.stopwatch.phase("write"):
                    directory.append(row)
                    directory.save(number, federation.model, engine.layout, federation.sampler.state_dict())
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
    return History(config, rows, summary, federation.model, federation.stopwatch.rounds)


def load(path: Path | str) -> History:
    """A finished run from its directory (without its model)."""
    directory = RunDirectory(path)
    return History(directory.config(), directory.rows(), directory.summary())


def assemble(
    config: Config,
    sampler: ClientSampler | None = None,
    filter: ModelFilter | None = None,
    averaging: Scheme | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    dataset: Dataset | None = None,
    draws: int | None = None,
) -> tuple[Federation, Engine]:
    """The federation that a configuration describes, ready for its first round; nothing is written.

    With `draws`, a seed, what is random in training follows from that; the initial model and all else from the run's.
    """
    algorithm = algorithms.find(config.algorithm)
    options = config.options()
    if filter is None and config.filter != "own":
        filter = FILTERS[config.filter].make(options)
    filter = filter or algorithm.filter(options)
    if sampler is None and config.sampler != "own":
        sampler = SAMPLERS[config.sampler].make(options)
    device = torch.device("cpu") if config.engine == "ray" else find_device(config.device)
    dataset = dataset or data.load(config.dataset, config.data_dir)
    validation, partition = split_data(config, dataset)
    for kind, name, part in _named_parts(config):
        check_needs(kind, name, part, options, config.system != "none", len(validation))
    readers = {
        config.algorithm: algorithm.at_server or algorithm.server_trains,
        type(filter).__name__: filter.needs_logits or filter.needs_validation,
        "watch_models": config.watch_models,
    }
    if any(readers.values()) and len(validation) == 0:
        reader = next(name for name, reads in readers.items() if reads)
        raise InvalidSetting("validation_per_class", 0, f"at least 1 with {reader}, which needs them")
    if algorithm.at_server:
        partition = data.Partition(validation, np.array([0, len(validation)]), unused=validation[:0])
    sizes = partition.sizes
    clients = np.flatnonzero(sizes)
    server = ServerClient(len(partition), len(validation) / sizes.sum()) if algorithm.server_trains else None
    if server is not None:
        ends = np.append(partition.offsets, partition.offsets[-1] + len(validation))
        partition = data.Partition(np.concatenate([partition.indices, validation]), ends, partition.unused)
    build = _factory(model, config, dataset)
    if config.augment and len(dataset.input_shape) != 3:
        raise InvalidSetting("augment", True, f"false for inputs {dataset.input_shape}, which are no images")
    settings = config.local_training(algorithm.objective(options))
    attack = None if config.attack == "none" else attacks.ATTACKS[config.attack]()
    hostile = attacks.hostile_clients(config.seed, clients, config.hostile)
    known = _mislabelled(config, dataset, validation)
    seen = known if attack is None else _attacked(attack, known, partition, hostile, config.seed)
    seed = config.seed if draws is None else draws
    engine = _engine(config, device, build, seen, partition, validation, settings, seed)
    if attack is not None:
        engine = HostileEngine(engine, attack, frozenset(hostile.tolist()), seed, len(dataset.test_labels))
    start = None
    if draws is not None:
        with torch_draws(config.seed, "initial model"):
            start = engine.layout.read(build()).to(device)
    system = _system(config, clients)
    federation = Federation(
        clients=clients,
        weights=sizes[clients].astype(np.float64),
        ratio=config.ratio,
        sampler=sampler or algorithm.sampler(options),
        engine=engine,
        filter=filter,
        averaging=averaging or algorithm.averaging(options),
        seed=config.seed,
        min_updates=config.min_updates,
        watch_models=config.watch_models,
        system=system,
        examples=None if system is None else np.array([settings.example_count(size) for size in sizes[clients]]),
        deadline=config.deadline,
        model=start,
        server=server,
    )
    if len(clients) < len(sizes):
        log.info("%d of %d clients hold no data and are never asked", len(sizes) - len(clients), len(sizes))
    if len(partition.unused):
        left = len(dataset.train_labels) - len(validation)
        log.info("%d of %d training examples are left over and unused", len(partition.unused), left)
    return federation, engine


def _named_parts(config: Config) -> Iterator[tuple[str, str, Part[Any]]]:
    if config.sampler != "own":
        yield "sampler", config.sampler, SAMPLERS[config.sampler]
    if config.filter != "own":
        yield "filter", config.filter, FILTERS[config.filter]


def _system(config: Config, clients: NDArray[np.int64]) -> SystemModel | None:
    if config.system == "none":
        return None
    if config.system == "drawn":
        return SystemModel.drawn(config.seed, clients)
    return SystemModel.from_trace(Path(config.system), config.seed, clients)


def _mislabelled(config: Config, dataset: Dataset, validation: NDArray[np.int64]) -> Dataset:
    """The data set as the server knows it, with errors among its validation labels."""
    if not config.validation_errors:
        return dataset
    share = config.validation_errors
    labels = data.mislabel(dataset.train_labels, validation, share, dataset.classes, config.seed)
    return replace(dataset, train_labels=labels)


def _attacked(
    attack: Attack, dataset: Dataset, partition: data.Partition, hostile: NDArray[np.int64], seed: int
) -> Dataset:
    """What clients hold once the hostile ones among them changed theirs; and tests of a backdoor after the others."""
    held = np.sort(np.concatenate([partition[client] for client in hostile.tolist()] or [partition.unused[:0]]))
    poisoned = attack.poison(dataset, held, seed) if len(held) else dataset
    triggered = attack.triggered(dataset)
    if triggered is None:
        return poisoned
    inputs, labels = triggered
    return replace(
        poisoned,
        test_inputs=np.concatenate([dataset.test_inputs, inputs]),
        test_labels=np.concatenate([dataset.test_labels, labels]),
    )


def split_data(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], data.Partition]:
    """The training data as a run splits it: positions of the server's validation examples, and the clients' parts."""
    validation, rest = data.validation_split(
        dataset.train_labels, config.validation_per_class, dataset.classes, config.seed, config.validation_imbalance
    )
    partition = data.partition(
        dataset.train_labels,
        config.clients,
        config.heterogeneity,
        alpha=config.alpha,
        shards_per_client=config.shards_per_client,
        seed=config.seed,
        candidates=rest,
    )
    return validation, partition


def _engine(
    config: Config,
    device: torch.device,
    build: Callable[[], nn.Module],
    dataset: Dataset,
    partition: data.Partition,
    validation: NDArray[np.int64],
    settings: LocalTraining,
    seed: int,
) -> Engine:
    """The engine that a configuration names; "auto" is lanes on a GPU, workers on a CPU."""
    common = (build, dataset, partition, validation, settings, seed)
    if config.engine == "ray":
        on_cluster = find_ray()(*common, config.device, config.arithmetic, config.actors, config.address)
        models.check_outputs(on_cluster.module, dataset.input_shape, dataset.classes, device)
        return on_cluster
    fitting = "lanes" if device.type == "cuda" else "workers"
    name = fitting if config.engine == "auto" else config.engine
    if name not in (fitting, "sequential"):
        raise InvalidSetting("engine", name, f"auto, {fitting}, sequential or ray where the device is {device.type}")
    if device.type == "cpu" and config.precision != "fp32":
        raise InvalidSetting("precision", config.precision, "fp32 where the device is cpu")
    engine: SequentialEngine
    if name == "lanes":
        engine = LanesEngine(*common, device, config.arithmetic)
    elif name == "workers":
        engine = WorkersEngine(*common, config.workers)
    else:
        engine = SequentialEngine(*common, device, config.arithmetic)
    models.check_outputs(engine.module, dataset.input_shape, dataset.classes, device)
    return engine


def find_ray() -> type[RayEngine]:
    """The engine that needs Ray, which is an extra."""
    try:
        from fedsieve.engines.ray import RayEngine
    except ImportError as error:
        hint = "another engine, or: pip install 'fedsieve[ray]'"
        raise InvalidSetting("engine", "ray", f"{hint} ({' '.join(str(error).split())})") from None
    return RayEngine


def find_device(name: str) -> torch.device:
    """The device a configuration names: "auto" is a GPU when there is one."""
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidSetting("device", name, f"auto or cpu: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def check_same_run(directory: RunDirectory, config: Config, resume: bool) -> None:
    """Raise unless the run in `directory` may be gone on with under `config`."""
    if not resume:
        raise InvalidSetting("out", str(directory.path), "a folder that holds no run yet, or --resume to go on with it")
    saved = directory.config()
    different = saved.differences(config)
    if different:
        name = different[0]
        raise InvalidSetting(
            name, getattr(config, name), f"{getattr(saved, name)!r}, as in the run in {directory.path}"
        )


def _factory(
    model: nn.Module | Callable[[], nn.Module] | None, config: Config, dataset: Dataset
) -> Callable[[], nn.Module]:
    if model is None:
        return partial(models.build, config.model, dataset.input_shape, dataset.classes)
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    return model


def _looks_at_validation(config: Config, filter: ModelFilter) -> bool:
    """Whether the run's algorithm chooses or trains by validation data."""
    algorithm = algorithms.find(config.algorithm)
    return algorithm.at_server or algorithm.server_trains or filter.needs_logits or filter.needs_validation


def _row(played: Round, engine: Engine, model: Tensor, validated: bool, began: float) -> dict[str, Any]:
    logits, labels = engine.logits([model], "test")[0], engine.labels("test")
    fooled = {}
    if isinstance(engine, HostileEngine):
        clean = engine.clean
        if len(labels) > clean:
            fooled = {"backdoor_success": float(accuracy(logits[clean:], labels[clean:]))}
        logits, labels = logits[:clean], labels[:clean]
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
        "test_accuracy": float(accuracy(logits, labels)),
        "test_loss": -float(log_likelihood(logits, labels)),
        **(_on_validation(engine, model) if validated else {}),
        **fooled,
        "train_loss": played.train_loss,
        "excluded": {str(client): reason for client, reason in played.excluded.items()},
        **({} if played.simulated is None else {"simulated": played.simulated}),
        **_details(played),
        "seconds": round(time.perf_counter() - began, 4),
    }


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
