"""Which configurations are judged for which target: all that the engine may run, or of each kind enough for CI."""

from collections.abc import Iterator

import torch

from kernels.tuning import meta_device
from tests.kernels.sites import (
    DECODE_FEW,
    DECODE_MANY,
    DECODE_SHARED,
    GEMMA_2_2B,
    GEMMA_3_4B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    LLAMA_3_405B,
    MIXED,
    PREFILL,
    RANKS,
    SMOLLM2_135M,
    Model,
    Step,
)
from tests.kernels.static.attention import attention
from tests.kernels.static.configurations import (
    Configuration,
    StepTensors,
    embedding,
    gains,
    one_launch,
    one_launch_with_activation,
    two_launches,
    two_launches_with_activation,
)
from tests.kernels.static.targets import SM_90, Target

STEPS = (DECODE_FEW, DECODE_MANY, DECODE_SHARED, MIXED, PREFILL)

_PAIR_STEPS = (DECODE_FEW, DECODE_MANY, DECODE_SHARED, MIXED)
"""With larger tiles than these steps have there are two launches."""


def shipped(target: Target, *, everything: bool = False) -> list[Configuration]:
    """The configurations to judge for a target, each machine code once."""
    with meta_device(target.device):
        found = _everything(target) if everything else _sample(target)
        distinct = {configuration.identity: configuration for configuration in reversed(list(found))}
    return list(reversed(distinct.values()))


def _everything(target: Target) -> Iterator[Configuration]:
    for model in (LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, SMOLLM2_135M, GEMMA_3_4B):
        for step in STEPS:
            for rank in RANKS:
                yield from _model(model, StepTensors(step, rank), target)
    for rank in RANKS:
        for step in (DECODE_FEW, PREFILL):
            for site in SMOLLM2_135M.layer:
                yield from two_launches(site, StepTensors(step, rank, torch.float32))
            yield from two_launches(LLAMA_3_8B.qkv, StepTensors(step, rank, torch.float16))
    for model in (LLAMA_3_8B, SMOLLM2_135M, GEMMA_2_2B, GEMMA_3_4B):
        for step in (*STEPS, Step(1, 1), Step(256, 256)):
            for dtype in (torch.bfloat16, torch.float32):
                yield from attention(model, step, dtype)


def _model(model: Model, tensors: StepTensors, target: Target) -> Iterator[Configuration]:
    """Every launch of a model at a step's shapes."""
    for site in (*model.layer, model.lm_head):
        yield from two_launches(site, tensors)
        if tensors.step in _PAIR_STEPS:
            yield one_launch(site, tensors)
        if target.can_launch_dependently:
            yield from two_launches(site, tensors, dependent=True)
    yield from two_launches_with_activation(model.gate_up, tensors)
    if tensors.step in _PAIR_STEPS:
        yield one_launch_with_activation(model.gate_up, tensors)
    yield from embedding(model, tensors)
    yield from gains(model.qkv, tensors)


def _sample(target: Target) -> Iterator[Configuration]:
    """Every kernel, rank and step, at the sites where they differ most; more of it for the target that is tuned for."""
    yield from _layer(LLAMA_3_8B, DECODE_MANY, 16)
    for step in STEPS if target is SM_90 else ():
        yield from _layer(LLAMA_3_8B, step, 16)
    for rank in RANKS:
        for step in (DECODE_FEW, DECODE_MANY, PREFILL) if target is SM_90 else (PREFILL,):
            tensors = StepTensors(step, rank)
            yield from two_launches(LLAMA_3_8B.qkv, tensors)
            yield from two_launches_with_activation(LLAMA_3_8B.gate_up, tensors)
    for step, rank in ((DECODE_FEW, 16), (DECODE_MANY, 64), (MIXED, 16)) if target is SM_90 else ((DECODE_MANY, 16),):
        tensors = StepTensors(step, rank)
        yield one_launch(LLAMA_3_8B.qkv, tensors)
        yield one_launch(LLAMA_3_8B.down, tensors)
        yield one_launch_with_activation(LLAMA_3_8B.gate_up, tensors)
        if target.can_launch_dependently:
            yield from two_launches(LLAMA_3_8B.qkv, tensors, dependent=True)
            yield from two_launches_with_activation(LLAMA_3_8B.gate_up, tensors, dependent=True)
    if target is SM_90:
        yield from two_launches(LLAMA_3_8B.lm_head, StepTensors(DECODE_MANY, 16))
        yield from two_launches(LLAMA_3_70B.down, StepTensors(DECODE_SHARED, 16))
        yield from two_launches(LLAMA_3_405B.qkv, StepTensors(DECODE_MANY, 64))
    yield from _layer(SMOLLM2_135M, DECODE_FEW, 8)
    yield from two_launches(SMOLLM2_135M.qkv, StepTensors(PREFILL, 16))
    yield from two_launches(SMOLLM2_135M.qkv, StepTensors(MIXED, 8, torch.float32))
    for model, step, rank in ((LLAMA_3_8B, DECODE_FEW, 16), (SMOLLM2_135M, PREFILL, 8)):
        yield from embedding(model, StepTensors(step, rank))
        yield from gains(model.qkv, StepTensors(step, rank))
    for model in (LLAMA_3_8B, SMOLLM2_135M, GEMMA_2_2B, GEMMA_3_4B):
        for step in (DECODE_FEW, PREFILL):
            yield from attention(model, step)
    yield from attention(SMOLLM2_135M, DECODE_FEW, torch.float32)


def _layer(model: Model, step: Step, rank: int) -> Iterator[Configuration]:
    tensors = StepTensors(step, rank)
    for site in model.layer:
        if site == model.gate_up:
            yield from two_launches_with_activation(site, tensors)
        else:
            yield from two_launches(site, tensors)
