"""Settings of the LoRA core and of one engine: frozen, keyword-only, unknown keys refused."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lora_core.sources import AdapterSources

MAX_LORA_RANK = 256
"""Largest `max_lora_rank` the kernels are built for."""

Quantization = Literal["none", "int8", "int4"]
"""Of the base model's weights."""


class Settings(BaseModel):
    """A group of settings; an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoRAConfig(Settings):
    """The `lora_config` section: whether adapters are served, how many at once, and how large."""

    enable_lora: bool = Field(default=False, description="Serve LoRA adapters beside the base model.")
    lora_paths: tuple[str, ...] = Field(
        default=(), description="Adapters loaded at start, each `name=path`, or `path` alone as both."
    )
    max_lora_rank: int = Field(
        default=16, ge=1, le=MAX_LORA_RANK, description="Largest adapter rank accepted; slots are padded to it."
    )
    max_num_loras: int = Field(
        default=1, ge=1, le=256, description="Slots: adapters that can be active in one batch, per replica."
    )
    allow_remote: bool = Field(
        default=False, description="Allow a Hugging Face repo id (`org/name` or `org/name@rev`) as a path."
    )
    sources: tuple[str, ...] | None = Field(
        default=None,
        description=(
            "Where adapters may come from, links followed: absolute folders (with all below them), `hub:org` and "
            "`hub:org/name`. Unset: any folder, and with allow_remote any repo."
        ),
    )
    max_download_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Largest weights that are fetched from the Hub for one adapter; unset: twice host_memory_bytes.",
    )
    adapt_embeddings: bool = Field(
        default=True, description="Serve adapters of embed_tokens and lm_head; their slots cost memory by vocabulary."
    )
    one_launch: bool = Field(
        default=False,
        description="On a GPU, in steps without long prompts, apply a layer's adapters with one kernel, not with two.",
    )
    host_memory_bytes: int = Field(
        default=8 * 2**30,
        ge=1,
        description="Host memory for loaded adapters, per replica; those not used lately are read from disk again.",
    )
    read_timeout_s: float = Field(
        default=60,
        gt=0,
        description="How long requests wait for an adapter's files to be read again before they are ended.",
    )
    drain_timeout_s: float = Field(
        default=300,
        ge=0,
        description="How long requests of an unloaded or replaced adapter may take to end before they are ended.",
    )

    @property
    def download_limit_bytes(self) -> int:
        """Largest weights that are fetched for one adapter."""
        # Files are at most twice as large as the tensors they become: fp32 for a base of 16 bits.
        return 2 * self.host_memory_bytes if self.max_download_bytes is None else self.max_download_bytes

    @model_validator(mode="after")
    def _sources_are_places(self) -> "LoRAConfig":
        AdapterSources(self.sources or (), "lora_config.sources")
        return self

    @model_validator(mode="after")
    def _paths_need_lora(self) -> "LoRAConfig":
        if self.lora_paths and not self.enable_lora:
            raise ValueError(
                f"lora_paths names {len(self.lora_paths)} adapter(s) while enable_lora is false; "
                "set enable_lora: true to serve them, or remove lora_paths"
            )
        return self


class EngineSettings(Settings):
    """The `engine` section: one engine's device and budgets."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of weights and activations; auto is the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto is cuda where there is one.")
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description=(
            "Devices that share the model, each with a process of its own: GPUs of one machine, or its CPU. It divides "
            "the model's heads; docs/tensor_parallel.md says what else it takes."
        ),
    )
    rank_timeout_s: float = Field(
        default=30,
        gt=0,
        description="With tensor_parallel_size: the engine ends when one of its processes takes no part for longer.",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus answer in tokens; unset is the model's own limit."
    )
    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: int = Field(default=512, ge=1, description="Most tokens, prompts and answers, in a step.")
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens in one KV-cache block.")
    kv_cache_tokens: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Tokens the KV cache holds. Unset: 16384 on a CPU, and on a GPU as many as gpu_memory_utilization leaves "
            "room for."
        ),
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description=(
            "On a GPU: the share of its memory that is free at start which the engine may take. What weights, adapter "
            "slots, graphs and a step's activations leave of it is the KV cache's, with kv_cache_tokens unset."
        ),
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep the KV blocks of ended requests for those that begin with the same text, adapter by adapter.",
    )
    max_slot_wait_s: float = Field(
        default=2.0,
        ge=0,
        description=(
            "An adapter with waiting requests gets a slot within so long, however busy those in slots are; "
            "docs/scheduling.md says how, and what holds when more of them wait than there are slots."
        ),
    )
    max_loras_per_step: int | None = Field(
        default=None, ge=1, description="Most adapters in one step; more take turns. Unset: as many as have slots."
    )
    attention_backend: Literal["triton", "flashinfer"] = Field(
        default="triton",
        description=(
            "On a GPU: whose kernels attend. triton: this project's. flashinfer: FlashInfer's, where flashinfer-python "
            "is installed and serves the model; else the log says why, and triton's do."
        ),
    )
    cuda_graphs: Literal["none", "common", "all"] = Field(
        default="common",
        description=(
            "On a GPU with Triton: the steps that replay captured graphs, of those in which every row decodes. common: "
            "steps without adapters, or whose adapters change linear layers by LoRA alone. all: also steps with DoRA "
            "adapters or adapters of the embedding, for half as many graphs more."
        ),
    )
    max_graph_seqs: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="Most sequences of a step that replays a graph; larger steps do without.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description=(
            "Prepare the next step while the device computes the last one, whose tokens it keeps. Unset: on a GPU."
        ),
    )
    compile: bool = Field(
        default=False,
        description=(
            "Fuse what layers compute between products and attention by torch.compile, at start. Meant for GPUs; a CPU "
            "gains nothing, and needs a C++ compiler for it."
        ),
    )
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the engine, or of each of its ranks; unset: torch's choice."
    )
    quantization: Quantization = Field(
        default="none",
        description=(
            "Weight-only quantisation at start, through torchao, of the linear layers in the base's decoder layers; "
            "embedding and head stay as they are, and adapters apply to unquantised activations. int4 is for CPUs, "
            "and fast only with dtype bfloat16."
        ),
    )
    pack_weights: bool = Field(
        default=True, description="On CPU, reorder the linear weights that are not quantised for oneDNN at start."
    )

    @model_validator(mode="after")
    def _quantized_is_whole(self) -> "EngineSettings":
        if self.tensor_parallel_size > 1 and self.quantization != "none":
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and quantization {self.quantization!r}, and "
                "quantised weights are not divided; set quantization: none, or tensor_parallel_size: 1"
            )
        return self


class EngineConfig(EngineSettings):
    """An engine's settings together with the model it serves."""

    model: Path = Field(description="Folder of the base model (config.json, *.safetensors, tokenizer files).")
