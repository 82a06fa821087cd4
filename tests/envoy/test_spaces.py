"""A tenant's own names and policies through a real Envoy, over engines that it shares with others."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from harness import HANG_GUARD_S, Engine, System, chat, eventually, pool_of

from extproc.access.keys import digest_of

ACME, OTHER = "pm-acme-0123456789abcdef", "pm-other-0123456789abcdef"
ACCESS = {
    "api_keys": [
        {"name": f"{tenant}-1", "tenant": tenant, "sha256": digest_of(key)}
        for tenant, key in (("acme", ACME), ("other", OTHER))
    ]
}
SPACE = {"aliases": {"house-model": "sim"}, "default_model": "house-model", "policies": {"chat": "round-robin"}}


def ask(system: System, key: str, **fields: Any) -> httpx.Response:
    """One chat."""
    headers = {"authorization": f"Bearer {key}"}
    body = {name: value for name, value in chat(**fields).items() if value is not None}
    return httpx.post(f"{system.url}/v1/chat/completions", json=body, headers=headers, timeout=HANG_GUARD_S)


def names(system: System, key: str) -> set[str]:
    """The models that there are for a caller."""
    headers = {"authorization": f"Bearer {key}"}
    listed = httpx.get(f"{system.url}/v1/models", headers=headers, timeout=HANG_GUARD_S).json()["data"]
    return {entry["id"] for entry in listed}


def test_a_tenants_space_is_its_own_and_changes_with_a_reload(
    make_engines: Callable[..., list[Engine]], make_system: Callable[..., System]
) -> None:
    """Its alias, its default, its turns in turn; everybody else is placed as ever, and has none of these names."""
    engines = make_engines(2, "--speed", "50", "--record", "50")
    headers = {"authorization": f"Bearer {OTHER}"}
    system = make_system(pools=[pool_of(engines)], access=ACCESS, tenants={"named": {"acme": SPACE}}, headers=headers)
    system.wait_pickable(*(engine.address for engine in engines))
    assert names(system, ACME) - names(system, OTHER) == {"house-model"}
    assert ask(system, OTHER, model="house-model").status_code == 404

    prompt = "one long prompt that an engine keeps " * 100
    own = [ask(system, ACME, content=prompt, model=None if n % 2 else "house-model") for n in range(6)]
    others = [ask(system, OTHER, content=f"other {prompt}") for _ in range(6)]
    assert {answer.status_code for answer in (*own, *others)} == {200}
    assert Counter(answer.headers["x-pointsman-endpoint"] for answer in own) == {
        engine.address: 3 for engine in engines
    }
    assert len({answer.headers["x-pointsman-endpoint"] for answer in others}) == 1  # its prefix is there
    for answer, policy, tenant in ((own[0], "round-robin", "acme"), (others[0], "default", "other")):
        record = system.decision(answer.headers["x-pointsman-request-id"])
        assert (record["policy"], record["tenant"]) == (policy, tenant)
    sent = [json.loads(base64.b64decode(r["body_base64"])) for engine in engines for r in engine.requests()]
    assert {body["model"] for body in sent} == {"sim"}

    explained = httpx.post(
        f"{system.admin_url}/v1/explain?tenant=acme", json=chat(model="house-model"), timeout=HANG_GUARD_S
    ).json()
    assert (explained["policy"], explained["model"]) == ("round-robin", "sim")

    system.config["tenants"] = {"named": {"acme": {}}}
    system.write_config()
    eventually(lambda: names(system, ACME) == names(system, OTHER), "the space is gone")
    assert ask(system, ACME, model="house-model").status_code == 404
    record = system.decision(ask(system, ACME, model="sim").headers["x-pointsman-request-id"])
    assert record["policy"] == "default"
