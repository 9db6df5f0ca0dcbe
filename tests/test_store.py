import os
import threading

import pytest

from etude.errors import UserError
from etude.store import open_store


@pytest.fixture(scope="module")
def s3():
    """A real S3 API on loopback."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    saved = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.client("s3").create_bucket(Bucket="etude")
    yield "s3://etude/run"
    os.environ.clear()
    os.environ.update(saved)
    server.stop()


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    url = str(tmp_path / "store") if request.param == "file" else request.getfixturevalue("s3") + f"/{tmp_path.name}"
    return open_store(url)


def test_objects_round_trip(store):
    store.put("a/one", b"1")
    store.put("a/one", b"11")
    assert store.get("a/one") == b"11"
    assert store.exists("a/one")
    assert not store.exists("a/two")
    with pytest.raises(KeyError):
        store.get("a/two")
    store.delete("a/one")
    store.delete("a/one")
    assert not store.exists("a/one")


def test_listing_is_sorted_and_can_start_after_a_key(store):
    for key in ("v/2", "v/10", "v/1", "w/3"):
        store.put(key, b"")
    assert store.list("v") == ["v/1", "v/10", "v/2"]
    assert store.list("v", after="v/1") == ["v/10", "v/2"]
    assert store.list("nothing") == []


def test_of_concurrent_creators_exactly_one_wins(store):
    barrier, results = threading.Barrier(8), []

    def create(i: int) -> None:
        barrier.wait(20)
        results.append((store.create("versions/1", f"writer {i}".encode()), i))

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winners = [i for won, i in results if won]
    assert len(results) == 8
    assert len(winners) == 1
    assert store.get("versions/1") == f"writer {winners[0]}".encode()


def test_refusals_are_one_sentence(tmp_path):
    (tmp_path / "store").mkdir()
    store = open_store(str(tmp_path / "store"))
    store.put("a", b"")
    with pytest.raises(UserError, match=r"cannot write a/b in file://") as error:
        store.put("a/b", b"")  # "a" is a file, not a folder
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot be opened as a store"):
        open_store("nonsense://x")


def test_a_bucket_that_is_not_there_is_named(s3):
    with pytest.raises(UserError, match="cannot write x in s3://absent"):
        open_store("s3://absent/run").put("x", b"")
