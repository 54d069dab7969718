"""The server that processes of tests are forked from: if it cannot import what it should, it says nothing, and every
process does it anew, for seconds.
"""

import sys

from tests import processes


def has_it(rank):
    return "tests.preloaded" in sys.modules


def test_processes_start_with_everything_imported(tmp_path):
    assert processes.values(has_it, 1, tmp_path) == [True]
