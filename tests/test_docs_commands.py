"""Every command of README, CONTRIBUTING and docs is run, or at least read as the program itself reads it.

    RUN          run here, in an empty folder, with arguments that make it smaller
    ELSEWHERE    run by another test, with the table of that test
    otherwise    parsed by the program's own parser, all flags checked: those that take hours, need a bucket or a
                 network, or several machines, which a page says by a name in capitals (HOST, ADDRESS, INTERFACE)

A command that nothing here can parse fails, and so does an entry of these tables that is on no page any more.
"""

import argparse
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from isles import cli, flags
from isles.bench import command as bench
from isles.core.method import Method
from isles.lab import command as lab
from isles.lab import programs
from isles.reproduce import studies
from isles.reproduce.command import SPEED
from isles.train import setup
from isles.train.config import TrainConfig
from tests import forked, test_examples
from tests.installed import ROOT
from tests.pages import WITH_COMMANDS, Command, commands, inline, read

SMALL = "--model nano --vocabulary 300 --batch-size 2 --sequence-length 32 --threads 1 --eval-tokens 512"
STORE = "store"
"""The folder that stands for a bucket."""
PLACEHOLDERS = {"s3://bucket/run": STORE, "FORM": "all-gather", "NAME": "methods", "IS_HOST": "1"}
RUN = {  # command: what is added to make it smaller
    "make demo": f"DEMO='{SMALL} --data synthetic:0.05 --steps 10 --eval-every 5 --overwrite'",
    "isles train --store s3://bucket/run --method distant --data 'text/*.jsonl' --steps 20000": f"{SMALL} --steps 8 "
    "--sync-every 4 --eval-every 4",
    "isles train --store s3://bucket/run": "--threads 1",
    "python -c \"import isles; isles.probe_store('s3://bucket/run')\"": "",
    "isles plan --preset 1B --bandwidth 1Gbit": "",
    "isles plan --params 124M --layers 12 --step-time 0.35 --bandwidth 20Mbit --latency 25ms --islands 4": "",
    "isles plan --events runs/demo/isles --bandwidth 100Mbit --plot utilisation.png": "",
    "isles plan --paper --params 1e9 --layers 24 --step-time 0.1 --sync-every 100 --json": "",
    "isles plan --store --events runs/mine --prices writes=5,reads=0.4,storage=0.023,out=0.09": "",
    "isles bench codecs": "--quick",
    "isles bench scaling": "--quick",
    "torchrun --nproc-per-node 2 examples/two_islands.py": "",
    "python examples/two_islands.py": "",
}
ELSEWHERE = {  # command: the test that runs it
    **{f"python examples/{name}": "test_examples.py" for name in test_examples.TRAINERS},
    "torchrun --nproc-per-node 2 examples/nanogpt_style.py": "test_examples.py",
    "isles bench --document docs/performance.md": "test_bench.py",
    "isles plan --store aws --params 124M --layers 12 --step-time 0.35 --bandwidth 50Mbit": "test_plan_command.py",
}

pytestmark = pytest.mark.timeout(900)  # many starts of Python, on a machine that may do other work
ALL = list({command.text: command for page in WITH_COMMANDS for command in commands(page)}.values())
PARSED = [command for command in ALL if command.text not in RUN and command.text not in ELSEWHERE]


def test_the_tables_name_commands_of_pages():
    texts = {command.text for command in ALL}
    assert RUN.keys() <= texts, RUN.keys() - texts
    assert ELSEWHERE.keys() - texts == set(), ELSEWHERE.keys() - texts
    assert all((ROOT / "tests" / name).exists() for name in ELSEWHERE.values())
    assert len(ALL) > 40


# ---- run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder as the pages take for granted: some text, the examples, a run."""
    here = tmp_path_factory.mktemp("work")
    (here / "text").mkdir()
    rows = [json.dumps({"text": f"{number} islands join {number * number} others by slow links. " * 20})
            for number in range(200)]  # fmt: skip
    (here / "text/some.jsonl").write_text("\n".join(rows))
    (here / "examples").symlink_to(ROOT / "examples")
    start(f"isles train --islands 2 --run runs/mine {SMALL} --data synthetic:0.05 --steps 8 --sync-every 4", here)
    shutil.copytree(here / "runs/mine", here / "runs/demo/isles")
    return here


def start(command, folder):
    """What it printed. Programs are forked, but for one line of Python."""
    program, *words = shlex.split(command)
    modules = {"isles": ["-m", "isles.cli"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    if (name := pathlib.Path(program).name) in modules and words[0] != "-c":
        done = forked.run([*modules[name], *words], folder, seconds=600)
    else:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        started = [sys.executable if program == "python" else program, *words]
        done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def filled(text):
    for placeholder, value in PLACEHOLDERS.items():
        text = re.sub(rf"(?<!\w){re.escape(placeholder)}(?!\w)", value, text)
    return text


def test_make_demo(tmp_path):
    """The target's own commands, as make would run them."""
    make = ["make", "-n", "--no-print-directory", "-f", ROOT / "Makefile", "-o", "install"]
    listed = start(shlex.join(map(str, [*make, *shlex.split(RUN["make demo"]), "demo"])), tmp_path).splitlines()
    assert len(listed) == 4
    printed = "".join(start(command, tmp_path) for command in listed)
    table = printed[printed.rindex("run  ") :].splitlines()
    shown = read("README.md")
    header = next(line for line in shown.splitlines() if line.startswith("    run  ")).replace("  worth", "")
    assert table[0].replace("  worth", "").split() == header.split(), (
        "worth is there if the second island adds something"
    )
    assert [line.split()[0] for line in table[1:4]] == ["isles", "data-parallel", "alone"]
    assert table[4] == "report: runs/demo/report.html"
    assert (tmp_path / "runs/demo/report.html").exists()


def test_islands_on_a_store(folder):
    """In the order of the page: the first makes the run, the second finds it. Then whoever looks at it."""
    texts = [text for text in RUN if "s3://bucket/run" in text]
    assert [command.text for command in commands("docs/elastic.md") if command.text in texts] == texts
    for text in texts:
        start(f"{filled(text)} {RUN[text]}", folder)
    assert {path.name for path in (folder / STORE).iterdir()} >= {"run.json", "islands", "rounds", "seals"}
    for command in ("isles export --store s3://bucket/run", "isles report --store s3://bucket/run"):
        assert any(command == each.text for each in inline("docs/elastic.md")), f"{command} is on the page"
        start(filled(command), folder)


def test_threads_and_processes_print_the_same_and_what_the_page_says(folder):
    page = read("docs/trainers.md")
    threads, processes = (
        start("python examples/two_islands.py", folder),
        start("torchrun --nproc-per-node 2 examples/two_islands.py", folder),
    )
    assert processes.splitlines() == threads.splitlines()[:-1]
    assert threads.splitlines()[-1] == "both islands hold the same model: True"
    begin = page.index("    $ torchrun --nproc-per-node 2 examples/two_islands.py\n")
    shown = [line[4:] for line in page[begin:].split("\n\n")[0].splitlines()[1:]]

    def without_error(line):  # the last digit is the processor's
        return re.sub(r"halves \S+,", "halves,", line)

    assert [without_error(line) for line in processes.splitlines()] == [without_error(line) for line in shown]


@pytest.mark.parametrize("text", [text for text in RUN if text.startswith(("isles plan", "isles bench"))])
def test_commands_that_are_run(text, folder):
    assert start(f"{text} {RUN[text]}", folder)


# ---- parsed


@pytest.mark.parametrize("command", PARSED, ids=str)
def test_commands_that_are_parsed(command):
    check(command.words)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_in_the_text_are_parsed(page):
    """`isles train --store` is a way to speak of a flag, so its value may be missing."""
    for command in set(inline(page)):
        words = [word for word in shlex.split(filled(command.text)) if word != "..."]
        assert is_parsed(words[1:]) or (words[-1].startswith("--") and is_parsed([*words[1:], "VALUE"])), str(command)


def is_parsed(arguments):
    try:
        return bool(cli.parse(arguments))
    except SystemExit:
        return False


@pytest.mark.parametrize(
    "text",
    [
        "isles train --no-such-flag 1",
        "isles train --method diloco --mixing 2",
        "isles lab --islands 2 -- --model nano --steps many",
        "isles reproduce nothing",
        "isles bench nothing",
        "python examples/nothing.py",
        "python examples/hf_trainer.py --nothing",
        "python experiments/closing.py --nothing",
        "torchrun --nothing 2 train.py",
        "torchrun --nnodes 2 -m isles.cli train --nothing",
        "make nothing",
        "pip install 'PATH/TO/CHECKOUT[nothing]'",
        "docker run isles",
    ],
)
def test_a_command_that_is_wrong_or_unknown_fails(text):
    with pytest.raises((AssertionError, SystemExit, ValueError, subprocess.CalledProcessError)):
        check(Command("", text).words)


def check(words):
    """Raises unless the program would understand it."""
    words = [filled(word) for word in words if word != "..."]
    program, rest = words[0], words[1:]
    if program == "isles":
        check_isles(rest)
    elif program == "torchrun":
        args = torchrun_parser().parse_args(rest)
        check_python((["-m"] if args.module else []) + [args.training_script, *args.training_script_args])
    elif program == "accelerate":
        assert rest[0] == "launch"
        check_python(rest[1:])
    elif program == "python":
        check_python(rest)
    elif program == "make":
        assert rest
        subprocess.run(["make", "-n", "-o", "install", *rest], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        (extras,) = re.findall(r"^PATH/TO/CHECKOUT\[([\w,]+)\]$", rest[1])
        assert rest[0] == "install"
        assert set(extras.split(",")) <= set(metadata.metadata("isles").get_all("Provides-Extra"))
    else:
        assert (program, *rest) == ("export", "GLOO_SOCKET_IFNAME=INTERFACE"), f"{program}: who runs this?"


def check_isles(arguments):
    args = cli.parse(arguments)
    if args.command == "train":
        setup.resolve(flags.given(args, TrainConfig), flags.given(args, Method))
    elif args.command == "lab" and args.store:
        (programs.timed if args.timed else programs.elastic)(args.flags)
    elif args.command == "lab" and not args.sweep:
        lab._options(args)
    elif args.command == "reproduce":
        assert args.study in (*studies.NAMES, SPEED)
    elif args.command == "bench":
        assert set(args.parts) <= {*bench.PARTS, bench.PEERS, bench.PAGE, bench.TRAINER, bench.DEVICE}


class Parsed(Exception):
    pass


def check_python(words):
    """A script of the repository comes to the end of its `parse_args`; one without a parser takes no flags."""
    if words[:2] == ["-m", "isles.cli"]:
        return check_isles(words[2:])
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[2:]), words
        return None
    script = ROOT / words[0]
    if words == ["train.py"]:  # of the reader
        return None
    assert script.exists(), words[0]
    source = script.read_text()
    if "ArgumentParser" not in source:
        compile(source, str(script), "exec")
        assert not any(word.startswith("-") for word in words[1:]), words
        return None
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *_):
        parse_args(self, words[1:])
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.syspath_prepend(str(script.parent))
        with pytest.raises(Parsed):
            runpy.run_path(str(script), run_name="__main__")
    return None
