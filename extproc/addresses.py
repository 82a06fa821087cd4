"""Addresses to listen on: why one cannot be had, in words that help. Not here: who listens where (the config says)."""

from __future__ import annotations

import errno
import os
import socket


class AddressTaken(Exception):
    """What Envoy is to listen on cannot be listened on."""


def why_not_bound(error: OSError) -> str:
    """Why an address could not be bound, and what may be behind it."""
    if error.errno == errno.EADDRINUSE:
        return "the address is already in use; does another Pointsman run?"
    return os.strerror(error.errno) if error.errno else str(error)


def refuse_taken_address(address: str) -> None:
    """Find out now what Envoy would only tell in its own words. Raises AddressTaken, which names the field."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise AddressTaken(f"listen.http: cannot listen on {address}: {why_not_bound(error)}") from error
