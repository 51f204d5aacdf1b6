"""The command line and what it is made of. Commands are thin: they parse, call and print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedsieve import __version__, algorithms, attacks
from fedsieve.cli.datasets import data_app
from fedsieve.cli.experiments import compare_command, pretrain_favor_command, run_command
from fedsieve.cli.flags import with_config_flags
from fedsieve.cli.options import Json
from fedsieve.cli.reproduce import reproduce_command
from fedsieve.errors import InvalidSetting
from fedsieve.parts import FILTERS, SAMPLERS, Part
from fedsieve.runs import find_runs

app = typer.Typer(
    name="fedsieve",
    help="Federated learning that chooses which clients to ask and which models to believe.",
    epilog="Begin with: fedsieve compare --algorithms fedavg,fedca,fedcm-ts --rounds 30",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedsieve {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    pass


app.command("run")(with_config_flags(run_command))
app.command("pretrain-favor")(with_config_flags(pretrain_favor_command, leave_out=("sampler", "favor_agent")))
app.command("compare")(with_config_flags(compare_command, leave_out=("algorithm",)))


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories, or folders that hold some")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="the page to write")] = Path("runs/report.html"),
    title: Annotated[str | None, typer.Option(help="its title")] = None,
) -> None:
    """Write one interactive web page about finished runs: a single file that needs no network.

    RUN is a run directory, or a folder that holds some.
    Runs that differ in nothing but algorithm and seed are averaged; other settings have parts of their own. Unfinished
    and damaged runs are named and left out.
    """
    from fedsieve.report.page import write_page

    histories = find_runs(runs)
    if not histories:
        raise InvalidSetting("runs", " ".join(map(str, runs)), "folders with at least one finished run")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        print(write_page(histories, out, title))
    except OSError as error:
        raise InvalidSetting("out", str(out), f"a file that can be written to ({error.strerror})") from None


app.command("reproduce")(reproduce_command)


@app.command("algorithms")
def algorithms_command(as_json: Json = False) -> None:
    """Print the algorithms as the paper's Table 1, read off the code, and all samplers, filters and attacks."""
    from fedsieve.report.tables import algorithms_table, attacks_table, parts_table

    rows = algorithms.table()
    if as_json:
        sources = [{"name": name, "source": source} for name, source in attacks.SOURCES.items()]
        listed = {
            "algorithms": rows,
            "samplers": _listed(SAMPLERS),
            "filters": _listed(FILTERS),
            "attacks": sources,
        }
        print(json.dumps(listed, indent=2, ensure_ascii=False))
    else:
        console = Console(width=None if Console().is_terminal else 140)
        console.print(algorithms_table(rows))
        console.print(parts_table("Samplers, for --sampler", SAMPLERS))
        console.print(parts_table("Filters, for --filter (f: liars assumed, --byzantine)", FILTERS))
        console.print(attacks_table(attacks.SOURCES))


def _listed(parts: Mapping[str, Part[Any]]) -> list[dict[str, str]]:
    return [{"name": name, "source": part.source, "needs": part.needs} for name, part in parts.items()]


app.add_typer(data_app, name="data")
