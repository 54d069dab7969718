"""`isles doctor`: what isles finds on this machine, whether it works, and what to do about what is missing.

sight.py      what there is: torch, devices, backends, numba, Triton, store client, network, limits
kernels.py    every kernel that is there against PyTorch on the CPU, bit for bit
smoke.py      two islands, as threads and as processes, on the devices that are there
command.py    the lines that are printed, and the exit code
"""
