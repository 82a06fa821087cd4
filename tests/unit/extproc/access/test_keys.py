"""API keys: made, written down, read from a file; none is ever quoted."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.access.keys import BadKeys, digest_of, make_key, name_for, parse_keys
from extproc.cli import cli
from extproc.config.loading import ConfigError, load, parse

POOLS = "pools: [{name: p, models: [m], endpoints: {static: ['10.0.0.1:1']}}]\n"
SECRET = "pm-this-must-not-be-told"


def entry(name: str = "a", tenant: str = "acme", key: str = "k") -> dict[str, str]:
    """A key's line."""
    return {"name": name, "tenant": tenant, "sha256": digest_of(key)}


def test_every_key_is_another() -> None:
    """Long enough that nobody guesses one."""
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("pm-") and len(key) >= 46 for key in keys)


def test_a_digest_is_the_sha_256_of_the_key() -> None:
    """As other tools make it; a key with odd bytes has one too."""
    assert digest_of("pm-x") == sha256(b"pm-x").hexdigest()
    assert digest_of("\udcff") == sha256(b"\xff").hexdigest()


def test_a_new_keys_name_can_stand_in_the_config() -> None:
    """Whatever the tenant is called."""
    for tenant in ("acme", "Überprüfung GmbH & Co.", "***"):
        text = f"{POOLS}access: {{api_keys: [{json.dumps(entry(name_for(tenant)))}]}}"
        assert parse(text).access.api_keys[0].tenant == "acme"


@pytest.mark.parametrize("wrap", [list, lambda keys: {"api_keys": list(keys)}])
def test_a_file_is_a_list_or_holds_one(wrap: type[list[object]]) -> None:
    """YAML or JSON; digests in either case."""
    keys = parse_keys(json.dumps(wrap([entry() | {"sha256": digest_of("k").upper()}, entry("b", key="l")])))
    assert [(key.name, key.sha256) for key in keys] == [("a", digest_of("k")), ("b", digest_of("l"))]


def test_an_empty_list_is_a_list() -> None:
    """It lets nobody in."""
    assert parse_keys("[]") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the file is empty; write `[]` to let nobody in"),
        ("# no keys at all", "the file is empty"),
        ("[{", "not YAML"),
        ("{api_keys: 3}", "expected a list of keys, or a mapping with one under `api_keys`"),
        ("api_keys:", "expected a list of keys"),
        ("[{name: a}]", "[0].tenant: required, but not given; [0].sha256: required"),
        (f"[{{name: a, tenant: t, sha256: {SECRET}}}]", "[0].sha256: not a SHA-256"),
        (f"[{{name: a, tenant: t, sha: {SECRET}}}]", "[0]: unknown key; did you mean 'sha256'?"),
        (f"[{{name: a, {SECRET}: t}}]", "[0]: unknown key; there are: name, tenant, sha256"),
        (f"- {SECRET}", "[0]: should be a mapping"),
        (f"{SECRET}: {SECRET}", "expected a list of keys"),
        (json.dumps([entry(), entry(key="l")]), "key name given more than once: a"),
        (json.dumps([entry(), entry("b")]), "sha256 given more than once"),
    ],
)
def test_what_is_no_list_of_keys_is_refused_without_quoting_it(text: str, why: str) -> None:
    """Somebody may have put the keys themselves there."""
    with pytest.raises(BadKeys) as told:
        parse_keys(text)
    assert why in str(told.value)
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    ("access", "why"),
    [
        (f"{{api_keys: [{{name: a, tenant: t, sha256: {SECRET}}}]}}", "access.api_keys[0].sha256: not a SHA-256"),
        (f"{{api_keys: [{SECRET}]}}", "access.api_keys[0]: should be a mapping"),
        (f"{{api_keys: {SECRET}}}", "access.api_keys: should be a list"),
        (f"{{api_keys: {{{SECRET}: t}}}}", "access.api_keys: should be a list"),
        (f"{{api_keys: [{{{SECRET}: t}}]}}", "access.api_keys[0]: unknown key"),
        (f"{{api_keys: [{{name: a, tenant: t, sha: {SECRET}}}]}}", "access.api_keys[0]: unknown key; did you mean"),
        (f"{{api_keys: [{{name: '{SECRET} ', tenant: t, sha256: a}}]}}", "access.api_keys[0].name: "),
        (f"{{jwt: {SECRET}}}", "access.jwt: should be a mapping"),
        (f"{{jwt: {{issuer: i, audiences: [], jwks_uri: 'ftp://u:{SECRET}@h/k'}}}}", "access.jwt.jwks_uri: "),
        (f"{{jwt: {{issuer: i, audiences: [], jwks_uri: 'http://u:{SECRET}/k'}}}}", "jwks_uri: its port is no number"),
        (SECRET, "access: should be a mapping"),
    ],
)
def test_a_key_in_the_config_is_not_told(access: str, why: str) -> None:
    """Wherever it was put in place of its digest: errors go to logs."""
    with pytest.raises(ConfigError) as told:
        parse(f"{POOLS}access: {access}")
    assert why in str(told.value)
    assert SECRET not in str(told.value)


def test_a_password_in_an_api_servers_url_is_not_told() -> None:
    """There may be none, and who gives one is told only that."""
    source = f"{{kubernetes: {{api_server: 'https://u:{SECRET}@k', pods: {{selector: a, port: 1}}}}}}"
    with pytest.raises(ConfigError) as told:
        parse(f"pools: [{{name: p, models: [m], endpoints: {source}}}]")
    assert "endpoints.kubernetes.api_server: " in str(told.value)
    assert SECRET not in str(told.value)


def test_of_what_is_no_secret_the_unknown_key_is_told() -> None:
    """It is most often a slip of the pen."""
    with pytest.raises(ConfigError, match=r"access\.api_kys: unknown key; did you mean 'api_keys'\?"):
        parse(f"{POOLS}access: {{api_kys: []}}")


# -- the commands


def test_the_command_prints_a_key_and_the_line_that_lets_it_in() -> None:
    """The line can be put into a file as it is."""
    result = CliRunner().invoke(cli, ["key", "--tenant", "acme", "--name", "laptop"])
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    [key] = [line for line in lines if line.startswith("pm-")]
    [entry] = parse_keys(lines[-1])
    assert (entry.name, entry.tenant, entry.sha256) == ("laptop", "acme", digest_of(key))


def test_the_command_refuses_a_name_that_the_config_would() -> None:
    """And prints no key."""
    result = CliRunner().invoke(cli, ["key", "--tenant", "acme", "--name", "a b"])
    assert result.exit_code == 2
    assert "pm-" not in result.stdout
    [line] = result.stderr.splitlines()
    assert line.startswith("no name for a tenant or a key: name: ")


@pytest.mark.parametrize(("content", "code", "said"), [("[]", 0, "0 API keys"), ("[{name: a}]", 2, "[0].tenant")])
def test_check_reads_the_key_file(tmp_path: Path, content: str, code: int, said: str) -> None:
    """Which stands beside the config."""
    (tmp_path / "keys.yaml").write_text(content)
    (tmp_path / "config.yaml").write_text(f"{POOLS}access: {{api_keys_file: keys.yaml}}")
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "config.yaml")])
    assert result.exit_code == code
    assert said in result.output


def test_files_count_from_the_configs_folder(tmp_path: Path) -> None:
    """Wherever we are started."""
    (tmp_path / "config.yaml").write_text(
        f"{POOLS}access: {{api_keys_file: keys.yaml, jwt: {{issuer: i, audiences: [], jwks_file: jwks.json}}}}\n"
        "observe: {request_log: {file: log.jsonl}}"
    )
    config = load(tmp_path / "config.yaml")
    assert config.access.api_keys_file == tmp_path / "keys.yaml"
    assert config.access.jwt is not None
    assert config.access.jwt.jwks_file == tmp_path / "jwks.json"
    assert config.observe.request_log is not None
    assert config.observe.request_log.file == tmp_path / "log.jsonl"


@pytest.mark.parametrize(
    ("jwt", "why"),
    [
        ("issuer: i, audiences: []", "give exactly one of: jwks_file, jwks_uri"),
        ("issuer: i, audiences: [], jwks_file: a, jwks_uri: 'https://i/k'", "give exactly one of"),
        ("issuer: i, jwks_file: a", "audiences: required"),
        ("issuer: i, audiences: [], jwks_uri: 'ldap://i/k'", "jwks_uri"),
        ("issuer: i, audiences: [], jwks_uri: 'https://i:port/k'", "jwks_uri"),
    ],
)
def test_faults_of_the_token_section(jwt: str, why: str) -> None:
    """Found when the file is read, not by Envoy."""
    with pytest.raises(ConfigError, match=why):
        parse(f"{POOLS}access: {{jwt: {{{jwt}}}}}")
