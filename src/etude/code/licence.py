"""Finds the licence that a repository or a package declares, and whether it is permissive."""

import email
import json
import re
from pathlib import Path

from etude.code.declared import read_pyproject, toml_table

_PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC", "public domain", "Unlicense", "0BSD")
_RESTRICTED = re.compile(r"\b(A?GPL|LGPL|MPL|GNU|Mozilla|EUPL|CC[- ]BY|proprietary|commercial)", re.IGNORECASE)
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


def is_permissive(licence: str) -> bool:
    """Whether the licence is one of the permissive families and names no copyleft licence."""
    if _RESTRICTED.search(licence):
        return False
    return any(re.search(rf"\b{re.escape(name)}\b", licence, re.IGNORECASE) for name in _PERMISSIVE)


def find_licence(repository: Path) -> tuple[str, str]:
    """(licence, place in which it was found), from pyproject.toml or a licence file. ("unknown", "no licence file or
    field") if the repository declares none."""
    licence = toml_table(read_pyproject(repository), "project").get("license")
    if isinstance(licence, dict):
        licence = licence.get("text") if len(str(licence.get("text", ""))) < 40 else None
    if isinstance(licence, str) and licence.strip():
        return licence.strip(), "pyproject.toml"
    for path in sorted(repository.iterdir()):
        if path.is_file() and path.stem.upper() in _FILES:
            text = path.read_text(encoding="utf-8", errors="replace")
            for name, pattern in _TEXTS:
                if re.search(pattern, text, re.IGNORECASE):
                    return name, path.name
    return "unknown", "no licence file or field"


def find_permissive_licence(repository: Path) -> tuple[str, str]:
    """The result of `find_licence` if it is permissive, else the licence in the package's metadata or package.json."""
    licence, source = find_licence(repository)
    if is_permissive(licence):
        return licence, source
    for file in [*sorted(repository.glob("*.dist-info/METADATA")), repository / "PKG-INFO"]:
        if file.is_file() and (declared := metadata_licence(file.read_text(encoding="utf-8", errors="replace"))):
            return declared, file.name
    file = repository / "package.json"
    if file.is_file():
        try:
            declared = json.loads(file.read_text(encoding="utf-8")).get("license")
        except (ValueError, AttributeError):
            declared = None
        if isinstance(declared, str):
            return declared, file.name
    return licence, source


def metadata_licence(metadata: str) -> str:
    """The licence named in a package's METADATA text, or "" if it declares none. The SPDX expression wins over trove
    classifiers, and these win over the free-text field, which often holds the whole text of the licence."""
    message = email.message_from_string(metadata)
    if expression := message.get("License-Expression"):
        return str(expression).strip()
    classifiers = [
        str(c).split("::")[-1].strip() for c in message.get_all("Classifier", []) if str(c).startswith("License")
    ]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    if classifiers:
        return " OR ".join(classifiers)
    return str(message.get("License", "")).strip().split("\n")[0][:80]
