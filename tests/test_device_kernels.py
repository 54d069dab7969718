"""Kernels for accelerators without an accelerator: they have the bits of the CPU, and they compile for real targets.

The bits are compared in Triton's interpreter (`interpreted_kernels.py`, in a process of its own). What is compiled for
NVIDIA and AMD is read: no fused multiply-add, no flushed denormals, no division but IEEE's. What runs on a GPU itself
`isles doctor` tests there.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isles import codecs
from isles.cli import main
from isles.wire import device_kernels
from isles.wire.packing import largest_scale

if importlib.util.find_spec("triton") is None:
    reason = "Triton is not installed, and kernels for accelerators are its: pip install 'isles[gpu]' (Linux)"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=True)

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
TYPES = {
    **dict.fromkeys(("anchor", "mean", "velocity", "into"), "*fp32"),
    **dict.fromkeys(("thetas", "ranges", "bodies"), "*i64"),
    **dict.fromkeys(("start", "divisor", "lr", "momentum", "kept", "taken"), "fp32"),
    **{"payload": "*u8", "finite": "*i32", "numel": "i32", "count": "i32", "column": "i32", "more": "i32"},
}
MEAN = {"CODEC": "mean", "LIMIT": 0, "WIDTH": 0, "ROWS": 16}


@pytest.mark.timeout(1200)  # half a minute of a core, which a busy machine may not have at once
def test_interpreted_kernels_have_the_bits_of_the_cpu():
    file = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=file.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout), done.stdout


# ---- compiled


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function that compiles a kernel for a target and returns its code as text, and the size of the binary."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from isles.wire import triton_kernels

    def call(name, target, fusion=False, **constants):
        kernel = getattr(triton_kernels, name)
        signature = {each: "constexpr" if each in constants else TYPES[each] for each in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(signature.values()) if each[0] == "*"}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"enable_fp_fusion": fusion})
        text, binary = ("ptx", "cubin") if TARGETS[target][0] == "cuda" else ("amdgcn", "hsaco")
        return made.asm[text], len(made.asm[binary])

    return call


def rounds_as_written(code, target):
    """Whether nothing in it is fused, approximate or flushed. IEEE's division is made of five multiply-adds on AMD."""
    if TARGETS[target][0] == "cuda":
        divisions = set(re.findall(r"\bdiv\.\S*f32", code))
        return not re.search(r"\b(fma|mad)\.(rn|rz|ftz)|\.ftz|rcp\.|\.approx", code) and divisions <= {"div.rn.f32"}
    fused, divided = re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)_\w*f32", code), code.count("v_div_fixup_f32")
    keeps = re.search(r"amdhsa_float_denorm_mode_32 3\b", code) and re.search(r"denorm_mode_16_64 3\b", code)
    return bool(keeps) and len(fused) == 5 * divided and code.count("v_rcp_f32") == divided


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", device_kernels.LIMITS)
def test_codecs_compile(name, target, compiled):
    rows = device_kernels._rows_of(codecs[name])
    scale = largest_scale(max(rows["LIMIT"], 1))
    code, size = compiled("encode_difference", target, LARGEST_SCALE=scale, **rows)
    assert size > 1000
    assert rounds_as_written(code, target)
    for start, store in (("zero", True), ("zero", False), ("into", True)):
        code, size = compiled("merge", target, START=start, STORE=store, **rows)
        assert size > 1000
        assert rounds_as_written(code, target)
    code, size = compiled("outer_step_and_mix", target, MOMENTUM="nesterov", MIXING="some", **rows)
    assert size > 1000
    assert rounds_as_written(code, target)


@pytest.mark.parametrize("target", TARGETS)
def test_outer_steps_compile(target, compiled):
    for momentum, mixing in (("none", "all"), ("plain", "some"), ("nesterov", "none"), ("nesterov", "some")):
        code, size = compiled("outer_step_and_mix", target, MOMENTUM=momentum, MIXING=mixing, **MEAN)
        assert size > 1000
        assert rounds_as_written(code, target)
        assert not re.search(r"\bdiv\.|v_div_", code), "there is nothing to divide"


@pytest.mark.parametrize("target", TARGETS)
def test_a_fused_multiply_add_would_be_seen(target, compiled):
    code, _ = compiled("outer_step_and_mix", target, fusion=True, MOMENTUM="nesterov", MIXING="some", **MEAN)
    assert not rounds_as_written(code, target)


# ---- where they apply


def test_without_the_interpreter_there_are_none_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    assert not device_kernels.available(cpu)
    assert not device_kernels.available(torch.zeros(1))
    assert not device_kernels.encodes(codecs["e3m0"], cpu)


def test_isles_fused_turns_them_off(monkeypatch):
    monkeypatch.setattr(device_kernels, "_works", lambda device: True)
    cuda = torch.device("cuda:0")
    assert device_kernels.available(cuda)
    assert device_kernels.encodes(codecs["e3m0"], cuda)
    assert not device_kernels.decodes(codecs["fp8"], cuda)
    monkeypatch.setenv("ISLES_FUSED", "0")
    assert not device_kernels.available(cuda)


def test_a_device_that_triton_cannot_use_is_told_and_left_to_pytorch(caplog):
    device_kernels._works.cache_clear()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with caplog.at_level("WARNING", logger="isles"):
        assert not device_kernels.available(torch.device("cuda:0"))
        assert not device_kernels.available(torch.device("cuda:0"))
    device_kernels._works.cache_clear()
    device_kernels._given_up.clear()
    assert [record.message for record in caplog.records if "do not run on cuda:0" in record.message] == [
        caplog.records[0].message
    ]


def test_there_is_nothing_to_measure_without_a_device(capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert main(["bench", "device"]) == 2
    assert "there is no accelerator: isles doctor says" in capsys.readouterr().err


def test_importing_needs_no_triton():
    program = "import sys; sys.modules['triton'] = None; import isles.wire.device_kernels, isles; isles.codecs"
    subprocess.run([sys.executable, "-c", program], check=True)
