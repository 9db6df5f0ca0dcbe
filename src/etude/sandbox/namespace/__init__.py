"""The backend of this machine: boxes from namespaces of the Linux kernel, seen from their owner."""

from etude.sandbox.namespace.backend import NamespaceBackend
