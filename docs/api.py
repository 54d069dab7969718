"""The API pages, from the docstrings: `make docs`.

    python docs/api.py FOLDER

The page of `isles` has the public names. The others are what those refer to: the callbacks for trainers, what a world
is, what a codec is.
"""

import pathlib
import sys
import warnings

import pdoc

import isles

MODULES = (
    "isles",
    "isles.integrations.transformers",
    "isles.integrations.lightning",
    "isles.wire.world",
    "isles.wire.codecs",
    "isles.wire.codec",
)


def write(folder: pathlib.Path) -> None:
    """Writes a page for each module, and index.html, which leads to them."""
    for name in isles.__all__:
        setattr(isles, name, getattr(isles, name))  # isles loads a name when it is used, pdoc looks at what is there
    warnings.filterwarnings("ignore", "Error parsing type annotation")  # it reads dataclasses in the wrong module
    pdoc.render.configure(docformat="markdown", show_source=False, footer_text=f"isles {isles.__version__}")
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
