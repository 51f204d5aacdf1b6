"""The fields of `Config` as command-line flags, so that there is one list of settings and one help text for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fedsieve.runs.config import NAMES, PLACE, Config, read_yaml

PANELS = {
    "What": ("algorithm", "sampler", "favor_agent", "filter", "dataset", "data_dir", "model", "seed"),
    "Clients and their data": (
        "heterogeneity",
        "alpha",
        "shards_per_client",
        "clients",
        "ratio",
        "rounds",
    ),
    "The server": (
        "server_momentum",
        "smoothing",
        "validation_per_class",
        "validation_imbalance",
        "validation_errors",
        "min_updates",
    ),
    "Judging models": ("score", "scored_by", "search", "even_classes"),
    "Local training": (
        "local_epochs",
        "local_steps",
        "batch_size",
        "lr",
        "momentum",
        "weight_decay",
        "schedule",
        "augment",
        "precision",
    ),
    "Devices and hostile clients": ("system", "deadline", "attack", "hostile", "byzantine"),
    "Readings of the paper": ("mu", "coefficients", "refresh"),
    "Where, and what is noted": tuple(sorted(PLACE - {"data_dir"})),
}


def with_config_flags(command: Callable[..., None], leave_out: Collection[str] = ()) -> Callable[..., None]:
    """`command`, taking `--config FILE` and a flag per field; these reach it together as `settings`.

    The other parameters of `command` stay as they are.
    """
    fields = [name for panel in PANELS.values() for name in panel if name not in leave_out]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "settings"
    ]
    config_file = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="YAML file of fields; flags win over it", rich_help_panel="What"),
        ],
    )

    def called(**given: Any) -> None:
        settings = {name: given.pop(name) for name in fields}
        command(settings=Given(given.pop("config"), {k: v for k, v in settings.items() if v is not None}), **given)

    parameters = [config_file, *map(_flag, fields), *own]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what Typer reads
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__doc__ = command.__doc__
    return called


class Given:
    """What the user set: a file of fields, perhaps, and flags that win over it."""

    def __init__(self, file: Path | None, flags: dict[str, Any]) -> None:
        self.file = file
        self.flags = flags

    def config(self, saved: Config | None = None) -> Config:
        """The configuration, with the fields of `saved` where nothing was set."""
        fields = {} if saved is None else saved.model_dump()
        if self.flags.get("engine", "ray") != "ray":
            fields |= {"address": None, "actors": None}  # of a cluster that the run is taken away from
        return Config(**fields | (read_yaml(self.file) if self.file else {}) | self.flags)


def _flag(name: str) -> inspect.Parameter:
    field = Config.model_fields[name]
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    kind: Any = kinds[0] if kinds[0] in (int, float, bool, str, Path) else int
    panel = next(title for title, names in PANELS.items() if name in names)
    metavar = None if kind is bool else "NAME" if name in NAMES else None
    default = "" if field.default in (None, "", 0) and name != "seed" else f" (default: {field.default})"
    help_text = f"{field.description}{default}"
    option = typer.Option(help=help_text, rich_help_panel=panel, metavar=metavar, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
