"""isles as users have it: built as a wheel, and installed into environments that have what it declares and no more.

An environment is made of links into the one that runs the tests: the packages that the wheel requires, those that they
require, and so on. So it takes no download, and a package that isles imports without declaring it is not there.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parent.parent
NOT_SOURCE = {".git", ".venv", "__pycache__", "build", "dist", "runs"}


@functools.cache
def tracked() -> list[str]:
    """The files of the repository; of an unpacked source distribution all that is there."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if not NOT_SOURCE & set(path.parts) and "egg-info" not in str(path))


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A wheel and a source distribution of a copy of the repository."""
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def environment(folder: pathlib.Path, wheel: pathlib.Path, *extras: str) -> pathlib.Path:
    """The Python of an environment with the wheel, some of its extras, and what they require."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in _required(wheel, extras):
        for entry in sorted({file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}):
            _link(pathlib.Path(str(distribution.locate_file(entry))), site / entry)
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-compile", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, env=_surroundings())
    return python


def run(python: pathlib.Path, *arguments: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """A program of an environment, which sees nothing of the repository."""
    command = [str(python), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=_surroundings())


def _surroundings() -> dict[str, str]:
    """Without PYTHONPATH, on which the repository may be."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def _link(target: pathlib.Path, link: pathlib.Path) -> None:
    """A folder that is no package may be shared by several distributions: it becomes a folder of links."""
    if target.is_dir() and not (target / "__init__.py").exists():
        link.mkdir(exist_ok=True)
        for inner in target.iterdir():
            _link_once(inner, link / inner.name)
    else:
        _link_once(target, link)


def _link_once(target: pathlib.Path, link: pathlib.Path) -> None:
    if target.exists() and not link.exists():
        link.symlink_to(target)


def _required(wheel: pathlib.Path, extras: tuple[str, ...]) -> list[metadata.Distribution]:
    """All that the wheel needs with these extras, as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [(text, extras) for text in requirements(wheel)]
    seen = set()
    while wanted:
        text, of_extras = wanted.pop()
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *of_extras)
        )
        key = (requirement.name.lower(), tuple(sorted(requirement.extras)))
        if not applies or key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), (text, distribution.version)
        found[requirement.name.lower()] = distribution
        wanted += [(inner, tuple(requirement.extras)) for inner in distribution.requires or ()]
    return list(found.values())


def requirements(wheel: pathlib.Path) -> list[str]:
    """What the wheel declares that it needs."""
    return information(wheel).get_all("Requires-Dist") or []


def information(wheel: pathlib.Path) -> metadata.PackageMetadata:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return metadata.PathDistribution(zipfile.Path(archive, str(pathlib.PurePosixPath(name).parent) + "/")).metadata
