"""One request of a client: its account, consent, release and session, decided before its turn is written."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Scope

from etude.live.gateway.arms import Assignment, assign
from etude.live.gateway.entries import Key
from etude.live.gateway.view import LogView
from etude.live.log.accounts import Accounts
from etude.live.log.consent import HEADER as CONSENT
from etude.live.log.consent import decide
from etude.live.log.records import Consent, TurnKind, ulid, ulid_of
from etude.live.log.tenants import ApiKey
from etude.live.log.users import is_signed, own_name, person_of
from etude.protocol import Refusal, headers

DIALECTS = {"/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages"}
"""The dialect of each path whose answers are turns."""
_IDLE_SECONDS = 1800.0  # of a session without a name
_MAX_SESSIONS = 100_000
_FIELD_HEADERS = ("user", "user-signature", "session", "kind", "organisation", "client")  # X-Etude-...


class _BodyFields(msgspec.Struct):
    """The fields that the gateway reads from a request body."""

    model: Any = None
    user: Any = None
    metadata: Any = None


@dataclass
class TurnRequest:
    """One request in flight."""

    key: ApiKey
    id: str
    path: str
    body: bytes
    account: str
    voucher: str  # the account that the key vouches for
    consent: Consent
    assignment: Assignment
    session: str
    organisation: str
    client: str
    kind: TurnKind
    began: float = field(default_factory=time.monotonic)
    strayed: int | None = None  # release of the control, if its server answered in place of the account's arm
    deserted: bool = False  # a server of the account's arm was away: not only busy
    answer: str = ""  # the id in the answer's body, unless it is made of `id`
    copy: bytearray | None = None  # of the answer's body, if its server keeps no turns
    is_stream: bool = False  # of server-sent events

    @property
    def size(self) -> int:
        """Bytes of the request and of the answer's copy."""
        return len(self.body) + len(self.copy or b"")

    @property
    def dialect(self) -> str | None:
        """The dialect of the turn; None if the path has no turns."""
        return DIALECTS.get(self.path)

    @property
    def recorded(self) -> bool:
        """Whether the turn may be recorded."""
        return self.consent.granted and self.dialect is not None

    @property
    def release(self) -> int:
        """The release that answers."""
        return self.assignment.release if self.strayed is None else self.strayed

    @property
    def counter_key(self) -> Key:
        """The key of the counters of the arm's own conduct."""
        return Key(self.assignment.release, self.assignment.arm, self.voucher, self.key.tenant)

    @property
    def turn_key(self) -> Key:
        """The key of the counters of the answer."""
        return self.counter_key._replace(release=self.release)


class RequestReader:
    """The reader of requests. `holdback` is the share of the accounts that stay on the held release."""

    def __init__(self, accounts: Accounts, view: LogView, holdback: float) -> None:
        self._accounts = accounts
        self._view = view
        self._holdback = holdback
        self._sessions: OrderedDict[tuple[str, ...], tuple[str, float]] = OrderedDict()

    def read(self, key: ApiKey, scope: Scope, body: bytes) -> TurnRequest:
        """A body with its headers as the request of a key. Raises Refusal."""
        fields, is_readable = _BodyFields(), True
        if body:
            try:
                fields = msgspec.json.decode(body, type=_BodyFields)
            except (ValueError, RecursionError):  # the server refuses the body
                is_readable = False  # without consent: another parser may read the name of a forgotten user
        body_user = fields.user or (fields.metadata.get("user_id") if isinstance(fields.metadata, dict) else None)
        sent = {name: _sent(scope, name) for name in _FIELD_HEADERS}
        if sent["kind"] not in ("", *TurnKind):
            raise Refusal(400, "X-Etude-Kind is main, side or bot", "kind")
        user = sent["user"] or (body_user if isinstance(body_user, str) else "")
        user, session = person_of(user)
        user = user or own_name(key.name)
        account = self._accounts.name(key.tenant, user)
        voucher = account if self._is_vouched_for(key, sent) else self._accounts.name(key.tenant, own_name(key.name))
        policy = self._view.directory.policies[key.tenant]
        consents, now = list(headers(scope, CONSENT.encode())), time.time_ns()
        consent = decide(policy, ",".join(consents) if consents else None, account in self._view.forgotten, now)
        if not is_readable:
            consent = Consent(policy="unreadable", at=now)
        assignment = assign(self._accounts, self._view.stages, self._holdback, voucher)
        agent = next(headers(scope, b"user-agent"), "").partition(" ")[0]
        client = (sent["client"] or agent)[:100]
        parts = (account, voucher, client, assignment.arm.value, str(assignment.release))
        organisation = sent["organisation"] and self._accounts.digest("organisation", key.tenant, sent["organisation"])
        return TurnRequest(
            key=key,
            id=ulid(),
            path=scope["path"],
            body=body,
            account=account,
            voucher=voucher,
            consent=consent,
            assignment=assignment,
            session=self._session(parts, sent["session"] or session),
            organisation=organisation,
            client=client,
            kind=TurnKind(sent["kind"] or TurnKind.MAIN),
        )

    def _is_vouched_for(self, key: ApiKey, sent: dict[str, str]) -> bool:
        """Whether the firm's proxy has signed the name in the header. Raises Refusal for a signature that is wrong."""
        if not sent["user-signature"]:
            return False
        if not key.proxy:
            message = "this key signs no names: `etude live key create --proxy` makes one that does"
            raise Refusal(401, message, "user_signature")
        if not sent["user"] or not is_signed(
            self._accounts.proxy_secret(key.digest), sent["user"], sent["user-signature"]
        ):
            raise Refusal(401, "X-Etude-User-Signature is not that of X-Etude-User with this key", "user_signature")
        return True

    def _session(self, parts: tuple[str, ...], name: str) -> str:
        """The id of the session with the client's name; without a name, requests at most half an hour apart share a
        session."""
        if name:
            return ulid_of(int(self._accounts.digest("session", *parts, name), 16))
        now = time.monotonic()
        session, last = self._sessions.get(parts, ("", -_IDLE_SECONDS))
        session = session if now - last < _IDLE_SECONDS and session else ulid()
        self._sessions[parts] = session, now
        self._sessions.move_to_end(parts)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session


def user_of(scope: Scope) -> str:
    """The user that the headers of a request name; "" without."""
    return _sent(scope, "user")


def _sent(scope: Scope, name: str) -> str:
    return _text(next(headers(scope, f"x-etude-{name}".encode()), ""))


def _text(header: str) -> str:
    """A header's value: UTF-8, as most clients send it, else Latin-1; so a user has the same name as in a body."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header
