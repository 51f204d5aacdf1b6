"""The commands about data sets: `data list`, `data fetch` and `data show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedsieve import data
from fedsieve.cli.options import DataDir, Json
from fedsieve.data.fetch import fetch_with_bar
from fedsieve.errors import InvalidSetting

data_app = typer.Typer(help="List, fetch and look at data sets.", no_args_is_help=True)


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
