"""`isles train` tells a user's mistake in one line, with exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isles.cli import main
from isles.train import learning_rate, setup
from isles.train.config import TrainConfig

MISTAKES = {
    "no number": (["--steps", "many"], "invalid int value"),
    "unknown flag": (["--stepps", "10"], "unrecognized arguments"),
    "unknown method": (["--method", "magic"], "invalid choice"),
    "no steps": (["--steps", "0"], "--steps 0 must be at least 1"),
    "no islands": (["--islands", "0"], "--islands 0 must be at least 1"),
    "learning rate": (["--learning-rate", "-1"], "greater than 0"),
    "not a number": (["--learning-rate", "nan"], "greater than 0"),
    "overlap": (["--overlap", "100"], "overlap=100 must be an integer from 0 to 99"),
    "codec": (["--codec", "zip"], "codec='zip' is not known"),
    "fragments": (["--fragments", "two"], "neither a number nor a JSON list"),
    "offsets": (["--offsets", "a,b"], "no list of whole numbers"),
    "no knobs": (["--method", "data-parallel", "--overlap", "1"], "--overlap has no meaning"),
    "missing file": (["--data", "no/such/file.txt"], "no/such/file.txt"),
    "missing validation": (["--data", "synthetic:0.1", "--val-data", "no/such/file.txt"], "no/such/file.txt"),
    "small vocabulary": (["--data", "synthetic:0.1", "--vocabulary", "100"], "from 257"),
    "missing tokenizer": (["--data", "synthetic:0.1", "--tokenizer", "no/such.json"], "no/such.json"),
    "sources": (["--island-data", "stdlib;stdlib;stdlib"], "3 sources for 2 islands"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)


def run(arguments: list[str], capsys) -> tuple[int, str]:
    try:
        code = main(["train", *arguments])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


def test_under_torchrun_the_islands_are_counted_from_the_ranks(monkeypatch):
    """Three machines have three sources, whatever `--islands` says or does not say."""

    def islands(world_size, on_this_machine, **chosen):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_machine))
        return setup.resolve(chosen, {}).config.islands

    assert islands(3, 1, island_data="a;b;c") == 3
    assert islands(24, 8, island_data="a;b;c", islands=7) == 3
    assert islands(8, 8, island_data="a;b", ranks_per_island=4) == 2
    assert islands(8, 8) == 8, "on one machine every rank is an island"
    with pytest.raises(ValueError, match="2 sources for 3 islands"):
        islands(3, 1, island_data="a;b")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(name, tmp_path, capsys):
    arguments, words = MISTAKES[name]
    code, said = run(["--run", str(tmp_path / "run"), *arguments], capsys)
    assert code == 2
    assert words in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_an_empty_file_is_a_mistake(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    code, said = run(["--run", str(tmp_path / "run"), "--data", str(tmp_path / "empty.txt")], capsys)
    assert code == 2
    assert "empty.txt" in said


def test_a_run_that_exists_is_not_touched(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep me")
    code, said = run(["--run", str(folder)], capsys)
    assert code == 2
    assert "--resume" in said
    assert "--overwrite" in said
    code, said = run(["--run", str(folder), "--overwrite"], capsys)
    assert code == 2
    assert "is none" in said, "only runs are overwritten"
    assert (folder / "mine.txt").read_text() == "keep me"
    code, said = run(["--run", str(folder / "mine.txt")], capsys)
    assert code == 2
    assert "is a file" in said


def test_resuming_needs_no_other_flag(tmp_path):
    wanted = setup.resolve(
        {"run": str(tmp_path / "run"), "steps": 7, "method": "eager", "seed": 3}, {"sync_every": 5, "mixing": 0.25}
    )
    with setup.claimed(wanted):
        pass
    again = setup.resolve({"run": str(tmp_path / "run"), "resume": True}, {})
    assert again.config.steps == 7
    assert again.config.seed == 3
    assert again.method() == wanted.method()
    assert setup.load(tmp_path / "run").method() == wanted.method()


def test_every_field_of_the_method_is_a_flag(capsys):
    import dataclasses

    from isles.core.method import Method

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(f"--{field.name.replace('_', '-')}" in text for field in dataclasses.fields(Method))


def test_help_does_not_load_torch():
    code = (
        "import sys, isles.cli\ntry: isles.cli.main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_starting_to_train_does_not_load_torch_in_the_parent():
    code = "import sys, isles.train.command, isles.view.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_the_saved_configuration_is_plain_json(tmp_path):
    wanted = setup.resolve({"run": str(tmp_path / "run")}, {"fragments": [["a"], ["b"]]})
    with setup.claimed(wanted):
        pass
    saved = json.loads((Path(wanted.config.run) / "config.json").read_text())
    assert saved["method"]["fragments"] == [["a"], ["b"]]
    assert saved["config"]["method"] == "gradual"


def test_a_learning_rate_is_chosen_where_none_is_given():
    def rate(parameters, **flags):
        return learning_rate.resolved(TrainConfig(**flags), parameters).learning_rate

    assert rate(10**6, learning_rate=0.5) == 0.5
    assert rate(10**6) == rate(10**6, method="streaming") == rate(10**6, method="data-parallel", islands=1)
    assert rate(10**6, method="data-parallel") < rate(10**6), "whose steps see the batch of all islands"
    assert rate(10**8) == pytest.approx(rate(10**6) / 10, rel=0.05)
    assert rate(10**6) / 4 < rate(10**6, batch_size=2) < rate(10**6) / 2, "a quarter of the batch"
    assert rate(10**6, batch_size=800) == rate(10**6)
    assert rate(100) == learning_rate.LARGEST


def test_only_the_rank_that_has_a_result_prints_json(monkeypatch, capsys):
    monkeypatch.setattr("isles.train.command.run", lambda args: None)
    assert main(["train", "--json"]) == 0
    assert capsys.readouterr().out == ""
