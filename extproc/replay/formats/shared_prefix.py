"""Load profiles of the shared-prefix kind, as llm-d's benchmarks have them: groups of users, each with a long prefix.

Only what decides placement is taken: the groups and the lengths. The profile's stages are one benchmark's ramp; here
arrivals are Poisson, at the rate the replay asks for. A profile may be a template (`.yaml.in`): its placeholders are
plain words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from extproc.config.yaml_text import BadYaml, parse_yaml
from extproc.replay.formats.blocks import BlockNames
from extproc.replay.formats.lines import BadTrace, Row
from extproc.replay.traces import Trace, TraceRequest

BLOCK_TOKENS = 128
_REQUESTS = 6000
_JITTER_S = 5.0
_OUTPUT_SPREAD = 0.1
"""Standard deviation of answers' lengths where the profile gives none, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Lengths in tokens. `users` of each of `groups` share the group's prefix; with `turns` a user's context grows."""

    groups: int
    users: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    output_spread: float
    multi_turn: bool = False


def read(path: Path, requests: int | None = None) -> Trace:
    """A trace drawn from the profile in the file, 6,000 requests unless said otherwise. Raises BadTrace."""
    profile = _profile(path)
    return generate(path.name.partition(".")[0], profile, requests or _REQUESTS)


def _profile(path: Path) -> Profile:
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (BadYaml, UnicodeDecodeError) as error:
        raise BadTrace(f"{path}: {error}") from error
    section = _section(document, "data", "shared_prefix")
    if section is None:
        raise BadTrace(f"{path}: no section data.shared_prefix; other kinds of profile are not read")
    row = Row(dict(section), f"{path}, data.shared_prefix")
    output = row.count("output_len")
    return Profile(
        row.count("num_groups"),
        row.count("num_prompts_per_group"),
        row.count("system_prompt_len"),
        row.count("question_len"),
        output,
        row.number("output_len_std", _OUTPUT_SPREAD * output),
        bool(section.get("enable_multi_turn_chat")),
    )


def _section(document: Any, *names: str) -> Mapping[str, Any] | None:  # noqa: ANN401 - YAML can hold anything
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else None


def generate(name: str, profile: Profile, requests: int, seed: int = 0) -> Trace:
    """Users drawn at random, one request a second on average."""
    rng, names, at_s = Random(seed), BlockNames(f"shared-prefix {seed}"), 0.0
    prefixes = [
        [names.of("prefix", group, block) for block in range(profile.prefix_tokens // BLOCK_TOKENS)]
        for group in range(profile.groups)
    ]
    said: dict[int, tuple[list[int], int]] = {}
    drawn = []
    for _ in range(requests):
        at_s += rng.expovariate(1.0)
        group, user = rng.randrange(profile.groups), rng.randrange(profile.users)
        speaker = group * profile.users + user
        before, tokens = said.get(speaker, (prefixes[group], profile.prefix_tokens))
        prompt, output = tokens + profile.question_tokens, _length(rng, profile)
        blocks, full = names.fill(before, (), prompt, output, BLOCK_TOKENS)
        drawn.append(TraceRequest(at_s, prompt, output, blocks, full, str(speaker)))
        if profile.multi_turn:
            said[speaker] = blocks, prompt + output
    return Trace(name, BLOCK_TOKENS, drawn, _JITTER_S)


def _length(rng: Random, profile: Profile) -> int:
    return max(1, int(rng.gauss(profile.output_tokens, profile.output_spread)))
