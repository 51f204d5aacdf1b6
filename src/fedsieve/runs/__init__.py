"""What was done: configuration, run directory, records, checkpoints, resume, comparisons."""

from fedsieve.runs.callback import Callback
from fedsieve.runs.comparison import Line, Spread, compare, rounds_to, summarise
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.experiment import History, assemble, load, run

__all__ = [
    "Callback",
    "Config",
    "History",
    "Line",
    "RunDirectory",
    "Spread",
    "assemble",
    "compare",
    "load",
    "rounds_to",
    "run",
    "summarise",
]
