"""FedSieve: federated learning that chooses which clients to ask and which models to believe."""

import os

# PyTorch's idle threads then sleep, after a moment. By default they spin, and where cores are busy that was measured to
# make a search of subsets ten to fifty times slower; asleep at once, up to five. Only of use before PyTorch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # of GNU's OpenMP, which goes by it first

from fedsieve import algorithms, averaging, clients, data, engines, errors, filtering, models, sampling
from fedsieve.data import Dataset
from fedsieve.errors import FedSieveError
from fedsieve.runs import Callback, Config, History, compare, load_run, run

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Config",
    "Dataset",
    "FedSieveError",
    "History",
    "algorithms",
    "averaging",
    "clients",
    "compare",
    "data",
    "engines",
    "errors",
    "filtering",
    "load_run",
    "models",
    "run",
    "sampling",
]
