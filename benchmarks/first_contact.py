"""How long a newcomer waits: `import fedsieve`, a run of one round on `digits`, and `make demo` with its peak memory.

python benchmarks/first_contact.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedsieve.runs.environment import environment

ROOT = Path(__file__).parent.parent
DEMO = "fedavg,fedprox,fedpdp,fedca,fedcm-ucb,fedcm-ts"


def seconds(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there too")
    arguments = parser.parse_args()
    bare = min(seconds("-c", "pass") for _ in range(3))
    torch_alone = min(seconds("-c", "import torch") for _ in range(3)) - bare
    imported = min(seconds("-c", "import fedsieve") for _ in range(3)) - bare
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{folder}/{number}" for number in range(3)]
        first_round = min(seconds("-m", "fedsieve", "run", "--rounds", "1", "--out", place) for place in places)
    with tempfile.TemporaryDirectory() as folder:
        words = ["compare", "--config", "examples/demo.yaml", "--algorithms", DEMO, "--seeds", "3", "--out", folder]
        demo = seconds("-m", "fedsieve", *words)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    results = {
        "import_torch_s": round(torch_alone, 2),
        "import_fedsieve_s": round(imported, 2),
        "first_round_s": round(first_round, 2),
        "demo_s": round(demo, 1),
        "demo_peak_mib": round(peak),
    }
    print(f"import torch     {torch_alone:6.2f} s")
    print(f"import fedsieve  {imported:6.2f} s   {imported / torch_alone:.2f} × torch alone (goal: 2 s)")
    print(f"first round      {first_round:6.2f} s   from the command to its end (goal: 4 s)")
    print(f"make demo        {demo:6.1f} s   (goal: 90 s)")
    print(f"peak memory      {peak:6.0f} MiB (goal: 1,024 MiB)")
    if arguments.json:
        record = {"results": results, **environment(torch.device("cpu"))}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
