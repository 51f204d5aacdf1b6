"""FedSieve: federated learning that chooses which clients to ask and which models to believe."""

from fedsieve import algorithms, averaging, clients, data, engines, errors, filtering, models, sampling
from fedsieve.data import Dataset
from fedsieve.errors import FedSieveError
from fedsieve.runs import Callback, Config, History, compare, run

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
    "models",
    "run",
    "sampling",
]
