"""Secrets and personal data in a text, replaced before the text reaches a disk.

    scrubbed(text)        the text with `<rule>` in place of each finding, and the number of findings by rule
    known_client(text)    the name of a client, or what of it is surely no secret
    Scrubber              the same in a child process, so that regular expressions delay no answers

The rules of secrets are those of datasets (`code/secrets.py`) and the expressions of detect-secrets' plugins; tests of
entropy are left out but for quoted base64, since digests fill source code. Personal data: e-mail addresses, telephone
numbers, IBANs and card numbers with valid check digits, public IP addresses, and home folders. Text that names no
person stays: example.com, loopback and private addresses, home folders of machines such as /home/runner. Personal data
of the rules in PERSONAL may stay where the request itself names it (`scrub_documents`): tools print home folders in
nearly every output, and an answer that repeats a name from its prompt does not teach the model that name.

A text is read as it stands, and once more without the escapes of JSON and URLs, for these hide where a secret begins
and ends. A run of base64 is a finding if there is a secret in the text that it stands for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import ipaddress
import math
import re
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from etude.code import find_secrets, lines_of, secret_rules

_SECONDS = 10.0  # for one record, in the child; all other records wait meanwhile
_NOBODY = frozenset({
    "user", "username", "users", "runner", "root", "ubuntu", "vscode", "node", "app", "coder", "codespace", "jovyan",
    "work", "shared", "public", "default", "me", "you", "name", "guest", "admin", "build", "builder", "circleci",
    "travis", "vagrant", "test",
})  # fmt: skip
_EXAMPLES = re.compile(
    r"(?i)(?:^|[@.])(?:example\.(?:com|org|net)|[\w-]+\.(?:example|test|invalid|localhost)|localhost)$"
)
_NO_MAIL = re.compile(r"(?i)^(?:git@|noreply@|no-reply@)")
_PLUGINS = (
    "artifactory.ArtifactoryDetector", "aws.AWSKeyDetector", "azure_storage_key.AzureStorageKeyDetector",
    "basic_auth.BasicAuthDetector", "cloudant.CloudantDetector", "discord.DiscordBotTokenDetector",
    "github_token.GitHubTokenDetector", "gitlab_token.GitLabTokenDetector", "ibm_cloud_iam.IbmCloudIamDetector",
    "ibm_cos_hmac.IbmCosHmacDetector", "jwt.JwtTokenDetector", "mailchimp.MailchimpDetector", "npm.NpmDetector",
    "openai.OpenAIDetector", "private_key.PrivateKeyDetector", "pypi_token.PypiTokenDetector",
    "sendgrid.SendGridDetector", "slack.SlackDetector", "softlayer.SoftlayerDetector",
    "square_oauth.SquareOAuthDetector", "stripe.StripeDetector", "telegram_token.TelegramBotTokenDetector",
    "twilio.TwilioKeyDetector",
)  # fmt: skip

PERSONAL = ("home", "email", "telephone", "ip")
"""Rules whose findings a tenant may keep in the encrypted content, if the request names them."""

Check = Callable[[str], bool]
Findings = frozenset[tuple[str, str]]
"""Findings: rule and text."""


def _entropy(text: str) -> float:
    """Shannon entropy of the characters, bits each."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def _luhn(text: str) -> bool:
    """Check digit of cards (ISO/IEC 7812)."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(reversed(digits))]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and sum(doubled) % 10 == 0


def _iban(text: str) -> bool:
    """Check digits of ISO 13616: the number modulo 97 is 1."""
    plain = re.sub(r"\s", "", text).upper()
    moved = plain[4:] + plain[:4]
    return 15 <= len(plain) <= 34 and int("".join(str(int(c, 36)) for c in moved)) % 97 == 1


def _public(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _somebody(text: str) -> bool:
    return re.split(r"[/\\]+", text)[-1].lower() not in _NOBODY


def _mail(text: str) -> bool:
    return not _EXAMPLES.search(text) and not _NO_MAIL.match(text)


def _telephone(text: str) -> bool:
    return 8 <= sum(c.isdigit() for c in text) <= 15


def _mixed(text: str) -> bool:
    """Whether a value is no plain word: it has digits beside letters, or punctuation."""
    return bool(re.search(r"[0-9]", text) and re.search(r"[A-Za-z]", text)) or bool(re.search(r"[^\w\s.:/-]", text))


_OWN: tuple[tuple[str, str, int, Check], ...] = (
    ("private_key", r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----BEGIN)[\s\S]){0,20000}?(?:-----END "
     r"[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", 0, lambda _: True),
    ("bearer", r"(?i)\b(?:bearer|token|basic)\s+([A-Za-z0-9._~+/=-]{16,})", 1, _mixed),
    ("assigned", r"(?i)\b[\w.-]{0,40}(?:password|passwd|passphrase|pwd|secret|token|api_?key|access_?key)[\w-]{0,20}"
     r"[\"']?\s{0,4}(?:=|:|=>|:=)\s{0,4}[\"'`]?([^\s\"'`,;(){}\[\]<>]{8,}+)(?!\()", 1, _mixed),
    ("cloud_key", r"\b(?:AIza[\w-]{35}|ya29\.[\w-]{20,}|dop_v1_[a-f0-9]{64}|hf_[A-Za-z]{30,}|sk-ant-[\w-]{20,}|"
     r"sk-(?:proj-)?[\w-]{20,}|github_pat_\w{40,}|glpat-[\w-]{20,}|shp(?:at|ss)_[a-fA-F0-9]{32}|"
     r"etl_[0-9a-f]{64})", 0, lambda _: True),
    ("base64", r"[\"'`]([A-Za-z0-9+/_-]{32,}={0,2})[\"'`]", 1,
     lambda t: _entropy(t) >= 4.5 and bool(re.search(r"[0-9]", t)) and bool(re.search(r"[A-Z]", t))),
    ("email", r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}\b", 0, _mail),
    ("iban", r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}\b", 0, _iban),
    ("card", r"(?<![\w.-])[0-9](?:[ -]?[0-9]){12,18}(?![\w-]|\.[0-9])", 0, _luhn),
    ("telephone", r"(?<![\w.+/-])(?:\+[0-9]{1,3}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?(?:[0-9]{2,4}[ .-]?){2,5}|"
     r"\([0-9]{3}\) ?[0-9]{3}[ -][0-9]{4}|[0-9]{3}[ -][0-9]{3}-[0-9]{4})(?![\w-])", 0, _telephone),
    ("ip", r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.-]|\.[0-9])", 0, _public),
    ("ip", r"(?<![\w:.])(?=[0-9a-fA-F]*:[0-9a-fA-F]*:)[0-9a-fA-F:]{3,39}(?![\w:])", 0, _public),
    ("home", r"(?:/home/|/Users/|[A-Za-z]:\\{1,2}Users\\{1,2})[A-Za-z0-9][\w.@-]{0,63}", 0, _somebody),
)  # fmt: skip


@cache
def _rules() -> tuple[tuple[str, re.Pattern[str], int, Check], ...]:
    import detect_secrets.plugins.keyword as keyword

    rules: list[tuple[str, re.Pattern[str], int, Check]] = []
    for path in _PLUGINS:
        module, name = path.split(".")
        plugin: Any = getattr(__import__(f"detect_secrets.plugins.{module}", fromlist=[name]), name)
        check = plugin.is_formally_valid if name == "JwtTokenDetector" else lambda _: True
        rules += [(module, pattern, 0, check) for pattern in plugin().denylist]
    quoted = keyword.QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP
    rules += [("keyword", pattern, group, lambda t: len(t) >= 6) for pattern, group in quoted.items()]
    return (*rules, *((rule, re.compile(text), group, check) for rule, text, group, check in _OWN))


@cache
def rules_version() -> str:
    """The version of the rules, a field of scrubbed records."""
    return f"4 detect-secrets {version('detect-secrets')}"


_clean: dict[bytes, Findings] = {}
"""Digests of texts without findings, except these personal ones: a conversation repeats with every turn."""
_MAX_CLEAN = 200_000


def scrubbed(text: str, stay: Findings = frozenset()) -> tuple[str, dict[str, int]]:
    """The text without its findings, except those in `stay`, and the number of removed findings by rule. Raises
    UserError without detect-secrets."""
    digest = _digest(text)
    if (held := _clean.get(digest)) is not None and held <= stay:
        return text, {}
    spans = [span for span in _spans(text, digest) if (span[2], text[span[0] : span[1]]) not in stay]
    if not spans:
        return text, {}
    counts: Counter[str] = Counter()
    parts, end = list[str](), 0
    for first, last, rule in spans:
        if first >= end:
            parts += [text[end:first], f"<{rule}>"]
            counts[rule] += 1
        end = max(end, last)
    return "".join([*parts, text[end:]]), dict(counts)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _spans(text: str, digest: bytes) -> list[tuple[int, int, str]]:
    spans = sorted({*_findings(text), *_hidden(text)})
    if all(rule in PERSONAL for _, _, rule in spans):
        _clean[digest] = frozenset((rule, text[first:last]) for first, last, rule in spans)
        if len(_clean) > _MAX_CLEAN:
            del _clean[next(iter(_clean))]
    return spans


_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)|%[0-9a-fA-F]{2}", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\n": ""}
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}+(?:\r?\n[A-Za-z0-9+/_-]{16,}+)*+(?:\r?\n[A-Za-z0-9+/_-]{1,75})?={0,2}")
_AROUND = 2000  # characters around escapes that are read without them
_DEPTH = 3  # of escapes within escapes, or base64 within base64
_PRINTED = bytes(range(32, 127)) + b"\t\r\n"


def _hidden(text: str, depth: int = _DEPTH) -> Iterator[tuple[int, int, str]]:
    """Findings in what a text stands for: without its escapes, and in runs of base64."""
    if depth == 0:
        return
    for match in _BASE64.finditer(text):
        inner = _decoded(match[0])
        if inner and any(rule not in PERSONAL for _, _, rule in (*_findings(inner), *_hidden(inner, depth - 1))):
            yield match.start(), match.end(), "base64"
    for low, high in _stretches(text):
        plain, places = _unescaped(text[low:high])
        for first, last, rule in (*_findings(plain), *_hidden(plain, depth - 1)):
            yield low + places[first], low + places[last], rule


def _stretches(text: str) -> Iterator[tuple[int, int]]:
    """The parts of a text that hold all escapes and what stands around them."""
    low, high = 0, -1
    for match in _ESCAPE.finditer(text):
        if high >= 0 and match.start() - _AROUND > high:
            yield low, high
            low, high = match.start() - _AROUND, -1
        if high < 0:
            low = max(0, match.start() - _AROUND)
        high = min(len(text), match.end() + _AROUND)
    if high >= 0:
        yield low, high


def _decoded(run: str) -> str:
    """The text that a run of base64 stands for; "" if it is none."""
    data = re.sub(r"[\r\n=]", "", run).translate(str.maketrans("-_", "+/"))
    try:
        decoded = base64.b64decode(data[: len(data) - (len(data) % 4 == 1)] + "==")
    except binascii.Error:
        return ""
    return "" if len(decoded) < 12 or decoded.translate(None, _PRINTED) else decoded.decode()


def _unescaped(text: str) -> tuple[str, list[int]]:
    """The text without one layer of escapes, and the place of each of its characters, and of its end, in `text`."""
    parts, places, end = list[str](), list[int](), 0
    for match in _ESCAPE.finditer(text):
        code = match[0]
        value = code[2:] if code[0] == "\\" and len(code) > 2 else code[1:]
        plain = chr(int(value, 16)) if len(code) > 2 else _ESCAPED.get(value, value)
        parts += [text[end : match.start()], plain]
        places += [*range(end, match.start()), *[match.start()] * len(plain)]
        end = match.end()
    return "".join([*parts, text[end:]]), [*places, *range(end, len(text) + 1)]


def known_client(text: str, digest: str) -> str:
    """The name of a client, as a header has it, if it looks like one ("claude-cli/2.0.14"); else its first words, as
    far as they are plain, and `digest`, a keyed hash of it: anything may stand in a header, keys too."""
    if _CLIENT.fullmatch(text) and not _CODE.search(text) and not scrubbed(text)[1]:
        return text
    words = _FIRST_WORDS.match(text)
    return f"{words[0]} {digest[:12]}" if words and text else digest[:12] if text else ""


_CLIENT = re.compile(r"[A-Za-z](?:[A-Za-z._-]|[0-9](?![0-9._-]{4})){0,39}(?:/v?[0-9][0-9A-Za-z.+-]{0,24})?")
_CODE = re.compile(r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{14,}|[A-Za-z]{25,}")
_FIRST_WORDS = re.compile(r"[A-Za-z]{1,15}(?:[-_ ][A-Za-z]{1,15}){0,3}(?![A-Za-z0-9])")


def holds_replaced(text: str) -> bool:
    """Whether something in a scrubbed text was replaced."""
    return any(f"<{rule}>" in text for rule in _rule_names())


@cache
def _rule_names() -> frozenset[str]:
    return frozenset({*(rule for rule, *_ in _rules()), *secret_rules(), "base64"})


def _findings(text: str) -> Iterator[tuple[int, int, str]]:
    whole = [rule for rule in _rules() if rule[0] != "keyword"]
    spaced = _SPACES.sub(_broken, text)
    for rule, pattern, group, check in whole:
        for match in pattern.finditer(spaced):
            if check(match.group(group)):
                yield match.start(group), match.end(group), rule
    data = spaced.encode("utf-8", "surrogatepass")
    for match in find_secrets(data):
        first = match.start if spaced.isascii() else len(data[: match.start].decode("utf-8", "surrogatepass"))
        yield first, first + len(data[match.start : match.end].decode("utf-8", "surrogatepass")), match.rule
    start = 0
    # The expressions of the keywords would run over many lines.
    for line in lines_of(_WORDS.sub(_broken, spaced), ends=True):
        if _KEYWORD.search(line):
            for rule, pattern, group, check in _rules():
                if rule == "keyword":
                    for match in pattern.finditer(line):
                        if check(match.group(group)):
                            yield start + match.start(group), start + match.end(group), rule
        start += len(line)


_KEYWORD = re.compile(r"(?i)key|pass|pwd|secret|contrase")
# detect-secrets' expressions take time cubic in the length of a run of blanks, and quadratic in a run of letters.
_SPACES, _WORDS = re.compile(r"[^\S\n]{25,}"), re.compile(r"\w{65,}")


def _broken(match: re.Match[str]) -> str:
    """A run with a NUL in the place of every 25th blank, or 65th letter."""
    step = 25 if match[0][0].isspace() else 65
    return "\0".join(match[0][low : low + step - 1] for low in range(0, len(match[0]), step)).ljust(len(match[0]), "\0")


def scrub_documents(documents: Sequence[bytes], keep: Sequence[str]) -> tuple[list[bytes], dict[str, int]]:
    """Documents scrubbed by `scrub_json`, and the number of removed findings by rule. Findings of the rules `keep` in
    the first document, a request, stay in all."""
    stay, counts = set[tuple[str, str]](), Counter[str]()

    def named(text: str) -> None:
        held = _clean.get(digest := _digest(text))
        if held is None:
            held = frozenset((rule, text[first:last]) for first, last, rule in _spans(text, digest))
        stay.update(each for each in held if each[0] in keep)

    if keep:
        _each_text(documents[0], named)
    cleaned = list[bytes]()
    for document in documents:
        data, removed = scrub_json(document, frozenset(stay))
        cleaned.append(data)
        counts.update(removed)
    return cleaned, dict(counts)


def scrub_json(data: bytes, stay: Findings = frozenset()) -> tuple[bytes, dict[str, int]]:
    """JSON, or any text, with every string scrubbed, keys included, except findings in `stay`; and the number of
    removed findings by rule."""
    counts: Counter[str] = Counter()

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            text, counted = scrubbed(value, stay)
            counts.update(counted)
            return text
        if isinstance(value, dict):
            return {clean(key): clean(item) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**12:
            text, counted = scrubbed(str(value))
            counts.update(counted)
            return text if counted else value
        return value

    try:
        value = clean(msgspec.json.decode(data))
    except (ValueError, RecursionError):
        text, counts_of_text = scrubbed(data.decode(errors="replace"), stay)
        return text.encode(), counts_of_text
    return (msgspec.json.encode(value) if counts else data), dict(counts)


def _each_text(data: bytes, tell: Callable[[str], object]) -> None:
    """Calls `tell` with every string of JSON, or with the whole of another text."""
    try:
        left: list[Any] = [msgspec.json.decode(data)]
    except (ValueError, RecursionError):
        left = [data.decode(errors="replace")]
    while left:
        value = left.pop()
        if isinstance(value, str):
            tell(value)
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


class Scrubber:
    """A child process that scrubs, started again if it dies or takes too long. Not thread-safe."""

    def __init__(self) -> None:
        _rules()
        self._child = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "etude.live.log.scrub"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def scrub(self, *documents: bytes, keep: Sequence[str] = ()) -> tuple[list[bytes], dict[str, int]]:
        """`scrub_documents` in the child. Raises TimeoutError or OSError on failure; the documents may not be kept
        then."""
        if self._child.poll() is not None:
            self._child = self._started()
        try:
            _write(self._child.stdin, msgspec.msgpack.encode((documents, keep)))
            answer = _read(self._child.stdout, time.monotonic() + _SECONDS)
        except (OSError, EOFError, TimeoutError) as e:
            self.close()
            raise e if isinstance(e, TimeoutError) else OSError(f"the scrubbing process has gone: {e}") from None
        return msgspec.msgpack.decode(answer, type=tuple[list[bytes], dict[str, int]])

    def close(self) -> None:
        """Ends the child."""
        self._child.kill()
        self._child.communicate()


def _write(pipe: Any, data: bytes) -> None:
    view = memoryview(struct.pack("<I", len(data)) + data)
    while view:
        view = view[pipe.write(view) :]


def _read(pipe: Any, deadline: float | None) -> bytes:
    held, wanted = b"", 4
    while len(held) < wanted:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and (left <= 0 or not select.select([pipe], [], [], left)[0]):
            raise TimeoutError(f"a text was not scrubbed within {_SECONDS:g} seconds")
        part = pipe.read(min(1 << 20, wanted - len(held)))
        if not part:
            raise EOFError("the pipe was closed")
        held += part
        if wanted == 4 and len(held) == 4:
            wanted += struct.unpack("<I", held)[0]
    return held[4:]


def main() -> None:
    """The child: reads frames of documents on standard input, and writes them scrubbed to standard output."""
    source, sink = io.FileIO(0, "rb"), io.FileIO(1, "wb")
    while True:
        try:
            documents, keep = msgspec.msgpack.decode(_read(source, None), type=tuple[list[bytes], list[str]])
        except EOFError:
            return
        try:
            _write(sink, msgspec.msgpack.encode(scrub_documents(documents, keep)))
        except BrokenPipeError:  # nobody waits for it any more
            return


if __name__ == "__main__":
    main()
