"""The same algorithms in real federations: strategies for Flower (`pip install 'fedsieve[flower]'`).

In a ServerApp, `FedCM(model=Net, validation=(x, y), fraction_train=0.4)` takes the place of Flower's `FedAvg(...)`;
ClientApps stay as they are. docs/flower.md leads from one to the other.
"""

try:
    import flwr as _flwr  # noqa: F401
except ImportError as _error:
    raise ImportError(f"pip install 'fedsieve[flower]' first ({_error})") from None

from fedsieve.flower.algorithms import FedCA, FedCM, FedPdp, FedSieve
from fedsieve.flower.client import client_app, say_who
from fedsieve.flower.strategy import SieveStrategy

__all__ = ["FedCA", "FedCM", "FedPdp", "FedSieve", "SieveStrategy", "client_app", "say_who"]
