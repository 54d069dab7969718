"""Nobody ever waits for the compiler in training: kernels are ready before it starts, or PyTorch does the work.

Proven here: nothing compiles outside `warm_up`; what happens when the compiler is broken, missing or switched off, and
that it is said once; that any number of threads and processes may warm up at once; and that kernels leave the
GIL to others and share nothing.
"""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from isles import codecs
from isles.wire import fused

pytest.importorskip("numba")
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    assert fused.warm_up(["e3m0", "fp32"])


def gaussian(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cold(monkeypatch):
    """As in a new process: nothing compiled, nothing said."""
    for name, empty in (("_ready", {}), ("_said", set())):
        monkeypatch.setattr(fused, name, empty)


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "isles"]


def test_nothing_compiles_in_encode(cold, monkeypatch):
    monkeypatch.setattr(fused, "_compile", lambda group: pytest.fail("compiled"))
    payload = codecs["e3m0"].encode(gaussian(1000))
    codecs["e3m0"].accumulate(payload, torch.zeros(1000))
    codecs["e3m0"].decode(payload, 1000)
    assert not fused._ready


def test_a_broken_compiler_is_said_once(cold, monkeypatch, caplog):
    def broken(group):
        raise OSError("no LLVM today")

    monkeypatch.setattr(fused, "_compile", broken)
    for _ in range(2):
        assert fused.warm_up(["int8"]) is False
    assert lines(caplog) == ["kernels do not compile here, codecs run in PyTorch: OSError('no LLVM today')"]
    assert codecs["int8"].encode(gaussian(10)).numel() == 130


def test_without_numba(cold, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="isles")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    for _ in range(2):
        assert fused.warm_up() is False
    assert len(lines(caplog)) == 1
    assert "isles[fast]" in lines(caplog)[0]
    assert caplog.records[0].levelno == logging.INFO


def test_switched_off(cold, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="isles")
    monkeypatch.setenv("ISLES_FUSED", "0")
    for _ in range(2):
        assert fused.warm_up(["e3m0"]) is False
    assert not fused._ready
    assert len(lines(caplog)) == 1
    assert "ISLES_FUSED=0" in lines(caplog)[0]
    monkeypatch.setenv("ISLES_FUSED", "1")
    assert fused.warm_up(["e3m0"]) is True


def test_unknown_kernels():
    with pytest.raises(ValueError, match=r"no kernels called fp7: choose from .*e3m0"):
        fused.warm_up(["e3m0", "fp7"])
    assert fused.warm_up([codecs["topk"].kernels]) is True  # none are needed


def test_threads_warm_up_once(cold, monkeypatch):
    compiled, compile_really = [], fused._compile
    monkeypatch.setattr(fused, "_compile", lambda group: compiled.append(group) or compile_really(group))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(fused.warm_up(["e3m0", "fp32"]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8
    assert sorted(compiled) == ["e3m0", "fp32"]


def test_threads_do_not_disturb_each_other():
    expected = {seed: codecs["e3m0"].encode(gaussian(50_001, seed)) for seed in range(4)}
    failures = []

    def work(seed):
        values = gaussian(50_001, seed)
        for _ in range(20):
            payload = codecs["e3m0"].encode(values)
            total = torch.zeros(50_001)
            codecs["e3m0"].accumulate(payload, total)
            if not torch.equal(payload, expected[seed]) or not torch.equal(
                total, codecs["e3m0"].decode(payload, 50_001)
            ):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_run_beside_a_kernel():
    """With a long switch interval, a thread that kept the GIL would be done before anybody else could look."""
    values, payload = gaussian(128 * 8000).numpy(), torch.zeros(8000 * 66, dtype=torch.uint8).numpy()
    encode = fused.kernels("e3m0")["encode"]
    interval = sys.getswitchinterval()

    def looked_inside():
        started, done = threading.Event(), []

        def work():
            started.set()
            for _ in range(50):
                encode(values, payload)
            done.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        inside = not done
        thread.join()
        return inside

    sys.setswitchinterval(30.0)
    try:
        assert any(looked_inside() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


SCRIPT = """
import sys, torch
import isles
from isles.wire import fused
assert "numba" not in sys.modules, "importing isles imports numba"
isles.codecs["e3m0"].encode(torch.ones(10))
assert "numba" not in sys.modules
assert fused.warm_up(["e3m0"]) is True
print(bytes(isles.codecs["e3m0"].encode(torch.arange(300.0)).tolist()).hex())
"""


def run(**environment):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(900)  # three processes compile or load
def test_processes_share_a_cache(tmp_path):
    """Two at once on an empty cache, then once more from it."""
    expected = bytes(codecs["e3m0"].encode(torch.arange(300.0)).tolist()).hex()
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    for processes in ([run(**environment) for _ in range(2)], [run(**environment)]):
        for process in processes:
            out, error = process.communicate(timeout=280)
            assert (process.returncode, out.strip()) == (0, expected), error
    assert list(tmp_path.rglob("*.nbi"))


def test_no_place_for_a_cache(monkeypatch):
    """Every process then compiles for itself."""
    import numba

    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    def double(value):
        return value + value

    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(double)
    assert fused.kernel(double)(21) == 42
