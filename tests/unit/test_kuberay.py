"""`cluster/kuberay`: its manifests fit KubeRay's published schema, and what they deploy fits ours."""

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.scripts.scripts import cli as ray_cli

from deployments.local_cluster import ENVIRONMENT
from deployments.serve_config import ServeConfig, read_serve_config

CLUSTER = Path(__file__).parents[2] / "cluster"
MANIFEST = CLUSTER / "kuberay" / "rayservice.yaml"
SCHEMA = CLUSTER / "kuberay" / "rayservice_v1.schema.json"


def strict(schema: Any) -> Any:
    """The schema with every field it does not name refused, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields") and schema["properties"]:
        # `metadata` is Kubernetes' own, and any.
        inner["additionalProperties"] = False
    return inner


def service() -> dict[str, Any]:
    """The RayService of the manifest."""
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    (found,) = [document for document in documents if document["kind"] == "RayService"]
    return dict(found)


def faults(document: dict[str, Any]) -> list[str]:
    """What the schema says against a manifest."""
    schema = strict(json.loads(SCHEMA.read_text()))
    schema["additionalProperties"] = True
    validator = jsonschema.Draft7Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def test_the_manifest_fits_the_published_schema() -> None:
    assert faults(service()) == []


def test_a_misspelt_field_is_found() -> None:
    document = service()
    document["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplica"] = 3
    assert [fault.partition(":")[0] for fault in faults(document)] == ["$.spec.rayClusterConfig.workerGroupSpecs[0]"]


def test_what_it_deploys_is_read_by_this_project(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(service()["spec"]["serveConfigV2"])
    served = read_serve_config(config)
    assert served.settings.router.journal is not None
    assert served.settings.router.journal.startswith("/shared/")
    spec = service()["spec"]["rayClusterConfig"]
    assert spec["rayVersion"] == ray.__version__
    engine = deployment(served, "EngineReplica")
    # A replica of the largest number the deployment may have finds a node.
    assert spec["workerGroupSpecs"][0]["maxReplicas"] >= engine["autoscaling_config"]["max_replicas"]
    # A pod is not killed before its replica has had the time to drain.
    grace_s = spec["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > engine["graceful_shutdown_timeout_s"]


def test_every_volume_that_is_mounted_exists() -> None:
    spec = service()["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_its_pods_have_what_this_project_sets_for_a_cluster_of_its_own() -> None:
    spec = service()["spec"]["rayClusterConfig"]
    wanted = {name: value for name, value in ENVIRONMENT.items() if name.startswith("RAY_SERVE_")}
    assert wanted
    for container in containers(spec):
        found = {variable["name"]: variable["value"] for variable in container["env"]}
        assert wanted.items() <= found.items()


def test_a_pod_that_goes_asks_ray_as_this_ray_is_asked() -> None:
    (worker,) = service()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = worker["template"]["spec"]["containers"]
    _bash, _flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    program, command, *options = shlex.split(script.partition(";")[0])
    assert program == "ray"
    # Parses the options, and does nothing.
    ray_cli.commands[command].make_context(command, options)


def test_the_network_policy_is_for_these_pods_and_opens_their_ports() -> None:
    (policy,) = yaml.safe_load_all((CLUSTER / "kuberay" / "network_policy.yaml").read_text())
    spec = service()["spec"]["rayClusterConfig"]
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert wanted <= group["template"]["metadata"]["labels"].items()
    (open_ports,) = [rule["ports"] for rule in policy["spec"]["ingress"] if "ports" in rule]
    named = {port["containerPort"]: port["name"] for one in containers(spec) for port in one["ports"]}
    assert [named[port["port"]] for port in open_ports] == ["serve", "metrics"]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of all pods of a cluster."""
    groups = (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.mark.parametrize("name", ["config.yaml", "gpu.yaml", "multi_node.yaml"])
def test_a_configuration_is_right(name: str) -> None:
    served = read_serve_config(CLUSTER / name)
    names = {"EngineReplica", "Ingress"}
    assert {found["name"] for found in served.content["applications"][0]["deployments"]} == names


def deployment(served: ServeConfig, name: str) -> dict[str, Any]:
    """One deployment's section."""
    (found,) = [one for one in served.content["applications"][0]["deployments"] if one["name"] == name]
    return dict(found)
