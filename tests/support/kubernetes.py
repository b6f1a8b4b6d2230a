"""Objects of Kubernetes: Helm renders the chart, and Kubernetes' own schemas judge each object.

`scripts/install_validators.py` installs Helm and the schemas.
"""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import yaml

from scripts import install_validators
from tests.test_docs import ROOT

CHART: Final = ROOT / "deploy" / "helm" / "streamer"
OPERATOR: Final = "monitoring.coreos.com/v1"
"""The API of the Prometheus Operator, which Kubernetes' schemas lack."""
Object = dict[str, Any]


def helm(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run Helm with a home of its own."""
    program = install_validators.helm()
    assert program is not None, "the tests of the chart need Helm on the path: brew install helm"
    return subprocess.run(
        [program, *arguments],
        env=os.environ | {"HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )


def render(values: Object, directory: Path, *arguments: str) -> list[Object]:
    """Return the objects of the chart with *values*."""
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    command = ("template", "shop", str(CHART), "--values", str(path), *arguments)
    rendered = helm(*command, directory=directory)
    assert rendered.returncode == 0, rendered.stderr
    return [document for document in yaml.safe_load_all(rendered.stdout) if document]


@cache
def _definitions(version: str) -> Object:
    return json.loads(install_validators.kubernetes_schema(version).read_text())["$defs"]  # type: ignore[no-any-return]


@cache
def _validator(version: str, api: str, kind: str) -> Any:
    definitions = _definitions(version)

    def is_named(definition: Object) -> bool:
        properties = definition.get("properties", {})
        names = (properties.get(key, {}).get("enum") for key in ("apiVersion", "kind"))
        return list(names) == [[api], [kind]]

    (name,) = (name for name, definition in definitions.items() if is_named(definition))
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions})


def check_schema(document: Object) -> None:
    """Check an object against the definitions of the oldest and the newest Kubernetes."""
    assert document["metadata"]["name"]
    if document["apiVersion"] == OPERATOR:
        return
    for version in install_validators.KUBERNETES_VERSIONS:
        validator = _validator(version, document["apiVersion"], document["kind"])
        faults = [f"{list(e.instance_path)}: {e.message}" for e in validator.iter_errors(document)]
        assert faults == [], (version, document["kind"])


def of_kind(documents: list[Object], kind: str) -> Object:
    (document,) = (document for document in documents if document["kind"] == kind)
    return document


def container_of(workload: Object) -> Object:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def check_workload(documents: list[Object], kind: str) -> None:
    """Check that the objects fit each other, the image and the program.

    *kind*: the kind of the object that creates the pods.
    """
    for document in documents:
        check_schema(document)
    workload, service = of_kind(documents, kind), of_kind(documents, "Service")
    budget = of_kind(documents, "PodDisruptionBudget")
    pod, container = workload["spec"]["template"]["spec"], container_of(workload)
    labels = workload["spec"]["template"]["metadata"]["labels"].items()
    for selector in (
        workload["spec"]["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ):
        assert selector
        assert selector.items() <= labels
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["publishNotReadyAddresses"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
    # A restart would repair no table, so the process alone decides about life.
    assert container["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    claims = workload["spec"].get("volumeClaimTemplates", [])
    volumes = {v["name"] for v in pod["volumes"]} | {c["metadata"]["name"] for c in claims}
    assert {m["name"] for m in container["volumeMounts"]} == volumes
    assert pod["terminationGracePeriodSeconds"] > 10
    _check_security(pod, container)
    assert "Secret" not in {document["kind"] for document in documents}
    assert not re.search(r":latest$|^[^:@]+$", container["image"])


def _check_security(pod: Object, container: Object) -> None:
    security, dockerfile = pod["securityContext"], (ROOT / "Dockerfile").read_text()
    assert f"--uid {security['runAsUser']} " in dockerfile
    assert security["runAsNonRoot"]
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
