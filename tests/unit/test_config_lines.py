"""A broken configuration: every fault at once, each with its line, and the keys with it where the server is to run."""

from pathlib import Path

import pytest

from cluster.yaml_lines import YamlLines
from deployments.serve_config import read_serve_config
from lora_core.errors import ConfigError

KEY = "k" * 20

BROKEN = """\
proxy_location: HeadOnly
http_option:
  host: 0.0.0.0
applications:
- name: llm
  import_path: deployments.app:build
  args:
    modle: demo
    engine:
      block_size: 0
      block_size: 16
    lora_config: {enable_lora: true, max_lora_rank: 512}
    access:
      tenants:
        Acme: {}
        acme:
          request_per_minute: 3
          adapters: many
  deployments:
  - name: EngineReplica
    num_replica: 2
  - name: Ingress
    num_replicas: -3
"""

RIGHT = """\
http_options:
  port: 8000
  host: {host}
applications:
- name: llm
  import_path: deployments.app:build
  args:
    access:
      keys_file: {keys}
      tenants:
        acme: {{}}
"""


def faults_of(path: Path, environment: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_serve_config(path, environment)
    return str(caught.value).split("\n")


def test_all_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BROKEN)
    head, *lines = faults_of(path)
    assert head == f"{path} has {len(lines)} faults:"
    for start in (
        "  line 2: http_option: unknown key 'http_option'; did you mean 'http_options'?",
        "  line 8: applications[0].args.modle: unknown key 'modle'; did you mean 'model'?",
        "  line 11: applications[0].args.engine.block_size: this key stands here twice",
        "  line 12: applications[0].args.lora_config.max_lora_rank: Input should be less than or equal to",
        "  line 15: applications[0].args.access.tenants.Acme",
        "  line 17: applications[0].args.access.tenants.acme.request",
        "  line 18: applications[0].args.access.tenants.acme.adapters: ",
        "  line 21: applications[0].deployments[0].num_replica: unknown key",
        "  line 23: applications[0].deployments[1].num_re",
    ):  # fmt: skip
        assert any(line.startswith(start) for line in lines), (start, lines)
    assert "did you mean 'requests_per_minute'" in "".join(lines)
    numbers = [int(line.split(":")[0].removeprefix("  line ")) for line in lines]
    assert numbers == sorted(numbers)


def test_what_is_not_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("applications:\n- name: [\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_serve_config(path)


def test_tenants_stay_within_the_sources_of_all(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = RIGHT.format(host="127.0.0.1", keys="/k").replace("acme: {}", "acme: {sources: [/models/acme]}")
    path.write_text(text)
    assert "needs lora_config.sources" in "".join(faults_of(path))
    within = text.replace("    access:", "    lora_config: {sources: [/other]}\n    access:")
    path.write_text(within)
    assert "'/models/acme', which is not within lora_config.sources" in "".join(faults_of(path))
    path.write_text(within.replace("/other", "/models"))
    read_serve_config(path)
    path.write_text(within.replace("[/other]", "[other]"))
    assert "no place for adapters" in "".join(faults_of(path))


@pytest.mark.parametrize(
    ("host", "opens"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False), ("10.1.2.3", False)]
)
def test_without_keys_it_listens_on_this_machine_alone(tmp_path: Path, host: str, opens: bool) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"http_options: {{host: {host}}}\napplications:\n- {{name: llm, import_path: 'a:b'}}\n")
    read_serve_config(path)
    if opens:
        read_serve_config(path, {})
    else:
        head, line = faults_of(path, {})
        assert head == f"{path} has a fault:"
        assert line.startswith(f"  line 1: http_options.host: found '{host}', and there are no keys")
        assert "LORA_FLEET_KEYS" in line
    read_serve_config(path, {"LORA_FLEET_KEYS": f"operator={KEY}"})


def test_faulty_keys_are_faults_of_the_configuration(tmp_path: Path) -> None:
    path, keys = tmp_path / "config.yaml", tmp_path / "keys"
    path.write_text(RIGHT.format(host="0.0.0.0", keys=keys))
    read_serve_config(path)
    assert "cannot be read" in "".join(faults_of(path, {}))
    keys.write_text(f"\nglobex={KEY}\nacme=short\n")
    told = "".join(faults_of(path, {}))
    assert f"line 8: applications[0].args.access: {keys}, line 2: 'globex' is no tenant" in told
    assert f"{keys}, line 3: the key of 'acme' has 5 characters" in told
    assert KEY not in told
    keys.write_text(f"acme={KEY}\n")
    read_serve_config(path, {})


def test_lines_of_what_is_not_there_are_those_of_what_is_around_it() -> None:
    lines = YamlLines("a:\n  b: 1\nc:\n- d: 2\n")
    assert [lines.line(path) for path in (("a", "b"), ("a", "x"), ("c", 0, "d"), ("c", 7), ("x",), ())] == [
        2,
        1,
        4,
        3,
        1,
        1,
    ]
    assert lines.repeated_keys() == []
