"""Many threads in one `memory://` store: none waits for another for ever, whatever obstore does with the GIL.

They run in a process of their own: where every thread waits for the GIL, no time limit inside the process ends it.
"""

import functools

from isles.elastic.requests import Operation
from isles.elastic.store import open_store
from tests import processes
from tests.stores import threads

TIMES = 10_000
"""With obstore 0.11 threads that do not take turns hang before that."""
WORKERS = [("put", "get"), ("put", "delete"), ("put", "delete", "list"), ("get", "list")]


def work(island):
    def repeat(kinds):
        store, answers = open_store("memory://busy"), set()
        for number in range(TIMES):
            for kind in kinds:
                name = "things/" if kind == "list" else f"things/{number % 5}"
                answers.add((kind, store.perform(Operation(kind, name, bytes(20_000), limit=20_000)).status))
        return answers

    return set().union(*threads(*(functools.partial(repeat, kinds) for kinds in WORKERS)))


def test_threads_that_write_delete_list_and_read(tmp_path):
    (found,) = processes.values(work, 1, tmp_path, ranks=0)
    assert {("put", "ok"), ("get", "ok"), ("delete", "ok"), ("list", "ok")} <= found
    assert not {"again", "failed", "damaged"} & {status for _, status in found}
