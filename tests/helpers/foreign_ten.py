"""Ten small Harbor folders, each with another style of verifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.helpers.foreign import write

_DOCKER = "FROM python:3.12-slim\nWORKDIR /app\nCOPY files/ /app/\n"
_PYTEST = "#!/bin/bash\ncd /app\npython3 -m pytest /tests/test_outputs.py -rA\n"
_REWARD = "if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
_HEAD = "#!/bin/bash\nset -e\ncd /app\n"
_TOML = 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n[environment]\nmemory_mb = 512\n'
Folder = Mapping[str, str]
TEN: Mapping[str, Folder] = {
    "sums-by-pytest": {  # pytest on an output file
        "instruction.md": "Sum `amount` of /app/sales.csv per region, and write the sums to /app/sums.json.\n",
        "environment/files/sales.csv": "region,amount\nnorth,3\nsouth,5\nnorth,4\neast,9\n",
        "tests/test.sh": _PYTEST + _REWARD,
        "tests/test_outputs.py": 'import json\n\n\ndef test_sums():\n    sums = json.load(open("/app/sums.json"))\n'
        '    assert sums == {"north": 7, "south": 5, "east": 9}\n',
        "solution/solve.sh": _HEAD + "python3 - <<'P'\nimport csv, json\nsums = {}\n"
        "for row in csv.DictReader(open('sales.csv')):\n"
        "    sums[row['region']] = sums.get(row['region'], 0) + int(row['amount'])\n"
        "json.dump(sums, open('sums.json', 'w'))\nP\n",
    },
    "sorted-by-diff": {  # shell diff with an expected file
        "instruction.md": "Write the words of /app/words.txt, sorted and each once, to /app/sorted.txt.\n",
        "environment/files/words.txt": "pear\napple\nfig\napple\n",
        "tests/test.sh": "#!/bin/bash\ndiff /app/sorted.txt /tests/expected_sorted.txt\n" + _REWARD,
        "tests/expected_sorted.txt": "apple\nfig\npear\n",
        "solution/solve.sh": _HEAD + "sort -u words.txt > sorted.txt\n",
    },
    "lines-counted-again": {  # the verifier computes the expected value from the input
        "instruction.md": "Write the number of lines of /app/access.log with the status 500 to /app/count.txt.\n",
        "environment/files/access.log": "a 200\nb 500\nc 500\nd 404\n",
        "tests/test.sh": '#!/bin/bash\n[ "$(grep -c " 500" /app/access.log)" = "$(cat /app/count.txt)" ]\n' + _REWARD,
        "solution/solve.sh": _HEAD + 'grep -c " 500" access.log > count.txt\n',
    },
    "report-in-ctrf": {  # a report of tests in ctrf's form, reward.json
        "instruction.md": "Convert /app/points.txt to GeoJSON in /app/points.json: a list of [x, y].\n",
        "environment/files/points.txt": "1 2\n3 4\n",
        "tests/test.sh": "#!/bin/bash\npython3 /tests/check.py\n",
        "tests/check.py": "import json, pathlib\nresults = []\n"
        "for name, wanted in (('first', [1, 2]), ('second', [3, 4])):\n"
        "    try:\n        points = json.loads(pathlib.Path('/app/points.json').read_text())\n"
        "        passed = points[('first', 'second').index(name)] == wanted and len(points) == 2\n"
        "    except Exception:\n        passed = False\n"
        "    results.append({'name': name, 'status': 'passed' if passed else 'failed'})\n"
        "folder = pathlib.Path('/logs/verifier')\n"
        "(folder / 'ctrf.json').write_text(json.dumps({'results': {'tests': results}}))\n"
        "share = sum(each['status'] == 'passed' for each in results) / len(results)\n"
        "(folder / 'reward.json').write_text(json.dumps({'reward': share}))\n",
        "solution/solve.sh": _HEAD + "python3 -c \"import json; json.dump([[int(n) for n in line.split()] "
        "for line in open('points.txt')], open('points.json', 'w'))\"\n",
    },
    "program-run-by-tests": {  # the answer is a program, which the verifier runs
        "instruction.md": "Write the program /app/reverse.py, which prints each line of its input reversed.\n",
        "environment/files/README": "A folder for programs.\n",
        "tests/test.sh": "#!/bin/bash\npython3 /tests/check.py\n",
        "tests/check.py": "import subprocess\n"
        "run = subprocess.run(['python3', '/app/reverse.py'], input='abc\\nde\\n', capture_output=True, text=True)\n"
        "open('/logs/verifier/reward.txt', 'w').write(str(int(run.stdout == 'cba\\ned\\n')))\n",
        "solution/solve.sh": _HEAD
        + "printf 'import sys\\nfor line in sys.stdin:\\n    print(line.rstrip()[::-1])\\n' > reverse.py\n",
    },
    "service-that-answers": {  # the verifier starts the agent's server and asks it
        "instruction.md": "Mend /app/server.py: GET /double?n=4 on port 8123 must answer 8.\n",
        "environment/files/server.py": "import http.server, urllib.parse\n\n\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n"
        "        n = int(urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)['n'][0])\n"
        "        body = str(n + 2).encode()\n        self.send_response(200)\n        self.end_headers()\n"
        "        self.wfile.write(body)\n\n\nhttp.server.HTTPServer(('127.0.0.1', 8123), Handler).serve_forever()\n",
        "tests/test.sh": "#!/bin/bash\npython3 /app/server.py > /dev/null 2>&1 &\nserver=$!\n"
        "python3 - <<'P'\nimport sys, time, urllib.request\nfor _ in range(50):\n    try:\n"
        "        answers = [urllib.request.urlopen(f'http://127.0.0.1:8123/double?n={n}').read() for n in (4, 7)]\n"
        "        sys.exit(answers != [b'8', b'14'])\n    except OSError:\n        time.sleep(0.1)\nsys.exit(1)\nP\n"
        "code=$?\nkill $server\n[ $code -eq 0 ]\n" + _REWARD,
        "solution/solve.sh": _HEAD + "sed -i 's/n + 2/n * 2/' server.py\n",
    },
    "checksum-of-a-file": {  # sha256sum -c
        "instruction.md": "Write the text `etude` in upper case, with a line end, to /app/upper.txt.\n",
        "environment/files/note.txt": "etude\n",
        "tests/test.sh": "#!/bin/bash\ncd /app && sha256sum -c /tests/sums\n" + _REWARD,
        "tests/sums": "32122e892a5df726c8e4cf2043c8eff2a03971bad52e84f0248d09490669ad57  upper.txt\n",
        "solution/solve.sh": _HEAD + "tr a-z A-Z < note.txt > upper.txt\n",
    },
    "file-that-is-there": {  # a weak verifier: the file has to exist
        "instruction.md": "Write a summary of /app/minutes.md to /app/summary.md.\n",
        "environment/files/minutes.md": "# Minutes\nWe met.\n",
        "tests/test.sh": "#!/bin/bash\ntest -s /app/summary.md\n" + _REWARD,
        "solution/solve.sh": _HEAD + "echo 'A meeting.' > summary.md\n",
    },
    "script-of-the-image": {  # the verifier calls a checker of the image
        "instruction.md": "Mend /app/settings.ini so that /app/validate.sh succeeds: `port` must be 8080.\n",
        "environment/files/settings.ini": "port = 80\n",
        "environment/files/validate.sh": "#!/bin/sh\ngrep -qx 'port = 8080' /app/settings.ini\n",
        "tests/test.sh": "#!/bin/bash\nbash /app/validate.sh\n" + _REWARD,
        "solution/solve.sh": _HEAD + "sed -i 's/80/8080/' settings.ini\n",
    },
    "table-of-a-database": {  # sqlite, read by the verifier
        "instruction.md": "Make the database /app/shop.db with a table items(name, price) of /app/items.csv.\n",
        "environment/files/items.csv": "tea,3\ncake,5\n",
        "tests/test.sh": "#!/bin/bash\npython3 - <<'P'\nimport sqlite3, sys\n"
        "rows = sqlite3.connect('/app/shop.db').execute('select name, price from items order by price').fetchall()\n"
        "sys.exit([(n, int(p)) for n, p in rows] != [('tea', 3), ('cake', 5)])\nP\n" + _REWARD,
        "solution/solve.sh": _HEAD + "python3 - <<'P'\nimport csv, sqlite3\ndb = sqlite3.connect('shop.db')\n"
        "db.execute('create table items(name, price)')\n"
        "db.executemany('insert into items values (?, ?)', csv.reader(open('items.csv')))\ndb.commit()\nP\n",
    },
}  # fmt: skip


def write_ten(root: Path) -> list[Path]:
    """The folders below `root`."""
    empty = dict.fromkeys(("environment/data/name.txt", "environment/greet.sh", "tests/check.py"))
    return [
        write(root / name, {**empty, "environment/Dockerfile": _DOCKER, "task.toml": _TOML, **files})
        for name, files in TEN.items()
    ]
