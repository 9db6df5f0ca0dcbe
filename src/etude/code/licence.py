"""Which licence a repository declares, and where it says so."""

from __future__ import annotations

import re
from pathlib import Path

from etude.tasks.fetch import read_project

_FILES = ("LICENSE", "LICENCE", "COPYING", "UNLICENSE")
# The phrase that opens or marks each licence, most specific first.
_TEXTS = (
    ("Apache-2.0", r"Apache License,?\s+Version 2\.0"),
    ("MPL-2.0", r"Mozilla Public License,?\s+(Version|v\.?) ?2\.0"),
    ("AGPL-3.0", r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3"),
    ("LGPL-3.0", r"GNU LESSER GENERAL PUBLIC LICENSE\s+Version 3"),
    ("GPL-3.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 3"),
    ("GPL-2.0", r"GNU GENERAL PUBLIC LICENSE\s+Version 2"),
    ("BSD-3-Clause", r"Redistribution and use[\s\S]*(Neither the name|names? of (its|the) contributors)"),
    ("BSD-2-Clause", r"Redistribution and use in source and binary forms"),
    ("ISC", r"Permission to use, copy, modify, and(/or)? distribute this software"),
    ("MIT", r"Permission is hereby granted, free of charge"),
    ("MIT", r"\bMIT License\b"),
    ("Unlicense", r"This is free and unencumbered software"),
)


def find_licence(repository: Path) -> tuple[str, str]:
    """(licence, where it was found); ("unknown", "no licence file or field") if the repository says nothing."""
    declared = read_project(repository).get("license")
    if isinstance(declared, dict):
        declared = declared.get("text") if len(str(declared.get("text", ""))) < 40 else None
    if isinstance(declared, str) and declared.strip():
        return declared.strip(), "pyproject.toml"
    for path in sorted(repository.iterdir()):
        if path.is_file() and path.stem.upper() in _FILES:
            text = path.read_text(encoding="utf-8", errors="replace")
            for name, pattern in _TEXTS:
                if re.search(pattern, text, re.IGNORECASE):
                    return name, path.name
    return "unknown", "no licence file or field"


def find_name(repository: Path) -> str:
    """Name and version, e.g. "pydash-8.1.0", from pyproject.toml, PKG-INFO or the folder's name."""
    project = read_project(repository)
    name, version = project.get("name"), project.get("version")
    info = repository / "PKG-INFO"
    if (not name or not version) and info.is_file():
        text = info.read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(Name|Version): (\S+)$", text, re.MULTILINE))
        name, version = fields.get("Name", name), fields.get("Version", version)
    if name and version:
        return f"{name}-{version}"
    return str(name) if name else re.sub(r"[^A-Za-z0-9._-]", "-", repository.resolve().name)
