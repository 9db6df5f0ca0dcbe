"""The figures of `docs/results.md`: records below `docs/figures`, and the page that is made of them.

`python -m benchmarks.results` writes the page; `--check` exits with 1 if the page is another. `etude bench NAME --json
--record docs/figures/NAME.json` writes a new record, or the one of an earlier run anew.

results.json  title and text of the page, the hardware that it leaves unsaid, and the names of the sections in order
NAME.json     a section: `title`, `level` of its heading, `text`, `records`

A record is what a benchmark prints (`bench`, `rows`, `checks`) with `command` (null, with the `reason`), `hardware`,
`date`, `commit` and `conditions`. It may have a `title`, a `text` below its rows, `hide` (patterns of cases that the
page leaves out; a record of which no case is left is not in it) and `by`: its rows form a table whose first column has
that heading, and a case is ROW/COLUMN. A row has `case`, `value` (a number, numbers in the order of its case, words),
`unit` and `baseline` (what it is measured against), and may have `before` and `interval` (low and high; all that is
known if `value` is null).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import textwrap
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "results.md"
WIDTH = 120
LONGEST = 5  # digits of a figure that is shown as it was written; longer ones are rounded
KEPT = ("title", "hide")  # of a record that is measured again

# --- data files -----------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """A data file; figures keep the digits that they are written with."""
    return json.loads(path.read_text(), parse_float=Decimal)


def dump(data: dict[str, Any]) -> str:
    """A data file as text, a line for each row."""
    marked = json.dumps(data, indent=1, ensure_ascii=False, default=lambda figure: f"<<{figure}>>")
    text = re.sub(r'"<<(.*?)>>"', lambda figure: figure[1], marked)
    return re.sub(r'\{\s+"case".*?\}', lambda row: re.sub(r"\n\s*", " ", row[0]), text, flags=re.DOTALL) + "\n"


def described() -> dict[str, str]:
    """Hardware, date and commit of a measurement that is made now."""
    import torch

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    chip = names[0].partition(":")[2].strip() if names else platform.machine()
    return {
        "hardware": f"{chip}, {len(names)} cores, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
    }


def record(path: Path, result: dict[str, Any], command: str, conditions: str) -> None:
    """Writes what a benchmark gave into a data file, in the place of the same benchmark's record there."""
    data = load(path) if path.is_file() else {"title": result["bench"], "level": 2, "records": []}
    made = {"bench": result["bench"], "command": command, **described(), "conditions": conditions}
    made |= {key: value for key, value in result.items() if key not in made}
    for i, old in enumerate(data["records"]):
        if old["bench"] == made["bench"] and ("--quick" in (old["command"] or "")) == ("--quick" in command):
            data["records"][i] = {key: old[key] for key in KEPT if key in old} | made
            break
    else:
        data["records"].append(made)
    path.write_text(dump(data))


# --- the page -------------------------------------------------------------------------------------------------------


def number(value: int | Decimal, signed: bool = False) -> str:
    """A figure as it was written, or three digits of one that a program printed; tiny ones with an exponent."""
    sign = "+" if signed and value else ""
    if isinstance(value, int):
        return f"{value:{sign},}"
    if len(value.as_tuple().digits) > LONGEST:
        value = Decimal(f"{value:.2e}") if abs(value) < 1000 else Decimal(f"{value:.0f}")
    tiny = value and value.adjusted() < -3
    return f"{value:{sign}e}" if tiny else f"{value:{sign},f}"


def numbers(value: Any, signed: bool) -> str:
    """One figure, several, or words."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(each if isinstance(each, str) else number(each, signed) for each in values)


def figure(row: dict[str, Any]) -> str:
    """One row's value with its unit, what it was before, its interval and what it is measured against."""
    unit, value, span = row["unit"], row["value"], row.get("interval")
    signed = unit == "points"
    if unit == "share":
        unit, value = "%", value * 100
    ends = [number(end, signed) for end in span or ()]
    shown = "-".join(ends) if value is None else numbers(value, signed)
    if "before" in row:
        shown = f"{numbers(row['before'], signed)}→{shown}"
    shown += unit if unit in ("%", "x", "") else f" {unit}"
    if ends and value is not None:
        shown += f" [{', '.join(ends)}]"
    if row["baseline"]:
        shown += f" ({row['baseline']})"
    return shown.strip()


def table(rows: list[dict[str, Any]], heading: str) -> list[str]:
    """Lines of a table: a case is ROW/COLUMN."""
    cells = {tuple(row["case"].rsplit("/", 1)): figure(row) for row in rows}
    names, columns = dict.fromkeys(name for name, _ in cells), dict.fromkeys(column for _, column in cells)
    lines = [[heading, *columns], *([name, *(cells.get((name, column), "") for column in columns)] for name in names)]
    text = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines]
    return [text[0], "|" + "---|" * len(lines[0]), *text[1:]]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of a paragraph or of a list's item."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def lead(made: dict[str, Any], hardware: str, before: dict[str, Any]) -> str:
    """What a record says of its measurement; unless it is that of the record before, with its command."""
    title = f"**{made['title']}.** " if "title" in made else ""
    if all(made[key] == before.get(key) for key in ("command", "hardware", "date", "commit")):
        return (title + made["conditions"]).strip()
    place = [] if made["hardware"] == hardware else [made["hardware"]]
    where = ", ".join([*place, made["date"], f"`{made['commit'][:8]}`"])
    command = f"`{made['command']}`" if made["command"] else "No command"
    return f"{title}{command} ({where}). {made['conditions']}".strip()


def rows_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record that the page shows."""
    hidden = made.get("hide", [])
    return [row for row in made["rows"] if not any(fnmatchcase(row["case"], pattern) for pattern in hidden)]


def section(data: dict[str, Any], hardware: str) -> list[str]:
    """Lines of a data file."""
    lines, before = ["#" * data["level"] + f" {data['title']}", "", *wrapped(data.get("text", "")), ""], {}
    for made in filter(rows_of, data["records"]):
        lines += [*wrapped(lead(made, hardware, before)), ""]
        if "by" in made:
            lines += table(rows_of(made), made["by"])
        else:
            lines += [line for row in rows_of(made) for line in wrapped(f"- {row['case']}: {figure(row)}", "  ")]
        lines += ["", *wrapped(made.get("text", "")), ""]
        before = made
    return lines


def page(folder: Path = FOLDER) -> str:
    """The page that the data files make."""
    whole = load(folder / "results.json")
    lines = [f"# {whole['title']}", "", *wrapped(f"{whole['text']} {whole['hardware']}."), ""]
    for name in whole["sections"]:
        lines += section(load(folder / f"{name}.json"), whole["hardware"])
    return re.sub(r"\n\n\n+", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description="docs/results.md from its data")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with an error if the page is another")
    made = page()
    if parser.parse_args().check:
        same = PAGE.read_text() == made
        print("docs/results.md is " + ("as its data make it" if same else "not what its data make"))
        return 0 if same else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
