"""Triton's interpreter without the work that it repeats, and without the memory that it holds.

It patches Triton's language anew at every call of a function inside a kernel, which is half of what it does. The
second time changes nothing. So it is done once for each module that has such functions, and stays until the process
ends.

It makes copies of a kernel's arguments for the host, and writes them back. Here they are in memory of the host, where
kernels can use them as they are. Its copies would keep their memory until Python looks for cycles, and a device would
seem to hold more than it does.
"""

from types import SimpleNamespace
from typing import Any


def prepare() -> None:
    """For this process, in which Triton has been imported with TRITON_INTERPRET=1, or will be."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patch(function)
            patched.add(id(function.__globals__))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor._init_args_hst = lambda self, arguments, options: (arguments, options)
    interpreter.GridExecutor._restore_args_dev = lambda self, *_: None
