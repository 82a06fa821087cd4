"""What pods, EndpointSlices and InferencePools say of endpoints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kubernetes_server import endpoint, endpoint_slice, inference_pool, pod

from extproc.fleet.discovery.endpoints import Discovered
from extproc.fleet.discovery.kubernetes_objects import (
    EndpointSlice,
    InferencePool,
    Pod,
    endpoints_of_pods,
    endpoints_of_slices,
)

A, B = Discovered("10.0.0.1:8000"), Discovered("10.0.0.2:8000")
A_GOING = Discovered("10.0.0.1:8000", terminating=True)


def of_pods(*pods: dict[str, Any], ports: tuple[int | str, ...] = (8000,), family: str = "any") -> list[Discovered]:
    """The endpoints of pods, none of which is skipped."""
    endpoints = endpoints_of_pods((msgspec.convert(one, Pod) for one in pods), ports, family)
    assert endpoints.skipped == 0
    return endpoints.found


def of_slices(*slices: dict[str, Any], port: int | str | None = None, family: str = "any") -> list[Discovered]:
    """The endpoints of slices, none of which is skipped."""
    endpoints = endpoints_of_slices([msgspec.convert(one, EndpointSlice) for one in slices], port, family)
    assert endpoints.skipped == 0
    return endpoints.found


# -- pods


@pytest.mark.parametrize(
    ("given", "endpoints"),
    [
        (pod("a", "10.0.0.1"), [A]),
        (pod("a", "10.0.0.1", ready=False), []),
        (pod("a", ready=False, phase="Pending"), []),
        (pod("a", "10.0.0.1", terminating=True), [A_GOING]),
        (pod("a", "10.0.0.1", terminating=True, ready=False), [A_GOING]),
        (pod("a", terminating=True, phase="Pending"), []),
        (pod("a", "10.0.0.1", phase="Succeeded"), []),
        (pod("a", "10.0.0.1", phase="Failed", terminating=True), []),
    ],
    ids=["ready", "not ready", "without an address", "terminating", "terminating and no longer ready",
         "deleted before it began", "completed", "failed"],
)  # fmt: skip
def test_a_pod_is_an_endpoint_when_ready_and_drains_when_it_is_deleted(
    given: dict[str, Any], endpoints: list[Discovered]
) -> None:
    """It is terminating for as long as it runs, ready or not; one whose containers have ended is nothing."""
    assert of_pods(given) == endpoints


def test_a_pod_without_conditions_is_not_ready() -> None:
    """It has only just been made."""
    assert of_pods({"metadata": {"name": "a"}, "status": {"phase": "Running", "podIP": "10.0.0.1"}}) == []


@pytest.mark.parametrize(
    ("family", "address"), [("any", "10.0.0.1:8000"), ("IPv4", "10.0.0.1:8000"), ("IPv6", "[fd00::1]:8000")]
)
def test_a_pod_of_two_families_is_one_endpoint(family: str, address: str) -> None:
    """By its first address, or the one of the family asked for."""
    assert of_pods(pod("a", "10.0.0.1", "fd00::1"), family=family) == [Discovered(address)]


def test_a_port_may_be_named() -> None:
    """As pods of different versions number it differently; a sidecar's ports count too, an init container's not."""
    first, second = pod("a", "10.0.0.1", ports={"http": 8000}), pod("b", "10.0.0.2", ports={"metrics": 1})
    second["spec"]["initContainers"] = [
        {"name": "once", "ports": [{"name": "http", "containerPort": 1}]},
        {"name": "proxy", "restartPolicy": "Always", "ports": [{"name": "http", "containerPort": 8200}]},
    ]
    assert of_pods(first, second, ports=("http",)) == [A, Discovered("10.0.0.2:8200")]


def test_each_port_is_an_endpoint() -> None:
    """A data-parallel engine has one for each rank."""
    assert of_pods(pod("a", "10.0.0.1"), ports=(8000, 8001)) == [A, Discovered("10.0.0.1:8001")]


@pytest.mark.parametrize(
    ("given", "port", "family"),
    [
        (pod("a", "10.0.0.1", ports={"metrics": 1}), "http", "any"),
        (pod("a", "10.0.0.1"), 8000, "IPv6"),
        (pod("a", "nonsense"), 8000, "any"),
    ],
    ids=["no such port", "no such family", "no address"],
)
def test_a_ready_pod_that_cannot_be_an_endpoint_is_counted(given: dict[str, Any], port: int | str, family: str) -> None:
    """It is missing from the fleet, and that should be seen."""
    endpoints = endpoints_of_pods([msgspec.convert(given, Pod)], [port], family)
    assert (endpoints.found, endpoints.skipped) == ([], 1)


def test_a_zone_comes_along() -> None:
    """From a pod's label, or from a slice's endpoint."""
    here = Discovered("10.0.0.1:8000", zone="a")
    assert of_pods(pod("a", "10.0.0.1", labels={"topology.kubernetes.io/zone": "a"})) == [here]
    assert of_slices(endpoint_slice("s", {**endpoint("10.0.0.1"), "zone": "a"})) == [here]


# -- slices


@pytest.mark.parametrize(
    ("conditions", "endpoints"),
    [
        ({"ready": True, "serving": True, "terminating": False}, [A]),
        ({}, [A]),
        ({"ready": None}, [A]),
        ({"ready": False, "serving": False, "terminating": False}, []),
        ({"ready": False, "serving": True, "terminating": True}, [A_GOING]),
        ({"ready": False, "serving": False, "terminating": True}, [A_GOING]),
        ({"ready": True, "serving": True, "terminating": True}, [A_GOING]),
    ],
)
def test_conditions_decide(conditions: dict[str, bool | None], endpoints: list[Discovered]) -> None:
    """Unknown means ready; terminating counts even where a Service publishes what is not ready."""
    assert of_slices(endpoint_slice("s", endpoint("10.0.0.1", "a", **conditions))) == endpoints


def test_an_object_in_slices_of_both_families_is_one_endpoint() -> None:
    """By IPv4, unless IPv6 is asked for; addresses that belong to nothing all count."""
    slices = [
        endpoint_slice("s6", endpoint("fd00::1", "a"), endpoint("fd00::9"), family="IPv6"),
        endpoint_slice("s4", endpoint("10.0.0.1", "a")),
    ]
    assert of_slices(*slices) == [A, Discovered("[fd00::9]:8000")]
    assert of_slices(*slices, family="IPv6") == [Discovered("[fd00::1]:8000"), Discovered("[fd00::9]:8000")]
    assert of_slices(*slices, family="IPv4") == [A]


def test_a_service_may_have_many_slices() -> None:
    """They come to one list, each at its own port number."""
    first = endpoint_slice("s1", endpoint("10.0.0.1", "a"), ports={"http": 8000, "metrics": 9000})
    second = endpoint_slice("s2", endpoint("10.0.0.2", "b"), ports={"http": 8200})
    assert of_slices(first, second, port="http") == [A, Discovered("10.0.0.2:8200")]
    assert of_slices(endpoint_slice("s1", endpoint("10.0.0.1"), ports={"x": 1, "y": 8000}), port=8000) == [A]


@pytest.mark.parametrize(
    "given",
    [
        endpoint_slice("s", endpoint("10.0.0.1"), ports={"http": 8000, "metrics": 9000}),
        endpoint_slice("s", endpoint("engine.example"), family="FQDN"),
        {**endpoint_slice("s", endpoint("10.0.0.1")), "ports": None},
        {**endpoint_slice("s"), "endpoints": [{"addresses": []}]},
    ],
    ids=["which port", "a host name", "no port", "no address"],
)
def test_an_endpoint_of_a_slice_that_cannot_be_one_is_counted(given: dict[str, Any]) -> None:
    """Never guessed at."""
    endpoints = endpoints_of_slices([msgspec.convert(given, EndpointSlice)], None, "any")
    assert (endpoints.found, endpoints.skipped) == ([], 1)


def test_a_slice_may_be_empty() -> None:
    """Go writes an empty list as null."""
    assert of_slices({**endpoint_slice("s"), "endpoints": None}) == []


# -- pools


def test_an_inference_pool_says_labels_and_ports() -> None:
    """Labels as a query takes them."""
    spec = msgspec.convert(inference_pool("qwen", 8000, 8001, tier="gold", app="vllm"), InferencePool).spec
    assert spec.label_selector == "app=vllm,tier=gold"
    assert [port.number for port in spec.target_ports] == [8000, 8001]
