"""What all tests share: one thread per process, a cache of their own, compiled kernels, a server to fork from.

Programs that each have a thread on every core wait for each other in a loop: a run of seconds then takes minutes.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile

import pytest

_cache = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts the workers, and in the workers, which have its environment."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not hasattr(config, "workerinput"):
        config.stash[_cache] = os.environ["ISLES_CACHE"] = tempfile.mkdtemp(prefix="isles-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache in config.stash:
        shutil.rmtree(config.stash[_cache], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    if forking := sys.modules.get("tests.processes"):  # a test wants it
        forking.start_server()


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    from tests import kernels  # not at the top: starting workers needs no torch

    kernels.warm_up()
    gc.collect()
    gc.freeze()  # what imports have made stays: looking for garbage in it took a fifth of some tests
