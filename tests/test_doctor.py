"""`isles doctor`: what it finds, what it says about what is missing, and that it notices what is broken."""

import dataclasses
import json

import pytest
import torch

from isles.cli import main
from isles.doctor import command, kernels, sight, smoke
from isles.wire import fused

pytest.importorskip("numba")


@pytest.fixture
def quick(monkeypatch):
    """Without the two processes, which take seconds to start."""
    monkeypatch.setattr(smoke, "processes", lambda *_: smoke.FINE)


def doctor(capsys):
    """The exit code, the lines, and the last one as JSON."""
    code = main(["doctor", "--json"])
    *lines, last = capsys.readouterr().out.strip().splitlines()
    return code, lines, json.loads(last)


def test_a_machine_on_which_all_is_well(capsys, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    code, lines, result = doctor(capsys)
    assert code == 0, lines
    assert result["ok"] is True
    assert result["broken"] == []
    assert result["two_islands"]["threads on cpu"] == result["two_islands"]["processes on cpu"] == "ok"
    assert result["kernels"]["cpu, numba"] == dict.fromkeys((*fused.GROUPS, fused.OUTER), "same bits")
    assert result["seen"]["torch"] == torch.__version__
    assert result["seen"]["backends"]["gloo"] is True
    assert result["seen"]["threads"] == torch.get_num_threads()
    assert lines[-1] == "all that is needed works"
    titles = [
        "isles",
        "torch",
        "devices",
        "backends",
        "numba",
        "Triton",
        "store",
        "network",
        "locked",
        "kernels",
        "two",
    ]
    assert [line.split()[0] for line in lines[: len(titles)]] == titles
    assert all(line.startswith("missing: ") for line in lines[len(titles) : -1])


def test_kernels_that_are_off_are_missing_not_broken(capsys, monkeypatch, quick):
    monkeypatch.setattr(fused, "_ready", {})
    monkeypatch.setenv("ISLES_FUSED", "0")
    code, lines, result = doctor(capsys)
    assert code == 0
    assert result["kernels"]["cpu, numba"] == {}
    assert any(line.startswith("missing: kernels are off (ISLES_FUSED=0)") for line in lines)


@pytest.mark.parametrize("group", [*fused.GROUPS, fused.OUTER])
def test_a_kernel_with_other_bits_is_found(group, capsys, monkeypatch, quick):
    fused.warm_up()
    name = "nesterov" if group == fused.OUTER else "merge"
    right = fused._ready[group][name]

    def wrong(*arguments):
        result = right(*arguments)
        last = arguments[0 if group == fused.OUTER else 1]
        last.view("int32")[1] ^= 1  # the last bit of one value
        return result

    monkeypatch.setitem(fused._ready, group, {**fused._ready[group], name: wrong})
    code, lines, result = doctor(capsys)
    assert code == 1
    assert result["ok"] is False
    bad = {name for name, found in result["kernels"]["cpu, numba"].items() if found != kernels.SAME}
    assert bad == {group}
    (line,) = [line for line in lines if line.startswith("broken: kernels")]
    assert f"{group} (OTHER BITS than PyTorch on the CPU)" in line
    assert "ISLES_FUSED=0" in line


def test_a_kernel_that_fails_is_found(capsys, monkeypatch, quick):
    def fails(*_):
        raise RuntimeError("no such luck\nin two lines")

    fused.warm_up()
    monkeypatch.setitem(fused._ready, "int8", {**fused._ready["int8"], "encode": fails})
    code, lines, _ = doctor(capsys)
    assert code == 1
    assert any("int8 (RuntimeError: no such luck)" in line for line in lines)


def test_islands_that_fail_are_broken(capsys, monkeypatch, quick):
    monkeypatch.setattr(smoke, "train", lambda *_: {}["nothing"])
    code, lines, result = doctor(capsys)
    assert code == 1
    assert result["two_islands"]["threads on cpu"].startswith("KeyError")
    assert any(line.startswith("broken: two islands, threads on cpu: KeyError") for line in lines)


def test_islands_that_disagree_are_broken(monkeypatch):
    digests = iter(("one", "two"))
    monkeypatch.setattr(smoke, "train", lambda *_: next(digests))
    assert smoke.threads(torch.device("cpu"))[0] == "the two islands end with different models"


def test_a_process_that_dies_says_why():
    assert smoke.processes(torch.device("meta"), "", None).startswith("exit code 1: ")


def test_an_interface_that_is_not_there_is_broken(capsys, monkeypatch, quick):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    code, lines, _ = doctor(capsys)
    assert code == 1
    assert any(line.startswith("broken: GLOO_SOCKET_IFNAME=nosuch0 is no interface") for line in lines)


def test_what_is_missing_comes_with_what_to_do():
    seen = dataclasses.replace(
        sight.look(),
        accelerator="cuda",
        devices={"cuda:0": "one", "cuda:1": "two"},
        backends={"gloo": True, "nccl": False},
        numba=None,
        triton=None,
        obstore=None,
        kernels_off=False,
        interfaces={"lo": "127.0.0.1"},
        locked_memory=8 << 20,
    )
    lines = command.advice(seen)
    for word in ("isles[fast]", "isles[gpu]", "NCCL", "isles[store]", "loopback", "ulimit -l"):
        assert sum(word in line for line in lines) == 1, word
    assert dict(command.describe(seen))["devices"] == "cuda:0 (one), cuda:1 (two)"
    plain = dataclasses.replace(
        seen, accelerator=None, devices={}, numba="1", obstore="1", interfaces={"eth0": "10.1.1.1"}
    )
    assert command.advice(plain) == [], "without an accelerator neither Triton nor pinned memory matter"
    assert command.problems(dataclasses.replace(seen, backends={"gloo": False, "nccl": False}), {}, {})
