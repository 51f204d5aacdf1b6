"""Make a virtual environment for each simulator that FedSieve is compared with.

python benchmarks/peers/install.py [--peers pfl,flower] [--where .peers]

requirements/PEER.txt has its pins. Where requirements/PEER.no-deps.txt exists, what it names is installed without what
it asks for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WHERE = HERE.parent.parent / ".peers"
PEERS = ("pfl", "fedjax", "fedlab", "flower")


def install(peer: str, where: Path) -> None:
    """A fresh environment `where`/`peer`."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", where / peer], check=True)
    python = str(where / peer / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = HERE / "requirements" / f"{peer}.txt"
    # PyTorch first and by its exact version, so that no other package chooses its build.
    for line in requirements.read_text().splitlines():
        if line.startswith("torch=="):
            subprocess.run([*pip, line], check=True)
    subprocess.run([*pip, "--requirement", str(requirements)], check=True)
    alone = requirements.with_suffix(".no-deps.txt")
    if alone.exists():
        subprocess.run([*pip, "--no-deps", "--requirement", str(alone)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help="which ones (default: all)")
    parser.add_argument("--where", type=Path, default=WHERE, help="folder of the environments")
    arguments = parser.parse_args()
    peers = arguments.peers.split(",")
    if strangers := set(peers).difference(PEERS):
        parser.error(f"no peer {min(strangers)}: choose from {', '.join(PEERS)}")
    failed = []
    for number, peer in enumerate(peers, 1):
        print(f"[{number}/{len(peers)}] {peer} into {arguments.where / peer}", flush=True)
        try:
            install(peer, arguments.where)
        except subprocess.CalledProcessError as error:
            failed.append(peer)
            print(f"    failed: {error}", flush=True)
    if failed:
        sys.exit(f"not installed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
