"""What agents write may show, never act."""

import unicodedata

import pytest

from etude.dashboard.text import (
    byte_count,
    clock,
    compact,
    duration,
    escape,
    inert,
    percent,
    points,
    shorten,
    signed,
    tick,
)


def test_markup_and_quotes_are_escaped():
    assert escape("<script>&\"'") == "&lt;script&gt;&amp;&quot;&#x27;"


def test_terminal_escapes_are_shown():
    assert inert("\x1b]52;c;cm0=\x07\x1b[2J\r\n\tok\x00\x7f\x9b") == "␛]52;c;cm0=␇␛[2J␍\n\tok␀␡⟨009B⟩"


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\U000e0041", "\ud800"])
def test_invisible_and_unencodable_characters_are_shown(character):
    text = inert(f"a{character}b")
    assert text == f"a⟨{ord(character):04X}⟩b"
    text.encode()


def test_nothing_that_acts_survives():
    text = inert("".join(map(chr, range(0x3000))))
    left = {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n", "\t"}
    # Arabic number signs and the like are format characters that are drawn
    assert all(0x600 <= ord(c) <= 0x8E2 for c in left)


def test_ordinary_text_is_left_alone():
    assert inert("naïve 漢字 🎉 a\tb\n") == "naïve 漢字 🎉 a\tb\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.6e-7, "1.6e−7"), (2e-4, "2e−4"), (0.0123, "0.0123"), (45.678, "45.7"), (12_345, "12.3k"),
     (3_100_000, "3.1M"), (-0.5, "−0.5"), (float("nan"), "–"), (float("inf"), "–")],
)  # fmt: skip
def test_compact(value, text):
    assert compact(value) == text


def test_units():
    assert percent(0.3456) == "34.6 %"
    assert points(-0.0123) == "−1.2"
    assert [signed(v) for v in (0.256, -0.256, -0.001)] == ["+0.26", "−0.26", "0.00"]
    assert [byte_count(n) for n in (12, 3_400, 5_600_000)] == ["12 B", "3.4 kB", "5.6 MB"]
    assert [duration(s) for s in (2.04, 59, 125, 3720)] == ["2.0 s", "59 s", "2 min 05 s", "1 h 02 min"]
    assert clock(125) == "2:05"
    assert [tick(t) for t in ("40.0 %", "+0.0", "+5.0", "0.25", "10.05")] == ["40 %", "0", "+5", "0.25", "10.05"]


def test_shorten_says_how_much_is_gone():
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 50 + "b" * 50, 10) == "aaaaa\n… 90 characters left out …\nbbbbb"
