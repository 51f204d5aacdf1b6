"""How long a bandit remembers, where clients change: everything, ever less of what is old, or the last rounds only."""

from __future__ import annotations

from dataclasses import dataclass

from fedsieve.errors import InvalidSetting


@dataclass(frozen=True)
class Memory:
    """What a reward still counts, by its age in finished rounds (0: the last one).

    `Memory()` keeps everything. `Memory(discount=γ)` lets a reward of age s count γ^s: D-UCB (Garivier & Moulines
    2011) and discounted Thompson sampling (Raj & Kalyani 2017). `Memory(window=τ)` counts the last τ rounds alone:
    SW-UCB (Garivier & Moulines 2011) and SW-TS (Trovò et al. 2020). What an arm starts with never fades, so that an
    arm of which nothing is remembered is again as good as untried.
    """

    discount: float = 1.0
    window: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.discount <= 1:
            raise InvalidSetting("discount", self.discount, "a number above 0 and up to 1")
        if self.window is not None and self.window < 1:
            raise InvalidSetting("window", self.window, "1 or more rounds")
        if self.window is not None and self.discount < 1:
            raise InvalidSetting("window", self.window, "either a window or a discount")

    @property
    def lasting(self) -> bool:
        """Whether nothing is ever forgotten."""
        return self.discount == 1 and self.window is None

    def rounds(self, round: int) -> float:
        """How many rounds up to `round` count: t; n_t(γ) = Σ_{s≤t} γ^(t-s); or min(t, τ)."""
        if self.window is not None:
            return min(round, self.window)
        return round if self.discount == 1 else (1 - self.discount**round) / (1 - self.discount)


EVERYTHING = Memory()
