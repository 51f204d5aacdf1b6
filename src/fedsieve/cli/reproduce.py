"""The command that makes studies: `reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedsieve.cli.options import DataDir
from fedsieve.cli.progress import RunProgress, RunsTable
from fedsieve.errors import InvalidSetting
from fedsieve.runs import read_record
from fedsieve.runs.assembly import find_device, find_ray
from fedsieve.runs.find import is_record


def reproduce_command(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="table2 to 5, figure1, 2, 3, 5, 6, claims, readings, all; or one of ours, field, attacks, validation",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="on bundled data, in minutes on a laptop: the shape, not the numbers")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="seeds of every run (default: 3; ours 5, table2 2, figure5 and 6 1; with --quick, ours and so on 1)"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="rounds of every run (default: 100, attacks 30, validation 60; with --quick 20, attacks 10)"),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="the data set (default: cifar10; with --quick digits)")] = None,
    data_dir: DataDir = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    engine: Annotated[str, typer.Option(help="auto, or ray: spread the runs over a Ray cluster")] = "auto",
    address: Annotated[
        str | None, typer.Option(help="with ray: the cluster (default: $RAY_ADDRESS, or one started here)")
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="runs that share a GPU at a time, 1 to 3 (default: 2 there, 1 on a CPU)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="records, tables and figures (default: under runs/)")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="another study's folder, whose runs count too; repeatable")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32 or bf16 (default: that of the runs in DIR, or bf16 on a GPU, else fp32)"),
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="run nothing: tables and figures from the records that are there")
    ] = False,
) -> None:
    """Reproduce the paper's tables and figures, its numbers beside ours; or compare FedCM with the field.

    TARGET is one or more of table2, table3, table4, table5, figure1, figure2, figure3, figure5, figure6, claims and
    readings, or all of these: `all`. Begin with `fedsieve reproduce all --quick`.

    Or it is one of four studies: `ours` has averaging that learns its weights beside the paper's algorithms and the
    baselines a sceptic asks for; `field` compares all ways to choose clients, with and without the combinatorial
    filter; `attacks` all defences under all attacks; `validation` what looks at validation data, by how much there is
    and how good it is.

    Runs that tables share are made once; each finished run is one small JSON file in DIR/records. What is there is not
    run again, whoever made it: put records of other machines or seeds there and they count, as do those in the folders
    given with --also. Interrupted, the same command goes on. Given twice with the same DIR, for two GPUs or to fill
    one, each takes runs the other is not at.

    At the end DIR has results.md with all tables and figures, and results.json with every run, its numbers and curves.
    """
    from fedsieve.reproduction import Reproduction, find_plan, write_up

    plan = find_plan(targets)
    folder = out or Path(f"runs/{plan.name}-quick" if quick else f"runs/{plan.name}")
    for place in also or ():
        if not (place.is_dir() or is_record(place)):
            raise InvalidSetting("also", str(place), "folders of runs, or records of runs")
    usual = _recorded_precision([folder / "records", *(also or ())])
    usual = usual or ("bf16" if _on_gpu(engine, device, address) else "fp32")
    more = {"engine": engine, "address": address, "data_dir": data_dir, "precision": precision or usual}
    study = plan.study(quick, rounds, dataset, device, **more)
    seeds = plan.quick_seeds if quick and seeds is None else seeds
    reproduction = Reproduction(plan, study, targets, seeds, folder, also or ())
    if report_only and reproduction.jobs and not reproduction.results().all():
        raise InvalidSetting("out", str(folder), "a folder with records of finished runs")
    if not report_only:
        missing = reproduction.missing()
        if engine == "ray":
            with RunsTable(len(missing), int(study.settings["rounds"])) as live:
                reproduction.run([], at_once, live)
        else:
            with RunProgress(sum(config.rounds for config in missing.values())) as progress:
                reproduction.run([progress], at_once)
    outcome = write_up(reproduction)
    console = Console(width=None if Console().is_terminal else 120)
    for table in outcome.tables:
        if not table.wide:
            console.print(table.rich())
    for path in outcome.files:
        print(path)


def _recorded_precision(places: Sequence[Path]) -> str | None:
    """What the first run that is there was made with: runs of another precision would not count beside it."""
    for place in places:
        for path in sorted(place.rglob("*.json")) if place.is_dir() else [place]:
            with suppress(InvalidSetting):
                return read_record(path).config.precision
    return None


def _on_gpu(engine: str, device: str, address: str | None) -> bool:
    """Whether runs would be on a GPU, of this machine or of the cluster."""
    if engine != "ray":
        return find_device(device).type == "cuda"
    find_ray()
    from fedsieve.runs.cluster import has_gpus

    return device != "cpu" and has_gpus(address)
