"""Reads the metadata of a Python project: name, version, dependencies, groups for tests. No code of the project is run.

The first source with dependencies counts: [project] of pyproject.toml, [tool.poetry], setup.cfg, setup.py (literal
lists), requires.txt or PKG-INFO of a release.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from email.parser import Parser
from pathlib import Path
from typing import Any

from etude.code.lines import lines_of
from etude.errors import UserError, first_line

DEPENDENCY_GROUPS = ("test", "tests", "testing", "unittest", "dev", "develop", "development", "all")  # in this order


def read_pyproject(repository: Path) -> dict[str, Any]:
    """The content of pyproject.toml; empty if the file is missing. Raises UserError if it is not TOML."""
    path = repository / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UserError(f"{path} cannot be read ({e}); repair it.") from None


def toml_table(data: object, *keys: str) -> dict[str, Any]:
    """A nested TOML table; empty if it is missing or not a table."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def setup_cfg(repository: Path) -> ConfigParser:
    """The content of setup.cfg; empty if the file is missing. Raises UserError if it cannot be read."""
    config = ConfigParser(interpolation=None)
    try:
        if (repository / "setup.cfg").is_file():  # no pipe, nor a link to a device
            config.read(repository / "setup.cfg", encoding="utf-8")
    except (ConfigError, UnicodeDecodeError) as e:
        raise UserError(f"{repository / 'setup.cfg'} cannot be read ({first_line(e)}); repair it.") from None
    return config


def project_name(repository: Path) -> str:
    """Name and version, e.g. "pydash-8.1.0", from pyproject.toml, PKG-INFO or the folder's name."""
    project = toml_table(read_pyproject(repository), "project")
    name, version = project.get("name"), project.get("version")
    info = repository / "PKG-INFO"
    if (not name or not version) and info.is_file():
        text = info.read_text(encoding="utf-8", errors="replace")
        fields = dict(re.findall(r"^(Name|Version): (\S+)$", text, re.MULTILINE))
        name, version = fields.get("Name", name), fields.get("Version", version)
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", str(name or repository.resolve().name))
    return f"{plain}-{re.sub(r'[^A-Za-z0-9._+-]', '-', str(version))}" if name and version else plain


def declared_requirements(repository: Path) -> list[str]:
    """The requirements that the project declares, word for word."""
    project = toml_table(read_pyproject(repository), "project")
    poetry = toml_table(read_pyproject(repository), "tool", "poetry", "dependencies")
    if isinstance(project.get("dependencies"), list):
        return [str(line) for line in project["dependencies"]]
    if poetry:
        return list(_of_poetry(poetry))
    dynamic = toml_table(read_pyproject(repository), "tool", "setuptools", "dynamic", "dependencies").get("file", ())
    if dynamic:
        names = [dynamic] if isinstance(dynamic, str) else list(dynamic)
        return [line for name in names for line in requirement_lines(repository, str(name))]
    written = setup_cfg(repository).get("options", "install_requires", fallback="")
    if written.strip():
        return list(_listed(repository, written))
    return _setup_py(repository).get("", []) or _released(repository).get("", [])


def dependency_groups(repository: Path) -> dict[str, list[str]]:
    """Extras and dependency groups by name, word for word; a group that includes others holds their lines."""
    data = read_pyproject(repository)
    lines_by_name: dict[str, list[str]] = {}

    def add(name: str, lines: Iterator[str]) -> None:
        lines_by_name.setdefault(re.sub(r"[-_.]+", "-", name).lower(), []).extend(lines)

    for name, lines in toml_table(data, "project", "optional-dependencies").items():
        add(name, (str(line) for line in lines if isinstance(lines, list)))
    listed = toml_table(data, "dependency-groups")
    for name in listed:
        add(name, _group(listed, name, ()))
    poetry = toml_table(data, "tool", "poetry")
    for name, content in toml_table(poetry, "group").items():
        add(name, _of_poetry(toml_table(content, "dependencies")))
    add("dev", _of_poetry(toml_table(poetry, "dev-dependencies")))
    config = setup_cfg(repository)
    for name in config.options("options.extras_require") if config.has_section("options.extras_require") else ():
        add(name, _listed(repository, config.get("options.extras_require", name)))
    for name, lines in [*_setup_py(repository).items(), *_released(repository).items()]:
        if name:
            add(name, iter(lines))
    return {name: list(dict.fromkeys(lines)) for name, lines in lines_by_name.items() if lines}


def requirement_lines(repository: Path, name: str) -> list[str]:
    """The lines of a requirements file and of the files that it includes (-r, once each), below the repository."""
    root = repository.resolve()
    pending, seen, lines = [(root / name).resolve()], set[Path](), list[str]()
    while pending:
        path = pending.pop(0)
        if path in seen or not path.is_relative_to(root) or not path.is_file():
            continue
        seen.add(path)
        for line in lines_of(path.read_text("utf-8", "replace")):
            inner = re.match(r"\s*(?:-r|--requirement)[\s=]*(\S+)", line)
            if inner:
                pending.append((path.parent / inner[1]).resolve())
            elif (plain := re.split(r"\s+#|^#", line)[0].strip()) and not plain.startswith("-"):
                lines.append(plain)
    return lines


def _group(listed: Mapping[str, Any], name: str, above: tuple[str, ...]) -> Iterator[str]:
    """A group of PEP 735: requirements, and tables that include another group."""
    content = listed.get(name)
    for line in content if isinstance(content, list) and name not in above else ():
        if isinstance(line, str):
            yield line
        elif isinstance(line, dict) and isinstance(line.get("include-group"), str):
            yield from _group(listed, line["include-group"], (*above, name))


def _listed(repository: Path, text: str) -> Iterator[str]:
    """An option of setup.cfg: lines, or `file:` and names of requirements files."""
    if text.strip().startswith("file:"):
        for name in text.strip().removeprefix("file:").split(","):
            yield from requirement_lines(repository, name.strip())
    else:
        yield from (line.strip() for line in lines_of(text) if line.strip())


def _of_poetry(content: Mapping[str, Any]) -> Iterator[str]:
    """Requirements of poetry's tables; ^ and ~ become lower bounds."""
    for name, value in content.items():
        version = value.get("version", "*") if isinstance(value, dict) else value
        optional = isinstance(value, dict) and ("git" in value or "path" in value or "url" in value)
        if name.lower() == "python" or optional or not isinstance(version, str):
            continue
        parts = [re.sub(r"^[\^~](?!=)\s*", ">=", part.strip()) for part in version.split(",")]
        parts = [f"=={part}" if re.match(r"\d", part) else part for part in parts if part and part != "*"]
        yield name + ",".join(parts)


def _setup_py(repository: Path) -> dict[str, list[str]]:
    """ "" -> install_requires, extra -> requirements. Only lists are read that setup.py holds as literals, in place or
    in a variable."""
    path = repository / "setup.py"
    try:
        tree = ast.parse(path.read_text("utf-8", "replace")) if path.is_file() else None
    except (SyntaxError, ValueError, RecursionError):
        tree = None
    if tree is None:
        return {}
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value

    def value(node: ast.expr) -> object:
        try:
            return ast.literal_eval(names.get(node.id, node) if isinstance(node, ast.Name) else node)
        except (ValueError, TypeError, RecursionError):
            return None

    extras: dict[str, list[str]] = {}
    keywords = (keyword for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords)
    for keyword in keywords:
        content = value(keyword.value)
        if keyword.arg in ("install_requires", "tests_require") and isinstance(content, list | tuple | str):
            lines = lines_of(content) if isinstance(content, str) else content
            extras["" if keyword.arg == "install_requires" else "tests"] = [str(line) for line in lines]
        if keyword.arg == "extras_require" and isinstance(content, dict):
            extras |= {str(name): [str(x) for x in lines] for name, lines in content.items() if isinstance(lines, list)}
    return extras


def _released(repository: Path) -> dict[str, list[str]]:
    """ "" -> requirements, extra -> requirements, from the PKG-INFO of a release."""
    info = repository / "PKG-INFO"
    extras: dict[str, list[str]] = {}
    about = Parser().parsestr(info.read_text("utf-8", "replace")) if info.is_file() else None
    for line in (about.get_all("Requires-Dist") or ()) if about is not None else ():
        requirement, _, marker = str(line).partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
        rest = re.sub(r"\s*(and\s+)?extra\s*==\s*['\"][\w.-]+['\"]", "", marker).strip()
        extras.setdefault(extra[1] if extra else "", []).append(
            f"{requirement.strip()}; {rest}" if rest else requirement
        )
    return extras
