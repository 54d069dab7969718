"""A user's mistake in `isles train` is one clear line, found before anything is trained, and nothing is lost by it."""

import json
import re
import shutil

import pytest

import isles
from isles.cli import main
from isles.elastic.store import KEY_VARIABLE, open_store
from isles.train import export, setup
from isles.train.store_run import SETTINGS
from tests.programs import Program

FLAGS = ["--model", "nano", "--data", "synthetic:0.02", "--tokenizer", "bytes", "--batch-size", "2", "--threads", "1"]
FLAGS += ["--sequence-length", "16", "--eval-tokens", "64", "--eval-every", "0", "--sample-tokens", "0"]
FLAGS += ["--warmup-steps", "2", "--sync-every", "2"]
WRONG = {
    "unknown model": (["--model", "foo"], "--model foo is not known"),
    "offsets of another length": (["--offsets", "0,1,1,1,1,1,1"], "offsets"),
    "sequences longer than the text": (["--sequence-length", "100000000"], "sequence"),
    "questions that are not there": (["--evals", "foo.jsonl"], "foo.jsonl"),
    "a device that is not there": (["--device", "cuda"], "--device cuda: torch finds no GPU here"),
    "a device that nobody knows": (["--device", "abacus"], "--device abacus is not known"),
}


def isles_train(folder, *flags):
    """Its exit code, and what it printed."""
    program = Program(["train", *flags], folder)
    return program.wait(), *program.communicate()


def train(folder, *flags):
    """Its exit code, and the last line of what it complained about."""
    code, _, said = isles_train(folder, *FLAGS, *flags)
    return code, said.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two islands, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    assert train(folder, "--run", "run", "--steps", "4", "--checkpoint-every", "2")[0] == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_leaves_no_folder_behind(name, tmp_path):
    flags, said = WRONG[name]
    code, line = train(tmp_path, "--run", "run", "--steps", "2", *flags)
    assert (code, said in line) == (2, True), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["unknown model", "offsets of another length", "sequences longer than the text"])
def test_a_mistake_leaves_no_run_in_a_store(name, tmp_path):
    pytest.importorskip("obstore")
    flags, said = WRONG[name]
    code, line = train(tmp_path, "--store", "store", "--run", "run", "--steps", "2", *flags)
    assert (code, said in line) == (2, True), line
    assert not (tmp_path / "store").exists()


def test_a_resume_that_is_refused_changes_nothing(run):
    before = (run / setup.FILE).read_bytes()
    code, line = train(run.parent, "--run", "run", "--resume", "--steps", "6", "--seed", "3")
    assert (code, "made with --seed 0, not 3" in line) == (2, True), line
    assert (run / setup.FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("islands", "said"), [("3", "2 islands of 3 hold checkpoints"), ("1", "made by 2 islands, not 1")]
)
def test_another_number_of_islands_does_not_resume(islands, said, run):
    weights = (run / export.WEIGHTS).read_bytes()
    code, line = train(run.parent, "--run", "run", "--resume", "--steps", "6", "--islands", islands)
    assert (code, said in line) == (2, True), line
    assert (run / export.WEIGHTS).read_bytes() == weights


def test_a_run_that_has_ended_without_checkpoints_is_not_trained_again(run):
    shutil.rmtree(run / "checkpoints")
    code, line = train(run.parent, "--run", "run", "--resume", "--steps", "6")
    assert (code, "has ended, and left no checkpoint" in line) == (2, True), line


def test_a_resume_needs_no_other_flag_and_shows_its_own_progress_only(run):
    code, _, said = isles_train(run.parent, "--resume", "--run", "run", "--steps", "6")
    assert code == 0
    assert "finished: 6 steps" in said
    assert "finished: 4 steps" not in said


def test_flags_of_a_store_need_a_store(tmp_path):
    code, line = train(tmp_path, "--run", "run", "--quorum", "2")
    assert (code, "--quorum is for islands that come and go" in line) == (2, True), line


def test_the_json_of_a_store_says_what_the_table_says(tmp_path, capsys):
    pytest.importorskip("obstore")
    code, out, _ = isles_train(tmp_path, *FLAGS, "--store", "store", "--run", "run", "--steps", "6", "--json")
    assert code == 0
    found = json.loads(out.strip().splitlines()[-1])
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["runs"][0]
    for name in ("bytes_sent", "peak_bytes_per_step", "compute_utilization", "wall_seconds"):
        assert found[name] == table[name], name
    assert found["peak_bytes_per_step"] > 0
    assert open_store(str(tmp_path / "store")).get(SETTINGS) is not None


@pytest.mark.parametrize(
    ("url", "arguments", "said"),
    [
        ("memory://mistakes", {"patiance": 3}, "patiance: a store in memory or in a folder has no such option"),
        ("memory://mistakes", {"key": 5}, "key is of type int: it must be text"),
        ("memory://mistakes", {"key": ""}, "key is empty: it must be text"),
        ("s3://", {}, "s3:// names no bucket: give s3://bucket/run"),
        ("s3:///x", {}, "s3:///x names no bucket"),
    ],
)
def test_arguments_of_a_store_world(url, arguments, said):
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match=re.escape(said)):
        isles.StoreWorld(url, **arguments)


def test_an_empty_key_in_the_environment_is_a_mistake(monkeypatch):
    pytest.importorskip("obstore")
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ValueError, match=f"{KEY_VARIABLE} is empty: it must be text"):
        isles.StoreWorld("memory://mistakes")


@pytest.mark.parametrize("name", isles.codecs)
def test_a_codec_encodes_tensors(name):
    with pytest.raises(ValueError, match="encodes floating-point tensors, not list"):
        isles.codecs[name].encode([1.0])
