"""The trainers are optional: isles imports none of them, and says in one line what is missing."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_without_the_library_one_line_says_what_to_install(name):
    hidden = "import sys; sys.modules.update(dict.fromkeys(['transformers', 'lightning', 'pytorch_lightning']))"
    command = [sys.executable, "-c", f"{hidden}; import isles.integrations.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert re.match(rf"ImportError: isles\.integrations\.{name} needs .*pip install", done.stderr.splitlines()[-1])


def test_importing_isles_imports_no_trainer():
    code = "import sys, isles; isles.DiLoCo, isles.TorchWorld; print([n for n in sys.modules if n in NAMES])"
    names = "{'transformers', 'lightning', 'pytorch_lightning', 'accelerate', 'peft', 'trl'}"
    command = [sys.executable, "-c", f"NAMES = {names}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.stdout.strip() == "[]", done.stderr
