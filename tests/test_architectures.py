"""The layers of real architectures are found, and a wrapped model is cut like a plain one.

Tiny models of the usual kinds: mixtures of experts, hybrids, residual nets, GPT-2, Llama, T5; compiled, data-parallel
and sharded ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import isles
from isles.core.fragments import cut
from tests.test_fragments import OUTSIDE, Block, Stack, check_cover, names, tops

torch.set_num_threads(1)


class OtherBlock(Block):
    """Another kind of layer in the same stack, as in models that alternate attention with something else."""


class MixtureBlock(nn.Module):
    """A block that has a list inside, with most of the parameters of the model in it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))


# ---- architectures


def test_experts_inside_a_block_are_not_layers():
    model = Stack(nn.ModuleList(MixtureBlock() for _ in range(3)))
    assert tops(names(model, fragments=4)[1:], 2) == [["layers.0"], ["layers.1"], ["layers.2"]]


def test_a_stack_that_alternates_two_kinds_of_layer_is_one_stack():
    model = Stack(nn.ModuleList((Block, OtherBlock)[i % 2]() for i in range(6)))
    fragments = names(model, fragments=4)
    assert fragments[0] == OUTSIDE
    assert tops(fragments[1:], 2) == [["layers.0", "layers.3"], ["layers.1", "layers.4"], ["layers.2", "layers.5"]]


def test_blocks_of_all_stages_of_a_residual_net():
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 3)
            self.norm = nn.BatchNorm2d(width)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 3)
            self.stage1 = nn.Sequential(Residual(4), Residual(4))
            self.stage2 = nn.Sequential(Residual(8), Residual(8))
            self.head = nn.Linear(8, 10)

    fragments = names(Net(), fragments=3)
    assert tops(fragments, 1)[0] == ["stem", "head"]
    assert tops(fragments[1:], 2) == [["stage1.0", "stage2.0"], ["stage1.1", "stage2.1"]]


def test_linear_layers_of_a_plain_sequential():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert names(model, fragments=3) == [[f"{i}.weight", f"{i}.bias"] for i in (0, 2, 4)]


def test_gpt2_with_tied_embeddings():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=50, n_positions=16))
    assert model.lm_head.weight is model.transformer.wte.weight
    fragments = names(model, fragments=3)
    assert fragments[0] == [f"transformer.{n}" for n in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")]
    assert tops(fragments[1:], 3) == [[f"transformer.h.{i}" for i in share] for share in ((0, 2), (1, 3))]
    check_cover(model, fragments)
    # Its second name will do as well.
    listed = [["lm_head.weight", *fragments[0][1:]], *fragments[1:]]
    assert names(model, fragments=listed) == fragments


def test_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=7, hidden_size=8, intermediate_size=16, num_attention_heads=2, vocab_size=50)
    )
    fragments = names(model, fragment_layers=3)
    assert fragments[0] == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert tops(fragments[1:], 3) == [[f"model.layers.{i}" for i in share] for share in ((0, 3, 6), (1, 4), (2, 5))]
    check_cover(model, fragments)


def test_both_stacks_of_an_encoder_and_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(num_layers=2, num_decoder_layers=2, d_model=8, d_ff=16, d_kv=4, num_heads=2, vocab_size=50)
    )
    fragments = names(model, fragments=3)
    assert all("block" not in name for name in fragments[0])
    assert "shared.weight" in fragments[0]
    assert tops(fragments[1:], 3) == [[f"{part}.block.{i}" for part in ("encoder", "decoder")] for i in (0, 1)]
    check_cover(model, fragments)


# ---- wrappers: a wrapped island and a plain one must agree on names


@pytest.fixture
def one_process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_compiled_models_have_the_names_of_plain_ones():
    plain = names(Stack(nn.ModuleList(Block() for _ in range(4))), fragments=3)
    assert names(torch.compile(Stack(nn.ModuleList(Block() for _ in range(4)))), fragments=3) == plain
    by_block = Stack(nn.ModuleList(torch.compile(Block()) for _ in range(4)))
    assert names(by_block, fragments=3) == plain
    assert names(by_block, fragments=plain) == plain


def test_distributed_and_sharded_models_have_the_names_of_plain_ones(one_process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = names(Stack(nn.ModuleList(Block() for _ in range(4))), fragments=3)
    wrapped = nn.parallel.DistributedDataParallel(Stack(nn.ModuleList(Block() for _ in range(4))))
    assert names(wrapped, fragments=3) == plain
    assert names(torch.compile(wrapped), fragments=3) == plain
    sharded = Stack(nn.ModuleList(Block() for _ in range(4)))
    mesh = init_device_mesh("cpu", (1,))
    for block in sharded.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    fragments = cut(sharded, isles.Method(fragments=3))
    assert [fragment.names for fragment in fragments] == plain
    before = [fragment.read() for fragment in fragments]
    fragments[0].write(before[0] + 1)
    assert torch.equal(fragments[0].read(), before[0] + 1)
    assert torch.equal(fragments[1].read(), before[1])
