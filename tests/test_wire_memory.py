"""Tensors as the arrays that kernels work on, and what is remembered of them."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch

import isles
from isles.core.fragments import Fragment
from isles.wire import memory
from isles.wire.memory import empty, empty_payload, memory_of, remember


def shares(array: np.ndarray, tensor: torch.Tensor) -> bool:
    return array.ctypes.data == tensor.data_ptr() and array.size == tensor.numel()


def test_new_vectors_are_known_by_their_memory():
    for tensor, dtype in ((empty(100), torch.float32), (empty_payload(100), torch.uint8)):
        assert (tensor.dtype, tensor.shape) == (dtype, (100,))
        assert shares(memory_of(tensor, dtype), tensor)
        assert memory_of(tensor, dtype) is memory_of(tensor, dtype)
    assert memory_of(empty(3), torch.uint8) is None
    assert empty(3, torch.device("meta")).device.type == "meta"


def test_what_is_remembered_is_found_again_and_forgotten_with_the_tensor():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert memory_of(tensor) is not memory_of(tensor)
    assert remember(tensor) is tensor
    array = memory_of(tensor)
    assert memory_of(tensor) is array
    tensor[1, 2] = 50.0
    assert array.tolist() == [0, 1, 2, 3, 4, 50]
    key, gone = id(tensor), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert key not in memory._arrays


def test_what_is_no_plain_memory_is_not_remembered():
    for tensor in (torch.zeros(4, 4).t()[:2], torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.bfloat16)):
        assert remember(tensor) is tensor
        assert memory_of(tensor) is None
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert memory_of(parameter) is None, "in-place work on it is autograd's business"


def test_a_copy_of_a_remembered_tensor_has_memory_of_its_own():
    tensor = remember(torch.zeros(3))
    other = copy.deepcopy(tensor)
    memory_of(other)[:] = 1.0
    assert (tensor.tolist(), other.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_a_fragment_notices_parameters_that_have_moved():
    parameter = torch.nn.Parameter(torch.zeros(3))
    fragment = Fragment([("weight", parameter)])
    first = fragment.tensors_in_place()
    assert fragment.tensors_in_place() is first
    parameter.data = torch.ones(3)
    (moved,) = fragment.tensors_in_place()
    assert moved.tolist() == [1, 1, 1]
    assert shares(memory_of(moved), parameter)


@pytest.mark.parametrize("update", ["fresh", "eager"])
def test_training_goes_on_the_same_when_weights_move_in_memory(update):
    def train(world, moves: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = isles.Method(sync_every=4, fragments=2, update=update, codec="e3m0", mixing=0.5)
        data = torch.Generator().manual_seed(world.rank)
        with isles.DiLoCo(model, optimizer, method, world=world):
            for step in range(16):
                model(torch.randn(4, 8, generator=data)).square().mean().backward()
                if moves and step % 3 == 0:
                    for parameter in model.parameters():
                        parameter.data = parameter.data.clone()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    stayed = isles.run_local(lambda world: train(world, False), 2)
    moved = isles.run_local(lambda world: train(world, True), 2)
    assert all(map(torch.equal, stayed, moved))
