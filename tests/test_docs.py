"""The documentation: no link leads nowhere, the API pages hold every public name, the README's code runs."""

import ast
import html.parser
import os
import pathlib
import posixpath
import re
import subprocess
import sys
import urllib.parse

import pytest
import torch
import torch.distributed as dist

import isles
from tests.installed import ROOT, tracked
from tests.pages import PAGES, anchors, blocks, links, read


@pytest.mark.parametrize("page", PAGES)
def test_links_and_their_anchors_lead_somewhere(page):
    for link in links(read(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (pathlib.PurePosixPath(page).parent / path) if path else pathlib.PurePosixPath(page)
        name = str((ROOT / target).resolve().relative_to(ROOT.resolve()))
        assert name in tracked(), f"{page}: there is no {link}"
        if anchor:
            assert anchor in anchors(read(name)), f"{page}: {name} has no heading #{anchor}"


def test_a_link_that_leads_nowhere_is_found():
    text = "# One: two\n\n## `Three`, *four*\n\n[a](b.md#c) ![d](e.png)\n\n    [f](g)\n\n`[h](i)`\n"
    assert links(text) == ["b.md#c", "e.png"]
    assert anchors(text) == {"one-two", "three-four"}


def test_every_page_can_be_reached_from_the_start_page():
    index = {link.partition("#")[0] for link in links(read("docs/index.md"))}
    missing = {pathlib.PurePosixPath(page).name for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert missing - index == {"index.md"}
    assert "docs/index.md" in links(read("README.md"))


def test_files_that_the_code_and_the_pages_mention_exist():
    mentioned = re.compile(r"\b(?:docs|examples|experiments|benchmarks|tests|isles)/[\w/-]+\.(?:md|py|png|jsonl)\b")
    known = set(tracked())
    for name in tracked():
        if name.endswith((".py", ".md")) and not name.startswith("tests/"):
            for path in mentioned.findall(read(name)):
                assert path in known, f"{name}: {path}"


@pytest.mark.parametrize("page", PAGES)
def test_python_on_pages_can_be_parsed(page):
    for language, lines in blocks(read(page)):
        if language == "python":
            ast.parse("\n".join(lines))


def test_the_readme_is_one_page():
    assert len(read("README.md").splitlines()) <= 90


def test_the_code_of_the_readme_runs(tmp_path):
    (code,) = (lines for language, lines in blocks(read("README.md")) if language == "python")
    code = [line.replace('init_process_group("gloo")', 'init_process_group("gloo", **place)') for line in code]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    network = torch.nn.Sequential(model, torch.nn.Flatten(0))
    network.register_forward_hook(lambda module, given, result: result.sum())
    seen = []
    names = {
        "place": {"init_method": f"file://{tmp_path}/rendezvous", "rank": 0, "world_size": 1},
        "model": network,
        "optimizer": torch.optim.SGD(network.parameters(), lr=0.1),
        "loader": torch.randn(5, 2, 3),
        "evaluate": seen.append,
    }
    try:
        exec("\n".join(code), names)
    finally:
        dist.destroy_process_group()
    assert seen == [network]
    assert names["diloco"].step_count == 5


# ---- the API pages


class Page(html.parser.HTMLParser):
    """The links of a page, and where links may point."""

    def __init__(self, text):
        super().__init__()
        self.links, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag in ("a", "link") and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img") and "src" in found:
            self.links.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "error::UserWarning", "docs/api.py", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path.relative_to(folder).as_posix(): Page(path.read_text()) for path in folder.rglob("*.html")}


def test_links_of_the_api_pages_lead_somewhere(site):
    count = 0
    for name, page in site.items():
        for link in page.links:
            if re.match(r"https?:|data:", link):
                continue
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            assert target in site, f"{name}: {link}"
            assert not anchor or anchor in site[target].ids, f"{name}: {link}"
            count += 1
    assert count > 300


def test_the_api_pages_have_every_public_name_with_its_docstring(site):
    assert site["isles.html"].ids >= set(isles.__all__)
    for name in set(isles.__all__) - {"codecs"}:
        assert (getattr(isles, name).__doc__ or "").strip(), name
        assert not getattr(isles, name).__doc__.startswith(f"{name}("), f"{name}: what dataclass writes by itself"
    for trainer in ("transformers", "lightning"):
        assert "DiLoCoCallback" in site[f"isles/integrations/{trainer}.html"].ids
