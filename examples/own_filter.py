"""Your own filter: keep the better half of the models, each judged alone on the validation set."""

from __future__ import annotations

import fedsieve as fs
from fedsieve.filtering import Candidates, Selection, accuracy


class BetterHalf(fs.filtering.ModelFilter):
    def select(self, candidates: Candidates) -> Selection:
        alone = accuracy(candidates.logits, candidates.labels)  # [models]
        half = (len(alone) + 1) // 2
        kept = tuple(sorted(alone.argsort(descending=True, stable=True)[:half].tolist()))
        together = accuracy(candidates.logits[list(kept)].mean(0), candidates.labels)
        return Selection(kept, score=float(together))


if __name__ == "__main__":
    config = fs.Config(algorithm="fedpdp", rounds=5)
    history = fs.run(config, filter=BetterHalf())
    print(f"kept in the last round: {history.rows[-1]['kept']} of {history.rows[-1]['sampled']}")
