"""Generations: the tables that follow from a config."""

from __future__ import annotations

import json

import pytest

from extproc.config.generations import Generation
from extproc.config.loading import parse
from extproc.config.pool_policies import build_policy, policy_of, presets
from extproc.request.tokens import TokenRates
from policies.placement.policy import Formula
from policies.types import InferenceRequest, Kind

CONFIG = """
pools:
  - name: chat
    models: [a, b]
    aliases: {x: a, y: b}
    bytes_per_token: 3.5
    tokens_per_cjk_character: 1.0
    tokens_per_image: 256
    endpoints: {static: []}
  - {name: code, models: [c], endpoints: {static: []}}
"""


def generation(extra: str = "") -> Generation:
    """The first generation of this config."""
    return Generation(1, parse(CONFIG + extra))


def test_every_name_leads_to_its_pool_and_model() -> None:
    """Models to themselves, aliases to theirs."""
    targets = generation().targets
    assert {name: (target.pool.name, target.model) for name, target in targets.items()} == {
        "a": ("chat", "a"),
        "b": ("chat", "b"),
        "x": ("chat", "a"),
        "y": ("chat", "b"),
        "c": ("code", "c"),
    }


def test_token_rates_are_the_pools() -> None:
    """The defaults where it says nothing."""
    targets = generation().targets
    assert targets["x"].rates == TokenRates(3.5, 1.0, 256)
    assert targets["c"].rates == TokenRates()


@pytest.mark.parametrize(
    ("wire", "length"),
    [("", 3), ("wire: {endpoint_list_length: 5}", 5), ("wire: {endpoint_list: single, endpoint_list_length: 5}", 1)],
)
def test_how_many_endpoints_are_named_is_a_setting(wire: str, length: int) -> None:
    """One where the caller cannot read a list."""
    assert generation(wire).targets["a"].list_length == length


def test_names_of_one_pool_share_its_terms() -> None:
    """So that there are few sets of headers to render."""
    targets = generation().targets
    assert targets["a"].terms is targets["y"].terms
    assert targets["a"].terms is not targets["c"].terms


def test_the_model_list_stays_the_same_within_a_generation() -> None:
    """Clients that compare it see no change."""
    one = generation()
    assert one.space_of(None).models_body is one.space_of(None).models_body
    assert [entry["id"] for entry in json.loads(one.space_of(None).models_body)["data"]] == ["a", "b", "x", "y", "c"]


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset_builds_a_policy_of_its_kind(preset: str) -> None:
    """Under its own name, which metrics and decisions show."""
    [pool] = parse(f"pools: [{{name: p, models: [m], endpoints: {{static: []}}, policy: {preset}}}]").pools
    policy = build_policy(pool)
    assert isinstance(policy, Formula) or f"{type(policy).__name__}Spec" == type(policy_of(pool)).__name__
    assert policy.name == preset


def test_a_policy_spelled_out_is_called_inline() -> None:
    """It has no other name."""
    text = "pools: [{name: p, models: [m], endpoints: {static: []}, policy: {kind: round_robin}}]"
    assert build_policy(parse(text).pools[0]).name == "inline"


@pytest.mark.parametrize(
    ("config", "tenant", "said", "sent"),
    [
        ("", None, "-5", None),
        ("queue: {}", None, "-5", "0"),
        ("queue: {}", None, "7", "7"),
        ("queue: {}", None, None, None),
        ("", "acme", "-5", "-3"),
        ("", "acme", "-2", "-2"),
        ("", "late", None, "4"),
        ("", "late", "9", "9"),
        ("", "somebody", "-5", "0"),
        ("queue: {classes: [{name: only, engine_priority: 20}]}", "acme", "-5", "20"),
    ],
)
def test_no_client_passes_others_inside_an_engine_by_its_own_word(
    config: str, tenant: str | None, said: str | None, sent: str | None
) -> None:
    """Where there are others whom a queue or tenants tell apart. Without either its header is its own affair."""
    pool = f"{{name: p, models: [m], endpoints: {{static: ['10.0.0.1:80']}}, {config}}}"
    tenants = "{named: {acme: {best_priority: -3}, late: {best_priority: 4}}}"
    generation = Generation(1, parse(f"access: {{tenant_header: x-tenant}}\ntenants: {tenants}\npools: [{pool}]"))
    request = InferenceRequest(Kind.CHAT, "m", "m", 10, tenant=tenant, class_name="only")
    headers = {} if said is None else {"x-vllm-priority": said}
    told = generation.engine_priority(headers, generation.targets["m"], request)
    assert told == (() if sent is None else (("x-vllm-priority", sent),))
