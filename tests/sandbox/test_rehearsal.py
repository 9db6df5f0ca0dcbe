"""The rehearsal of a live box runs in no box: whatever it sees, it signals no process of the machine."""

import os
import signal
import socket

import pytest

from etude.sandbox.guest.live_box import LiveBox, _Rehearsal


def test_only_pid_1_of_a_box_signals_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for server in (_Rehearsal(theirs, (), None), LiveBox(theirs, (), None)):
            server.request = {"limits": {"memory": 0}, "environment": {}}  # all processes together hold more
            if isinstance(server, _Rehearsal):
                server._watch()
            else:
                with pytest.raises(AssertionError):
                    server._watch()
            with pytest.raises(AssertionError):
                server._signal(signal.SIGKILL)
        assert sent == []
        monkeypatch.setattr(os, "getpid", lambda: 1)
        server._watch()
        assert sent == [(-1, signal.SIGKILL)]
