"""The clock of an island: it counts inner steps, and jumps forward like a Lamport clock.

A slow island takes part in every round, with fewer steps in its contribution, instead of falling behind for ever. It
jumps in three cases only:

    It reads the seal of a round that it has not even sent.          It goes to where the log is.
    Others have sent a round, and one more step would be too late.   It goes to the send of that round, at once.
    Nobody waits for it any more.                                    It goes to the first round that nobody has sent.

In the last case its payload is there when the others look: then it is back. Whoever has sent a round has applied all
that come before it in the schedule, so a jump to a round that somebody has sent waits for nothing. With unlimited
patience and a quorum of all islands nobody jumps, and all is as in a world of a fixed size.
"""

from __future__ import annotations

import math

from isles.elastic.log import Log
from isles.elastic.rounds import OpenRounds


def jump(
    clock: int, log: Log, rounds: OpenRounds, own: int | None, patience: float, step_seconds: float, now: float
) -> int:
    """Where the clock has to be: here, or further on. `own` is this island's number."""
    clock, begun = max(clock, log.numbering.clock_after(log.tail)), rounds.begun_and_next()
    for number in begun if patience < math.inf else ():
        if now + step_seconds > rounds[number].began + patience / 2:
            clock = max(clock, log.numbering.place(number).send_clock)
    if own not in log.expected and not any(rounds[number].sending for number in begun):
        clock = max(clock, log.numbering.place(begun[-1]).send_clock)
    return clock
