"""What is in deploy/ fits its schemas, its tools accept it, and it agrees with the broker."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from penstock.config import load
from penstock.wire.origins import Origins
from tests.deploy.image import ROOT, instructions

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose"
UNIT = DEPLOY / "systemd/penstock.service"
SHARED = DEPLOY / "kubernetes-shared"


def manifests(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.yaml") if path.name != "kustomization.yaml")


PORTS = {"http": 6632, "tcp": 12345, "kafka": 9092, "websocket": 9090}


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def tool(name: str) -> str:
    program_path = shutil.which(
        name, path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    )
    if program_path is None:
        pytest.skip(f"needs {name} (tools/test-programs installs promtool)")
    return program_path


def check_schema(name: str, path: Path) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", f"vendor.{name}", str(path)])
    assert done.exit_code == 0, done.output


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def resource(kind: str, name: str, directory: Path = KUBERNETES) -> dict[str, Any]:
    everything = [document for path in manifests(directory) for document in documents(path)]
    (result,) = [
        one for one in everything if (one["kind"], one["metadata"]["name"]) == (kind, name)
    ]
    return result


def environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Every set of environment variables that a broker is given."""
    image: dict[str, str] = {}
    for word, rest in instructions((DEPLOY / "docker/Dockerfile").read_text()):
        if word == "ENV":
            image |= dict(pair.split("=", 1) for pair in rest.split())
    yield "Dockerfile", image
    for path in COMPOSE.glob("*.yaml"):
        for name, service in yaml.safe_load(path.read_text())["services"].items():
            if service["image"] == "penstock":
                yield f"{path.name} {name}", image | service.get("environment", {})
    for directory, kind, name in (
        (KUBERNETES, "StatefulSet", "penstock"),
        (KUBERNETES, "Deployment", "penstock-queues"),
        (SHARED, "StatefulSet", "penstock"),
    ):
        (container,) = resource(kind, name, directory)["spec"]["template"]["spec"]["containers"]
        yield (
            f"{directory.name} {kind} {name}",
            image
            | {one["name"]: one.get("value", "postgresql://db/app") for one in container["env"]},
        )
    yield (
        "systemd",
        dict(
            line.split("=", 2)[1:]
            for line in UNIT.read_text().splitlines()
            if line.startswith("Environment=")
        ),
    )


def test_the_linter_accepts_the_dockerfile():
    done = run(tool("hadolint"), str(DEPLOY / "docker/Dockerfile"))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("github-workflows", "workflows/ci.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/bug.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/idea.yml"),
    ],
)
def test_files_for_contributors_fit_their_schema(schema, path):
    check_schema(schema, DEPLOY.parent / ".github" / path)


@pytest.mark.parametrize("path", sorted(COMPOSE.glob("*.yaml")), ids=lambda path: path.name)
def test_compose_files_fit_the_schema_and_name_what_is_there(path):
    check_schema("compose-spec", path)
    tree = yaml.safe_load(path.read_text())
    for name, service in tree["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (
                (COMPOSE / source).exists() if source.startswith(".") else source in tree["volumes"]
            ), volume
        assert set(service.get("depends_on", ())) <= tree["services"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), (
            "open to the network"
        )
        if "build" in service:
            assert (COMPOSE / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists()
            assert Origins().has_host(f"{name}:6632")


def test_prometheus_and_grafana_find_brokers_rules_and_dashboards():
    services = yaml.safe_load((COMPOSE / "cluster.yaml").read_text())["services"]
    mounted = {
        name: dict(v.split(":")[1::-1] for v in services[name]["volumes"])
        for name in ("prometheus", "grafana")
    }
    prometheus = yaml.safe_load((COMPOSE / "prometheus/prometheus.yml").read_text())
    (rules,) = prometheus["rule_files"]
    assert list((COMPOSE / mounted["prometheus"][str(Path(rules).parent)]).glob(Path(rules).name))
    (scrape,) = prometheus["scrape_configs"]
    brokers = [name for name, service in services.items() if service["image"] == "penstock"]
    assert scrape["static_configs"][0]["targets"] == [f"{name}:{PORTS['http']}" for name in brokers]
    provisioning = COMPOSE / mounted["grafana"]["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/penstock.yml").read_text())[
        "providers"
    ]
    boards = sorted((COMPOSE / mounted["grafana"][provider["options"]["path"]]).glob("*.json"))
    assert boards
    assert all(json.loads(board.read_text())["uid"] for board in boards)
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.parametrize(
    "path", [*manifests(KUBERNETES), *manifests(SHARED)], ids=lambda path: path.name
)
def test_manifests_fit_the_schemas_of_kubernetes(path):
    for document in documents(path):
        kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("directory", [KUBERNETES, SHARED], ids=lambda path: path.name)
def test_kustomize_renders_the_manifests(directory):
    done = run(tool("kubectl"), "kustomize", str(directory))
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert len(rendered) == sum(len(documents(path)) for path in manifests(directory))
    for document in rendered:
        kubernetes_validate.validate(document, "1.33", strict=True)
        assert document["metadata"]["namespace"] == "penstock"


@pytest.mark.parametrize(
    ("directory", "workloads"),
    [
        (
            KUBERNETES,
            (
                ("StatefulSet", "penstock", "penstock-topics"),
                ("Deployment", "penstock-queues", "penstock"),
            ),
        ),
        (
            SHARED,
            (
                ("StatefulSet", "penstock", "penstock-brokers"),
                ("StatefulSet", "penstock", "penstock"),
            ),
        ),
    ],
    ids=["owner", "shared"],
)
def test_manifests_agree_with_each_other_and_with_the_image(directory, workloads):
    named = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    assert sorted(named) == [path.name for path in manifests(directory)]
    user = next(
        rest
        for word, rest in instructions((DEPLOY / "docker/Dockerfile").read_text())
        if word == "USER"
    )
    settings = yaml.safe_load(resource("ConfigMap", "penstock", directory)["data"]["penstock.yaml"])
    stopping = sum(int(settings[key].rstrip("s")) for key in ("shutdown_delay", "shutdown_timeout"))
    for kind, name, service in workloads:
        spec = resource(kind, name, directory)["spec"]
        pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        everywhere = labels | {"app.kubernetes.io/name": "penstock"}  # kustomize adds it
        target = resource("Service", service, directory)["spec"]
        assert target["selector"].items() <= everywhere.items()
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports.items() <= PORTS.items()
        assert all(ports[port["targetPort"]] == port["port"] for port in target["ports"])
        context = pod["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert context["runAsNonRoot"]
        assert pod["terminationGracePeriodSeconds"] >= stopping + 30
        probe = container["readinessProbe"]
        assert settings["shutdown_delay"] == "10s"
        assert (probe["periodSeconds"] + probe["timeoutSeconds"]) * probe["failureThreshold"] < 10
        assert probe["httpGet"]["path"] == "/health/ready"
        assert {container[one]["httpGet"]["path"] for one in ("startupProbe", "livenessProbe")} == {
            "/health/live"
        }
        volumes = [
            one["name"]
            for one in (
                *pod["volumes"],
                *(v["metadata"] for v in spec.get("volumeClaimTemplates", ())),
            )
        ]
        assert sorted(one["name"] for one in container["volumeMounts"]) == sorted(volumes)
        hosts = Origins(hosts=settings["http_server"]["hosts"])
        for ending in ("", ".penstock", ".penstock.svc", ".penstock.svc.cluster.local"):
            assert hosts.has_host(f"{service}{ending}:6632")
        if service == "penstock-brokers":
            assert hosts.has_host(f"{name}-0.{service}.penstock:6632")
        assert not hosts.has_host("rebound.example:6632")


def test_what_the_brokers_are_given_are_settings(tmp_path):
    for origin, environment in environments():
        loaded = load(None, environment)
        assert not loaded.warnings, (origin, loaded.warnings)
    file = tmp_path / "penstock.yaml"
    for directory, placement in ((KUBERNETES, "local"), (SHARED, "shared")):
        file.write_text(resource("ConfigMap", "penstock", directory)["data"]["penstock.yaml"])
        config = load(file, {}).config
        assert config.shutdown_delay == 10
        assert config.topics.placement == placement


def test_kafka_clients_reach_each_of_the_equal_brokers_by_name():
    spec = resource("StatefulSet", "penstock", SHARED)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    service = resource("Service", spec["serviceName"], SHARED)
    assert service["spec"]["clusterIP"] == "None"
    address = f"$(PENSTOCK_SERVER_NAME).{spec['serviceName']}.penstock:{PORTS['kafka']}"
    assert given["PENSTOCK_KAFKA_SERVER_ADVERTISED"] == address
    names = list(given)  # Kubernetes replaces a variable that comes before
    assert names.index("PENSTOCK_SERVER_NAME") < names.index("PENSTOCK_KAFKA_SERVER_ADVERTISED")


def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path):
    analyze = tool("systemd-analyze")
    text = UNIT.read_text().replace(
        "/opt/penstock/bin/penstock", "/bin/true"
    )  # it looks whether the program is there
    unit = tmp_path / "penstock.service"
    unit.write_text(text)
    done = run(analyze, "verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("RestartSec=1", "RestartSex=1"))
    assert "RestartSex" in run(analyze, "verify", "--man=no", str(unit)).stderr
    scored = run(analyze, "security", "--offline=true", "--no-pager", str(UNIT)).stdout
    level = re.search(r"Overall exposure level for penstock.service: ([\d.]+)", scored)
    assert level, scored
    assert float(level[1]) < 2.0
