"""The log of seals, as one island has read it; and whom it names.

The log decides everything that islands must agree on. Seals are read in order, each is checked against the digest of
the one before it, and against the schedule: a seal of another run, of another schedule, or out of order is an error.

Who is looked for in the next round is a function of the last seals and of the announcements that have been seen:

    expected   waited for: the islands of the last seal, and those who joined after it was written
    wanted     looked for: these, and whoever one of the last `gone_after` seals names, be it as missing

Seals before those are forgotten. The store keeps them.
"""

from __future__ import annotations

from isles.elastic.numbering import Numbering
from isles.elastic.objects import Seal, seal_name
from isles.wire.world import MismatchError


class Log:
    """Seals up to round `tail`."""

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self.tail = self.gone_after = 0
        self.known = 0
        """How many islands have ever joined: their numbers are below this."""
        self._seals: dict[int, Seal] = {}
        self._digests: dict[int, str] = {}
        self._named: tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]] | None = None

    def __getitem__(self, number: int) -> Seal:
        return self._seals[number]

    def begin(self, digest: str, gone_after: int) -> None:
        """With what run.json says: the first seal has its digest."""
        self._digests[0], self.gone_after = digest, gone_after

    def skip_to(self, number: int) -> None:
        """Reads on after this round. Its digest is unknown: the manifest of a snapshot vouches for a later one."""
        self.tail = max(0, number)

    def digest(self, number: int) -> str:
        return self._digests[number]

    def append(self, seal: Seal, digest: str) -> None:
        """The next seal, or an error."""
        number, place = self.tail + 1, self.numbering.place(self.tail + 1)
        before = self._seals.get(self.tail)
        checks = {
            "round": (seal.round, number),
            "fragment": (seal.fragment, place.fragment),
            "clock": (seal.clock, place.send_clock),
            "digest of the seal before it": (seal.previous, self._digests.get(self.tail, seal.previous)),
            "number of islands": (max(seal.known, before.known if before else 0), seal.known),
        }
        for what, (found, wanted) in checks.items():
            if found != wanted:
                advice = "it belongs to another run, or to another schedule"
                raise MismatchError(f"{seal_name(number)}: its {what} is {found}, and must be {wanted}: {advice}")
        self._seals[number], self._digests[number] = seal, digest
        self.tail, self.known = number, max(self.known, seal.known)

    @property
    def expected(self) -> tuple[int, ...]:
        """Islands to wait for in the next round."""
        return self._names()[0]

    @property
    def wanted(self) -> tuple[int, ...]:
        """Islands to look for in the next round."""
        return self._names()[1]

    def _names(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        key = (self.tail, self.known)
        if self._named is None or self._named[0] != key:
            last = self._seals.get(self.tail)
            joined = range(last.known if last else 0, self.known)
            expected = {*(last.islands if last else ()), *joined}
            recent = [self._seals[k] for k in range(self.tail - self.gone_after + 1, self.tail + 1) if k in self._seals]
            named = {island for seal in recent for island in (*seal.islands, *seal.missing)}
            self._named = key, tuple(sorted(expected)), tuple(sorted(expected | named))
        return self._named[1:]

    def forget(self, number: int) -> None:
        """Rounds up to this one have been applied: what the roster does not need goes."""
        for k in [k for k in self._digests if k < min(number, self.tail - self.gone_after + 1)]:
            self._digests.pop(k)
            self._seals.pop(k, None)
