"""The federation that a configuration describes: data, clients, parts and the engine that trains them."""

from __future__ import annotations

import copy
import difflib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedsieve import algorithms, attacks, data, models
from fedsieve.attacks import Attack, NaNSender
from fedsieve.averaging import Scheme
from fedsieve.clients import LocalTraining
from fedsieve.data import Dataset
from fedsieve.engines import Engine, LanesEngine, SequentialEngine, WorkersEngine
from fedsieve.engines.hostile import HostileEngine
from fedsieve.engines.precision import arithmetic
from fedsieve.errors import InvalidSetting
from fedsieve.federation import Federation, ServerClient
from fedsieve.filtering import ModelFilter
from fedsieve.parts import FILTERS, SAMPLERS, Part, check_needs, check_own
from fedsieve.randomness import torch_draws
from fedsieve.runs.config import Config, check_device
from fedsieve.sampling import ClientSampler
from fedsieve.system import SystemModel

if TYPE_CHECKING:
    from fedsieve.engines.ray import RayEngine

log = logging.getLogger("fedsieve")


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
    check_own(sampler, filter, averaging)
    if not isinstance(dataset, Dataset | None):
        raise InvalidSetting("dataset", dataset, "a Dataset, such as Dataset.from_arrays makes; names go into Config")
    algorithm = algorithms.find(config.algorithm)
    device = torch.device("cpu") if config.engine == "ray" else find_device(config.device)
    dataset = dataset or data.load(config.dataset, config.data_dir)
    validation, partition = split_data(config, dataset)
    _check_finite("validation examples", dataset.train_inputs[validation])
    _check_finite("test_inputs", dataset.test_inputs)
    options = config.options(int(np.count_nonzero(partition.sizes)))
    for kind, name, part in _named_parts(config):
        check_needs(kind, name, part, options, config.system != "none", len(validation))
    remote = not algorithm.at_server  # a server that trains alone needs nobody chosen, and waits for nobody
    if filter is None and config.filter != "own" and remote:
        filter = FILTERS[config.filter].make(options)
    filter = filter or algorithm.filter(options)
    _check_count(filter, options.per_round)
    if config.min_updates > options.per_round and remote:
        raise InvalidSetting("min_updates", config.min_updates, f"at most {options.per_round}, as many as are asked")
    if sampler is None and config.sampler != "own" and remote:
        sampler = SAMPLERS[config.sampler].make(options)
    sampler = sampler or algorithm.sampler(options)
    if sampler.needs_times and config.system == "none":
        allowed = "it with a system, drawn or a CSV file: it looks at times"
        raise InvalidSetting("sampler", type(sampler).__name__, allowed)
    readers = {
        config.algorithm: algorithm.trains_on_validation,
        type(filter).__name__: filter.looks_at_validation,
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
    hostile = attacks.hostile_clients(config.seed, clients[:0] if algorithm.at_server else clients, config.hostile)
    if attack is not None and not algorithm.at_server:
        _check_hostile(config, attack, len(hostile), len(clients))
    known = _mislabelled(config, dataset, validation)
    looked_at = validation  # who trains on it as a client does has it as it is
    if config.even_classes and len(validation):
        looked_at = validation[data.even_out(known.train_labels[validation], config.seed)]
    seen = known if attack is None else _attacked(attack, known, partition, hostile, config.seed)
    system = _system(config, clients) if remote else None
    seed = config.seed if draws is None else draws
    engine = _engine(config, device, build, seen, partition, looked_at, settings, seed)
    if attack is not None:
        engine = HostileEngine(engine, attack, frozenset(hostile.tolist()), seed, len(dataset.test_labels))
    start = None
    if draws is not None:
        with torch_draws(config.seed, "initial model"):
            start = engine.layout.read(build()).to(device)
    federation = Federation(
        clients=clients,
        weights=sizes[clients].astype(np.float64),
        ratio=config.ratio,
        sampler=sampler,
        engine=engine,
        filter=filter,
        averaging=averaging or algorithm.averaging(options),
        seed=config.seed,
        min_updates=config.min_updates if remote else 1,
        pace=settings.pace,
        server_momentum=config.server_momentum,
        watch_models=config.watch_models,
        system=system,
        examples=None if system is None else np.array([settings.example_count(size) for size in sizes[clients]]),
        deadline=config.deadline,
        model=start,
        server=server,
    )
    if system is not None and config.deadline is not None:
        model_bytes = engine.layout.size * engine.layout.dtype.itemsize
        evaluated_before = federation.sampler.needs_losses
        least = system.least_deadline(federation.examples, model_bytes, evaluated_before)
        if config.deadline < least:
            engine.close()
            allowed = f"at least {math.ceil(100 * least) / 100}: the quickest client takes that many seconds"
            raise InvalidSetting("deadline", config.deadline, allowed)
    if len(clients) < len(sizes):
        log.info("%d of %d clients hold no data and are never asked", len(sizes) - len(clients), len(sizes))
    if len(partition.unused):
        left = len(dataset.train_labels) - len(validation)
        log.info("%d of %d training examples are left over and unused", len(partition.unused), left)
    return federation, engine


def check(config: Config) -> None:
    """Raise what its run would raise before the first round, if anything."""
    _, engine = assemble(config.model_copy(update={"engine": "sequential"}))
    engine.close()


def split_data(config: Config, dataset: Dataset) -> tuple[NDArray[np.int64], data.Partition]:
    """The training data as a run splits it: positions of the server's validation examples, and the clients' parts."""
    validation, rest = data.validation_split(
        dataset.train_labels, config.validation_per_class, dataset.classes, config.seed, config.validation_imbalance
    )
    if not len(rest):
        allowed = "fewer: with so many there is no training data left for clients"
        raise InvalidSetting("validation_per_class", config.validation_per_class, allowed)
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


def _check_finite(what: str, inputs: NDArray[Any]) -> None:
    """Raise where the server would judge by what is no number; a client that holds such is left out by itself."""
    if inputs.dtype.kind == "f" and inputs.size and not np.isfinite((inputs.min(), inputs.max())).all():
        raise InvalidSetting("dataset", f"NaN or infinity among the {what}", "finite numbers")


def _named_parts(config: Config) -> Iterator[tuple[str, str, Part[Any]]]:
    if config.sampler != "own":
        yield "sampler", config.sampler, SAMPLERS[config.sampler]
    if config.filter != "own":
        yield "filter", config.filter, FILTERS[config.filter]


def _factory(
    model: nn.Module | Callable[[], nn.Module] | None, config: Config, dataset: Dataset
) -> Callable[[], nn.Module]:
    if model is None:
        return partial(models.build, config.model, dataset.input_shape, dataset.classes)
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    return partial(_made_by, model)


def _made_by(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of the user's own function, which may be none."""
    made = make() if callable(make) else make
    if not isinstance(made, nn.Module):
        raise InvalidSetting("model", made, "a torch.nn.Module, or a function that makes one; names go into Config")
    return made


def _system(config: Config, clients: NDArray[np.int64]) -> SystemModel | None:
    if config.system == "none":
        return None
    if config.system == "drawn":
        return SystemModel.drawn(config.seed, clients)
    path = Path(config.system)
    meant = difflib.get_close_matches(config.system.lower(), ("none", "drawn"), n=1)
    if not config.system or (meant and not path.exists()):
        allowed = f"{meant[0]!r} (nearest), or a CSV file" if meant else "none, drawn or a CSV file"
        raise InvalidSetting("system", config.system, allowed)
    return SystemModel.from_trace(path, config.seed, clients)


def _check_count(filter: ModelFilter, per_round: int) -> None:
    """Raise if a round asks for fewer models than a filter can do with, or for more."""
    least, most = filter.least_models, filter.most_models
    if least <= per_round and (most is None or per_round <= most):
        return
    wanted = f"at least {least}" if per_round < least else f"at most {most}"
    allowed = f"it where {wanted} clients are asked in a round, not {per_round}: change the ratio, or the filter"
    raise InvalidSetting("filter", type(filter).__name__, allowed)


def _check_hostile(config: Config, attack: Attack, hostile: int, clients: int) -> None:
    """Raise if an attack has nobody to make it, or leaves nobody whose model can be used."""
    if config.hostile and not hostile:
        allowed = f"{1 / clients:.3g} or more, at which one of the {clients} clients that hold data is hostile"
        raise InvalidSetting("hostile", config.hostile, allowed)
    if hostile == clients and isinstance(attack, NaNSender):
        allowed = f"a share that leaves one of {clients} clients honest: hostile ones send no model"
        raise InvalidSetting("hostile", config.hostile, allowed)


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
    if device.type == "cpu" and config.precision == "tf32":
        raise InvalidSetting("precision", config.precision, "fp32 or bf16 where the device is cpu")
    engine: SequentialEngine
    if name == "lanes":
        engine = LanesEngine(*common, device, config.arithmetic)
    elif name == "workers":
        engine = WorkersEngine(*common, config.workers, config.arithmetic)
    else:
        engine = SequentialEngine(*common, device, config.arithmetic)
    with arithmetic(config.arithmetic, device):
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
