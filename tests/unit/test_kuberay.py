"""`cluster/kuberay`: its manifests fit KubeRay's published schema, and what they deploy fits ours."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

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


@pytest.mark.parametrize("name", ["config.yaml", "gpu.yaml", "multi_node.yaml"])
def test_a_configuration_is_right(name: str) -> None:
    served = read_serve_config(CLUSTER / name)
    names = {"EngineReplica", "Ingress"}
    assert {found["name"] for found in served.content["applications"][0]["deployments"]} == names


def deployment(served: ServeConfig, name: str) -> dict[str, Any]:
    """One deployment's section."""
    (found,) = [one for one in served.content["applications"][0]["deployments"] if one["name"] == name]
    return dict(found)
