"""The engine gives the numbers that it gave before, bit for bit (see tests/golden.py for how they are made)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.golden import CODECS, METHODS, STEPS, file_of, trajectory

torch.set_num_threads(1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("preset", METHODS)
def test_trajectory_is_the_golden_one(preset, codec):
    golden = json.loads(file_of(preset).read_text())[codec]
    for rank, (steps, expected_steps) in enumerate(zip(trajectory(preset, codec), golden, strict=True)):
        for step, (weights, expected) in enumerate(zip(steps, expected_steps, strict=True), start=1):
            when = f"step {step}" if step <= STEPS else "the end"
            assert weights == expected, f"{preset} in {codec} is no longer what it was: island {rank}, {when}"


def test_the_golden_trajectories_are_different_from_each_other():
    """Otherwise they would prove little: no two methods, and no two islands, have the same numbers."""
    golden = {preset: json.loads(file_of(preset).read_text()) for preset in METHODS}
    all_of_them = [str(island) for by_codec in golden.values() for islands in by_codec.values() for island in islands]
    assert len(set(all_of_them)) == len(all_of_them) == len(METHODS) * len(CODECS) * 2
