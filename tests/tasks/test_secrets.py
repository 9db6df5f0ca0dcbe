"""Forty secrets of more than 25 kinds, planted in names, code, tests, data and history: none is in a dataset."""

from __future__ import annotations

import base64
import random
import string
from pathlib import Path

import pytest

from etude.code import functions
from etude.config import BuildConfig
from etude.tasks import commits, inventory
from etude.tasks.build import build_dataset
from etude.tasks.inventory import Inventory
from tests.tasks.test_build import TINY, quiet
from tests.tasks.test_inventory import clone, git, write

LETTERS = string.ascii_letters + string.digits
RANDOM = random.Random(37)


def drawn(count: int, alphabet: str = LETTERS) -> str:
    """Random characters, with a digit and a capital where the alphabet has them."""
    while True:
        text = "".join(RANDOM.choice(alphabet) for _ in range(count))
        if alphabet != LETTERS or (any(map(str.isdigit, text)) and any(map(str.isupper, text))):
            return text


HEX, CAPITALS = "0123456789abcdef", string.ascii_uppercase + "234567"
PEM = "-----BEGIN {} " + "KEY-----\n{}\n-----END {} " + "KEY-----\n"


def pem(kind: str) -> tuple[str, str]:
    body = drawn(64)
    return body, PEM.format(kind, f"{body}\n{drawn(64)}", kind)


def planted() -> dict[str, tuple[str, str]]:
    """Path -> (text that must not be in a dataset, content of the file)."""
    files: dict[str, tuple[str, str]] = {}

    def plant(path: str, token: str, form: str = "{}") -> None:
        files[path] = token, form.replace("{}", token) + "\n"

    plant("deploy/github.yml", "ghp_" + drawn(36), "token: {}")
    plant("tests/test_github.py", "github_pat_" + drawn(22) + "_" + drawn(59), 'TOKEN = "{}"')
    plant("docs/gitlab.md", "glpat-" + drawn(20), "export GITLAB_TOKEN={}")
    plant("data/aws.ini", "AKIA" + drawn(16, CAPITALS), "aws_access_key_id = {}")
    plant("tests/data/aws.json", drawn(20) + "/" + drawn(19), '{"aws_secret_access_key": "{}"}')
    plant("config/slack.toml", "xoxb-" + drawn(11, string.digits) + "-" + drawn(12, string.digits) + "-" + drawn(24))
    plant("tests/fixtures/hook.json", "T" + drawn(8, CAPITALS) + "/B" + drawn(10, CAPITALS) + "/" + drawn(24),
          '{"url": "https://hooks.slack' + '.com/services/{}"}')  # fmt: skip
    plant("README.rst", "AIza" + drawn(35), "key={}")
    plant("examples/openai.py", "sk-proj-" + drawn(60), 'client = Client(api_key="{}")')
    plant("examples/router.py", "sk-or-v1-" + drawn(64, HEX), 'KEY = "{}"')
    plant("docs/anthropic.txt", "sk-ant-api03-" + drawn(93) + "AA", "{}")
    plant("tests/test_stripe.py", "sk_live_" + drawn(24), 'stripe.api_key = "{}"')
    plant("ci/pypi.cfg", "pypi-AgEIcHlwaS5vcmc" + drawn(80), "password = {}")
    plant(".npmrc", "npm_" + drawn(36), "//registry.npmjs.org/:_authToken={}")
    plant("web/.npmrc", drawn(32), "//r.corp.net/:_authToken={}")
    plant("notebooks/hf.ipynb", "hf_" + drawn(34), '{"source": "login(\\"{}\\")"}')
    plant("mail/sendgrid.yaml", "SG." + drawn(22) + "." + drawn(43), "key: {}")
    plant("data/db.txt", drawn(14), "postgres://shop:{}@db.corp.net:5432/shop")
    plant("tests/settings.json", drawn(12), '{"url": "mongodb+srv://root:{}@cluster0.corp.net/x"}')
    plant("conf/pip.conf", drawn(18), "index-url = https://builder:{}@pypi.corp.net/simple")
    plant(".pgpass", drawn(10), "db.corp.net:5432:shop:shop:{}")
    plant("home/.netrc", drawn(10), "machine api.corp.net login me password {}")
    plant(".env", drawn(10), "SECRET={}")
    plant("deploy/PROD.ENV", drawn(10), "PASSWORD={}")
    plant(".aws/credentials", drawn(40), "[default]\nanything = {}")
    plant(".docker/config.json", base64.b64encode(f"me:{drawn(14)}".encode()).decode(), '{"auths":{"r":{"auth":"{}"}}}')
    plant("ops/kube.yml", base64.b64encode(drawn(24).encode()).decode(),
          "apiVersion: v1\nkind: Secret\nmetadata:\n  name: a\ndata:\n  password: {}")  # fmt: skip
    plant("infra/terraform.tfstate", drawn(16), '{"password": "{}"}')
    plant("config/secrets.yml", drawn(16), "production:\n  base: {}")
    plant("gcp/my-service-account.json", drawn(40, HEX), '{"private_key_id": "{}"}')
    plant("keys/id_ed25519", drawn(40), "{}")
    for path, kind in (
        ("certs/server.pem", "RSA PRIVATE"),
        ("tests/keys/a.key", "OPENSSH PRIVATE"),
        ("x.asc", "EC PRIVATE"),
    ):
        files[path] = pem(kind)
    plant("docs/putty.txt", drawn(60), "PuTTY-User-Key-File-3: ssh-rsa\r\nEncryption: none\r\n{}")
    plant("tests/test_jwt.py", ".".join(
        base64.urlsafe_b64encode(text.encode()).decode().strip("=")
        for text in ('{"alg":"HS256","typ":"JWT"}', '{"sub":"' + drawn(20) + '"}', drawn(32))), 'T = "{}"')  # fmt: skip
    plant("bot/telegram.cfg", drawn(10, string.digits) + ":AA" + drawn(33), "telegram_token = {}")
    plant("bot/discord.txt", "M" + drawn(23) + "." + drawn(6) + "." + drawn(27), "bot {}")
    plant("azure/conn.txt", drawn(86) + "==", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};")
    plant("vault/agent.hcl", "hvs." + drawn(95), 'token = "{}"')
    plant("do/spaces.conf", "dop_v1_" + drawn(64, HEX), "do = {}")
    plant("tests/data/utf16.txt", "glpat-" + drawn(20), "{}")
    plant("tests/data/encoded.yml", "ghp_" + drawn(36), "data: {}")
    return files


PLANTED = planted()


def plant(root: Path, files: dict[str, tuple[str, str]]) -> None:
    write(root, {path: content for path, (_, content) in files.items()})
    if "tests/data/utf16.txt" in files:
        token, content = files["tests/data/utf16.txt"]
        (root / "tests/data/utf16.txt").write_text(content, "utf-16")
        encoded = base64.b64encode(f"token = {files['tests/data/encoded.yml'][0]}".encode()).decode()
        (root / "tests/data/encoded.yml").write_text(f"data: {encoded}\n")
        assert token


def library() -> dict[str, str]:
    files = {p.relative_to(TINY).as_posix(): p for p in TINY.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    return {path: file.read_text() for path, file in files.items()}


def holders(root: Path) -> list[tuple[str, str]]:
    """(planted path, file that holds its secret) for all files below a folder."""
    forms = {path: (token.encode(), token.encode("utf-16-le"), base64.b64encode(f"token = {token}".encode()))
             for path, (token, _) in PLANTED.items()}  # fmt: skip
    return [
        (path, file.relative_to(root).as_posix())
        for file in root.rglob("*")
        if file.is_file() and (data := file.read_bytes())
        for path, texts in forms.items()
        if any(text in data for text in texts)
    ]


def copied(root: Path, taken: Inventory, target: Path) -> Path:
    for path in taken.files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes((root / path).read_bytes())
    return target


@pytest.mark.parametrize("tracked", [True, False])
def test_planted_secrets_are_left_out_and_named(tmp_path: Path, tracked: bool) -> None:
    assert len(PLANTED) >= 40
    root = write(tmp_path / "r", library())
    plant(root, PLANTED)
    if tracked:
        clone(root, {})
    taken = inventory.take(root)
    assert holders(root)
    assert holders(copied(root, taken, tmp_path / "copy")) == []
    assert set(taken.withheld) == set(PLANTED)
    assert set(library()) - {".gitignore"} <= set(taken.files), "no honest file is lost"


def test_planted_secrets_are_in_no_dataset(tmp_path: Path) -> None:
    """Those of the tree, and those that files of today and messages held in the past."""
    root = write(tmp_path / "tiny", library() | {"notes.md": "\n".join(content for _, content in PLANTED.values())})
    clone(root, {})
    write(root, {"notes.md": "Nothing.\n"})
    git(root, "commit", "-q", "-a", "-m", f"Take out {PLANTED['deploy/github.yml'][0]}")
    plant(root, PLANTED)
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "Add settings")
    data = build_dataset(root, tmp_path / "out", BuildConfig(max_tasks=3, kinds=("mutation", "commit")), quiet)
    write_all(tmp_path / "box", dict(data.image(data.tasks[0]).history))
    shown = tmp_path / "log.txt"
    shown.write_text(git(tmp_path / "box", "log", "-p", "--all", "--text"))
    (data.root / "log.txt").write_bytes(shown.read_bytes())
    assert holders(data.root) == []
    assert "notes.md" in shown.read_text()
    card = (data.root / "DATACARD.md").read_text()
    assert "Left out, likely secrets (" in card
    assert "`.npmrc` (npm" in card
    assert any("Left out, credentials by name (" in warning for warning in data.manifest.warnings)


def write_all(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_a_commit_whose_reversal_brings_a_secret_back_is_no_task(tmp_path: Path) -> None:
    token = PLANTED["deploy/github.yml"][0]
    now, test = "def f(x):\n    return x + 1\n", "from m import f\n\n\ndef test_f():\n    assert f(1) == 2\n"
    for name, old in (("honest", "'none'"), ("secret", f"'{token}'")):
        root = clone(tmp_path / name, {"m.py": f"def f(x):\n    return {old}\n"})
        write(root, {"m.py": now, "test_m.py": test})
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", "Return the number that follows")
        found = list(commits.reversals(root, {"m.py": now}, functions.functions("m.py", now), ["test_m.py"]))
        assert len(found) == (name == "honest")
