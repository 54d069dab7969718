"""Dense starts for property tests."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def dense_starts(draw, every: int, most_steps: int = 60):
    """None, or stages of growing rounds that are no longer than `every`."""
    periods = sorted(draw(st.lists(st.integers(1, every), max_size=3)))
    share = most_steps // max(1, len(periods))
    return tuple((draw(st.integers(1, max(1, share // period))), period) for period in periods)
