"""card.md of a corpus of documents, made of its corpus.json alone. It holds no time and no path of this machine: equal
builds give equal cards."""

from __future__ import annotations

from typing import Any

from etude.code import table
from etude.corpus.documents.copies import BAND_TEXT
from etude.corpus.documents.seal import MOST

RULES = {
    "other kinds of files": "no ending of a language or of text",
    "link": "symbolic links are not followed",
    "submodule": "another repository: name its clone as a source of its own",
    "vendored": "below vendor, node_modules, third_party and their like",
    "lock file or minified": "by its name",
    "credentials": "a file that holds credentials by its name",
    "not UTF-8": "another encoding, or broken",
    "binary": "control characters",
    "generated": "its first lines say that a program wrote it",
    "too short": "fewer than 10 lines; own files: fewer than 3",
    "too long": "more than 20,000 lines or 1 MB",
    "long lines": "code with a line over 1,000 characters, or 100 on average",
    "few letters": "less than a quarter",
    "short tokens": "fewer than 2 characters per token: tables of numbers",
    "few comments": "less than 1 % of the characters; own files may",
    "many comments": "more than 85 % of the characters",
    "neither a text nor a conversation": "a line of replay data without text or messages",
    "copy": "equal but for blanks",
    "near copy": BAND_TEXT,
    "secrets": f"more than {MOST}, or in a place where none can be replaced",
    "syntax": "more than 1 % of the file does not parse",
    "suite": "holds a piece of a suite that no definition encloses",
}


def card(corpus: dict[str, Any]) -> str:
    """The card as Markdown."""
    sources, options = corpus["sources"], corpus["options"]
    dropped = {reason: [row["dropped"].get(reason, 0) for row in sources] for reason in RULES}
    held = sum(row["held_out_documents"] for row in sources)
    sections = [
        "# Documents\n",
        f"Made by `etude corpus build` with seed {options['seed']}: {sum(r['documents'] for r in sources):,} documents "
        f"of {sum(r['characters'] for r in sources):,} characters, {held:,} of them held out. Digest of the parts "
        f"(blake3): `{corpus['digest']}`.\n",
        "## Where they come from\n",
        table(
            ("source", "kind", "licence", "stated in", "revision", "documents", "characters", "held out"),
            [
                (
                    row["name"],
                    row["kind"],
                    row["licence"] or "not stated",
                    row["licence_source"],
                    row["revision"][:12],
                    row["documents"],
                    row["characters"],
                    row["held_out_documents"],
                )
                for row in sources
            ],
        ),
        "The licence of own sources is the word of whoever built the corpus. Every row names its file, its lines, the "
        "revision, the licence and the date of the last change.\n",
        "## What they are\n",
        table(
            ("source", "windows of several files", "texts to be filled in", "secrets replaced", "suites' pieces cut"),
            [
                (
                    row["name"],
                    row["windows"],
                    row["fill_in_the_middle"],
                    row["secrets_replaced"],
                    row["definitions_of_suites_cut"],
                )
                for row in sources
            ],
        ),
        _notes(corpus),
        "## What was left out\n",
        table(
            ("reason", *(row["name"] for row in sources), "rule"),
            [(reason, *counts, RULES[reason]) for reason, counts in dropped.items() if any(counts)],
        ),
    ]
    return "\n".join(sections)


def _notes(corpus: dict[str, Any]) -> str:
    options = corpus["options"]
    after, suites = options["hold_out_after"], options["suites"]
    lines = [
        f"Histories are trained on as of {after}. Held out are files that were added since, and of files that were "
        "changed since the definitions with new lines; no near copy of these files is trained on."
        if after
        else "No file is held out by its date.",
        f"{options['suite_pieces']} pieces of {', '.join(suites)} and their copies (renamed, reflowed) are not in it; "
        f"{options['suite_pieces_too_short']} were too short to be searched."
        if suites
        else "No suite was named: nothing keeps answers of a benchmark out.",
    ]
    for row in corpus["sources"]:
        if row["kind"] == "conversations" and row["without_a_date"]:
            lines.append(f"{row['without_a_date']} rows of {row['name']} have no date, and are trained on.")
    if unread := sum(row["without_a_parser"] for row in corpus["sources"]):
        lines.append(
            f"{unread} documents are in languages without a parser here: their syntax was not checked, and "
            f"they are cut at lines (parsed: {', '.join(options['syntax'])})."
        )
    return " ".join(lines) + "\n"
