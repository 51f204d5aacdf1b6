"""The commands: thin, they parse, call and print."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedsieve import __version__, algorithms, attacks, data
from fedsieve.cli.flags import Given, with_config_flags
from fedsieve.cli.progress import RunProgress, RunsTable
from fedsieve.data.fetch import fetch_with_bar
from fedsieve.errors import InvalidSetting
from fedsieve.locking import made
from fedsieve.parts import FILTERS, SAMPLERS, Part
from fedsieve.runs import (
    Callback,
    RunDirectory,
    compare,
    find_runs,
    pretrain_favor,
    read_record,
    run,
    summarise,
    tracker,
)
from fedsieve.runs.assembly import find_device, find_ray
from fedsieve.runs.comparison import grid
from fedsieve.runs.directory import write_whole
from fedsieve.runs.environment import environment
from fedsieve.runs.experiment import SIMULATED
from fedsieve.runs.find import is_record
from fedsieve.runs.trackers import Tracker

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
log = logging.getLogger("fedsieve")

data_app = typer.Typer(help="List, fetch and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Track = Annotated[
    str, typer.Option(metavar="A,B", help="also log to tensorboard, mlflow or wandb, in a folder track beside the run")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
DataDir = Annotated[
    Path | None, typer.Option(help="folder of data sets (default: $FEDSIEVE_DATA or ~/.cache/fedsieve)")
]


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


def run_command(
    settings: Given,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where the run is written (default: a name under runs/)")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the run in --out after a crash or a kill")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="show where the time of a round goes; numbers also in profile.json")
    ] = False,
    track: Track = "",
) -> None:
    """Run one experiment and write it to a run directory.

    The directory holds config.yaml, metrics.jsonl (a row per round), summary.json and checkpoints. A run that was
    killed goes on with `fedsieve run --out DIR --resume`, and ends as if nothing had happened.
    """
    begun = RunDirectory(out) if resume and out is not None else None
    config = settings.config(begun.config() if begun is not None and begun.exists else None)
    name = f"{config.dataset}-{config.heterogeneity}-{config.alpha:g}-{config.algorithm}-seed{config.seed}"
    place = out or (Path("runs") / name if resume else _unused(Path("runs") / name))
    if resume and not RunDirectory(place).exists:
        log.info("there is no run in %s to go on with: it begins now", place)
    with _tracked(track, place) as trackers, RunProgress(config.rounds) as progress:
        history = run(config, out=place, resume=resume, callbacks=[progress, *trackers])
    summary = history.summary
    print(
        f"{config.algorithm} on {config.dataset}, seed {config.seed}, {summary['rounds']} rounds: "
        f"final {100 * summary['final_accuracy']:.1f} %, best {100 * summary['best_accuracy']:.1f} %, "
        f"mean of the last 10 {100 * summary['mean_last_10']:.1f} %, {summary['duration']:.1f} s\n{place}"
    )
    if profile and history.profile:
        from fedsieve.report.tables import profile_table

        Console(width=None if Console().is_terminal else 120).print(profile_table(history.profile))
        write_whole(place / "profile.json", (json.dumps(history.profile, indent=2) + "\n").encode())
    elif profile:
        print("nothing to profile: the run was finished before")


def _unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... where no run was begun."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(place for place in chain([folder], numbered) if not RunDirectory(place).exists)


@contextmanager
def _tracked(names: str, out: Path) -> Iterator[list[Callback]]:
    """The trackers of these names, in folders of `out`; where nothing came to be tracked, there are none afterwards."""
    given = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    trackers: list[Tracker] = []
    with made(out / "track") if given else nullcontext():
        try:
            for name in given:
                trackers.append(tracker(name, out / "track"))
            yield [*trackers]
        finally:
            for one in trackers:
                with suppress(OSError):  # not empty, as it should be
                    one.folder.rmdir()


def compare_command(
    settings: Given,
    algorithms: Annotated[
        str, typer.Option("--algorithms", metavar="A,B,C", help="algorithms to compare, the baseline first")
    ] = "fedavg,fedprox,fedpdp,fedca,fedcm-ucb,fedcm-ts",
    seeds: Annotated[int, typer.Option(help="runs of each algorithm, seeds counting up from --seed")] = 3,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where runs, table and pictures are written")] = Path(
        "runs/compare"
    ),
    at_once: Annotated[
        int | None, typer.Option(help="runs that share a GPU at a time, 1 to 3 (default: 2 there, 1 on a CPU)")
    ] = None,
    track: Track = "",
    as_json: Json = False,
) -> None:
    """Compare algorithms over seeds: a table, accuracy curves with bands, and who was sampled and kept.

    Finished runs in --out are not repeated, and an interrupted comparison goes on where it stopped. The table gives
    mean ± standard deviation over seeds, and the rounds it took to reach the first algorithm's final accuracy; with
    --system also simulated time and bytes sent, with --attack also whether hostile clients were kept.
    """
    from fedsieve.report import figures, style
    from fedsieve.report.page import write_page
    from fedsieve.report.tables import attack_table, comparison_table

    config = settings.config()
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    count = len(grid(config, names, seeds))
    with _tracked(track, out) as trackers:
        if config.engine == "ray":
            with RunsTable(count, config.rounds) as table:
                histories = compare(config, names, seeds, out, trackers, at_once, table)
        else:
            with RunProgress(count * config.rounds) as progress:
                histories = compare(config, names, seeds, out, [progress, *trackers], at_once)
    lines = summarise(histories)
    if not lines:
        raise InvalidSetting("algorithms", algorithms, "algorithms of which at least one run finishes")
    done = {line.algorithm: histories[line.algorithm] for line in lines}
    title = f"{config.dataset}, {config.heterogeneity} heterogeneity" + (
        f", α = {config.alpha:g}" if config.heterogeneity in ("client", "class") else ""
    )
    curves = {name: [history.accuracy for history in runs] for name, runs in done.items()}
    common = set.intersection(*({run.config.seed for run in runs} for runs in done.values()))
    seed = min(common, default=config.seed)
    shown = {name: next((run for run in runs if run.config.seed == seed), runs[0]) for name, runs in done.items()}
    first = {name: run.rows for name, run in shown.items()}
    hostile = next(iter(shown.values())).summary.get("hostile", ())
    asked_and_kept = f"{title}: who was asked and kept" + (f", seed {seed}" if common else "")
    drawn = {
        "curves": figures.accuracy_curves(curves, title),
        "participation": figures.participation(first, config.clients, asked_and_kept, hostile),
    }
    if config.system != "none":
        for what in SIMULATED:
            timed = {
                name: [(taken, run.accuracy) for run in runs if (taken := run.simulated(what))]
                for name, runs in done.items()
            }
            drawn[f"curves-{what}"] = figures.accuracy_over(what, timed, title)
    pictures = [style.save(figure, out / f"{name}.png") for name, figure in drawn.items()]
    record = {
        "algorithms": [dataclasses.asdict(line) for line in lines],
        "config": config.model_dump(mode="json", exclude={"algorithm"}),
        **environment(find_device(config.device)),
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    write_whole(out / "comparison.json", (text + "\n").encode())
    if as_json:
        print(text)
        return
    console = Console(width=None if Console().is_terminal else 100)
    console.print(comparison_table(lines))
    if config.attack != "none":
        console.print(attack_table(lines))
    page = write_page([history for name in done for history in done[name]], out / "report.html", title)
    for path in [page, *pictures, out / "comparison.json"]:
        print(path)


def pretrain_favor_command(
    settings: Given,
    episodes: Annotated[int, typer.Option(help="federations that the agent learns from")] = 100,
    target: Annotated[
        float, typer.Option(help="validation accuracy with which an episode ends; rewards are relative to it")
    ] = 0.9,
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the agent is written")] = Path(
        "runs/favor.safetensors"
    ),
) -> None:
    """Teach the agent of `--sampler favor` whom to ask, for the clients of a configuration.

    An episode has up to --rounds rounds and asks one client in each. Clients, their data and the initial model are
    those of `fedsieve run` with the same settings and --seed; what is random in training is not. Then:
    fedsieve run --sampler favor --favor-agent FILE
    """
    config = settings.config()
    with made(out.parent):
        try:
            aside = out.with_name(out.name + ".tmp")
            aside.touch()
            aside.unlink()
        except OSError as error:
            raise InvalidSetting("out", str(out), f"a file that can be written to ({error.strerror})") from None
        with RunProgress(episodes * config.rounds) as progress:

            def watch(episode: int, round: int, reached: float) -> None:
                progress.show(f"episode {episode}", (episode - 1) * config.rounds + round, reached)

            done = pretrain_favor(config, episodes, target, watch=watch)
        write_whole(out, done.agent.to_bytes())
    tenth = max(1, episodes // 10)
    print(
        f"{episodes} episodes, {sum(done.rounds)} rounds, {done.trainings} trainings of a client, "
        f"{done.seconds:.1f} s\nrewards of an episode: {np.mean(done.returns[:tenth]):.2f} in the first {tenth}, "
        f"{np.mean(done.returns[-tenth:]):.2f} in the last {tenth}\n{out}"
    )


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


@app.command("reproduce")
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


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets and whether they are here."""
    rows = [
        {
            "name": name,
            "title": entry.title,
            "train": entry.train_examples,
            "test": entry.test_examples,
            "classes": entry.classes,
            "here": entry.bundled or data.is_fetched(name, data_dir),
        }
        for name, entry in data.DATASETS.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(header_style="bold", title=f"Data sets ({data.data_folder(data_dir)})", title_justify="left")
    for heading in ("Name", "What", "Train", "Test", "Classes", "Here"):
        table.add_column(heading, justify="right" if heading in ("Train", "Test", "Classes") else "left")
    for row in rows:
        here = "yes" if row["here"] else f"fedsieve data fetch {row['name']}"
        numbers = [f"{row[column]:,}" for column in ("train", "test", "classes")]
        table.add_row(str(row["name"]), str(row["title"]), *numbers, here)
    Console(width=None if Console().is_terminal else 120).print(table)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="mnist|fashion-mnist|cifar10", help="the data set")],
    data_dir: DataDir = None,
) -> None:
    """Bring a data set to the data folder, from the first source that answers, checked against fixed SHA-256 sums."""
    print(fetch_with_bar(name, data_dir))


@data_app.command("show")
def data_show(
    dataset: Annotated[str, typer.Option(help="the data set")] = "digits",
    heterogeneity: Annotated[
        str, typer.Option(help="iid, client, class, shards; several with commas between")
    ] = "client,class",
    alpha: Annotated[str, typer.Option(help="Dirichlet concentration; several with commas between")] = "0.1,1,5",
    clients: Annotated[int, typer.Option(help="number of clients")] = 20,
    shards_per_client: Annotated[int, typer.Option(help="with shards: shards each client gets")] = 2,
    validation_per_class: Annotated[int | None, typer.Option(help="validation examples per class")] = None,
    seed: Annotated[int, typer.Option(help="seed of the partition")] = 0,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="picture to write: png, svg or pdf")] = Path(
        "runs/data.png"
    ),
) -> None:
    """Draw how many examples of each class every client holds: the paper's Figure 1, for any partition."""
    from fedsieve.report import figures, style

    try:
        alphas = [float(value) for value in alpha.split(",")]
    except ValueError:
        raise InvalidSetting("alpha", alpha, "numbers above 0, with commas between") from None
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise InvalidSetting("out", str(out), "a file name that ends in .png, .svg or .pdf")
    loaded = data.load(dataset, data_dir)
    per_class = data.DATASETS[dataset].validation_per_class if validation_per_class is None else validation_per_class
    _, rest = data.validation_split(loaded.train_labels, per_class, loaded.classes, seed)
    panels = {}
    for scheme in (name.strip() for name in heterogeneity.split(",")):
        for value in alphas if scheme in ("client", "class") else alphas[:1]:
            split = data.partition(
                loaded.train_labels,
                clients,
                scheme,
                alpha=value,
                shards_per_client=shards_per_client,
                seed=seed,
                candidates=rest,
            )
            title = f"{scheme}, α = {value:g}" if scheme in ("client", "class") else scheme
            panels[title] = split.class_counts(loaded.train_labels, loaded.classes)
            sizes = split.sizes
            print(
                f"{title}: {sizes.min()} to {sizes.max()} examples per client, {(sizes == 0).sum()} clients without, "
                f"{len(split.unused)} examples unused"
            )
    print(style.save(figures.data_per_client(panels, f"{dataset}, {clients} clients"), out))
