"""One typed configuration of a run: from Python, from YAML, from flags; saved whole with every run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsieve.algorithms import ALGORITHMS, Options
from fedsieve.attacks import ATTACKS
from fedsieve.clients import SCHEDULES, LocalTraining, Objective
from fedsieve.data import DATASETS
from fedsieve.engines.precision import Precision
from fedsieve.errors import InvalidSetting, MissingData, unknown_name
from fedsieve.filtering.combinatorial import ScoredBy, Search
from fedsieve.filtering.scores import Score
from fedsieve.models import MODELS
from fedsieve.parts import FILTERS, SAMPLERS
from fedsieve.sampling.bandit import Refresh

Positive = Annotated[int, Field(ge=1)]

NAMES: dict[str, tuple[str, ...]] = {
    "algorithm": tuple(ALGORITHMS),
    "dataset": tuple(DATASETS),
    "model": tuple(MODELS),
    "heterogeneity": ("iid", "client", "class", "shards"),
    "schedule": tuple(SCHEDULES),
    "score": get_args(Score),
    "scored_by": get_args(ScoredBy),
    "search": get_args(Search),
    "coefficients": ("normalised", "literal", "mean"),
    "refresh": get_args(Refresh),
    "precision": get_args(Precision),
    "sampler": ("own", *SAMPLERS),
    "filter": ("own", *FILTERS),
    "attack": ("none", *ATTACKS),
    "engine": ("auto", "lanes", "workers", "sequential", "ray"),
}
"""The fields whose value is one of a set of names."""

PLACE = frozenset({"engine", "address", "actors", "device", "workers", "data_dir", "watch_models"})
"""Where a run happens and what is noted of it, not what it computes: may differ between parts of a resumed run."""


class Config(BaseModel):
    """Everything that defines a run. Fields left out of the data set's own habits are filled in from them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    algorithm: str = Field("fedcm-ts", description="the algorithm: a row of `fedsieve algorithms`")
    sampler: str = Field("own", description="whom to ask: the algorithm's own, or a sampler of `fedsieve algorithms`")
    filter: str = Field("own", description="whom to believe: the algorithm's own, or a filter of `fedsieve algorithms`")
    dataset: str = Field("digits", description="the data set: a row of `fedsieve data list`")
    data_dir: Path | None = Field(
        None, description="folder of fetched data sets (default: $FEDSIEVE_DATA or ~/.cache/fedsieve)"
    )
    model: str = Field("", description="mlp, cnn, vgg11 or vgg11-bn (default: what fits the data set)")
    heterogeneity: str = Field("class", description="how data differs between clients: iid, client, class or shards")
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration; small is far from IID")
    shards_per_client: Positive = Field(2, description="with heterogeneity shards: shards each client gets")
    clients: Positive = Field(20, description="number of clients")
    ratio: float = Field(0.4, gt=0, le=1, description="share of the clients asked in a round")
    rounds: Positive = Field(100, description="communication rounds")
    local_epochs: Positive = Field(5, description="passes of a client over its data in a round")
    local_steps: Positive | None = Field(None, description="steps of a client in a round, instead of epochs")
    batch_size: Positive = Field(0, description="examples in a client's step (default: 16 for digits, else 64)")
    lr: float = Field(0.05, gt=0, description="learning rate of the clients")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the clients' SGD")
    weight_decay: float = Field(5e-4, ge=0, description="weight decay of the clients' SGD")
    schedule: str = Field("cosine", description="learning rate over rounds: constant, step or cosine")
    augment: bool | None = Field(None, description="crop and flip training images (default: as usual for the data set)")
    precision: str = Field(
        "fp32",
        description="the numbers training computes with: fp32, bf16 (fast on a GPU, and on a CPU that has it), "
        "or tf32 (on a GPU)",
    )
    server_momentum: float = Field(
        0.0, ge=0, lt=1, description="share of a round's change that is repeated in the next, on top of its own"
    )
    smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="hand out an average over rounds: the weight of all before the last (0.8: some five rounds count)",
    )
    mu: float = Field(0.1, ge=0, description="FedProx's weight of the proximal term")
    score: str = Field("accuracy", description="what the combinatorial filter maximises: accuracy or cross-entropy")
    scored_by: str = Field("logits", description="score averaged logits (the paper), or really averaged weights (slow)")
    search: str = Field(
        "auto", description="how the best subset is looked for: auto, exhaustive, branch-and-bound or beam"
    )
    coefficients: str = Field(
        "normalised",
        description="FedPdp's: normalised, literal as printed, or mean, all alike, for samplers that go by size",
    )
    refresh: str = Field("fresh", description="bandit indices: fresh every round, or stale as printed")
    validation_per_class: int = Field(
        0,
        ge=0,
        description="validation images per class, taken from the training data (default: as usual for the data set)",
    )
    validation_imbalance: float = Field(
        1.0,
        ge=1,
        description="how many times as many validation images the most frequent class has as the rarest",
    )
    even_classes: bool = Field(
        False, description="repeat validation images of rarer classes until all classes have as many"
    )
    validation_errors: float = Field(0.0, ge=0, le=1, description="share of the validation labels that are wrong")
    attack: str = Field("none", description="what hostile clients do: none, " + ", ".join(ATTACKS))
    hostile: float = Field(0.0, ge=0, le=1, description="share of the clients that are hostile")
    byzantine: int | None = Field(
        None,
        ge=0,
        description="liars a round that krum, bulyan, trimmed-mean and rejection assume (default: the hostile share)",
    )
    system: str = Field(
        "none",
        description="the clients' devices: none, drawn (speeds, bandwidths, availability), or a CSV file",
    )
    deadline: float | None = Field(None, gt=0, description="with a system: simulated seconds a round waits at most")
    favor_agent: Path | None = Field(
        None, description="with sampler favor: its agent, a file that `fedsieve pretrain-favor` writes"
    )
    min_updates: Positive = Field(1, description="usable client models without which a round is lost")
    seed: int = Field(0, ge=0, description="everything random in the run follows from it")
    engine: str = Field(
        "auto", description="how clients run: lanes (a GPU), workers (CPU cores), sequential, ray, or auto: what fits"
    )
    address: str | None = Field(
        None,
        description="with engine ray: a cluster, host:port or auto (default: $RAY_ADDRESS, or one started here)",
    )
    actors: Positive | None = Field(
        None, description="with engine ray: processes that train clients (default: one per GPU, or one per node)"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    workers: Positive | None = Field(None, description="clients trained at once on a CPU (default: one per core)")
    watch_models: bool = Field(
        False, description="note how every client's model does on each class, also where no filter looks at it"
    )

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _first_problem(error, settings) from None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, settings: Any) -> Any:
        settings = {name: value for name, value in dict(settings).items() if value is not None}
        for field, names in NAMES.items():
            if field in settings and settings[field] not in names:
                raise unknown_name(field, settings[field], names)
        for field, value in settings.items():
            if isinstance(value, bool) and field in cls.model_fields and bool not in _kinds(field):
                raise InvalidSetting(field, value, allowed_values(field))
        known = DATASETS[settings.get("dataset", "digits")]
        defaults = {
            "model": known.model,
            "validation_per_class": known.validation_per_class,
            "batch_size": known.batch_size,
            "augment": known.augment,
        }
        return settings | {name: value for name, value in defaults.items() if name not in settings}

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        check_device(self.device)
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.deadline is not None and self.system == "none":
            named = SAMPLERS.get(self.sampler)
            too = f", which {self.sampler} needs too" if named and named.times else ""
            raise InvalidSetting("deadline", self.deadline, f"it with --system drawn or a CSV file{too}")
        if self.favor_agent is not None and self.sampler != "favor":
            raise InvalidSetting("favor_agent", str(self.favor_agent), "none without --sampler favor")
        if self.hostile and self.attack == "none":
            raise InvalidSetting("attack", self.attack, f"one of {', '.join(ATTACKS)} where clients are hostile")
        if self.attack != "none" and not self.hostile:
            raise InvalidSetting("hostile", self.hostile, f"a share of the clients above 0 with attack {self.attack}")
        assuming = [name for name, part in FILTERS.items() if part.assumes_liars]
        if self.byzantine is not None and self.filter not in assuming:
            raise InvalidSetting(
                "byzantine", self.byzantine, f"it with one of these filters alone: {', '.join(assuming)}"
            )
        for field in ("address", "actors"):
            if getattr(self, field) is not None and self.engine != "ray":
                raise InvalidSetting(field, getattr(self, field), "it with --engine ray alone")
        return self

    @classmethod
    def load(cls, path: Path | str, **overrides: Any) -> Config:
        """Read a YAML file of fields; `overrides` win over what it says."""
        return cls(**(read_yaml(Path(path)) | {name: value for name, value in overrides.items() if value is not None}))

    def to_yaml(self) -> str:
        """Every field, as YAML that `load` reads back to an equal configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def differences(self, other: Config) -> list[str]:
        """The names of the fields in which the two define different results."""
        return [
            name
            for name in type(self).model_fields
            if name not in PLACE and getattr(self, name) != getattr(other, name)
        ]

    def options(self, holders: int | None = None) -> Options:
        """The choices an algorithm reads, where so many clients hold data (default: all)."""
        per_round = max(1, math.floor(self.ratio * (self.clients if holders is None else holders) + 0.5))
        return Options(
            lr=self.lr,
            mu=self.mu,
            score=self.score,  # type: ignore[arg-type] # checked against NAMES
            scored_by=self.scored_by,  # type: ignore[arg-type]
            search=self.search,  # type: ignore[arg-type]
            coefficients=self.coefficients,
            refresh=self.refresh,  # type: ignore[arg-type]
            ratio=self.ratio,
            per_round=per_round,
            byzantine=math.floor(self.hostile * per_round + 0.5) if self.byzantine is None else self.byzantine,
            deadline=self.deadline,
            favor_agent=self.favor_agent,
        )

    @property
    def files(self) -> dict[str, Path]:
        """The files besides data sets that a run reads, by the field that names them."""
        trace = {} if self.system in ("none", "drawn") else {"system": Path(self.system)}
        return trace | ({} if self.favor_agent is None else {"favor_agent": self.favor_agent})

    @property
    def arithmetic(self) -> Precision:
        """What a GPU computes with."""
        return self.precision  # type: ignore[return-value] # checked against NAMES

    def local_training(self, objective: Objective) -> LocalTraining:
        """The settings of a client's training."""
        return LocalTraining(
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            batch_size=self.batch_size,
            epochs=self.local_epochs,
            steps=self.local_steps,
            schedule=SCHEDULES[self.schedule],
            rounds=self.rounds,
            augment=bool(self.augment),
            objective=objective,
        )


def check_device(name: str) -> None:
    """Raise unless this can be the name of a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise InvalidSetting("device", name, "auto, cpu, cuda or cuda:N")


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields in a YAML file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingData(f"config: there is no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSetting("config", str(path), f"a readable YAML file ({_one_line(error)})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InvalidSetting("config", str(path), "a YAML file of `field: value` lines")
    return content


def _first_problem(error: ValidationError, settings: dict[str, Any]) -> Exception:
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InvalidSetting):
        return cause
    field = str(problem["loc"][0]) if problem["loc"] else "configuration"
    if problem["type"] == "extra_forbidden":
        return unknown_name("field", field, Config.model_fields)
    return InvalidSetting(field, settings.get(field), allowed_values(field))


def _kinds(field: str) -> tuple[Any, ...]:
    annotation = Config.model_fields[field].annotation
    return get_args(annotation) or (annotation,)


def allowed_values(field: str) -> str:
    """What a field may hold, in words: "a number above 0 and at most 1"."""
    schema = Config.model_json_schema()["properties"][field]
    schema = schema.get("anyOf", [schema])[0]
    kind = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}.get(schema["type"], "a text")
    bounds = {"exclusiveMinimum": "above", "minimum": "of at least", "exclusiveMaximum": "below", "maximum": "at most"}
    limits = [f"{word} {schema[name]:g}" for name, word in bounds.items() if name in schema]
    return " ".join([kind, " and ".join(limits)]).strip()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
