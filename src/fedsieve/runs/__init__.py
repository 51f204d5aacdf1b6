"""What was done: configuration, run directory, records, checkpoints, resume, comparisons."""

from fedsieve.runs.assembly import assemble
from fedsieve.runs.callback import Callback
from fedsieve.runs.comparison import Line, Spread, compare, rounds_to, summarise
from fedsieve.runs.config import Config
from fedsieve.runs.directory import RunDirectory
from fedsieve.runs.experiment import History, load, run
from fedsieve.runs.find import find_runs
from fedsieve.runs.frames import RunFrames, load_run
from fedsieve.runs.many import run_many
from fedsieve.runs.participation import gini, requests, share_of
from fedsieve.runs.pretraining import Pretraining, pretrain_favor
from fedsieve.runs.record import read_record, record_name, write_record
from fedsieve.runs.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker, tracker

__all__ = [
    "Callback",
    "Config",
    "History",
    "Line",
    "MLflowTracker",
    "Pretraining",
    "RunDirectory",
    "RunFrames",
    "Spread",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "assemble",
    "compare",
    "find_runs",
    "gini",
    "load",
    "load_run",
    "pretrain_favor",
    "read_record",
    "record_name",
    "requests",
    "rounds_to",
    "run",
    "run_many",
    "share_of",
    "summarise",
    "tracker",
    "write_record",
]
