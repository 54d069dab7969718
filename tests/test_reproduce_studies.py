"""Every study in its quick form, from the command line to the page: none of them rots."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from isles import cli
from isles.reproduce import results, studies
from isles.reproduce.job import Text
from isles.reproduce.scale import SCALES
from isles.reproduce.study import Records


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reproduce")


@pytest.fixture
def reproduce(folder, monkeypatch, capsys):
    """Runs the command with a cache of its own; gives exit code, standard output and standard error."""
    monkeypatch.setenv("ISLES_CACHE", str(folder / "cache"))

    def call(*flags: str):
        try:
            code = cli.main(["reproduce", *flags, "--results", str(folder / "results")])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("name", studies.NAMES)
def test_study(name, reproduce, folder):
    code, out, err = reproduce(name, "--scale", "quick", "--json")
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    content = json.loads((folder / "results" / f"{name}.json").read_text())
    assert answer["runs"] == len(content["records"]) == len(studies.study(name).configurations(SCALES["quick"]))
    assert content["command"] == f"isles reproduce {name} --scale quick"
    assert content["findings"] == answer["findings"] != []
    for finding in content["findings"]:
        assert all(finding[part] for part in ("claim", "paper", "ours", "criterion"))
        assert finding["agrees"] in (True, False, None)
        assert finding["claim"] in " ".join(out.split())
    for record in content["records"]:
        assert 0 < record["val_loss"] < 10
        assert record["curve"][-1] == [record["job"]["steps"], record["val_loss"]]
    assert (folder / "results" / f"{name}.png").stat().st_size > 1000

    code, _, err = reproduce(name, "--scale", "quick")  # all of it is known by now
    assert code == 0
    assert "to go" not in err
    again = studies.study(name).findings(Records(content["records"]))  # as the page makes them, from the file alone
    assert [vars(finding) for finding in again] == content["findings"]


@pytest.mark.parametrize("name", studies.NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_configurations_of_every_scale_are_made(name, scale):
    jobs = studies.study(name).configurations(SCALES[scale])
    assert all(job.method is None or job.method.sync_every * 2 <= job.steps for job in jobs.values())


def test_a_study_goes_on_elsewhere_from_what_was_written(reproduce, folder, monkeypatch, tmp_path):
    assert reproduce("recipe", "--scale", "quick")[0] == 0
    written = folder / "results" / "recipe.json"
    records = json.loads(written.read_text())["records"]
    written.unlink()
    begun = written.with_suffix(".part.jsonl")
    begun.write_text("".join(json.dumps(record) + "\n" for record in records[1:]))
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path))  # of a machine that has run nothing
    code, _, err = reproduce("recipe", "--scale", "quick")
    assert code == 0
    assert "1 runs to go" in err
    assert [each["key"] for each in json.loads(written.read_text())["records"]] == [each["key"] for each in records]
    assert not begun.exists()


def test_runs_of_later_seeds_are_kept_while_earlier_ones_are_written(reproduce, folder):
    assert reproduce("recipe", "--scale", "quick")[0] == 0
    written = folder / "results" / "recipe.json"
    whole = json.loads(written.read_text())["records"]
    later = [{**record, "key": f"later {record['key']}"} for record in whole]
    written.with_suffix(".part.jsonl").write_text(json.dumps(later[0]) + "\n")
    content = {**json.loads(written.read_text()), "records": [*whole, later[1]]}
    written.write_text(json.dumps(content))
    about = (studies.study("recipe"), SCALES["quick"], Text("synthetic:0.1"))
    results.write(*about, whole, "isles reproduce recipe", written)
    assert results.finished(written).keys() == {each["key"] for each in (*whole, *later[:2])}
    results.write(*about, [*whole, *later[:2]], "isles reproduce recipe", written)
    assert not written.with_suffix(".part.jsonl").exists()


def test_list(reproduce):
    code, out, _ = reproduce("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*studies.NAMES, "speed"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "name a study"),
        (["nothing"], "there is no study 'nothing'"),
        (["methods", "--steps", "3"], "--steps 3 is too short"),
        (["methods", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["methods", "--workers", "0"], "--workers 0 must be at least 1"),
        (["methods", "--model", "huge"], "--model huge is not known"),
        (["methods", "--scale", "quick", "--data", "missing.txt"], "'missing.txt' not found"),
        (["methods", "--scale", "enormous"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(flags, says, reproduce):
    code, _, err = reproduce(*flags)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_page(reproduce, folder):
    assert reproduce("similarity", "--scale", "quick")[0] == 0
    assert reproduce("non-iid", "--scale", "quick")[0] == 0
    (folder / "results" / "similarity.png").unlink()
    code, out, err = reproduce("--document", "--page", str(folder / "docs" / "page.md"))
    assert code == 0, err
    assert out.strip() == str(folder / "docs" / "page.md")
    page = (folder / "docs" / "page.md").read_text()
    for name in ("similarity", "non-iid"):
        for finding in json.loads((folder / "results" / f"{name}.json").read_text())["findings"]:
            assert f"| {finding['claim']} | {finding['paper']} | {finding['ours']} |" in page
        assert f"](../results/{name}.png)" in page
        assert f"`isles reproduce {name} --scale quick`" in page
    assert (folder / "results" / "similarity.png").exists()
    assert str(folder) not in page


def test_page_without_results(reproduce, tmp_path, monkeypatch):
    code = cli.main(["reproduce", "--document", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
    assert code == 2
    assert not (tmp_path / "page.md").exists()


def test_results_name_the_text_but_not_where_it_lies(reproduce, folder):
    text = folder / "secret place" / "novels.train.txt"
    text.parent.mkdir()
    text.write_text("\n".join(f"line {number} of a short text that repeats itself" for number in range(4000)))
    code, _, err = reproduce(
        "evaluated-weights", "--scale", "quick", "--data", str(text), "--val", str(text), "--model", "1x2x8"
    )
    assert code == 0, err
    written = (folder / "results" / "evaluated-weights.json").read_text()
    assert json.loads(written)["text"] == ["novels"]
    assert json.loads(written)["command"].endswith("--model 1x2x8 --data NOVELS --val HELD_OUT")
    assert "secret place" not in written


def test_speed(reproduce, folder):
    code, out, err = reproduce("speed", "--scale", "quick")
    assert code == 0, err
    rates = json.loads((folder / "results" / "speed.json").read_text())["steps_per_second"]
    assert set(rates) == {f"{way}, plain" for way in ("one process", "processes", "stacked", "one after the other")}
    assert all(rate > 0 for rate in rates.values())
    assert "| processes, plain |" in out


def test_a_grid_of_rates_is_extended_until_its_best_is_not_at_an_end():
    study, loss_of = studies.study("worth"), lambda job: 3 + math.log(job.learning_rate / best) ** 2
    for best, expected in ((0.012, 0), (0.0075, 1), (0.0061, 2), (0.03, 2), (1.0, 2)):
        first = study.configurations(SCALES["cpu"])
        jobs = {name: job for name, job in first.items() if name.startswith("demo, AdamW, M = 2: gradual at ")}
        added = []
        while True:
            records = [{"name": n, "job": job.as_dict(), "val_loss": loss_of(job)} for n, job in jobs.items()]
            more = study.extended(jobs, Records(records))
            if not more:
                break
            jobs.update(more)
            added += more
        assert len(added) == expected, (best, added)
        assert all(name.endswith(f" at {jobs[name].learning_rate:g}") for name in added)
