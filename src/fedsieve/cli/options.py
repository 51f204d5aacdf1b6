"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
DataDir = Annotated[
    Path | None, typer.Option(help="folder of data sets (default: $FEDSIEVE_DATA or ~/.cache/fedsieve)")
]
