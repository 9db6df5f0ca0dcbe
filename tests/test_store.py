import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

import etude.store
from etude.errors import UserError
from etude.store import ObjectMissing, open_store


@pytest.fixture(scope="module")
def s3(s3_service, s3_credentials):
    """A real S3 API on loopback."""
    os.environ["AWS_ENDPOINT_URL"] = s3_service
    return "s3://etude/run"


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
    with pytest.raises(ObjectMissing):
        store.get("a/two")
    assert issubclass(ObjectMissing, KeyError)
    store.delete("a/one")
    store.delete("a/one")
    assert not store.exists("a/one")


def test_listing_is_sorted_and_can_start_after_a_key(store):
    for key in ("v/2", "v/10", "v/1", "w/3"):
        store.put(key, b"")
    assert store.list("v") == ["v/1", "v/10", "v/2"]
    assert store.list("v", after="v/1") == ["v/10", "v/2"]
    assert store.list("nothing") == []
    assert [(e.key, e.bytes) for e in store.entries("v")] == [("v/1", 0), ("v/10", 0), ("v/2", 0)]
    assert all(abs(e.modified - time.time()) < 60 for e in store.entries())


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


def test_a_folder_can_be_given_in_three_ways(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("with space/store").put("a", b"1")
    assert open_store(f"{tmp_path}/with space/store").get("a") == b"1"
    assert open_store(f"file://{tmp_path}/with%20space/store").get("a") == b"1"
    for wrong, why in [("file://host/store", "not a local folder"), ("s3:///store", "names no bucket")]:
        with pytest.raises(UserError, match=why):
            open_store(wrong)


def test_large_objects_go_up_in_parts(s3, monkeypatch):
    monkeypatch.setattr(etude.store, "PART", 5 << 20)  # the smallest part that S3 takes
    data = os.urandom(11 << 20)
    store = open_store(f"{s3}/large")
    store.put("big", data)
    assert store.get("big") == data


def test_a_store_that_does_not_answer_is_given_up_in_time(monkeypatch):
    with socket.socket() as refused:
        refused.bind(("127.0.0.1", 0))  # bound and never listening: connections are refused
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refused.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setattr(etude.store, "RETRYING", timedelta(seconds=0.2))
        store = open_store("s3://etude/run")
        started = time.monotonic()
        with pytest.raises(UserError, match=r"cannot read x in s3://etude/run: .* check that it is reachable"):
            store.get("x")
    assert time.monotonic() - started < 30


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    script = (
        "import resource, sys\n"
        "from etude.errors import UserError\n"
        "from etude.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"  # stands in for a device without space
        "try:\n"
        "    store.put('key', b'x' * 5000)\n"
        "except UserError as e:\n"
        "    print(e, '|', store.list())\n"
    )
    said = subprocess.check_output([sys.executable, "-c", script, str(tmp_path / "store")], text=True, timeout=60)
    assert said.startswith("cannot write key in file://")
    assert said.endswith("check that it is reachable, writable and not full | []\n")


def test_a_durable_put_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """The order of what the file system is asked for: a power cut between any two of them leaves the old or the new."""
    calls, real = [], {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def name(path):
        return Path(path).relative_to(tmp_path).as_posix().partition("#")[0]

    def fsync(descriptor):
        calls.append(("fsync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real["fsync"](descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for call in ("replace", "link"):
        monkeypatch.setattr(os, call, lambda a, b, call=call: (calls.append((call, name(b))), real[call](a, b)))
    store = open_store(str(tmp_path / "store"), durable=True)
    store.put("folder/put", b"1")
    folders = [("fsync", "store")]
    assert calls == [
        *folders,
        ("fsync", "store/folder/put"),
        ("replace", "store/folder/put"),
        ("fsync", "store/folder"),
    ]
    calls.clear()
    assert store.create("folder/new", b"2")
    assert calls == [("fsync", "store/folder/new"), ("link", "store/folder/new"), ("fsync", "store/folder")]
    assert not store.create("folder/new", b"3")
    store.put("folder/put", b"4")
    assert [store.get(key) for key in store.list()] == [b"2", b"4"]
    assert sorted(p.name for p in (tmp_path / "store/folder").iterdir()) == ["new", "put"]


WRITER = """
import os, sys
from etude.store import open_store
store = open_store(sys.argv[1], durable=bool(sys.argv[2]))
data = os.urandom(1 << 20) * 4
for i in range(10**6):
    store.put(f"puts/{i}", data)
    store.create(f"creates/{i}", data)
    if i == 3:
        print("going", flush=True)
"""


@pytest.mark.parametrize("durable", ["", "durable"])
def test_a_writer_killed_in_the_middle_leaves_no_part_of_an_object(tmp_path, durable):
    folder = tmp_path / "store"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), durable], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"going\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=60)
    store = open_store(str(folder))
    keys = store.list()
    assert len(keys) >= 8
    assert {Path(folder, key).stat().st_size for key in keys} == {4 << 20}
    assert all(key.split("/")[1].isdigit() for key in keys), "what was left half-written is not listed"


def test_a_fork_that_would_wait_for_ever_is_refused(tmp_path):
    store = open_store(str(tmp_path / "store"))
    store.put("a", b"1")
    if (pid := os.fork()) == 0:
        try:
            store.put("b", b"2")
        except AssertionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
