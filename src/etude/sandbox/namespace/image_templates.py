"""The owner's side of the processes that live boxes are forked from: see `guest/image_template.py`."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

from etude.sandbox.connection import Connection
from etude.sandbox.machine_profile import MachineProfile

KEPT = 8  # templates kept without a box, for the next box on their image


class ImageTemplate:
    """The process of one image. It ends when no box and no `ImageTemplates` holds this object."""

    def __init__(self, connection: Connection, machine_profile: MachineProfile | None) -> None:
        self.connection = connection
        self.machine_profile = machine_profile
        weakref.finalize(self, connection.close)

    def fork(self, connection: int, groups: Sequence[int]) -> None:
        """A live box at the other end of the socket `connection`, in control groups. Raises BoxDead."""
        self.connection.tell([connection, *groups])


class ImageTemplates:
    """All image templates of a sandbox, by a digest of their parts."""

    def __init__(self) -> None:
        self._all: weakref.WeakValueDictionary[bytes, ImageTemplate] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, ImageTemplate] = OrderedDict()

    def get(self, key: bytes, make: Callable[[], ImageTemplate]) -> ImageTemplate:
        """The template of that key; `make` makes a missing one."""
        template = self._all.get(key)
        if template is None or template.connection.dead is not None:
            template = self._all[key] = make()
        self._kept[key] = template
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return template

    def close(self, reason: str) -> None:
        """End all templates, and with them their boxes."""
        for template in list(self._all.values()):
            template.connection.close(reason)
        self._kept.clear()
