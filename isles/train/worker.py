"""One island's process: `python -m isles.train.worker RUN`. Its configuration is in the run's folder; exit code and
last line say how it ended.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import isles
from isles.train.elastic import ElasticTrainer
from isles.train.launch import FAILED, LOST_PEER, STOPPED, USER_MISTAKE
from isles.train.loop import Stopped, Trainer
from isles.train.place import find_place, leave
from isles.train.setup import load


def exit_code(work: Callable[[], object]) -> int:
    """Does the work; the last line printed is the reason if the exit code is not 0."""
    try:
        work()
        return 0
    except Stopped as reason:
        print(reason, file=sys.stderr)
        return STOPPED
    except isles.LostPeerError as error:
        print(error, file=sys.stderr)
        return LOST_PEER
    except OSError as error:
        print(error, file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(error, file=sys.stderr)
        return USER_MISTAKE
    except Exception:
        traceback.print_exc()
        return FAILED


def train(folder: str) -> None:
    """Trains what the run's folder says."""
    setup = load(Path(folder))
    method = setup.method()
    if setup.config.store and method is not None:
        ElasticTrainer(setup.config, method).run()
    else:
        Trainer(setup.config, method, find_place(setup.config)).run()
        leave()


if __name__ == "__main__":
    code = exit_code(lambda: train(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # threads may still wait for a lost island
    sys.exit(0)
