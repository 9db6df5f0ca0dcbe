"""Backends whose boxes are machines of a remote host: a container engine, a cluster or a service."""
