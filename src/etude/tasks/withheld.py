"""Judges the files of a repository: which of them a dataset leaves out, and why.

Left out are names and contents that look like credentials, kinds of files that are not listed here, and files that are
too large to be looked through. Tests read files of every kind, and packages their data, so unlisted kinds stay below
folders of tests and of code. A likely secret in the library's own code refuses the build: without it imports break.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath

from etude.code import counted_alike, credential_name, functions, is_script, language_of, secret_in
from etude.errors import UserError
from etude.grading import is_test_file

MAX_BYTES = 4 << 20  # of a file that is no code
JUNK = "caches, builds and archives"
NAME = "names that are not UTF-8"
KIND = "kinds of files that are not listed"
LARGE = f"over {MAX_BYTES >> 20} MiB"
UNCUT = "tests that are not in plain UTF-8"  # of which a part could not be cut out
CREDENTIAL, SECRET = "credentials by name", "likely secrets"
_TEXTS = """
1 adoc asc avsc bash bat bib bzl cc cer cert cfg cff cjs clj cmake cmd conf cpp crt cs csr css csv cxx dart desktop diff
dtd ejs el elm erl ex example exs feature fish fs g4 gitkeep go gotmpl gql gradle graphql graphqls groovy h haml hbs hcl
hpp hrl hs htm html http ics in inc ini ipynb j2 java jinja jinja2 jl js json json5 jsonc jsonl jsx kt kts less lhs
liquid lock lua m mak mako markdown md mdx mjs mk ml mli mm mmd mod mts mustache nim nix org patch pem php pip pl plist
pm po pod pot prisma properties proto ps1 pub pug puml pxd pxi py pyi pyx r rb rdf rest robot rs rst sample sass scala
scss sh snap sol spec sql srt sty styl sum sv svelte svg swift tcl template tex text tf tmpl toml tpl ts tsv tsx txt
typed url v vb vhd vim vtt vue wat webmanifest wsdl xhtml xml xsd xsl xslt yaml yml zig zsh
"""
_BINARIES = """
avif bmp cur dat docx eot flac gif icns ico jfif jpeg jpg mo mp3 mp4 npy npz odt ogg otf parquet pdf png pptx ttc ttf
wasm wav webm webp woff woff2 xlsx
"""
_PERSONAL = """
bak cap core crash db db3 dbf dmp dump eml har hprof kdb log mbox mdb msg pcap pcapng pickle pkl pst rdb sav sqlite
sqlite3 wal
"""  # kinds that hold what people did and wrote; they stay below tests alone
_KINDS = {text: frozenset(text.split()) for text in (_TEXTS, _BINARIES, _PERSONAL)}
_TESTED = re.compile(
    r"(?i)(^|/)_*((tests?|testing|specs?|fixtures?|testdata|mocks?|snapshots?)|[^/]+[-_]tests?|tests?[-_][^/]+)_*/"
)
_MANIFESTS = frozenset(("pyproject.toml", "setup.cfg", "package.json", "pytest.ini", "tox.ini", "conftest.py"))
_APART = re.compile(r"(?i)(^|/)(website|site|www|demos?|playground|samples?|bench|benches|cookbook|\.[^/]+)/")
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_SHOWN = 5

Reasons = dict[str, str]
"""Path -> why a file is left out: one of the constants above, or one with a detail after a colon."""


def judged(repository: Path, paths: Sequence[str]) -> tuple[Reasons, tuple[str, ...]]:
    """The files among `paths` that a dataset leaves out, and the sources that are not in plain UTF-8. Raises UserError
    for a likely secret in code of the library."""
    out, encoded, refused = Reasons(), list[str](), Reasons()
    coded = {folder.as_posix() for path in paths if is_code(path) for folder in PurePosixPath(path).parents} - {"."}
    for path in paths:
        own = is_code(path) and not _beside(path)
        if (reason := _by_name(repository / path, path, own)) is not None:
            out[path] = reason
            continue
        data = (repository / path).read_bytes()
        if (rule := secret_in(data, path, marked=True)) is not None:
            (refused if own or _is_manifest(path) else out)[path] = f"{SECRET}: {rule}"
        elif not _is_known(path, data, coded):
            out[path] = KIND
        elif why := _unlike_git(path, data):
            if is_test_file(path) if is_script(path) else functions.is_test_module(path):
                out[path] = f"{UNCUT}: {why}"
            else:
                encoded.append(path)
    if refused:
        raise _refusal(repository, refused)
    return out, tuple(encoded)


def _unlike_git(path: str, data: bytes) -> str:
    """The reason why a source has not the lines of plain UTF-8 that are cut and written here; "" if it has."""
    if is_script(path):
        return "" if data.decode("utf-8", "ignore").encode() == data else "unknown"
    if not path.endswith((".py", ".pyi")):
        return ""
    encoding = functions.encoding_of(data)
    if encoding == "utf-8" and not counted_alike(data.decode("utf-8", "replace")):
        return 'lines that "\\r" ends'
    return encoding if encoding != "utf-8" else ""


def clashes(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths of which two are one on a file system that ignores case, or forms of accents."""
    alike = defaultdict[str, list[str]](list)
    for path in paths:
        alike[unicodedata.normalize("NFC", path).casefold()].append(path)
    return tuple(sorted(path for same in alike.values() if len(same) > 1 for path in same))


def sentences(reasons: Reasons, most: int) -> list[str]:
    """A sentence for each reason, with up to `most` files."""
    by_reason = defaultdict[str, list[str]](list)
    for path, reason in sorted(reasons.items()):
        general, _, detail = reason.partition(": ")
        by_reason[general].append(f"`{path}`" + (f" ({detail})" if detail else ""))
    return [
        f"Left out, {reason} ({len(names)}): {shortened(names, most)}." for reason, names in sorted(by_reason.items())
    ]


def shortened(names: Sequence[str], most: int) -> str:
    """Up to `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_code(path: str) -> bool:
    """Whether a file is source code by its ending, not data or text."""
    return language_of(path) not in (None, "json", "markdown")


def is_pointer(file: Path) -> bool:
    """Whether a file is a pointer that stands in place of a file of Git LFS."""
    with file.open("rb") as data:
        return data.read(len(_POINTER)) == _POINTER


def _by_name(file: Path, path: str, own: bool) -> str | None:
    """The reason for which a file is left out without being read."""
    if not is_code(path) and (what := credential_name(path)) is not None:
        return f"{CREDENTIAL}: {what}"
    return LARGE if not own and file.stat().st_size > MAX_BYTES else None


def _is_known(path: str, data: bytes, coded: Collection[str]) -> bool:
    """Whether a file is of a kind that a dataset takes at its place."""
    name = PurePosixPath(path).name
    stem, _, suffix = name.lower().rpartition(".")
    if _is_tested(path) or suffix in _KINDS[_BINARIES] or is_code(path):
        return True
    if suffix in _KINDS[_PERSONAL]:
        return False
    text = b"\0" not in data[:8192] or data[:2] in (b"\xff\xfe", b"\xfe\xff")
    plain = suffix in _KINDS[_TEXTS] or not stem or not suffix or name.isupper() or stem.startswith(".")
    return (text and plain) or any(folder.as_posix() in coded for folder in PurePosixPath(path).parents)


def _is_tested(path: str) -> bool:
    return functions.is_test(path) or _TESTED.search(path) is not None


def _beside(path: str) -> bool:
    """Whether code lies beside the library: tests, documentation, examples, tools."""
    return (_is_tested(path) or functions.is_beside(path) or _APART.search(path) is not None) and not _is_manifest(path)


def _is_manifest(path: str) -> bool:
    return PurePosixPath(path).name in _MANIFESTS and not functions.is_beside(path)


def _refusal(repository: Path, refused: Reasons) -> UserError:
    shown = shortened([f"{path} ({reason.partition(': ')[2]})" for path, reason in refused.items()], _SHOWN)
    option = " ".join(f"'{path}'" for path in refused)
    return UserError(
        f"{repository} holds likely secrets in its code, which a dataset would pass on: {shown}; take them out, mark "
        f"lines that hold none with `gitleaks:allow`, or leave these files out with `--exclude {option}`."
    )
