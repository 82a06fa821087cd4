"""`pointsman check`: what it says of a config, of the files it names, and of what was probably meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.access.keys import BadKeys, digest_of, parse_keys
from extproc.cli import cli
from extproc.config.files import file_faults
from extproc.config.loading import ConfigError, load, parse
from extproc.config.pool_policies import presets
from extproc.wire.certificates import self_signed

POOL = "pools: [{name: chat, models: [m], endpoints: {static: ['10.0.0.1:80']}POLICY}]\n"
KEY = json.dumps({"name": "laptop", "tenant": "acme", "sha256": digest_of("k")})


def check(folder: Path, text: str) -> Any:
    """The command, on a file in `folder`."""
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    return CliRunner().invoke(cli, ["check", str(folder / "c.yaml")])


def config(extra: str = "", policy: str = "") -> str:
    """A file with one pool."""
    return POOL.replace("POLICY", policy and f", policy: {policy}") + extra


def faults(text: str) -> list[str]:
    """One line per fault."""
    with pytest.raises(ConfigError) as told:
        parse(text, source="f")
    return str(told.value).splitlines()


# -- a valid file


@pytest.mark.parametrize(
    ("access", "says"),
    [
        ("", "access: everybody may call"),
        (f"access: {{api_keys: [{KEY}]}}", "access: 1 API keys"),
        ("access: {tenant_header: x-t}", "access: tenants that a gateway names in x-t"),
        (
            f"access: {{api_keys: [{KEY}], jwt: {{issuer: i, audiences: [], jwks_uri: 'http://i/k'}}}}",
            "access: 1 API keys; tokens of i",
        ),
    ],
)
def test_who_may_call_is_always_said(tmp_path: Path, access: str, says: str) -> None:
    """Most of all where it is everybody."""
    result = check(tmp_path, config(access))
    assert (result.exit_code, says in result.stdout.splitlines()) == (0, True)


def test_keys_in_both_places_are_counted(tmp_path: Path) -> None:
    """One that stands in both is one."""
    (tmp_path / "keys.yaml").write_text(f"[{KEY}]")
    result = check(tmp_path, config(f"access: {{api_keys: [{KEY}], api_keys_file: keys.yaml}}"))
    assert f"access: 1 API keys ({tmp_path / 'keys.yaml'})" in result.stdout


def test_a_key_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of it is of one moment, though it breaks in the next."""
    answers: list[Any] = [parse_keys(f"[{KEY}]"), BadKeys("broken since")]
    monkeypatch.setattr("extproc.followed_files.read_keys", lambda _file: answers.pop(0))
    result = check(tmp_path, config("access: {api_keys_file: keys.yaml}"))
    assert (result.exit_code, len(answers)) == (0, 1)
    assert f"access: 1 API keys ({tmp_path / 'keys.yaml'})" in result.stdout


def test_the_queue_and_the_guard_are_told(tmp_path: Path) -> None:
    """By what an operator would look for first; of what there is none, nothing."""
    guard = "guard: {requests: {per_s: 5}, concurrency: 8, patterns: {card: {regex: '[0-9]{16}'}}}"
    queue = "queue: {late_binding: false, classes: [{name: now, places: 10}, {name: later, places: 20}]}"
    told = check(tmp_path, config(guard)).stdout
    assert "guard: each address: 5 requests a second, 8 at once; patterns: card" in told.splitlines()
    assert "queue of" not in told
    with_queue = check(tmp_path, POOL.replace("POLICY", f", {queue}")).stdout
    assert "pool chat: queue of now (weight 1, 10 places), later (weight 1, 20 places); late binding off" in with_queue
    assert "guard:" not in with_queue


def test_a_weight_that_does_not_count_as_written_is_told(tmp_path: Path) -> None:
    """And only that: a bound that binds nothing is not worth a line."""
    scorers = "{scorers: [{name: prefix_affinity, weight: WEIGHT}, {name: least_request, weight: 2}]}"
    told = "pool chat: prefix_affinity weighs 60 %, counts 30 % (max_affinity_share)"
    assert told in check(tmp_path, config(policy=scorers.replace("WEIGHT", "3"))).stdout.splitlines()
    assert "max_affinity_share" not in check(tmp_path, config(policy=scorers.replace("WEIGHT", "0.5"))).stdout


@pytest.mark.parametrize(
    ("policy", "endpoints", "says"),
    [
        ("{scorers: [{name: cost}]}", "static: []", "endpoints: 0 static; policy: inline (weighted)"),
        ("{kind: lmetric}", "dns: {name: _v._tcp.x}", "endpoints: DNS SRV of _v._tcp.x; policy: inline (lmetric)"),
        ("default", "dns: {name: x, port: 1}", "endpoints: DNS A/AAAA of x; policy: default"),
        ("default", "kubernetes: {pods: {selector: app=v, port: 1}}", "Kubernetes, pods app=v;"),
        ("default", "kubernetes: {namespace: n, inference_pool: {name: p}}", "InferencePool p in namespace n;"),
        ("default", "kubernetes: {endpoint_slices: {service: s}}", "Kubernetes, EndpointSlices of s;"),
    ],
)
def test_a_pools_line_names_its_source_and_policy(tmp_path: Path, policy: str, endpoints: str, says: str) -> None:
    """In words, not as Python prints it."""
    text = f"pools: [{{name: p, models: [m], endpoints: {{{endpoints}}}, policy: {policy}}}]"
    assert says in check(tmp_path, text).stdout


def test_presets_are_listed_when_asked_for(tmp_path: Path) -> None:
    """And do not hide the rest when not."""
    assert CliRunner().invoke(cli, ["check", "--presets"]).stdout.split() == list(presets())
    assert "lmetric" not in check(tmp_path, config()).stdout


# -- what was meant


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (config("limts: {}"), "f: limts: unknown key; did you mean 'limits'?"),
        (config("nothing_like_it: 1"), "f: nothing_like_it: unknown key; see `pointsman check --schema`"),
        (config("retries: {atempts: 1}"), "f: retries.atempts: unknown key; did you mean 'attempts'?"),
        (config(policy="{kind: weigted}"), "; did you mean 'weighted'?"),
        (config(policy="{scorrers: []}"), "f: pools[0].policy.scorrers: unknown key; did you mean 'scorers'?"),
        (config(policy="{scorers: [{nam: cost}]}"), "scorers[0].nam: unknown key; did you mean 'name'?"),
        (config(policy="{kind: lmetric, load_factr: 1}"), "load_factr: unknown key; see"),
        (config(policy="leastrequest"), "no preset 'leastrequest'; did you mean 'least-request'? there are: "),
        (config(policy="{scorers: [{name: kv_use}]}"), "unknown scorer 'kv_use'; did you mean 'kv_usage'? there are"),
        (config(policy="{filters: [contxt], scorers: []}"), "unknown filter 'contxt'; did you mean 'context'?"),
        ("pools: [{name: a, models: m, endpoints: {static: []}}]", "pools[0].models: should be a list (given: 'm')"),
        ("pools: [{name: 5, models: [m], endpoints: {static: []}}]", "name: should be text; put it in quotes (given"),
        ("pools: [a]", "f: pools[0]: should be a mapping (given: 'a')"),
        (config("probe: {trial: maybe}"), "f: probe.trial: should be true or false (given: 'maybe')"),
        (config(policy="{picker: max_score}"), "policy: nothing ranks the endpoints; name scorers, or use least"),
    ],
)
def test_a_fault_is_told_in_an_operators_words(text: str, line: str) -> None:
    """With what was probably meant, where one word is close."""
    assert any(line in fault for fault in faults(text))


def test_every_policys_fault_is_told() -> None:
    """Not the first alone."""
    one = "{name: NAME, models: [NAME], endpoints: {static: []}, policy: nope, hardware: nope}"
    told = faults(f"pools: [{one.replace('NAME', 'a')}, {one.replace('NAME', 'b')}]")
    places = [fault.split(": ")[1] for fault in told]
    assert places == ["pools[0].policy", "pools[0].hardware", "pools[1].policy", "pools[1].hardware"]


def test_a_slip_in_the_key_file_has_its_line(tmp_path: Path) -> None:
    """But nothing of what stands there."""
    (tmp_path / "keys.yaml").write_text(f"- {KEY}\n- {{name: secret, name: secret}}\n")
    result = check(tmp_path, config("access: {api_keys_file: keys.yaml}"))
    assert result.exit_code == 2
    assert f"c.yaml: access.api_keys_file: {tmp_path / 'keys.yaml'}: line 2: not YAML" in result.stderr
    assert "secret" not in result.output


# -- help


@pytest.mark.parametrize("command", [[], ["check"], ["replay"]])
def test_help_is_had_by_its_short_name_too(command: list[str]) -> None:
    """Of the whole and of each command."""
    short, long = (CliRunner().invoke(cli, [*command, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage: " in short.output


# -- files


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a certificate, its key, another key, and things that are neither."""
    for name in ("a", "b"):
        key, certificate = self_signed()
        (tmp_path / f"{name}.key").write_bytes(key)
        (tmp_path / f"{name}.crt").write_bytes(certificate)
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    (tmp_path / "keys.json").write_text('{"keys": [{"kty": "RSA"}]}')
    (tmp_path / "none.json").write_text('{"keys": []}')
    return tmp_path


GOOD = "certificate: a.crt, key: a.key"
JWT = "access: {jwt: {issuer: i, audiences: [], JWKS}}"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("listen: {tls: {certificate: gone, key: a.key}}", "listen.tls.certificate: FOLDER/gone: No such file"),
        ("listen: {tls: {certificate: broken, key: a.key}}", "listen.tls.certificate: FOLDER/broken: holds no cert"),
        ("listen: {http_tls: {certificate: a.crt, key: a.crt}}", "listen.http_tls.key: FOLDER/a.crt: holds no private"),
        ("listen: {http_tls: {certificate: a.crt, key: b.key}}", "listen.http_tls.key: FOLDER/b.key: is not the key"),
        (f"listen: {{tls: {{{GOOD}, client_ca: a.key}}}}", "listen.tls.client_ca: FOLDER/a.key: holds no certificate"),
        (JWT.replace("JWKS", "jwks_file: gone"), "access.jwt.jwks_file: FOLDER/gone: No such file"),
        (JWT.replace("JWKS", "jwks_file: a.crt"), "access.jwt.jwks_file: FOLDER/a.crt: is no JSON with a list"),
        (JWT.replace("JWKS", "jwks_file: none.json"), "access.jwt.jwks_file: FOLDER/none.json: has no key"),
        (JWT.replace("JWKS", "jwks_uri: 'https://i/k', jwks_ca: /gone"), "access.jwt.jwks_ca: /gone: No such file"),
        ("observe: {request_log: {file: gone/log}}", "observe.request_log.file: FOLDER/gone: no such folder"),
        ("observe: {request_log: {file: a.crt/log}}", "observe.request_log.file: FOLDER/a.crt: no such folder"),
        ("observe: {request_log: {file: ../FOLDER}}", "observe.request_log.file: "),
    ],
)
def test_a_file_that_would_stop_us_is_named_with_its_field(files: Path, extra: str, says: str) -> None:
    """Before anything starts."""
    result = check(files, config(extra.replace("../FOLDER", str(files))))
    assert result.exit_code == 2
    assert f"c.yaml: {says.replace('FOLDER', str(files))}" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "extra",
    [
        f"listen: {{tls: {{{GOOD}, client_ca: b.crt}}, http_tls: {{{GOOD}}}}}",
        JWT.replace("JWKS", "jwks_file: keys.json"),
        JWT.replace("JWKS", "jwks_uri: 'http://i/k', jwks_ca: /gone"),
        "observe: {request_log: {file: log}}",
    ],
)
def test_good_files_are_no_fault(files: Path, extra: str) -> None:
    """Nor is a file that only we shall make, or a CA that nobody asks."""
    result = check(files, config(extra))
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_file_that_may_come_later_is_worth_a_warning(tmp_path: Path) -> None:
    """The others serve without it."""
    result = check(tmp_path, "pools: [{name: p, models: [m], endpoints: {file: gone.yaml}}]")
    assert result.exit_code == 0
    assert f"warning: pools[0].endpoints.file: {tmp_path / 'gone.yaml'}: cannot be read" in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("- foo", ["[0]: 'foo' is not IP:port"]),
        ("hello", ["expected a list of IP:port, or a mapping with one under `endpoints`"]),
        ("- [a", ["not YAML or JSON: "]),
        ("- 10.0.3.14\n- 10.0.3.15:80\n- host.example:8000", ["[0]: '10.0.3.14' is", "[2]: 'host.example:8000' is"]),
        ("- {adress: '10.0.3.14:80'}", ["[0].address: required", "[0].adress: unknown key; did you mean 'address'?"]),
        ("", ["the file is empty; write `[]` if there are no endpoints"]),
        (b"\xff\xfe", ["is not text in UTF-8"]),
    ],
)
def test_an_endpoints_file_is_read_as_a_running_system_does(
    tmp_path: Path, content: str | bytes, told: list[str]
) -> None:
    """What that would only log is a fault here, each in a line."""
    file = tmp_path / "list.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    result = check(tmp_path, "pools: [{name: p, models: [m], endpoints: {file: list.yaml}}]")
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if "c.yaml: " in line]
    assert len(lines) == len(told)
    for line, what in zip(lines, told, strict=True):
        assert f"c.yaml: pools[0].endpoints.file: {file}: {what}" in line
    assert "is valid" not in result.output
    file.write_text("[]")
    assert check(tmp_path, "pools: [{name: p, models: [m], endpoints: {file: list.yaml}}]").exit_code == 0


def test_an_endpoints_file_that_is_a_folder_is_a_fault(tmp_path: Path) -> None:
    """It will not become a file."""
    (tmp_path / "list.yaml").mkdir()
    result = check(tmp_path, "pools: [{name: p, models: [m], endpoints: {file: list.yaml}}]")
    assert (result.exit_code, "list.yaml: is a folder" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("field", "content", "why"),
    [
        ("ca_file", "no", "holds no certificate in PEM"),
        ("token_file", "", "holds no token"),
        ("token_file", "a\nb", "holds no token"),
        ("token_file", b"\xff", "is not text in UTF-8"),
    ],
)
def test_a_clusters_credentials_are_looked_at(tmp_path: Path, field: str, content: str | bytes, why: str) -> None:
    """As far as they are there: in a pod they come with it."""
    (tmp_path / "f").write_bytes(content.encode() if isinstance(content, str) else content)
    source = f"{{kubernetes: {{api_server: 'https://k', pods: {{selector: a=b, port: 1}}, {field}: f}}}}"
    result = check(tmp_path, f"pools: [{{name: p, models: [m], endpoints: {source}}}]")
    assert result.exit_code == 2
    assert f"c.yaml: pools[0].endpoints.kubernetes.{field}: {tmp_path / 'f'}: {why}" in result.stderr


def test_good_credentials_of_a_cluster_are_no_fault(tmp_path: Path) -> None:
    """A token may end with a line feed."""
    (tmp_path / "ca").write_bytes(self_signed()[1])
    (tmp_path / "token").write_text("secret\n")
    source = "{api_server: 'https://k', pods: {selector: a=b, port: 1}, ca_file: ca, token_file: token}"
    result = check(tmp_path, f"pools: [{{name: p, models: [m], endpoints: {{kubernetes: {source}}}}}]")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_tokenizer_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    """Once what it takes is there."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    precise = "prefix_index: {precise: {tokenizer: '.'}}"
    result = check(tmp_path, f"pools: [{{name: p, models: [m], endpoints: {{static: []}}, {precise}}}]")
    assert result.exit_code == 2
    assert f"precise.tokenizer: {tmp_path / 'tokenizer.json'} cannot be used: " in result.stderr


def test_a_tokenizer_that_is_not_there_is_worth_a_warning(tmp_path: Path) -> None:
    """Requests are served all the same, by the approximate index; what is there is not complained of."""
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    precise = "prefix_index: {precise: {tokenizer: tok}}"
    said = check(tmp_path, f"pools: [{{name: p, models: [m], endpoints: {{static: []}}, {precise}}}]")
    assert said.exit_code == 0, said.output
    warning = "warning: pools[0].prefix_index.precise.tokenizer: "
    assert f"{warning}{tmp_path / 'tok' / 'tokenizer_config.json'}: cannot be read" in said.stderr
    assert "tokenizer.json: cannot be read" not in said.stderr


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_start_names_the_field_too(files: Path, command: str) -> None:
    """And starts nothing, Envoy least of all."""
    (files / "c.yaml").write_text(config("listen: {tls: {certificate: a.crt, key: b.key}}"))
    result = CliRunner().invoke(cli, [command, str(files / "c.yaml")])
    assert result.exit_code == 2
    assert "listen.tls.key: " in result.stderr


def test_what_only_envoy_reads_does_not_keep_us_from_serving(files: Path) -> None:
    """Beside an Envoy of the operator's, which may run elsewhere."""
    (files / "c.yaml").write_text(config(f"{JWT.replace('JWKS', 'jwks_file: gone')}"))
    assert len(file_faults(load(files / "c.yaml"))) == 1
    assert file_faults(load(files / "c.yaml"), of_envoy=False) == []
