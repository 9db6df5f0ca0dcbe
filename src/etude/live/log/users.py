"""The user names that clients send, and what vouches for them.

    key without --proxy      vouches for one account: its own. Other names are parts of it
    key with --proxy         vouches for each name that its firm's proxy has signed, too:

    X-Etude-User:            NAME
    X-Etude-User-Signature:  HMAC-SHA256(SECRET, NAME), 64 hexadecimal digits; NAME and SECRET as UTF-8

SECRET is shown with the key, and derived from it and from the folder's keys. Weights, arms and counters are by the
account that is vouched for (`voucher`); contents and their deletion are by the name (`account`).
"""

from __future__ import annotations

import hashlib
import hmac
import re

import msgspec

_CLAUDE_CODE = re.compile(r"(user_[0-9a-f]{8,128}_account_[0-9A-Za-z-]*)_session_([0-9A-Za-z-]+)")


class _AgentUser(msgspec.Struct):
    """The user id of Claude Code since 2.1.78, a JSON object, and of agents that imitate it."""

    session_id: str
    device_id: str = ""
    account_uuid: str = ""


def person_of(user: str) -> tuple[str, str]:
    """The person and the session in a user name. Agents that put their session into it are known by its form: Claude
    Code's `user_HASH_account_UUID_session_UUID`, and its JSON object of device, account and session. Others have no
    session. The person is "" where a name has nothing but a session."""
    if match := _CLAUDE_CODE.fullmatch(user):
        return match[1], match[2]
    if user.startswith("{"):
        try:
            known = msgspec.json.decode(user, type=_AgentUser)
        except (ValueError, RecursionError):
            return user, ""
        parts = [f"account {known.account_uuid}"] if known.account_uuid else []
        parts += [f"device {known.device_id}"] if known.device_id else []
        return ", ".join(parts), known.session_id
    return user, ""


def own_name(key: str) -> str:
    """The user of requests of a key that name none."""
    return f"key {key}"


def signature_of(secret: str, name: str) -> str:
    """The signature of a name."""
    return hmac.new(secret.encode(), name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def is_signed(secret: str, name: str, signature: str) -> bool:
    """Whether a proxy has signed a name."""
    sent = signature.strip().lower().encode("utf-8", "surrogatepass")
    return hmac.compare_digest(signature_of(secret, name).encode(), sent)
