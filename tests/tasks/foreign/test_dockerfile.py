# pyright: reportPrivateUsage=false
"""Dockerfiles: what is understood, where boxes show it, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.tasks.foreign.dockerfile import CopyStep, FolderRefused, Layout, Recipe, RunStep, layout, pieces, read, words
from etude.tasks.foreign.folder import load
from etude.tasks.foreign.image import _requirements, _without_installers
from tests.helpers.foreign import DOCKERFILE, write


def test_what_a_dockerfile_says() -> None:
    recipe = read(DOCKERFILE)
    assert recipe.environment == {"NAME": "world", "KIND": "plain"}
    assert recipe.workdir == "/app"
    copies = [step for step in recipe.steps if isinstance(step, CopyStep)]
    assert copies == [CopyStep(("data/",), "/data/"), CopyStep(("greet.sh",), "/app/")]
    runs = [step for step in recipe.steps if isinstance(step, RunStep)]
    assert [run.folder for run in runs] == ["/", "/app"]
    assert "echo" in runs[1].script


def test_a_heredoc_is_one_script() -> None:
    text = "FROM ubuntu:24.04\nRUN cat > /app/a.py <<'EOF'\n# no comment\nx = 1\nEOF\nRUN <<END\nset -e\nls\nEND\n"
    first, second = (step for step in read(text).steps if isinstance(step, RunStep))
    assert first.script == "cat > /app/a.py <<'EOF'\n# no comment\nx = 1\nEOF"
    assert second.script == "set -e\nls"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM nvidia/cuda:12", "its base image nvidia/cuda:12 is neither Python, Ubuntu nor Debian"),
        ("FROM acme/python:3", "its base image acme/python:3 is"),
        ("FROM python:3 AS a\nFROM python:3", "several stages"),
        ("FROM python:3\nENTRYPOINT ['x']", "has ENTRYPOINT"),
        ("FROM python:3\nCOPY --from=a /x /y", "copies with --from=a"),
        ("FROM python:3\nUSER ada", "the user ada"),
        ("FROM python:3\nADD https://a.b/c /d", "copies https://a.b/c /d"),
        ("FROM python:3\nHEALTHCHECK NONE", "has HEALTHCHECK"),
        ("FROM python:3\nFETCH it", "has FETCH, which is not known"),
        ("RUN ls", "no FROM"),
    ],
)
def test_what_boxes_cannot_do_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(FolderRefused) as refused:
        read(text)
    assert reason in str(refused.value)


def test_a_base_of_ones_own_can_be_named() -> None:
    assert read("FROM acme/base:2", ["acme/base:2"]) == Recipe((), {}, "/")


def places(text: str, *texts: str) -> Layout:
    return layout(read(text), *texts)


def test_the_working_folder_is_the_tree_and_the_rest_lies_aside() -> None:
    where = places(DOCKERFILE, "Results go to /var/results/x.csv; see https://a.org/b/c, ~/.ssh, either/or.")
    assert where.places == {
        "/app": "", "/data": ".root/data", "/var/results": ".root/var/results", "/logs": ".root/logs",
        "/root": ".root/root",
    }  # fmt: skip
    assert where.inside("/app/out/x") == "out/x"
    assert where.inside("/data") == ".root/data"
    with pytest.raises(FolderRefused, match="writes to /etc/x, which boxes have from this machine"):
        where.inside("/etc/x")


def test_a_workspace_is_the_tree_if_there_is_one() -> None:
    where = places("FROM ubuntu\nWORKDIR /workspace/project\nCOPY a /srv/a/b\n")
    assert where.workdir == "/workspace/project"
    assert where.inside("/workspace/project/x") == "project/x"
    assert where.inside("/srv/a/b") == ".root/srv/a/b"
    both = places("FROM ubuntu\nWORKDIR /app\nCOPY a /workspace/a\n")
    assert both.inside("/app/x") == ".root/app/x"


def test_a_system_folder_is_no_place_to_work() -> None:
    with pytest.raises(FolderRefused, match="its working folder is /usr/src/app"):
        places("FROM python:3\nWORKDIR /usr/src/app\n")
    assert places("FROM python:3\n").workdir == "/workspace"


def test_scripts_are_cut_between_commands_only() -> None:
    script = "a 'x && y' && b \"p; q\" ; (c && d)\nfor i in 1 2; do e; done"
    assert [text for _, text in pieces(script)][:3] == ["a 'x && y'", 'b "p; q"', "(c && d)"]
    assert all(script.startswith(text, start) for start, text in pieces(script))
    commented = "#!/bin/sh\n# don't\nls\ncase $x in a) b;; esac\ncd y"
    assert [text for _, text in pieces(commented)][-3:] == ["case $x in a) b", "esac", "cd y"]
    assert words("uvx \\\n --with a \\\n") == ["uvx", "--with", "a"]
    assert words("pip install -q 'a>=1' 2>/dev/null || true") == ["pip", "install", "-q", "a>=1"]
    assert words("curl x | sh") == ["curl", "x"]


def test_what_installs_is_taken_out_of_a_script() -> None:
    script = "apt-get update && apt-get install -y python3 && if [ -f a ] && [ -f b ]; then c || d; fi"
    assert _without_installers(script) == ": && : && if [ -f a ] && [ -f b ]; then c || d; fi"
    assert _without_installers("pip install x && \\\n  rm -rf /var/lib/apt/lists/*") == ""
    with pytest.raises(FolderRefused, match="apt-get installs no-such-package"):
        _without_installers("apt-get install -y --no-install-recommends no-such-package=1.2")


def test_what_the_tests_need_is_known_beforehand(tmp_path: Path) -> None:
    script = (
        "if uv run --with 'a>=1' pytest /tests; then x; fi\npip3 install -q b==2 -r requirements.txt\nuvx --from=c d"
    )
    given = {"tests/test.sh": script, "environment/requirements.txt": "# of the image\ne~=3  # yes\n"}
    assert _requirements(load(write(tmp_path, given))) == ["a>=1", "b==2", "e~=3", "c", "pytest"]
    with pytest.raises(FolderRefused, match=r"pip installs git\+https://a.org/b"):
        _requirements(load(write(tmp_path, {"tests/test.sh": "pip install git+https://a.org/b"})))


def test_recipes_are_compared_by_value() -> None:
    assert read("FROM python:3\n# a comment\n") == Recipe((), {}, "/")
