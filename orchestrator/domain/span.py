"""A guessed number of seconds: a range that should hold nine of ten, and its middle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds that something is likely to take."""

    low_s: float
    middle_s: float
    high_s: float

    def __add__(self, other: Span) -> Span:
        return Span(
            low_s=self.low_s + other.low_s,
            middle_s=self.middle_s + other.middle_s,
            high_s=self.high_s + other.high_s,
        )

    def times(self, low: float, middle: float, high: float) -> Span:
        """Each of the three by a factor of its own."""
        return Span(
            low_s=self.low_s * low, middle_s=self.middle_s * middle, high_s=self.high_s * high
        )

    def or_longer(self, other: Span) -> Span:
        """The longer of the two, number by number."""
        return Span(
            low_s=max(self.low_s, other.low_s),
            middle_s=max(self.middle_s, other.middle_s),
            high_s=max(self.high_s, other.high_s),
        )


NOTHING = Span(low_s=0.0, middle_s=0.0, high_s=0.0)
