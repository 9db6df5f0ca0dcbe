"""What is found in texts, what may stay, and texts that were made to be slow."""

from __future__ import annotations

import json
import re

import pytest

from etude.live.log.scrub import _SPACES, _WORDS, Scrubber, _broken, scrub_documents, scrubbed

ANN, BOB = "/home/ann/shop", "C:\\Users\\bob"
REQUEST = json.dumps({"messages": [{"role": "user", "content": f"In {ANN} and {BOB}\\x: fix it"}]}).encode()


def test_home_folders_of_the_request_stay_and_no_other_does():
    copied, made_up = json.dumps(f"cd {ANN} && ls {BOB}").encode(), b'"ls /home/zoe"'
    for _ in range(2):  # the second time from the cache of clean texts
        assert scrub_documents([REQUEST, copied], ["home"]) == ([REQUEST, copied], {})
        assert scrub_documents([REQUEST, made_up], ["home"]) == ([REQUEST, b'"ls <home>"'], {"home": 1})
        assert scrub_documents([REQUEST, copied], [])[1] == {"home": 4}
        assert scrub_documents([b"{}", copied], ["home"])[1] == {"home": 2}, "kept in another's request"
    assert scrub_documents([b'"/home/ann a@corp.io"', b'"a@corp.io"'], ["home"])[1] == {"email": 2}
    mail = [b'"/home/ann a@corp.io https://x:hunter2@corp.io"', b'"a@corp.io b@corp.io"']
    assert scrub_documents(mail, ["email"])[1] == {"home": 1, "basic_auth": 1, "email": 1}
    child = Scrubber()
    try:
        assert child.scrub(REQUEST, copied, keep=["home"])[1] == {}
        assert child.scrub(REQUEST, copied)[1] == {"home": 4}
    finally:
        child.close()


@pytest.mark.parametrize(
    "text", ["password" * 12_500, "password" + " " * 100_000, "token" + "\t" * 100_000, "api_key='" * 10_000]
)  # fmt: skip
def test_a_text_made_to_be_slow_holds_nobody_up(text):
    """Each took minutes to hours: the record of everybody waits for it. What changes is counted."""
    found, counts = scrubbed(text)
    assert (found != text) == bool(counts)


def test_a_private_key_that_never_ends_is_gone_up_to_the_next():
    begin, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    assert scrubbed(f"a {begin}\nMIIE\n{end} b") == ("a <private_key> b", {"private_key": 1})
    assert "MIIE" not in scrubbed(f"a {begin}\n{begin}\nMIIE")[0]


def test_broken_runs_leave_every_place_where_it_was():
    for text in ("a" + " " * 100 + "b", "w" * 200, " " * 25, " " * 24, "x" * 65 + "\t" * 30 + "\n" + "y" * 130):
        broken = _WORDS.sub(_broken, _SPACES.sub(_broken, text))
        assert len(broken) == len(text)
        assert all(new in (old, "\0") for old, new in zip(text, broken, strict=True))
        assert not re.search(r"[^\S\n]{25}|\w{65}", broken)
    found, _ = scrubbed(f"password = {' ' * 20}'hunter2-Xy9!' and {'_' * 70} password: 'hunter3-Xy9!'")
    assert "hunter" not in found


def test_the_rules_of_datasets_are_those_of_the_log():
    token, webhook = (
        "dop_v1_" + "0a1b2c3d" * 8,
        "https://hooks.slack" + ".com/services/T0AB1CD2E/B0AB1CD2E/" + "aB3dE5gH7" * 2,
    )
    text, counts = scrubbed(f"é {token} ü\nand {webhook}Ab3xYz")
    assert "0a1b2c3d" not in text
    assert "aB3dE5gH7" not in text
    assert text.startswith("é <")
    assert " ü\nand " in text
    assert counts
