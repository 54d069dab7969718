"""Names for the phases of a round, for whoever profiles a run.

Under torch.profiler every phase is a range: isles.outer_gradient, isles.encode (inside the first, where both are one
pass over memory), isles.wait, isles.outer_step and isles.mix. Otherwise it is nothing: opening a range takes
microseconds even where nobody looks, several times per fragment.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """A range of that name in the profile that is being taken, if there is one."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING
