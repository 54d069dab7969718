"""The pages of the documentation, read by tests: links, headings, code blocks, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.installed import ROOT, tracked

PAGES = [name for name in tracked() if name.endswith(".md")]
WITH_COMMANDS = [name for name in PAGES if re.fullmatch(r"README\.md|CONTRIBUTING\.md|docs/[\w-]+\.md", name)]
PROGRAMS = {
    *("isles", "python", "python3", "torchrun", "accelerate", "make", "pip", "export", "cd", ".", "source", "bash"),
    *(
        "sh",
        "git",
        "ssh",
        "scp",
        "nc",
        "curl",
        "wget",
        "docker",
        "sudo",
        "sysctl",
        "aws",
        "kubectl",
        "conda",
        "uv",
        "mpirun",
    ),
    *("apt", "apt-get", "pytest", "ruff", "mypy", "twine", "tensorboard", "srun", "sbatch", "wg", "ip", "tc"),
}
"""A line of a code block that begins with one of these is a command, and so is one that begins with a path to one."""


@dataclass(frozen=True)
class Command:
    """A command of a page, on one line, without the comment behind it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Code blocks with their language; those that are indented have none."""
    lines, before = iter(text.splitlines()), ""
    indented: list[str] = []
    for line in lines:
        if fence := re.match(r"```(\w*)$", line):
            inside = []
            for inner in lines:
                if inner == "```":
                    break
                inside.append(inner)
            yield fence[1], inside
        elif line.startswith("    ") and (indented or not before.strip()):
            indented.append(line[4:])
            continue
        elif line.strip() or not indented:
            if indented:
                yield "", indented
            indented = []
        before = line
    if indented:
        yield "", indented


def prose(text: str) -> str:
    """The page without its code blocks; what is in backticks stays."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<=\n\n)(?:    .*\n|\n(?=    ))+", "\n", text)


def commands(page: str) -> list[Command]:
    """The commands in code blocks."""
    found = []
    for language, lines in blocks(read(page)):
        if language in ("", "sh", "bash", "console", "text"):
            for line in re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines():
                line = re.sub(r"(^|\s+)#\s.*", "", line.removeprefix("$ ")).strip()
                if re.match(r"\S+( \S|$)", line) and re.split(r"[ /]", line.partition(" ")[0])[-1] in PROGRAMS:
                    found.append(Command(page, line))
    return found


def inline(page: str) -> list[Command]:
    """Commands of isles with flags or parts, in the text."""
    spans = re.findall(r"`([^`]+)`", prose(read(page)))
    return [Command(page, " ".join(span.split())) for span in spans if re.match(r"isles\s+[a-z]+\s+\S", span)]


def links(text: str) -> list[str]:
    """What links and images point at."""
    text = re.sub(r"`[^`\n]*`", "", prose(text))
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'<img src="([^"]+)"', text)


def anchors(text: str) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    found: list[str] = []
    for title in re.findall(
        r"^#+ +(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    ):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)
