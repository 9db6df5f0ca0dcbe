"""Publishing to, and following, an S3 service behind a link that fails: HTTP faults, not the store's interface."""

from datetime import timedelta

import pytest

import etude.store
from etude.errors import UserError
from etude.store import open_store
from etude.weights import manifest
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.faulty_link import linked
from tests.helpers.small_tensors import nudged, tensors, widened


@pytest.fixture
def faulty(s3_service, s3_credentials, tmp_path, monkeypatch):
    """A link to the service, and a store behind it whose deadlines are short."""
    with linked(s3_service) as (url, link):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setattr(etude.store, "REQUEST", timedelta(seconds=1))
        monkeypatch.setattr(etude.store, "RETRYING", timedelta(seconds=2))
        yield link, open_store(f"s3://etude/{tmp_path.name}")


def first(kind, method, part, times):
    """`kind` for the first `times` requests of `method` whose path contains `part`."""
    left = [times]

    def fault(seen_method, path):
        if seen_method != method or part not in path or not left[0]:
            return ""
        left[0] -= 1
        return kind

    return fault


@pytest.mark.parametrize("part", ["payloads/", "versions/00000001"])
@pytest.mark.parametrize("kind", ["refuse", "lose", "stall"])
def test_a_write_that_fails_once_costs_a_retry(faulty, kind, part):
    link, store = faulty
    old, new = tensors(0), nudged(tensors(0), 1)
    writer = Publisher(store)
    writer.publish(0, old, (), {})
    link.fault = first(kind, "PUT", part, 1)
    writer.publish(1, new, (), {})
    assert [fault for _, _, fault in link.seen if fault] == [kind]
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    assert weights_digest(live) == manifest.newest_manifest(store).digest == weights_digest(new)


def test_a_service_that_always_refuses_is_one_sentence_and_leaves_the_old_version(faulty):
    link, store = faulty
    old, new = tensors(0), nudged(tensors(0), 1)
    writer = Publisher(store)
    writer.publish(0, old, (), {})
    link.fault = lambda method, path: "refuse" if method == "PUT" and "versions/" in path else ""
    with pytest.raises(UserError, match=r"cannot write versions/00000001\.json"):
        writer.publish(1, new, (), {})
    link.fault = lambda method, path: ""
    assert manifest.newest_manifest(store).digest == weights_digest(old)
    assert writer.publish(1, new, (), {}).digest == weights_digest(new)


@pytest.mark.parametrize("kind", ["refuse", "cut", "stall"])
def test_a_read_that_fails_is_made_again(faulty, kind):
    link, store = faulty
    new = nudged(tensors(0), 1)
    writer = Publisher(store)
    writer.publish(0, tensors(0), (), {})
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    writer.publish(1, new, (), {})
    link.fault = first(kind, "GET", "payloads/", 1)
    receiver.apply(receiver.poll())
    assert [fault for _, _, fault in link.seen if fault] == [kind]
    assert weights_digest(live) == weights_digest(new)


def test_while_nothing_can_be_read_the_old_version_stays(faulty):
    link, store = faulty
    old, new = tensors(0), nudged(tensors(0), 1)
    writer = Publisher(store)
    writer.publish(0, old, (), {})
    live = widened(tensors(9))
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll())
    writer.publish(1, new, (), {})
    link.fault = lambda method, path: "cut" if method == "GET" and "payloads/" in path else ""
    with pytest.raises((UserError, ValueError)):
        receiver.poll()
    assert weights_digest(live) == weights_digest(old)
    link.fault = lambda method, path: ""
    receiver.apply(receiver.poll())
    assert weights_digest(live) == weights_digest(new)
