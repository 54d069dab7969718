"""What the processes of tests have in memory from their start: the server they are forked from imports this once.

Importing torch takes two seconds, what the first step of any optimizer imports (torch._dynamo) two more, and loading
compiled kernels half a second. Nothing is computed here, and no thread is left: a fork has only the thread that made
it.
"""

import gc

import numpy  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import isles.core.diloco
import isles.elastic.world
import isles.reproduce.train
import isles.train.command
import isles.train.loop
import isles.wire.torch_world  # noqa: F401
from tests import kernels

kernels.warm_up()
gc.collect()
gc.freeze()  # forks share this memory; looking for garbage in it would copy it
