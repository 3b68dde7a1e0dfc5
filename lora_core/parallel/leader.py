"""The first rank's side of a model on several devices: it starts the other ranks, and tells them what to do."""

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.step_input import StepInput
from lora_core.errors import ConfigError, EngineDead
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import DecoderConfig
from lora_core.models.split import check_divisible, whole_of
from lora_core.models.weights import read_checkpoint
from lora_core.parallel.checkpoint_modules import CheckpointModules
from lora_core.parallel.group import START_TIMEOUT_S, RankGroup
from lora_core.parallel.rank_messages import Call, Connect, Done, RankMessage, Ready, Started
from lora_core.parallel.rank_process import RankProcess
from lora_core.parallel.shard import Shard
from lora_core.parallel.slot_split import SlotSplit
from lora_core.parallel.step_wire import StepTeller


class Leader:
    """The other ranks of a model, as the first one has them compute with it; for one thread.

    Each is a process that ends with this one, or with this object.

    Attributes:
        group: The first rank's connections to them.
    """

    def __init__(self, engine_config: EngineConfig, lora_config: LoRAConfig, device: torch.device) -> None:
        """Start the other ranks, which go on to load their shares of the model.

        Raises:
            ConfigError: the model cannot be divided so, or there are too few devices.
            EngineDead: a rank did not start.
        """
        size = engine_config.tensor_parallel_size
        check_divisible(decoder_config(read_hf_config(engine_config.model)), size)
        _check_devices(size, device)
        self._model = engine_config.model
        self._teller = StepTeller()
        self._fault: str | None = None
        self._followers: list[RankProcess] = []
        # It has no name, so that nothing is left of it however the ranks end. It is never closed: torch's FileStore
        # opens it once more when it is destroyed, whenever that is, and ends the whole process if it finds a socket.
        with tempfile.TemporaryFile() as file:
            rendezvous = os.dup(file.fileno())
        self._end = weakref.finalize(self, _end_all, self._followers)
        try:
            for rank in range(1, size):
                self._followers.append(RankProcess(rank, engine_config, lora_config, rendezvous))
            for follower in self._followers:
                follower.expect(Started, START_TIMEOUT_S)
            self._tell_all(Connect())
            self.group = RankGroup(Shard(0, size), rendezvous, device, engine_config.rank_timeout_s)
        except BaseException:
            self.close()
            raise
        for follower in self._followers:
            follower.join(self.group)

    def split_slots(self, config: DecoderConfig, dtype: torch.dtype) -> SlotSplit:
        """How adapters' tensors are divided, for the manager.

        Args:
            config: The first rank's share of the model.
            dtype: The model's data type.
        """
        base = CheckpointModules(read_checkpoint(self._model), dtype)
        return SlotSplit(whole_of(config), self._followers, base)

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks give, each when it has begun.

        Raises:
            ConfigError: a rank cannot work with this configuration.
            EngineDead: a rank failed otherwise.
        """
        try:
            return self.group.least(number)
        except EngineDead as error:
            failures = [failure for follower in self._followers if (failure := follower.failure()) is not None]
            raise (failures or [error])[0] from error

    def wait_ready(self, num_blocks: int) -> None:
        """Return when all ranks have loaded their shares of the model.

        Args:
            num_blocks: KV blocks, of which every rank has the same.

        Raises:
            ConfigError: a rank cannot work with this configuration.
            EngineDead: a rank failed otherwise.
        """
        for follower in self._followers:
            found = follower.expect(Ready, START_TIMEOUT_S).num_blocks
            assert found == num_blocks, f"{follower.name} has {found} KV blocks, the first rank {num_blocks}"

    @contextmanager
    def step(self, step: StepInput) -> Iterator[None]:
        """Have the other ranks compute a step, while the first one computes it in the block.

        Raises:
            EngineDead: a rank is gone, or took no part; no further step can be computed.
        """
        self.check()
        try:
            self._tell_all(self._teller.tell(step))
            yield
        except EngineDead as error:
            raise self._explain(error) from error

    def call(self, method: str) -> None:
        """Call a method of the other ranks' runners, one that takes nothing and returns nothing.

        Raises:
            EngineDead: it failed, or a rank is gone.
        """
        self._tell_all(Call(method))
        for follower in self._followers:
            follower.expect(Done, START_TIMEOUT_S)

    def check(self) -> None:
        """Raise EngineDead if a rank's process has ended."""
        if self._fault is None:
            gone = next((follower for follower in self._followers if follower.is_gone), None)
            if gone is None:
                return
            self._fault = gone.fault() or f"{gone.name} has ended"
        raise EngineDead(self._fault)

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._end()

    def _tell_all(self, message: RankMessage) -> None:
        for follower in self._followers:
            follower.tell(message)

    def _explain(self, error: EngineDead) -> EngineDead:
        """What made a step fail, as far as it is known; whoever took no part must not go on."""
        told = [reason for follower in self._followers if (reason := follower.fault()) is not None]
        for follower in self._followers:
            follower.write_stack()
        self._fault = "; ".join(told) or f"{error}; see what holds the ranks up, or raise engine.rank_timeout_s"
        self.close()
        return EngineDead(self._fault)


def _check_devices(size: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and torch finds {torch.cuda.device_count()} CUDA device(s) here; lower "
            f"it, or give each replica {size} GPUs (num_gpus in the ray_actor_options of EngineReplica)"
        )


def _end_all(followers: Sequence[RankProcess]) -> None:
    for follower in followers:
        follower.end()
