"""Config files: what they may say, and errors that name the place and the fix."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import cli
from extproc.config.loading import ConfigError, load, parse
from extproc.config.policy_kinds import KINDS
from extproc.config.pool_policies import policy_of, presets
from extproc.config.schema import Config
from extproc.config.sections.endpoint_sources import Endpoint
from extproc.config.sections.fields import check_address
from policies.placement.filters import FILTERS
from policies.placement.profiles import Profile
from policies.placement.rotation import ConsistentHashSpec
from policies.placement.scorers import SCORERS
from policies.placement.weighted import WeightedSpec

SMALL = """
listen: {http: 127.0.0.1:8080}
pools:
  - name: chat
    models: [Qwen/Qwen2.5-7B-Instruct]
    endpoints: {static: [127.0.0.1:8001, 127.0.0.1:8002]}
"""
ONE_SOURCE = "give exactly one of: static, file, dns, kubernetes"


def pool(extra: str = "", *, name: str = "p", models: str = "[m]", endpoints: str = "{static: ['10.0.0.1:80']}") -> str:
    """A file with one pool."""
    return f"pools: [{{name: {name}, models: {models}, endpoints: {endpoints}, {extra}}}]"


def faults(text: str) -> list[str]:
    """One line per fault."""
    with pytest.raises(ConfigError) as caught:
        parse(text, source="f.yaml")
    return str(caught.value).splitlines()


# -- good files


def test_endpoints_may_have_more_to_say_than_an_address() -> None:
    """As mappings, beside plain addresses in the same list."""
    text = pool(endpoints="{static: ['10.0.0.1:80', {address: '[0::1]:80', weight: 2, zone: a, cost: 1.5}]}")
    plain, told = parse(text).pools[0].endpoints.static or ()
    assert plain == "10.0.0.1:80"
    assert told == Endpoint(address="[::1]:80", weight=2, zone="a", cost=1.5)


def test_the_smallest_useful_file_is_enough() -> None:
    """Everything else has a default that works."""
    config = parse(SMALL)
    [chat] = config.pools
    assert chat.endpoints.static == ("127.0.0.1:8001", "127.0.0.1:8002")
    assert (chat.policy, chat.cluster_name) == ("default", "pool_chat")
    assert config.listen.grpc == "127.0.0.1:9004"
    assert config.limits.request_body_bytes == 32 * 1024 * 1024
    assert config.retries.attempts == 1
    assert config.wire.endpoint_list_length == 3


def test_a_cluster_may_be_anothers() -> None:
    """By name, as the mesh has it."""
    assert parse(pool("cluster: outbound|80||vllm")).pools[0].cluster_name == "outbound|80||vllm"


def test_a_config_cannot_be_changed_after_it_was_read() -> None:
    """A generation is immutable."""
    config = parse(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        config.pools[0].name = "other"  # type: ignore[misc]


# -- errors


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            pool("modells: [m]"),
            "f.yaml: pools[0].modells: unknown key; did you mean 'models'?",
        ),
        (
            SMALL + "limts: {}",
            "f.yaml: limts: unknown key; did you mean 'limits'?",
        ),
        ("pools: [{name: p, models: [m]}]", "f.yaml: pools[0].endpoints: required, but not given"),
        ("listen: {}", "f.yaml: pools: required, but not given"),
        (
            pool(endpoints="{static: ['localhost:80']}"),
            (
                "f.yaml: pools[0].endpoints.static[0]: 'localhost:80' is not IP:port, "
                "for example 127.0.0.1:8001 or [::1]:8001"
            ),
        ),
        (pool(endpoints="{}"), f"f.yaml: pools[0].endpoints: {ONE_SOURCE}"),
        (pool(endpoints="{static: [], file: a}"), f"f.yaml: pools[0].endpoints: {ONE_SOURCE}"),
        (
            pool(endpoints="{static: ['10.0.0.1:80', '10.0.0.1:80']}"),
            "f.yaml: pools[0].endpoints.static: an address is listed twice",
        ),
        (
            pool(endpoints="{static: ['10.0.0.1:80', {address: '10.0.0.1:80'}]}"),
            "f.yaml: pools[0].endpoints.static: an address is listed twice",
        ),
        (
            pool(endpoints="{static: [{address: '10.0.0.1:80', weight: 0}]}"),
            "f.yaml: pools[0].endpoints.static[0].weight: Input should be greater than 0 (given: 0)",
        ),
        (
            pool(endpoints="{static: [10.5]}"),
            "f.yaml: pools[0].endpoints.static[0]: should be IP:port, or a mapping with an `address` (given: 10.5)",
        ),
        (
            pool(endpoints="{static: [{address: '10.0.0.1:80', wait: 1}]}"),
            "f.yaml: pools[0].endpoints.static[0].wait: unknown key; did you mean 'weight'?",
        ),
        (
            pool("aliases: {a: x}"),
            "f.yaml: pools[0]: alias 'a' points to 'x'; this pool serves ['m']",
        ),
        (pool("aliases: {m: m}"), "f.yaml: pools[0]: 'm' is both a model and an alias"),
        (
            pool("policy: nope"),
            f"f.yaml: pools[0].policy: no preset 'nope'; there are: {', '.join(sorted(presets()))}",
        ),
        (
            pool("policy: {scorers: [{name: nope}]}"),
            f"f.yaml: pools[0].policy: unknown scorer 'nope'; there are: {', '.join(sorted(SCORERS))}",
        ),
        (
            pool("policy: {filters: [nope]}"),
            f"f.yaml: pools[0].policy: unknown filter 'nope'; there are: {', '.join(sorted(FILTERS))}",
        ),
        (
            pool("policy: {kind: nope}"),
            f"f.yaml: pools[0].policy: kind must be one of {', '.join(map(repr, KINDS))}, not 'nope'",
        ),
        (
            SMALL + "limits: {endpoints: many}",
            "f.yaml: limits.endpoints: should be a whole number (given: 'many')",
        ),
        (
            SMALL + "retries: {statuses: [503, 200]}",
            "f.yaml: retries.statuses[1]: Input should be greater than or equal to 500 (given: 200)",
        ),
        (
            SMALL + "admin: {listen: 'localhost:9700'}",
            "f.yaml: admin.listen: 'localhost:9700' is not IP:port, for example 127.0.0.1:8001 or [::1]:8001",
        ),
        ("", "f.yaml: expected a mapping with `pools:` at the top, found nothing"),
        ("3", "f.yaml: expected a mapping with `pools:` at the top, found a single value"),
        ("[]", "f.yaml: expected a mapping with `pools:` at the top, found a list"),
        ("pools: [", "f.yaml: not YAML: while parsing a flow node"),
    ],
)
def test_an_error_names_the_place_and_the_fix(text: str, line: str) -> None:
    """Among the lines is this one, whole."""
    assert line in faults(text)


@pytest.mark.parametrize(
    "extra",
    ["modells: [m]", "aliases: {a: x}", "policy: {kind: nope}", "policy: {scorers: [{name: queue_depth, weight: -1}]}"],
)
def test_one_fault_is_one_line(extra: str) -> None:
    """What only follows from it (the list is too short, a policy is no preset's name) would mislead."""
    assert len(faults(pool(extra))) == 1


def test_an_empty_list_of_pools_is_a_fault_of_its_own() -> None:
    """Not the shadow of another."""
    assert faults("pools: []") == ["f.yaml: pools: should have at least 1 item"]


@pytest.mark.parametrize("figure", [".inf", "-.inf", ".nan", "1e308", "-1"])
@pytest.mark.parametrize(
    "section",
    [
        *(f"hardware: {{{field.name}: FIGURE}}" for field in fields(Profile)),
        *(
            f"policy: {{kind: marginal_cost, {name}: FIGURE}}"
            for name in ("stall_weight", "overflow_s", "eviction_fade_s")
        ),
        "policy: {scorers: [{name: queue_depth, weight: FIGURE}]}",
        "policy: {kind: consistent_hash, load_factor: FIGURE}",
        "bytes_per_token: FIGURE",
        "tokens_per_cjk_character: FIGURE",
    ],
)
def test_a_figure_that_would_make_no_sense_of_costs_is_refused(section: str, figure: str) -> None:
    """One endless cost, and no endpoint is better than another; or none is a number."""
    with pytest.raises(ConfigError):
        parse(pool(section.replace("FIGURE", figure)))


def test_a_policy_that_is_neither_name_nor_mapping_is_a_fault() -> None:
    """Told at its place."""
    assert all(line.startswith("f.yaml: pools[0].policy: ") for line in faults(pool("policy: 5")))


def test_every_fault_is_told_at_once() -> None:
    """A file is mended in one go."""
    told = "\n".join(faults(pool("modells: [m]") + "\nlimits: {endpoints: 0}\nnope: 1"))
    assert all(path in told for path in ("pools[0].modells", "limits.endpoints", "nope"))


def test_every_item_of_a_list_is_looked_at() -> None:
    """And a policy is, whatever else is wrong with its pool."""
    static = "[vllm.example:8000, 10.0.0.1, '10.0.0.1:80', {address: here}]"
    places = [line.split(": ")[1] for line in faults(pool("policy: defualt", endpoints=f"{{static: {static}}}"))]
    listed = [f"pools[0].endpoints.static[{number}]" for number in (0, 1)]
    assert places == [*listed, "pools[0].endpoints.static[3].address", "pools[0].policy"]
    servers = pool(endpoints="{dns: {name: x, port: 1, servers: [ns, '10.0.0.1:53', 10.0.0.2]}}")
    assert [line.split(": ")[1][-10:] for line in faults(servers)] == ["servers[0]", "servers[2]"]


def test_a_policy_is_looked_at_whatever_else_is_wrong() -> None:
    """Of pools and of tenants, if it is valid in itself; one that is not is told of once."""
    scorers = "{scorers: [{name: kv_use}]}"
    broken = pool(f"policy: {scorers}, hardware: abacus, modells: 1").removesuffix("]")
    tenants = f"{{default: {{policies: {{p: nope}}}}, named: {{acme: {{policies: {{p: {scorers}}}}}, b: 3}}}}"
    told = faults(f"{broken}, 3, {{policy: {{kind: nope}}}}]\ntenants: {tenants}")
    assert [place for place in (line.split(": ")[1] for line in told) if "polic" in place or "hard" in place] == [
        "pools[2].policy",
        "pools[0].policy",
        "pools[0].hardware",
        "tenants.default.policies.p",
        "tenants.named.acme.policies.p",
    ]


@pytest.mark.parametrize(
    "sections", ["pools: 3", "pools: {}\ntenants: 3", "pools: [3]\ntenants: {named: 3}", "tenants: {default: 3}"]
)
def test_sections_of_the_wrong_kind_hide_nothing_and_break_nothing(sections: str) -> None:
    """Each is told as what it is."""
    assert all("should be a" in line or "required" in line for line in faults(sections))


def test_what_does_not_fit_together_is_told_of_all_at_once() -> None:
    """Every name, not the first of the first section alone; and an unknown scorer beside it."""
    one = "{name: p, models: [m], aliases: {a: x, b: y}, endpoints: {static: []}}"
    assert [line.split("alias ")[1][:3] for line in faults(f"pools: [{one}]")] == ["'a'", "'b'"]
    tenants = "{default: {pools: [q, r], best_class: now}, named: {acme: {default_model: n}}}"
    routing = "{paths: [{prefix: /a, pool: q}, {prefix: /b, pool: r}], default_model: n}"
    queue = "{classes: [{name: c, places: 1, overflow: d}, {name: e, places: 1, overflow: e}]}"
    assert len(faults(pool(f"queue: {queue}"))) == 2
    told = "\n".join(
        faults(
            f"{pool('policy: nope')}\ntenants: {tenants}\nrouting: {routing}\nguard: {{client: tenant, concurrency: 1}}"
        )
    )
    for fault in (
        "without `access` no request has a tenant",
        "tenants.default.pools: it sees no pool 'q'",
        "tenants.default.pools: it sees no pool 'r'",
        "tenants.named.acme.default_model: it sees no model 'n'",
        "guard.client: tenant needs `access`",
        "top level: tenants.default.best_class: no class 'now'",
        "/a leads to pool 'q'",
        "/b leads to pool 'r'",
        "routing.default_model is 'n'",
        "pools[0].policy: no preset 'nope'",
    ):
        assert fault in told


def test_filters_and_scorers_are_told_of_together() -> None:
    """A policy's every unknown part."""
    [fault] = faults(pool("policy: {filters: [f, g], scorers: [{name: s}, {name: t}]}"))
    assert all(f"'{name}'" in fault for name in "fgst")


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("{name: p, models: [n], cluster: c, endpoints: {static: []}}", "pool name given more than once: p"),
        ("{name: q, models: [n], cluster: pool_p, endpoints: {static: []}}", "cluster given more than once: pool_p"),
        ("{name: q, models: [m], endpoints: {static: []}}", "model or alias given more than once: m"),
        ("{name: q, models: [n], aliases: {m: n}, endpoints: {static: []}}", "model or alias given more than once: m"),
    ],
)
def test_names_are_given_once(second: str, what: str) -> None:
    """Pools, clusters, and every name a client may use."""
    text = f"pools: [{{name: p, models: [m], endpoints: {{static: []}}}}, {second}]"
    assert faults(text) == [f"f.yaml: top level: {what}"]


@pytest.mark.parametrize("name", ["a b", "-a", "a/b", "''", "x" * 64])
def test_a_pools_name_is_fit_for_a_label(name: str) -> None:
    """It becomes a cluster's name and a metric's label."""
    assert any(line.startswith("f.yaml: pools[0].name: String should match") for line in faults(pool(name=name)))


@pytest.mark.parametrize(
    "access", ["{}", "{api_keys: []}", "{forward_credentials: true}", "{api_keys_file: null, api_keys: []}"]
)
def test_an_access_section_that_names_nobody_is_a_fault(access: str) -> None:
    """Who writes one means to close the door; it must not stand open."""
    [fault] = faults(f"{SMALL}access: {access}")
    assert fault.startswith("f.yaml: access: names nobody who may call: give api_keys,")


def test_one_source_is_enough() -> None:
    """An empty list of keys beside a file is one."""
    assert parse(f"{SMALL}access: {{tenant_header: x-t}}").access.guarded
    assert parse(f"{SMALL}access: {{api_keys: [], api_keys_file: keys.yaml}}").access.guarded


# -- addresses


@pytest.mark.parametrize("address", ["127.0.0.1:1", "0.0.0.0:65535", "[::1]:8001", "[fd00::1:2]:80"])
def test_addresses_are_ip_and_port(address: str) -> None:
    """IPv6 in brackets."""
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("engine:80", "not IP:port"),
        ("10.0.0.1", "not IP:port"),
        ("10.0.0.1:", "not IP:port"),
        ("10.0.0:80", "not IP:port"),
        ("::1:80", "not IP:port"),
        ("http://10.0.0.1:80", "not IP:port"),
        (" 10.0.0.1:80", "not IP:port"),
        ("", "not IP:port"),
        ("10.0.0.256:80", "not IP:port"),
        ("10.0.0.1:0", "port outside 1-65535"),
        ("10.0.0.1:65536", "port outside 1-65535"),
        ("10.0.0.1:08000", "port outside 1-65535"),
        ("010.0.0.1:80", "not IP:port"),
        ("10.0.0.1:8000\n", "not IP:port"),
        ("\u0661\u0660.0.0.1:80", "not IP:port"),
        ("[:::::]:80", "not IP:port"),
        ("fd00::1:80", "not IP:port"),
    ],
)
def test_what_is_no_address_is_told_why(address: str, why: str) -> None:
    """With the value itself."""
    with pytest.raises(ValueError, match=why) as caught:
        check_address(address)
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("spelled", ["[0:0::1]:80", "[0000:0:0:0:0:0:0:0001]:80", "[::1]:80"])
def test_an_ipv6_address_has_one_spelling(spelled: str) -> None:
    """Envoy's own, or its access log would speak of an endpoint that nobody knows."""
    assert check_address(spelled) == "[::1]:80"
    assert parse(pool(endpoints=f"{{static: ['{spelled}']}}")).pools[0].endpoints.static == ("[::1]:80",)


def test_two_spellings_of_one_address_are_one_address() -> None:
    """Listed twice."""
    lines = faults(pool(endpoints="{static: ['[::1]:80', '[0::1]:80']}"))
    assert lines == ["f.yaml: pools[0].endpoints.static: an address is listed twice"]


# -- presets


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_can_be_named(name: str) -> None:
    """In a pool's `policy`; building it is part of reading the file."""
    [named] = parse(pool(f"policy: {name}")).pools
    assert named.policy == name
    assert policy_of(named) == presets()[name]


def test_a_policy_may_be_spelled_out() -> None:
    """Instead of a name."""
    [spelled] = parse(pool("policy: {kind: consistent_hash, load_factor: 2.0}")).pools
    assert spelled.policy == ConsistentHashSpec(load_factor=2.0)
    assert policy_of(spelled) is spelled.policy


def test_changing_the_list_of_presets_changes_nothing() -> None:
    """It is a copy."""
    presets().clear()
    assert "default" in presets()


def test_no_preset_exceeds_its_own_bound_on_affinity() -> None:
    """What a preset's weights say is what happens."""
    for name, policy in presets().items():
        if not isinstance(policy, WeightedSpec):
            continue
        total = sum(scorer.weight for scorer in policy.scorers)
        affinity = sum(scorer.weight for scorer in policy.scorers if scorer.name == "prefix_affinity")
        assert not total or affinity / total <= policy.max_affinity_share, name


# -- files


def test_a_file_is_read_and_its_name_is_in_the_errors(tmp_path: Path) -> None:
    """So that it is known which of two was wrong."""
    file = tmp_path / "pointsman.yaml"
    file.write_text(SMALL)
    assert load(file) == parse(SMALL)
    file.write_text("pools: []")
    with pytest.raises(ConfigError, match=f"{file}: pools: "):
        load(file)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    """In words: not a traceback, and no number either."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("none.yaml", "No such file or directory"),
        ("binary", "is not text in UTF-8"),
        ("", "Is a directory"),
    ):
        with pytest.raises(ConfigError) as told:
            load(tmp_path / name)
        assert str(told.value) == f"{tmp_path / name}: {why}"


def test_files_are_relative_to_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the working directory; absolute ones stay."""
    (tmp_path / "etc").mkdir()
    file = tmp_path / "etc" / "pointsman.yaml"
    file.write_text(
        "pools:\n"
        "  - {name: a, models: [a], endpoints: {file: lists/a.yaml}}\n"
        "  - {name: b, models: [b], endpoints: {file: /b.yaml}}\n"
        "  - {name: c, models: [c], endpoints: {static: []}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load(Path("etc/pointsman.yaml"))
    assert [one.endpoints.file for one in config.pools] == [
        tmp_path / "etc" / "lists" / "a.yaml",
        Path("/b.yaml"),
        None,
    ]


# -- schema


def test_the_schema_knows_every_section_and_forbids_the_rest() -> None:
    """What `pointsman check --schema` prints, for editors."""
    schema = Config.model_json_schema()
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["required"] == ["pools"]
    assert all(part["additionalProperties"] is False for part in (schema, *schema["$defs"].values()))
    assert "$defs" in schema


def test_the_schema_is_printed_as_json() -> None:
    """By `pointsman check --schema`, without a file."""
    result = CliRunner().invoke(cli, ["check", "--schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == Config.model_json_schema()
