"""The package: what is built holds everything, and works in an environment that has only what it declares."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import isles
from isles.cli import COMMANDS
from tests.installed import ROOT, build, environment, information, requirements, run, tracked
from tests.processes import free_address

pytestmark = pytest.mark.timeout(900)  # many starts of Python, on a machine that may do other work
EXTRAS = {"fast", "hf", "lightning", "store", "tensorboard"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution."""
    return build(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def plain(built, tmp_path_factory):
    """Python with the wheel, without extras."""
    return environment(tmp_path_factory.mktemp("plain") / "env", built[0])


@pytest.fixture(scope="module")
def full(built, tmp_path_factory):
    """Python with the wheel and all extras."""
    return environment(tmp_path_factory.mktemp("full") / "env", built[0], *EXTRAS, "gpu")


# ---- what is in it


def test_the_wheel_holds_every_file_of_the_package(built):
    with zipfile.ZipFile(built[0]) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == {name for name in tracked() if name.startswith("isles/")}
    assert any(name.endswith(".js") for name in found)
    assert "isles/py.typed" in found


def test_the_source_distribution_holds_the_repository(built):
    with tarfile.open(built[1]) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in found if name.startswith("isles.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert found - made == set(tracked())


def test_twine_finds_nothing_to_complain_about(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_what_the_wheel_says_of_itself(built):
    about = information(built[0])
    assert about["Name"] == "isles"
    assert set(about.get_all("Provides-Extra")) == EXTRAS | {"dev", "gpu"}
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"


def test_the_version_is_that_of_the_installed_package(built, plain, tmp_path):
    (declared,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert information(built[0])["Version"] == declared
    done = run(plain, "-m", "isles.cli", "--version", cwd=tmp_path)
    assert done.stdout == f"isles {declared}\n", done.stderr
    assert isles.__version__ == metadata.version("isles")


def test_lower_bounds_are_those_that_are_tested(built):
    """`make oldest` installs these."""
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if "==" in line
    )
    declared = {}
    for text in requirements(built[0]):
        requirement = Requirement(text)
        is_for_users = not {"dev", "gpu"} & set(re.findall(r'"(\w+)"', str(requirement.marker)))
        if is_for_users or requirement.name in pinned:  # trl is a trainer too, which isles itself does not need
            (bound,) = requirement.specifier
            assert bound.operator == ">=", text
            declared.setdefault(requirement.name, set()).add(Version(bound.version))
    assert declared == {name: {Version(version)} for name, version in pinned.items()}


# ---- without optional parts


def test_the_environment_has_nothing_of_the_repository_and_no_optional_part(plain, tmp_path):
    names = ["numba", "obstore", "transformers", "lightning", "tensorboard", "datasets", "pytest", "pdoc"]
    code = f"import importlib.util as u, isles; print([n for n in {names} if u.find_spec(n)], isles.__file__)"
    done = run(plain, "-c", code, cwd=tmp_path)
    assert done.stdout.startswith("[] "), done.stdout + done.stderr
    assert str(plain.parent.parent) in done.stdout
    assert "\n" not in run(plain, "-m", "isles.cli", cwd=tmp_path).stderr.strip(), "no command: one line"


def test_every_module_but_the_callbacks_can_be_imported(plain, tmp_path):
    """Modules that need an optional part import it when they do something with it."""
    code = """
import importlib, pkgutil, isles
failed = {}
for module in pkgutil.walk_packages(isles.__path__, "isles."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        failed[module.name] = str(error)
import json
print(json.dumps(failed))
"""
    done = run(plain, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout)
    callbacks = {"isles.integrations.transformers", "isles.integrations.lightning"}
    assert failed.keys() == callbacks | {"isles.wire.kernels", "isles.wire.triton_kernels"}
    assert "pip install 'isles[hf]'" in failed["isles.integrations.transformers"]
    assert "pip install 'isles[lightning]'" in failed["isles.integrations.lightning"]
    assert all("\n" not in message for message in failed.values())


def test_every_command_has_its_help(plain, tmp_path):
    """In one process: what one command loads hides nothing from the next, since nothing optional is there."""
    code = f"""
from isles.cli import main
for name in {list(COMMANDS)}:
    try:
        main([name, "--help"])
    except SystemExit as end:
        print("code", end.code)
"""
    done = run(plain, "-c", code, cwd=tmp_path)
    assert done.stdout.count("code 0") == len(COMMANDS), done.stdout + done.stderr
    assert done.stderr == ""


MISSING = {
    "train --store memory://run --steps 2": "isles[store]",
    "export --store memory://run": "isles[store]",
    "report --store memory://run": "isles[store]",
    "watch --store memory://run": "isles[store]",
    "lab --store --islands 2": "moto",
    "train --model hf:gpt2 --steps 2 --islands 1": "isles[hf]",
    "train --data hf:some/set --steps 2 --islands 1": "pip install datasets",
    "train --data some.parquet --steps 2 --islands 1": "pip install pyarrow",
    "train --tensorboard --steps 2 --islands 1": "isles[tensorboard]",
    "train --wandb project --steps 2 --islands 1": "pip install wandb",
    "bench trainer --quick": "isles[hf]",
    "bench page --quick": "playwright",
}
"""Commands, and what they lack."""
FORKS = """
import os, sys
import torch
from isles.cli import main
for number, command in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        os.mkdir(str(number))
        os.chdir(str(number))
        open("some.parquet", "wb").write(b"PAR1")
        for name, file in (("out", 1), ("err", 2)):
            os.dup2(os.open("../%s-%d" % (name, number), os.O_CREAT | os.O_WRONLY), file)
        sys.exit(main(command.split()))
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Each command in a process and a folder of its own; Python starts once."""


@pytest.fixture(scope="module")
def answers(plain, tmp_path_factory):
    """Of each command: the exit code, what it printed, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("missing")
    done = run(plain, "-c", FORKS, *MISSING, cwd=folder)
    codes = [int(line) for line in done.stdout.split()]
    texts = [[(folder / f"{name}-{number}").read_text() for name in ("out", "err")] for number in range(len(codes))]
    return {
        command: (code, *text, folder / str(number))
        for number, (command, code, text) in enumerate(zip(MISSING, codes, texts, strict=True))
    }


@pytest.mark.parametrize(("command", "missing"), MISSING.items())
def test_what_needs_an_optional_part_says_so_in_one_line(command, missing, answers):
    code, out, err, folder = answers[command]
    assert code == 2, out + err
    said = [line for line in err.splitlines() if not re.match(r"reading |downloading |measuring: ", line)]
    assert len(said) == 1, err
    assert missing in said[0]
    assert not (folder / "runs").exists(), "a run that cannot be leaves nothing behind"


def test_it_trains_without_optional_parts(plain, tmp_path):
    small = "--model nano --vocabulary 300 --data synthetic:0.05 --batch-size 2 --sequence-length 32 --sync-every 2"
    done = run(
        plain, "-m", "isles.cli", "train", *small.split(), "--steps", "4", "--run", "run", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["bytes_sent"] > 0
    assert (tmp_path / "run/report.html").stat().st_size > 10_000, "with its styles and scripts"


# ---- with them


def test_with_extras_every_module_can_be_imported(full, tmp_path):
    code = """
import importlib, pkgutil, isles
names = [module.name for module in pkgutil.walk_packages(isles.__path__, "isles.")]
for name in names:
    importlib.import_module(name)
from isles.wire import fused
assert fused.warm_up(["e3m0"])
print(len(names))
"""
    done = run(full, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(name.startswith("isles/") and name.endswith(".py") for name in tracked()) - 1


def test_a_stranger_copies_an_example_and_changes_the_model(full, tmp_path):
    """The file alone, in an empty folder, with the package: two islands."""
    text = (ROOT / "examples/hf_trainer.py").read_text()
    changed = text.replace('"n_layer": 4', '"n_layer": 2')
    assert changed != text
    (tmp_path / "mine.py").write_text(changed)
    settings = ["--steps", "4", "--sync-every", "2", "--width", "16", "--address", free_address()]
    done = run(full, "mine.py", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"2 islands: loss \d+\.\d+; each sent [\d,]+ bytes", done.stdout), done.stdout


# ---- types


USER = '''
"""What users write, with every public name, for mypy --strict."""

import torch

import isles


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> int:
    method: isles.Method = isles.Method.streaming(sync_every=100, overlap=5)
    world = isles.TorchWorld.connect("host:29500", island=0, islands=2, timeout=60.0)
    told: list[isles.Event] = []
    with isles.DiLoCo(model, optimizer, method, world=world, on_event=told.append) as diloco:
        for batch in batches:
            loss: torch.Tensor = model(batch).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
        with diloco.global_model():
            model(batches[0])
        state = diloco.state_dict()
        diloco.load_state_dict(state)
    stats: isles.Stats = diloco.stats
    reveal_type(stats.bytes_sent)
    reveal_type(diloco.step_count)
    reveal_type(diloco.clock)
    return stats.bytes_sent


def island(world: isles.LocalWorld) -> float:
    return float(world.rank)


reveal_type(isles.run_local(island, 2))
payload = isles.codecs["e3m0"].encode(torch.zeros(10))
reveal_type(isles.codecs["e3m0"].decode(payload, 10))
store = isles.StoreWorld("memory://run", quorum=1, patience=None, timeout=600.0, key=None)
isles.probe_store("memory://run")
reveal_type(isles.__version__)
try:
    pass
except (isles.LostPeerError, isles.MismatchError) as error:
    print(error)
'''
REVEALED = ["int", "int", "int", "list[float]", "torch._tensor.Tensor", "str"]
WRONG = """
import isles

isles.Method(sync_every="often")
isles.run_local(lambda world: world.rank, "two")
isles.TorchWorld.connect("host:29500", iland=0, islands=2)
isles.Nothing
"""


def test_types_are_seen_in_a_users_project(plain, tmp_path):
    """mypy in an empty project, on the installed package."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, "--python-executable", str(plain)]
    done = subprocess.run([*command, "user.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True)
    errors = re.findall(r"^(\w+)\.py:(\d+): error:", done.stdout, re.MULTILINE)
    assert errors == [("wrong", str(line)) for line in (4, 5, 6, 7)], done.stdout + done.stderr
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert [text.replace("builtins.", "") for text in revealed] == REVEALED


# ---- how long it takes to import


def test_importing_isles_takes_at_most_a_tenth_more_than_importing_torch(plain, tmp_path):
    """With what a training over torch.distributed uses of it, in CPU time. The best of several starts counts."""
    code = """
import time
begin = time.process_time()
import torch
middle = time.process_time()
import isles
isles.DiLoCo, isles.Method, isles.TorchWorld
print(middle - begin, time.process_time() - begin)
"""
    of_torch, of_both = [], []
    for _ in range(4):
        done = run(plain, "-c", code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        torch_seconds, seconds = map(float, done.stdout.split())
        of_torch.append(torch_seconds)
        of_both.append(seconds)
    assert min(of_both) <= 1.1 * min(of_torch), (of_torch, of_both)
