"""The commands that train: `run`, `compare` and `pretrain-favor`."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from fedsieve.cli.flags import Given
from fedsieve.cli.options import Json
from fedsieve.cli.progress import RunProgress, RunsTable
from fedsieve.errors import InvalidSetting
from fedsieve.locking import made
from fedsieve.runs import Callback, RunDirectory, compare, pretrain_favor, run, summarise, tracker
from fedsieve.runs.assembly import find_device
from fedsieve.runs.comparison import grid
from fedsieve.runs.directory import write_whole
from fedsieve.runs.environment import environment
from fedsieve.runs.experiment import SIMULATED
from fedsieve.runs.trackers import Tracker

log = logging.getLogger("fedsieve")

Track = Annotated[
    str, typer.Option(metavar="A,B", help="also log to tensorboard, mlflow or wandb, in a folder track beside the run")
]


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
    with tracked(track, place) as trackers, RunProgress(config.rounds) as progress:
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
def tracked(names: str, out: Path) -> Iterator[list[Callback]]:
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
    with tracked(track, out) as trackers:
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
    hostile = {name: run.summary.get("hostile", ()) for name, run in shown.items()}
    asked_and_kept = f"{title}: who was asked and kept" + (f", seed {seed}" if common else "")
    drawn = {
        "curves": figures.accuracy_curves(curves, title),
        "participation": figures.participation(first, config.clients, asked_and_kept, hostile),
    }
    if config.system != "none":
        for what in SIMULATED:
            timed = {
                name: found
                for name, runs in done.items()
                if (found := [(taken, run.accuracy) for run in runs if (taken := run.simulated(what))])
            }
            if timed:
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
    if out.is_dir():
        raise InvalidSetting("out", str(out), "the name of a file, not of a folder")
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
