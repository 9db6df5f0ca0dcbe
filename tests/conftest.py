import os
import sys
import threading

# Read by torch when it is loaded, here and in the processes that tests start. The suite runs one worker per core: more
# threads in a worker, or threads that spin while they wait, take the time of the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", default="fakegpu", help="device of tests/device: fakegpu, a stand-in, or cuda")


@pytest.fixture(autouse=True)
def process_settings():
    """Undoes what a server or a stage of training sets for its process, for the tests after it: torch's threads, and
    how long a thread of Python runs at a time."""
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != (threads := int(os.environ["OMP_NUM_THREADS"])):
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def s3_service():
    """The URL of an S3 service on loopback with a bucket "etude". It answers one request at a time: a real service
    judges `If-None-Match` and writes in one step, moto in two, and a second writer would win between them."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ, start_response):
        with one_at_a_time:
            return list(moto(environ, start_response))

    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    ).create_bucket(Bucket="etude")
    yield url
    server.shutdown()
    thread.join(30)
    server.server_close()


@pytest.fixture(scope="module")
def s3_credentials():
    """Credentials for the service in the environment, as users give them, as long as a module's tests run."""
    saved = dict(os.environ)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    yield
    os.environ.clear()
    os.environ.update(saved)
