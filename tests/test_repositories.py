"""The list of thirty public repositories follows its rule, and a message's own option is the second command."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter

from benchmarks import repositories

SCRIPTS = {"jest", "vitest", "mocha", "node:test"}


def test_the_list_is_drawn_by_its_rule() -> None:
    known = json.loads(repositories.LIST.read_text())
    entries = known["repositories"]
    assert len(entries) == len({entry["name"] for entry in entries}) == 30
    assert Counter(entry["kind"] in SCRIPTS for entry in entries) == {False: 22, True: 8}
    assert [i for i, entry in enumerate(entries, 1) if entry.get("kept_back")] == list(range(2, 30, 3))
    for kind, names in known["larger_list"].items():
        assert names == sorted(names, key=lambda name: hashlib.sha256(name.lower().encode()).hexdigest())
        drawn = [entry["name"] for entry in entries if entry["kind"] == kind]
        assert drawn
        assert drawn == [name for name in names if name in drawn]
    assert all(re.fullmatch(r"[0-9a-f]{40}", entry["commit"]) for entry in entries)


def test_the_second_command_is_what_the_message_names() -> None:
    named = repositories.named_options
    assert named("remove them, or leave these files out with `--exclude 'a b' 'c'`.") == ["--exclude", "a b", "c"]
    assert named("add `--requires first second` to the command") == ["--requires", "first", "second"]
    assert named("`--requires PACKAGE` brings what they lack, `--exclude FILE` drops them") == []
    assert named("good: 24 tasks of 9 files") == []
