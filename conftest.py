"""Modules of kernels are collected, for their doctests, only where there is what they are written for."""

import importlib.util

NEEDS = {"isles/wire/kernels.py": "numba", "isles/wire/triton_kernels.py": "triton"}
collect_ignore = [path for path, package in NEEDS.items() if importlib.util.find_spec(package) is None]
