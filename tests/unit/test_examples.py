"""The manifests in docs/examples: what they say of Pointsman is what Pointsman and its image are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import __version__
from extproc.config.loading import load
from extproc.control.envoy_config import require_reachable
from extproc.names import STRIPPED_HEADERS
from extproc.observe.metrics import Metrics
from policies.fleet_state import FleetState

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
GATEWAYS = sorted((EXAMPLES / "gateways").glob("*.yaml"))


def objects(path: Path) -> dict[str, Any]:
    """A file's objects by kind and name."""
    found = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in found}


def container(path: Path, name: str) -> dict[str, Any]:
    """The one container of a Deployment."""
    [found] = objects(path)[f"Deployment {name}"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def service_ports() -> dict[int, dict[str, Any]]:
    """Of the Service by which Envoy and gateways find us."""
    service = objects(KUBERNETES / "deploy-pointsman.yaml")["Service pointsman"]
    return {port["port"]: port for port in service["spec"]["ports"]}


def port_of(address: str | None) -> int:
    """The port of `IP:port` or `name:port`."""
    assert address is not None
    return int(address.rpartition(":")[2])


def test_envoy_finds_pointsman_by_its_service() -> None:
    """The config leads Envoy to the Service's name and to a port that it has; nothing listens on loopback alone."""
    listen = load(KUBERNETES / "pointsman.yaml").listen
    require_reachable(load(KUBERNETES / "pointsman.yaml"))
    assert listen.envoy_dials == f"pointsman.llm.svc:{port_of(listen.grpc)}"
    assert {port_of(listen.grpc), port_of(listen.grpc_tls)} <= service_ports().keys()
    assert all(address.startswith("0.0.0.0:") for address in (listen.http, listen.grpc, listen.health))


def test_ports_of_the_pods_are_those_of_the_config() -> None:
    """Probes ask where health checks are answered, clients reach Envoy's listener."""
    config = load(KUBERNETES / "pointsman.yaml")
    ours = container(KUBERNETES / "deploy-pointsman.yaml", "pointsman")
    ports = {port["name"]: port["containerPort"] for port in ours["ports"]}
    listen = config.listen
    expected = {"grpc": listen.grpc, "grpc-tls": listen.grpc_tls, "grpc-health": listen.health}
    assert ports == {name: port_of(address) for name, address in expected.items()} | {
        "metrics": port_of(config.observe.metrics)
    }
    assert {ours[probe]["grpc"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {port_of(listen.health)}
    [clients] = container(KUBERNETES / "deploy-envoy.yaml", "envoy")["ports"]
    assert clients["containerPort"] == port_of(listen.http)


def test_the_image_is_the_dockerfiles() -> None:
    """Its user by number, and its version."""
    pod = objects(KUBERNETES / "deploy-pointsman.yaml")["Deployment pointsman"]["spec"]["template"]["spec"]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == [str(pod["securityContext"]["runAsUser"])]
    assert pod["containers"][0]["image"].endswith(f"/pointsman:{__version__}")


def test_plaintext_is_said_of_the_plaintext_port_only() -> None:
    """`kubernetes.io/h2c` on the port with TLS would have gateways speak plaintext to it."""
    listen = load(KUBERNETES / "pointsman.yaml").listen
    h2c = {number for number, port in service_ports().items() if port.get("appProtocol") == "kubernetes.io/h2c"}
    assert h2c == {port_of(listen.grpc)}


def test_engines_are_scaled_by_a_figure_that_there_is_for_a_pool_that_there_is() -> None:
    """A query for another name would be null, for ever."""
    scaled = objects(KUBERNETES / "scale.yaml")["ScaledObject vllm-qwen"]["spec"]
    [trigger] = scaled["triggers"]
    [(name, pool)] = re.findall(r'(pointsman_\w+)\{pool="([^"]+)"\}', trigger["metadata"]["query"])
    metrics = Metrics()
    metrics.observe_state(FleetState(), dict, lambda: 0.0)
    assert name in {family.name for family in metrics.registry.collect()}
    assert pool in {one.name for one in load(KUBERNETES / "pointsman.yaml").pools}


@pytest.mark.parametrize("path", GATEWAYS, ids=lambda path: path.stem)
def test_gateways_ask_at_a_port_there_is(path: Path) -> None:
    """InferencePools at the one with TLS, all others in plaintext."""
    text = path.read_text(encoding="utf-8")
    asked = re.findall(r"name: pointsman, port: (\d+)|outbound\|(\d+)\|\|pointsman|\{number: (9\d+)\}", text)
    listen = load(KUBERNETES / "pointsman.yaml").listen
    expected = listen.grpc_tls if path.stem == "inference-pool" else listen.grpc
    assert {int("".join(groups)) for groups in asked} == {port_of(expected)}


@pytest.mark.parametrize("name", ["envoy-gateway", "istio", "kgateway"])
def test_gateways_remove_every_header_that_is_ours(name: str) -> None:
    """While we are away they would believe what clients write there."""
    text = (EXAMPLES / "gateways" / f"{name}.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"^ +- (?:remove: )?(x-(?:gateway|pointsman)-[a-z-]+)$", text, re.MULTILINE)) == set(
        STRIPPED_HEADERS
    )
