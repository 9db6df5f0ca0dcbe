"""Images of boxes: the minimal one, archives, root folders, services; and images that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes.util import find_library
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from etude.config import NamespaceSandboxConfig, validate_sandbox
from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image, Limits
from etude.sandbox.images import minimal
from etude.sandbox.images.archive import ImageArchive, inside
from etude.sandbox.images.store import find_image

SEARCH = "/usr/local/bin:/usr/bin"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
EXPECTED = [name for name in ("librt.so.1", "libutil.so.1", "libstdc++.so.6") if find_library(name[3:].split(".")[0])]
SERVER = "python3 -m http.server --bind 127.0.0.1 --directory /srv 8123"
READY = "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8123/price.txt\", timeout=1)'"
SERVICE = {"name": "prices", "start": SERVER, "ready": READY, "seconds": 20.0}
LIBRARY = '''
from urllib.request import urlopen


def price():
    """The price that the service says."""
    return int(urlopen("http://127.0.0.1:8123/price.txt", timeout=5).read())


def total(count):
    return count * price()
'''
TEST = "from shop import total\n\n\ndef test_total():\n    assert total(3) == 21\n"


def lines(config: NamespaceSandboxConfig, *commands: str, boxes: int = 1) -> list[str]:
    """The output of commands, which run in one box after another."""

    async def play(folder: Path) -> list[str]:
        async with open_sandbox(config, memo=0) as sandbox:
            printed = []
            for _ in range(boxes):
                box = await sandbox.create(Image(folder, None, {}), Limits())
                printed += [(await box.exec(line, 60)).output.strip() for line in commands]
                await box.close()
            return printed

    return asyncio.run(play(Path.cwd()))


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work tree of `lines`."""
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")


@pytest.fixture(scope="session")
def base() -> Path:
    """The root of the minimal image."""
    return find_image(NamespaceSandboxConfig()).folder


@pytest.fixture(scope="session")
def product(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder of a product: the minimal image, a site-package, data, and a copy of the product's code."""
    root = tmp_path_factory.mktemp("product") / "root"
    shutil.copytree(base, root, symlinks=True, copy_function=_link)
    files = {
        f"usr/local/lib/{PYTHON}/site-packages/installed.py": "VALUE = 5\n",
        "srv/price.txt": "7\n",
        "app/shop.py": LIBRARY,
        "opt/tool/run": "#!/bin/sh\necho tool\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "opt/tool/run").chmod(0o755)
    os.mkfifo(root / "app/pipe")
    return root


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# The minimal image


def test_the_minimal_image_has_programs_and_no_package() -> None:
    """A copy of a library that lies in a box is the answer to each task of that library."""
    find = (
        r"find / -xdev \( -path /proc -o -path /opt/runner \) -prune -o \( -name '*-packages' -o -name ensurepip "
        r"-o -name '*.whl' -o -name node_modules -o -name '_vendor*' -o -name pip -o -name idlelib \) -print"
    )
    ran = lines(
        NamespaceSandboxConfig(),
        find + " 2>/dev/null",
        "python -c 'import ssl, sqlite3, lzma, ctypes, zoneinfo; print(zoneinfo.ZoneInfo(\"Europe/Berlin\"))'",
        "git --version && awk 'BEGIN { print 1 + 1 }' && find . -maxdepth 0 && sed s/a/b/ <<< a && tput cols",
        "python3 -c 'import setuptools'",
        "which gcc cc ld",
        f"python3 -c 'import ctypes; [ctypes.CDLL(name) for name in {json.dumps(EXPECTED)}]; print(1)'",
    )
    assert ran[0] == ""
    assert ran[1] == "Europe/Berlin"
    assert ran[2].split("\n")[1:4] == ["2", ".", "b"]
    assert "ModuleNotFoundError" in ran[3]
    assert ran[4] == ""
    assert ran[5] == "1"


def test_an_image_is_made_once_and_named_by_its_content(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = find_image(NamespaceSandboxConfig())
    changed = os.stat(first.folder).st_ctime_ns
    assert first.digest == base.parent.name, "another copy of the same files"
    assert find_image(NamespaceSandboxConfig()) == first
    assert os.stat(first.folder).st_ctime_ns == changed
    shutil.rmtree(first.folder.parent)
    assert find_image(NamespaceSandboxConfig()).digest == first.digest


def test_an_index_brings_pip_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image with a package index, and nothing that installs from the index, has no use."""
    config = NamespaceSandboxConfig(index="https://index.example/simple", index_before=date(2024, 5, 1))
    assert lines(config, "python3 -m pip --version")[0].startswith("pip ")
    monkeypatch.setattr(minimal.os.path, "isdir", lambda path: not path.endswith("/pip"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"pip is not installed beside .* sandbox.index need it; .* sandbox\.programs"):
        find_image(config)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
def test_programs_are_added_by_name() -> None:
    program = "echo 'int main(void) { return 42; }' > /tmp/a.c; gcc /tmp/a.c -o /tmp/a; /tmp/a; echo $?"
    assert lines(NamespaceSandboxConfig(programs=("gcc",)), program) == ["42"]
    with pytest.raises(UserError, match=r"sandbox.programs: frobnicate is not installed on this machine"):
        find_image(NamespaceSandboxConfig(programs=("frobnicate",)))
    with pytest.raises(UserError, match=r"sandbox.programs are added to the minimal image"):
        validate_sandbox({"image": "x.tar", "programs": ["gcc"]}, "here")


# Root folders and services


def test_a_root_folder_is_an_image(product: Path) -> None:
    config = NamespaceSandboxConfig(image=str(product), exclude=("/app/shop.py",))
    kept = "echo mine > /srv/new; cat /srv/new /srv/price.txt"
    first, second, third, *more = lines(
        config, kept, "ls /srv; cat /app/shop.py; ls /app", "touch /usr/x /etc/x 2>&1 | wc -l", "/opt/tool/run", boxes=2
    )
    assert first.split() == ["mine", "7"]
    assert second.split() == ["new", "price.txt", "cat:", "/app/shop.py:", "No", "such", "file", "or", "directory"]
    assert third == "2"
    assert more[0] == "tool"
    assert more[1:3] == [first, second], "no file of the box before"
    image = find_image(config)
    assert find_image(NamespaceSandboxConfig(image=str(product))).digest == image.digest.partition("-without-")[0]
    assert sorted(os.listdir(image.folder / "srv")) == ["price.txt"]
    assert image.writable == ("/app", "/srv")


def test_services_run_for_agents_and_for_tests_that_are_decided_outside(product: Path, tmp_path: Path) -> None:
    repository, hidden = tmp_path / "repository", tmp_path / "hidden"
    for folder, name, text in ((repository, "shop.py", LIBRARY), (hidden, "test_shop.py", TEST)):
        folder.mkdir()
        (folder / name).write_text(text)
    config = validate_sandbox({"image": str(product), "exclude": ["/app"], "services": [SERVICE]}, "here")
    code = "import installed, shop; print(installed.VALUE, shop.total(2))"

    async def play() -> None:
        async with open_sandbox(config, memo=0) as sandbox:
            image = Image(repository, None, {})
            box = await sandbox.create(image, Limits())
            assert (await box.exec(f"python3 -c '{code}'", 30)).output.split() == ["5", "14"]
            await box.close()
            test = "test_shop.py::test_total"
            right = await sandbox.run_tests(image, {}, [test], hidden, Limits())
            assert (right.outcomes, right.outside) == ({test: "passed"}, {test}), right
            wrong = LIBRARY.replace("count * price()", "count + price()").encode()
            report = await sandbox.run_tests(image, {"shop.py": wrong}, [test], hidden, Limits())
            assert (report.outcomes, report.outside) == ({test: "failed"}, {test}), report

    asyncio.run(play())


def test_a_service_that_does_not_get_ready_is_told_before_anything_runs(product: Path) -> None:
    slow = SERVICE | {"ready": "echo not yet; false", "seconds": 0.5}
    config = validate_sandbox({"image": str(product), "services": [slow]}, "here")
    said = r"the service prices was not ready within 0.5 s; see sandbox.services .its last output: .*ready: not yet"
    with pytest.raises(UserError, match=said):
        lines(config, "true")
    ended = SERVICE | {"start": "echo no such setting; exit 3", "ready": "false", "seconds": 60.0}
    config = validate_sandbox({"image": str(product), "services": [ended]}, "here")
    with pytest.raises(UserError, match=r"the service prices ended before it was ready; .* no such setting"):
        lines(config, "true")
    for status in ("true", "exit 2"):  # it has gone into the background
        behind = SERVICE | {"start": f"({SERVER} &) ; {status}"}
        assert lines(validate_sandbox({"image": str(product), "services": [behind]}, "here"), "echo here") == ["here"]
    with pytest.raises(UserError, match="two services 'prices'"):
        validate_sandbox({"services": [SERVICE, SERVICE]}, "here")


# Archives


def _archive(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _layer(entries: Sequence[tuple[str, str, Any]]) -> bytes:
    """A layer of (name, kind, content or target)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, value in entries:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            member.type = {"f": tarfile.REGTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "d": tarfile.DIRTYPE}[kind]
            data = value if kind == "f" else b""
            member.size = len(data)
            member.linkname = value if kind in "lh" else ""
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


LOWER = [
    ("usr/bin", "d", ""),
    ("bin", "l", "usr/bin"),
    ("usr/bin/bash", "f", b"bash"),
    ("bin/python3", "f", b"through a link"),
    ("data/old/a", "f", b"1"),
    ("data/old/b", "f", b"2"),
    ("data/gone", "f", b"3"),
    ("abs", "l", "/data"),
    ("up", "l", "../../../data"),
]
UPPER = [
    ("data/.wh.gone", "f", b""),
    ("data/old/.wh..wh..opq", "f", b""),
    ("data/old/c", "f", b"4"),
    ("abs/new", "f", b"5"),
    ("up/newer", "h", "abs/new"),
    ("../../escaped", "f", b"6"),
    ("usr/bin/python3", "f", b"replaced"),
]
TREE = {
    "abs": "-> /data",
    "bin": "-> usr/bin",
    "data/new": "5",
    "data/newer": "5",
    "data/old/c": "4",
    "escaped": "6",
    "up": "-> ../../../data",
    "usr/bin/bash": "bash",
    "usr/bin/python3": "replaced",
}


def _settings(layers: Sequence[bytes], architecture: str = "", path: str = SEARCH) -> bytes:
    """The configuration of an image."""

    def content(layer: bytes) -> str:
        with contextlib.suppress(Exception):  # a damaged layer has any digest
            layer = gzip.decompress(layer) if layer[:2] == b"\x1f\x8b" else layer
            layer = _unzstd(layer) if layer[:4] == b"\x28\xb5\x2f\xfd" else layer
        return f"sha256:{hashlib.sha256(layer).hexdigest()}"

    settings = {"architecture": architecture, "config": {"Env": [f"PATH={path}", "A=b=c"]}}
    return json.dumps(settings | {"rootfs": {"type": "layers", "diff_ids": [*map(content, layers)]}}).encode()


def _docker(
    path: Path,
    layers: Sequence[bytes],
    architecture: str = "",
    images: int = 1,
    search: str = "/usr/local/bin:/usr/bin",
) -> Path:
    config = _settings(layers, architecture, search)
    names = [f"{n}/layer.tar" for n in range(len(layers))]
    entry = {"Config": "config.json", "RepoTags": ["a:b"], "Layers": names}
    files = dict(zip(names, layers, strict=True)) | {"config.json": config}
    return _archive(path, files | {"manifest.json": json.dumps([entry] * images).encode()})


def _oci(path: Path, layers: Sequence[bytes]) -> Path:
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    config = blob(_settings(layers))
    manifest = blob(json.dumps({"config": config, "layers": [blob(layer) for layer in layers]}).encode())
    inner = blob(json.dumps({"manifests": [manifest]}).encode())
    other = blob(b"{}") | {"platform": {"architecture": "s390x"}}
    return _archive(path, files | {"index.json": json.dumps({"manifests": [other, inner]}).encode()})


def _unzstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.decompress(data)


def _zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, _zstd])
@pytest.mark.parametrize("form", [_docker, _oci])
def test_layers_are_applied_as_the_specification_says(
    form: Callable[[Path, Sequence[bytes]], Path], compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = form(tmp_path / "image.tar", [compress(_layer(LOWER)), compress(_layer(UPPER))])
    root = tmp_path / "root"
    root.mkdir()
    with ImageArchive(path) as archive:
        image = archive.image()
        archive.unpack(image, root)
    assert image.environment == {"PATH": "/usr/local/bin:/usr/bin", "A": "b=c"}
    found = {}
    for entry in root.rglob("*"):
        if entry.is_symlink():
            found[str(entry.relative_to(root))] = f"-> {os.readlink(entry)}"
        elif entry.is_file():
            found[str(entry.relative_to(root))] = entry.read_text()
    assert found == TREE
    assert os.stat(root / "data/new").st_ino == os.stat(root / "data/newer").st_ino
    assert sorted(os.listdir(tmp_path)) == ["image.tar", "root", "tree"], "nothing left the root"


def test_links_of_an_image_are_followed_in_its_root(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "out").symlink_to("../../../etc")
    assert inside(tmp_path, "/out/passwd") == f"{tmp_path}/etc/passwd"
    assert inside(tmp_path, "a/../../b") == f"{tmp_path}/b"
    with pytest.raises(UserError, match="loop of links"):
        inside(tmp_path, "loop/x")


def test_an_archive_makes_boxes(product: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(product, ".", filter=lambda m: None if "/git" in m.name or m.name.endswith("/node") else m)
    path = _docker(tmp_path / "image.tar", [buffer.getvalue(), _layer([("srv/price.txt", "f", b"8\n")])])
    config = NamespaceSandboxConfig(image=str(path))
    assert lines(config, "cat /srv/price.txt; echo $A; python3 -c 'import installed'", boxes=2) == ["8\nb=c"] * 2
    assert find_image(config).digest.startswith("sha256-")


@pytest.mark.parametrize("profiles", [None, (), "image"], ids=["none", "reference", "image"])
def test_packages_of_a_virtual_environment_and_the_work_tree_are_found(
    base: Path, tmp_path: Path, profiles: Any
) -> None:
    """As in most images of products: python3 in PATH is that of an environment without the system's packages."""
    python = find_image(NamespaceSandboxConfig()).python
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(base, ".")
    packages = f"opt/venv/lib/{PYTHON}/site-packages"
    settings = f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n"
    venv = _layer([
        ("opt/venv/pyvenv.cfg", "f", settings.encode()),
        (f"{packages}/dependency.py", "f", b"VALUE = 5\n"),
        (f"{packages}/start.pth", "f", b"import os; os.environ['STARTED'] = 'x'\n"),
        ("opt/venv/bin/python3", "l", python),
    ])  # fmt: skip
    path = _docker(
        tmp_path / "image.tar", [buffer.getvalue(), venv], search="/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
    )
    (tmp_path / "tree/m.py").write_text("import dependency\n\n\ndef f():\n    return dependency.VALUE\n")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "test_m.py").write_text("from m import f\n\n\ndef test_f():\n    assert f() == 5\n")
    image = Image(tmp_path / "tree", None, {})

    async def play() -> None:
        config = NamespaceSandboxConfig(image=str(path))
        async with open_sandbox(config, memo=0, machine_profiles=profiles) as sandbox:
            box = await sandbox.create(image, Limits())
            done = await box.exec("cd /tmp; python3 -c 'import m, pytest, sys; print(sys.prefix, m.f())'", 60.0)
            assert done.output.split() == ["/opt/venv", "5"], done.output
            await box.close()
            report = await sandbox.run_tests(image, {}, ["test_m.py::test_f"], hidden, Limits())
            assert (report.outcomes, report.decided) == ({"test_m.py::test_f": "passed"}, 1.0), report.messages

    asyncio.run(play())


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda at: at / "missing.tar", "cannot be read .No such file"),
    "no archive": (lambda at: _written(at / "x.tar", b"text"), "is no archive of an image"),
    "no image": (lambda at: _archive(at / "x.tar", {"a": b""}), "neither manifest.json nor index.json"),
    "two images": (lambda at: _docker(at / "x.tar", [], images=2), "holds 2 images for this machine"),
    "another machine": (lambda at: _docker(at / "x.tar", [], "s390x"), "is an image for s390x, and this machine is"),
    "a lost layer": (lambda at: _archive(at / "x.tar", _WITHOUT), "lacks the layer 0/layer.tar"),
    "a damaged layer": (
        lambda at: _docker(at / "x.tar", [gzip.compress(_layer(LOWER))[:200]]),
        "0/layer.tar is damaged",
    ),
    "a damaged layer in zstd": (
        lambda at: _docker(at / "x.tar", [_zstd(_layer(LOWER))[:90]]),
        "0/layer.tar is damaged",
    ),
    "a layer with another byte": (
        lambda at: _changed(_docker(at / "x.tar", [_layer(LOWER)]), b"through a link"),
        "0/layer.tar is damaged .its digest differs",
    ),
    "a link to nothing": (
        lambda at: _docker(at / "x.tar", [_layer([("a", "h", "nothing")])]),
        "0/layer.tar is damaged .* No such file",
    ),
    "layers without digests": (
        lambda at: _archive(at / "x.tar", _WITHOUT | {"0/layer.tar": b""}),
        "has 1 layers and 0 digests",
    ),
    "no Python": (lambda at: _docker(at / "x.tar", [_layer(LOWER[:3])]), "has no python3 in its PATH"),
    "no shell": (lambda at: _docker(at / "x.tar", [_layer([("usr/bin/python3", "f", b"")])]), "has no /bin/bash"),
    "no root folder": (lambda at: _folder(at / "empty"), "is no root folder of an image: it has no /bin/sh"),
    "broken JSON": (lambda at: _archive(at / "x.tar", {"manifest.json": b"{"}), "manifest.json is not JSON"),
}
_WITHOUT = {
    "config.json": b"{}",
    "manifest.json": json.dumps([{"Config": "config.json", "Layers": ["0/layer.tar"]}]).encode(),
}


def _changed(path: Path, text: bytes) -> Path:
    """The archive with one byte of a file in a layer changed."""
    data = path.read_bytes()
    assert data.count(text) == 1
    return _written(path, data.replace(text, bytes([text[0] ^ 1]) + text[1:]))


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_an_image_whose_python_is_too_old_is_refused_in_a_sentence(base: Path, tmp_path: Path) -> None:
    """A script that has the version of an older Python, and knows the options that the older Python knew."""
    shutil.copytree(base, tmp_path / "root", symlinks=True, copy_function=_link)
    real = find_image(NamespaceSandboxConfig()).python
    script = tmp_path / "root/usr/local/bin/python3"
    script.unlink()
    script.write_text(
        f"#!/bin/bash\n[[ $1$2$3$4 = -S-s-B-c ]] || exit 2\n"
        f"exec {os.path.realpath(f'{base}{real}').removeprefix(str(base))} -S -s -B -c "
        '"import sys; sys.version_info = (3, 9, 2); $5" "${@:6}"\n'
    )
    script.chmod(0o755)
    with pytest.raises(UserError, match=r"python3 of the image is 3\.9; boxes need 3\.11 or later"):
        lines(NamespaceSandboxConfig(image=str(tmp_path / "root")), "true")


@pytest.mark.parametrize("case", BAD)
def test_an_image_that_is_none_is_refused_in_a_sentence(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make, message = BAD[case]
    with pytest.raises(UserError, match=message) as raised:
        find_image(NamespaceSandboxConfig(image=str(make(tmp_path))))
    assert "\n" not in str(raised.value)
    images = tmp_path / "cache/etude/images"
    assert not images.exists() or not [entry for entry in os.listdir(images) if entry.startswith(".")]


def test_what_a_killed_unpacking_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: Path
) -> None:
    """But not that of a process which still unpacks, nor a folder that is younger than its lock may be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with contextlib.ExitStack() as stack:
        for name, age, held in (("dead", 100, False), ("busy", 100, True), ("young", 0, False)):
            lock = tmp_path / f"etude/images/.new-{name}/lock"
            lock.parent.mkdir(parents=True)
            lock.touch()
            os.utime(lock, (time.time() - age,) * 2)
            if held:
                fcntl.flock(stack.enter_context(open(lock, "rb")), fcntl.LOCK_EX)
        find_image(NamespaceSandboxConfig(image=str(product)))
    assert {path.name for path in (tmp_path / "etude/images").glob(".new-*")} == {".new-busy", ".new-young"}


def test_an_excluded_path_must_exist(product: Path) -> None:
    with pytest.raises(UserError, match=r"sandbox.exclude: app is no path below the root"):
        find_image(NamespaceSandboxConfig(image=str(product), exclude=("app",)))
    with pytest.raises(UserError, match=r"sandbox.exclude: /nowhere is not in the image"):
        find_image(NamespaceSandboxConfig(image=str(product), exclude=("/nowhere",)))
