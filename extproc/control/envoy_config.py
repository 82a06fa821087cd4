"""Envoy configuration, generated from ours: a whole bootstrap, or the parts for an Envoy somebody else runs.

Not here: what changes while we run (xds.py), and the parts themselves (listener.py, clusters.py and their like).

Rejected: templates of YAML text. Every setting here was measured to matter, and a message refuses a field it does not
have before Envoy sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from extproc.config.schema import Config
from extproc.config.sections.fields import is_wildcard
from extproc.control import envoy_types as envoy
from extproc.control.access_logs import request_log
from extproc.control.authentication import key_set_clusters
from extproc.control.clusters import (
    lane_clusters,
    load_assignment,
    own_pool_clusters,
    pointsman_cluster,
    pool_cluster,
    xds_source,
)
from extproc.control.listener import header_stripping, http_filters, http_settings, listener_settings, listeners
from extproc.control.local_replies import local_replies
from extproc.control.routes import virtual_host

__all__ = [
    "NotReachable",
    "Sections",
    "bootstrap",
    "filters",
    "load_assignment",
    "own_pool_clusters",
    "pool_cluster",
    "require_reachable",
    "to_yaml",
]

Sections: TypeAlias = Mapping[str, Message | Sequence[Message]]
"""Parts of an Envoy configuration by the name of the field they belong in."""


class NotReachable(Exception):
    """The configuration does not say where an Envoy finds us."""


def require_reachable(config: Config) -> None:
    """Raise NotReachable if only an Envoy on our own host would find us by this configuration."""
    listen = config.listen
    if listen.grpc_from_envoy is None and is_wildcard(listen.grpc):
        raise NotReachable(
            f"listen.grpc is {listen.grpc}, which for an Envoy is itself: say in listen.grpc_from_envoy where it finds"
            " us, for example pointsman.llm.svc:9004"
        )


def bootstrap(
    config: Config, *, admin_socket: str | None = None, node_id: str = "pointsman", node_cluster: str = "pointsman"
) -> envoy.Bootstrap:
    """All that an Envoy of ours is started with; pools and their addresses follow by xDS.

    `admin_socket` is a path for Envoy's admin interface; without one there is none.
    """
    return envoy.Bootstrap(
        # xDS refuses to start unless both are set
        node=envoy.Node(id=node_id, cluster=node_cluster),
        admin=_admin(admin_socket) if admin_socket else None,
        static_resources=envoy.Bootstrap.StaticResources(
            listeners=listeners(config),
            clusters=[pointsman_cluster(config), *lane_clusters(config), *key_set_clusters(config)],
        ),
        dynamic_resources=envoy.Bootstrap.DynamicResources(
            ads_config=xds_source(),
            cds_config=envoy.ConfigSource(ads=envoy.AggregatedConfigSource(), resource_api_version=envoy.ApiVersion.V3),
        ),
    )


def filters(config: Config) -> Sections:
    """The parts for an Envoy with a control plane of its own.

    Each key names the field it goes into: `listener` and `http_connection_manager` hold settings to merge into those,
    `virtual_host` goes among the route configuration's, `clusters` into static_resources, and the rest into the HTTP
    connection manager. Pool clusters ask us for their addresses on a stream of their own, so the Envoy's ADS stays
    untouched.
    """
    return {
        "listener": listener_settings(config),
        "http_connection_manager": http_settings(config),
        "early_header_mutation_extensions": [header_stripping(config)],
        "http_filters": http_filters(config),
        "virtual_host": virtual_host(config),
        "local_reply_config": local_replies(),
        "access_log": [request_log(config)],
        "clusters": [
            pointsman_cluster(config),
            *lane_clusters(config),
            *key_set_clusters(config),
            *own_pool_clusters(config, via="own_stream"),
        ],
    }


def to_yaml(parts: Message | Sections) -> str:
    """YAML as Envoy reads it."""
    return yaml.safe_dump(_plain(parts), sort_keys=False, allow_unicode=True, width=120)


def _plain(parts: Message | Sections | Sequence[Message]) -> Any:  # noqa: ANN401 - JSON-like data of any shape
    if isinstance(parts, Message):
        return _in_order(MessageToDict(parts, preserving_proto_field_name=True))
    if isinstance(parts, Mapping):
        return {name: _plain(section) for name, section in parts.items()}
    return [_plain(part) for part in parts]


def _in_order(value: object) -> object:
    """What it is comes first, the rest by the alphabet: the messages' own order of maps differs from run to run."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=lambda key: (key not in {"@type", "name"}, key))
        return {key: _in_order(value[key]) for key in keys}
    return [_in_order(item) for item in value] if isinstance(value, list) else value


def _admin(socket: str) -> envoy.Admin:
    return envoy.Admin(address=envoy.Address(pipe=envoy.Pipe(path=socket)))
