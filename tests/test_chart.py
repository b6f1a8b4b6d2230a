"""The Helm chart: rendered by Helm, judged by Kubernetes' schemas, and its configuration loaded."""

import copy
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import streamer
from streamer.config import static_mapping
from tests.support.kubernetes import (
    CHART,
    OPERATOR,
    Object,
    check_workload,
    container_of,
    helm,
    of_kind,
    render,
)
from tests.test_deploy import ALERTS
from tests.test_docs import ROOT, problem_of

CONFIG: Final[Object] = {
    "target": {"url": "postgresql://loader:${DW_PASSWORD}@warehouse/dw"},
    "sources": [
        {
            "database": "shop",
            "urls": [{"url": "postgresql://streamer@shop-db/shop", "sid": "eu"}],
            "tables": {"customers": {}, "orders": {"type": "history"}},
        }
    ],
}
SMALL: Final[Object] = {"config": CONFIG}
STATEFULSET: Final = "templates/statefulset.yaml"
LARGE: Final[Object] = {
    "config": CONFIG | {"workers": 8},
    "replicas": 3,
    "image": {"repository": "registry.example/streamer", "digest": f"sha256:{'0' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": {"environment": "streamer", "files": "streamer-files"},
    "listen": "[::]:9000",
    "environment": [{"name": "TZ", "value": "UTC"}],
    "persistence": {"storageClass": "fast", "size": "100Gi"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "page": "https://streamer.example/"},
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {}}],
        "egress": [{"ports": [{"port": 5432, "protocol": "TCP"}]}],
    },
    "serviceAccountName": "streamer",
    "podAnnotations": {"example.org/team": "data"},
    "podLabels": {"team": "data"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "data", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "high",
    "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
    "volumeMounts": [{"name": "tls", "mountPath": "/etc/tls"}],
}
OPEN: Final[Object] = SMALL | {
    "persistence": {"enabled": False},
    "networkPolicy": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "watchConfig": False,
}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    directory = tmp_path_factory.mktemp("chart")
    values = {"small": SMALL, "large": LARGE, "open": OPEN}
    return {name: render(chosen, directory) for name, chosen in values.items()}


def changed(values: Object, **config: Any) -> Object:
    """Return *values* with different settings of streamer."""
    return values | {"config": copy.deepcopy(values["config"]) | config}


@pytest.mark.parametrize("name", ["small", "large", "open"])
def test_objects_fit_kubernetes_and_each_other(
    name: str, rendered: dict[str, list[Object]]
) -> None:
    check_workload(rendered[name], "StatefulSet")


def test_chart_and_manifest_have_the_version_of_the_program(
    rendered: dict[str, list[Object]],
) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    manifest = yaml.safe_load_all((ROOT / "deploy/kubernetes/streamer.yaml").read_text())
    workload = of_kind(list(manifest), "Deployment")

    assert chart["appVersion"] == chart["version"] == streamer.__version__
    small = container_of(of_kind(rendered["small"], "StatefulSet"))["image"]
    assert small == container_of(workload)["image"] == f"streamer:{streamer.__version__}"
    large = container_of(of_kind(rendered["large"], "StatefulSet"))["image"]
    assert large == f"registry.example/streamer@sha256:{'0' * 64}"


@pytest.mark.parametrize("name", ["small", "large"])
def test_streamer_takes_the_configuration_and_the_command_of_the_pod(
    name: str, rendered: dict[str, list[Object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = container_of(of_kind(rendered[name], "StatefulSet"))
    monkeypatch.setenv("DW_PASSWORD", "secret")
    monkeypatch.setenv("STREAMER_ADMIN__TOKEN", "secret")
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    path = tmp_path / "config.yaml"
    path.write_text(of_kind(rendered[name], "ConfigMap")["data"]["config.yaml"])

    settings, mapping = static_mapping.load(path)

    assert settings.http.listen.endswith(f":{container['ports'][0]['containerPort']}")
    assert [source.label for source in mapping.sources] == ["shop:eu"]
    assert settings.workers == (8 if name == "large" else 4)
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts["config"] == "/etc/streamer"  # the working directory of the image
    assert problem_of(container["args"][container["args"].index("run") :]) is None


def test_a_new_source_restarts_no_pod_and_another_setting_restarts_each(tmp_path: Path) -> None:
    def checksum(values: Object) -> str:
        workload = of_kind(render(values, tmp_path, "--show-only", STATEFULSET), "StatefulSet")
        annotations = workload["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    grown = [*CONFIG["sources"], CONFIG["sources"][0] | {"database": "books"}]

    assert checksum(changed(SMALL, sources=grown)) == checksum(SMALL)
    assert checksum(changed(SMALL, workers=9)) != checksum(SMALL)
    # A process that does not watch the file needs the restart for each change.
    assert checksum(changed(OPEN, sources=grown)) != checksum(OPEN)


def test_a_file_is_the_configuration_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"# A comment.\n{yaml.safe_dump(CONFIG)}")

    documents = render({}, tmp_path, "--set-file", f"config={path}")

    assert (
        of_kind(documents, "ConfigMap")["data"]["config.yaml"].strip() == path.read_text().strip()
    )


def test_alerts_are_those_of_the_one_file(rendered: dict[str, list[Object]]) -> None:
    """The chart has a link to the file, so a second copy cannot differ."""
    assert (CHART / "alerts.yaml").resolve() == ROOT / "deploy/prometheus/alerts.yaml"
    assert (CHART / "alerts.yaml").is_symlink()
    assert of_kind(rendered["open"], "PrometheusRule")["spec"] == ALERTS
    rules = of_kind(rendered["large"], "PrometheusRule")["spec"]["groups"][0]["rules"]
    for rule, original in zip(rules, ALERTS["groups"][0]["rules"], strict=True):
        address = original["annotations"]["runbook_url"].partition("}}/")[2]
        assert rule["annotations"]["runbook_url"] == f"https://streamer.example/{address}"
        assert rule["expr"] == original["expr"]


def test_prometheus_scrapes_the_service_as_the_job_of_the_alerts(
    rendered: dict[str, list[Object]],
) -> None:
    monitor = of_kind(rendered["large"], "ServiceMonitor")
    service = of_kind(rendered["large"], "Service")
    (endpoint,) = monitor["spec"]["endpoints"]

    assert monitor["apiVersion"] == OPERATOR
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "streamer"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    kinds = {document["kind"] for document in rendered["small"]}
    assert kinds == {"StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "config: give the configuration of streamer"),
        (["--set", "config.workers=1", "--set", "replica=2"], "'replica' not allowed"),
        (["--set", "config.workers=1", "--set", "image.tag=latest"], "image/tag"),
        (["--set", "config=a: ["], "config: not YAML"),
    ],
    ids=["no configuration", "unknown value", "latest", "faulty configuration"],
)
def test_helm_refuses(options: list[str], complaint: str, tmp_path: Path) -> None:
    refused = helm("template", "shop", str(CHART), *options, directory=tmp_path)

    assert refused.returncode != 0
    assert complaint in refused.stderr


def test_lint_has_no_complaint(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(LARGE))

    checked = helm("lint", "--strict", str(CHART), "--values", str(path), directory=tmp_path)

    assert checked.returncode == 0, checked.stdout
