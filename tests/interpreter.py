"""Triton's interpreter without the work that it repeats.

It patches Triton's language anew at every call of a function inside a kernel, which is half of what it does. The
second time changes nothing. So it is done once for each module that has such functions, and stays until the process
ends.
"""

from types import SimpleNamespace
from typing import Any


def patch_once() -> None:
    """For this process, in which Triton has been imported with TRITON_INTERPRET=1, or will be."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patch(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once
