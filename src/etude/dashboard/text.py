"""Text for people. Text of agents is hostile: it may hold markup, terminal escapes or invisible characters."""

from __future__ import annotations

import html
import math
import re

# Characters with an effect instead of a visible form: C0 and C1 controls except tab and newline, bidirectional
# overrides, zero-width and other invisible format characters, line separators, and lone surrogates, which no encoder
# accepts.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e0fff]"
)


def inert(text: str) -> str:
    """`text` with control and invisible characters replaced by visible names: ESC becomes ␛, U+202E becomes ⟨202E⟩."""
    return _ACTING.sub(lambda match: _picture(ord(match[0])), text)


def escape(text: str) -> str:
    """`text` for HTML, in element content and in quoted attributes."""
    return html.escape(inert(text), quote=True)


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` characters, the middle left out and counted."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def percent(value: float, digits: int = 1) -> str:
    """A share, 0 to 1, in percent."""
    return f"{100 * value:.{digits}f} %"


def tick(text: str) -> str:
    """A formatted axis label without a trailing `.0` or the sign of zero."""
    text = re.sub(r"\.0(?!\d)", "", text)
    return "0" if text == "+0" else text


def clock(seconds: float) -> str:
    """`1:05`, minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def points(value: float) -> str:
    """A difference of two shares in percentage points, always signed, with a real minus."""
    return f"{100 * value:+.1f}".replace("-", "−")


def signed(value: float) -> str:
    """Two digits with a sign, a real minus; zero has none."""
    text = f"{value:+.2f}".replace("-", "−")
    return "0.00" if text in ("+0.00", "−0.00") else text


def compact(value: float) -> str:
    """Three significant digits with a metric suffix: 0.0123, 4.5, 12.3k, 3.1M; tiny values as 1.2e−6."""
    size = abs(value)
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def optional(value: float | None) -> str:
    """`compact`, or a dash for None."""
    return "–" if value is None else compact(value)


def byte_count(value: float) -> str:
    """Bytes with a decimal prefix: 512 B, 1.08 MB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """`7 s`, `2 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨{code:04X}⟩"
