"""`args` and the whole configuration file: right values pass, each wrong one is named with what would be right."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.schema import parse_settings
from deployments.serve_config import read_serve_config
from lora_core.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"


def test_shipped_configuration_is_right() -> None:
    config = read_serve_config(CONFIG)
    assert config.app_name == "llm"
    assert config.address == "http://127.0.0.1:8000"
    assert config.settings.base_name == "SmolLM2-135M-Instruct"
    assert len(config.settings.lora_config.lora_paths) == 3


def test_what_the_shipped_configuration_only_mentions_works_too(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(re.sub(r"^( +)# (\w+: )", r"\1\2", CONFIG.read_text(), flags=re.MULTILINE))
    shipped, settings = read_serve_config(CONFIG).settings, read_serve_config(path).settings
    assert settings.engine.quantization == "int8"
    assert not settings.lora_config.adapt_embeddings
    assert settings.lora_config.host_memory_bytes == shipped.lora_config.host_memory_bytes == 8 * 2**30
    assert settings.lora_config.drain_timeout_s == shipped.lora_config.drain_timeout_s == 300
    assert settings.queue == shipped.queue


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"modle": "demo"}, "modle: unknown key 'modle'; did you mean 'model'?"),
        ({"engine": {"max_num_seq": 3}}, "engine.max_num_seq: unknown key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"zzz": 1}, "known keys: model, model_name, engine, lora_config, replica, queue, router"),
        ({"lora_config": {"enable_lora": True, "max_lora_rank": 512}}, "less than or equal to 256 (found 512)"),
        ({"lora_config": {"enable_lora": True, "max_num_loras": 0}}, "greater than or equal to 1 (found 0)"),
        ({"lora_config": {"lora_paths": ["a=b"]}}, "set enable_lora: true"),
        ({"lora_config": {"host_memory_bytes": 0}}, "lora_config.host_memory_bytes: Input should be greater than or"),
        ({"lora_config": {"drain_timeout_s": -1}}, "lora_config.drain_timeout_s: Input should be greater than or"),
        ({"lora_config": {"adapt_embedding": False}}, "did you mean 'adapt_embeddings'?"),
        ({"queue": {"max_waiting": 0}}, "queue.max_waiting: Input should be greater than or equal to 1 (found 0)"),
        ({"queue": {"max_wait": 1}}, "did you mean 'max_waiting'?"),
        ({"replica": {"stream_window_s": -1}}, "replica.stream_window_s: Input should be greater than or equal to 0"),
        ({"engine": {"quantization": "int3"}}, "engine.quantization: Input should be 'none', 'int8' or 'int4'"),
        ({"engine": {"dtype": "int3"}}, "engine.dtype: "),
        ({"engine": {"max_num_seqs": "many"}}, "valid integer"),
    ],
)
def test_wrong_args_are_named(args: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(args)
    assert named in str(caught.value)


def test_downloads_have_a_limit() -> None:
    settings = parse_settings({"lora_config": {"host_memory_bytes": 100}})
    assert settings.lora_config.download_limit_bytes == 200
    settings = parse_settings({"lora_config": {"host_memory_bytes": 100, "max_download_bytes": 7}})
    assert settings.lora_config.download_limit_bytes == 7


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings({"modle": "x", "engine": {"block_size": 0}})
    assert "modle" in str(caught.value)
    assert "block_size" in str(caught.value)


def write(folder: Path, change: dict[str, Any], where: list[str | int]) -> Path:
    content = yaml.safe_load(CONFIG.read_text())
    target = content
    for part in where:
        target = target[part]
    target.update(change)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("change", "where", "named"),
    [
        ({"http_option": {}}, [], "did you mean 'http_options'?"),
        ({"import_paths": "x"}, ["applications", 0], "did you mean 'import_path'?"),
        ({"num_replica": 3}, ["applications", 0, "deployments", 0], "did you mean 'num_replicas'?"),
        ({"num_replicas": -3}, ["applications", 0, "deployments", 1], "num_replicas"),
        ({"num_replicas": 3}, ["applications", 0, "deployments", 0], "autoscaling_config"),
        (
            {"max_replica": 3},
            ["applications", 0, "deployments", 0, "autoscaling_config"],
            "deployments[0].autoscaling_config.max_replica: unknown key 'max_replica'; did you mean 'max_replicas'?",
        ),
    ],
)
def test_wrong_keys_outside_args_are_named(
    tmp_path: Path, change: dict[str, Any], where: list[str | int], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_serve_config(write(tmp_path, change, where))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "num_cpus"),
    [
        ({}, 2.0),
        ({"autoscaling_config": {"min_replicas": 1, "initial_replicas": 3, "max_replicas": 5}}, 3.0),
        ({"autoscaling_config": {"max_replicas": 5}}, 1.0),
        ({"autoscaling_config": None, "num_replicas": 4}, 4.0),
        ({"autoscaling_config": None}, 1.0),
    ],
)
def test_cpus_are_those_of_the_replicas_it_starts_with(tmp_path: Path, change: dict[str, Any], num_cpus: float) -> None:
    assert read_serve_config(write(tmp_path, change, ["applications", 0, "deployments", 0])).num_cpus == num_cpus


@pytest.mark.parametrize("text", ["applications: [", "- 1", "applications: []", ""])
def test_broken_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_serve_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_serve_config(tmp_path / "absent.yaml")
