"""Backends that get their boxes from somebody else: a container engine, a cluster, a service."""
