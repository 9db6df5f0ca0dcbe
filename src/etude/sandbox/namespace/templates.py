"""The owner's side of stems: see `guest/image_template.py`."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

from etude.sandbox.base import BoxDead
from etude.sandbox.machine_profile import MachineProfile
from etude.sandbox.namespace.connection import Connection

KEPT = 8  # stems that go on without a box, for the next one on their image
DEPTH = 64  # frozen layers below one box: mount options must fit a page


class ImageTemplate:
    """The process of one image; ends when nothing holds this object: no box, no frozen layer, and not
    `ImageTemplates`."""

    def __init__(self, connection: Connection, persona: MachineProfile | None) -> None:
        self.connection = connection
        self.persona = persona
        self._layers = 0
        weakref.finalize(self, connection.close)

    def fork(self, connection: int, groups: Sequence[int]) -> None:
        """A live box at the other end of `connection`. Raises BoxDead."""
        self.connection.tell({"box": len(groups)}, [connection, *groups])

    def keep(self, mount: int) -> Layer:
        """Hand over a frozen layer, for boxes to be made upon. Raises BoxDead."""
        self._layers += 1
        name = str(self._layers)
        try:
            self.connection.tell({"keep": name}, [mount])
        finally:
            os.close(mount)
        return Layer(self, name)


class Layer:
    """What a box wrote before it was forked; goes when no box stands on it."""

    def __init__(self, stem: ImageTemplate, name: str) -> None:
        self.stem = stem
        self.name = name
        weakref.finalize(self, _drop, stem.connection, name)


def _drop(connection: Connection, name: str) -> None:
    with contextlib.suppress(BoxDead):  # and its layers with it
        connection.tell({"drop": name}, [])


class ImageTemplates:
    """All stems of a sandbox, by what they are made of."""

    def __init__(self) -> None:
        self._all: weakref.WeakValueDictionary[bytes, ImageTemplate] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, ImageTemplate] = OrderedDict()

    def get(self, key: bytes, make: Callable[[], ImageTemplate]) -> ImageTemplate:
        """The stem of that key, made if there is none."""
        stem = self._all.get(key)
        if stem is None or stem.connection.dead is not None:
            stem = self._all[key] = make()
        self._kept[key] = stem
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return stem

    def close(self, why: str) -> None:
        """Their boxes end with them."""
        for stem in list(self._all.values()):
            stem.connection.close(why)
        self._kept.clear()
