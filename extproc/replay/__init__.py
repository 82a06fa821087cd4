"""Traces through policies, offline in virtual time: which policy suits a fleet and its traffic."""
