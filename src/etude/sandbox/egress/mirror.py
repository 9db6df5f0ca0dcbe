"""A package index as it was at a date, without the package under test, in front of a simple index.

Files are dated by their index's `upload-time` (PEP 700); undated files are not served. Nor is the rest of an index:
no search, no list of projects, no metadata of later files.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote, urljoin

import httpx2

from etude.sandbox.egress.policy import EgressRefused, PackageIndex, normal_project

HOST = "pypi.internal"  # its name in a box
ENVIRONMENT = {
    "PIP_INDEX_URL": f"http://{HOST}/simple/",
    "PIP_TRUSTED_HOST": HOST,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_DEFAULT_INDEX": f"http://{HOST}/simple/",
}
SECONDS = 60.0  # without a byte from the index
INDEX_JSON = "application/vnd.pypi.simple.v1+json"
MAX_PROJECTS = 1000  # whose files are remembered
_KEPT = ("filename", "hashes", "requires-python", "yanked")


class IndexUnavailable(Exception):
    """The index has no answer."""


@dataclass(frozen=True)
class IndexResponse:
    """A response. `size` is in bytes, None if the index does not say."""

    status: int
    kind: str
    size: int | None
    chunks: AsyncGenerator[bytes, None]


class IndexMirror:
    """The index of a sandbox, shared by its boxes."""

    def __init__(self, index: PackageIndex) -> None:
        self._index = index
        headers = {"accept-encoding": "identity"}
        self._client = httpx2.AsyncClient(follow_redirects=True, timeout=SECONDS, headers=headers)
        self._projects: dict[str, dict[str, dict[str, Any]]] = {}  # project -> file name -> the index's entry

    async def answer(self, path: str) -> IndexResponse:
        """The response to a GET. Raises EgressRefused, IndexUnavailable, or httpx2.HTTPError."""
        match [unquote(part) for part in path.partition("?")[0].split("/")]:
            case ["", "simple", project] | ["", "simple", project, ""]:
                project = self._allowed(project)
                return _whole(self._page(project, await self._files(project)))
            case ["", "files", project, name]:
                project = self._allowed(project)
                file = (await self._files(project)).get(name)
                if file is not None:
                    return await self._download(file)
        raise EgressRefused("no such page or file at that date")

    async def close(self) -> None:
        """Close connections to the index."""
        await self._client.aclose()

    def _allowed(self, project: str) -> str:
        project = normal_project(project)
        if project in self._index.without:
            raise EgressRefused("the package under test")
        return project

    async def _files(self, project: str) -> dict[str, dict[str, Any]]:
        if project not in self._projects:
            page = urljoin(self._index.url, f"{quote(project, safe='')}/")
            response = await self._client.get(page, headers={"accept": INDEX_JSON})
            if response.status_code == 404:
                raise EgressRefused("no such page or file at that date")
            if response.status_code != 200 or response.headers.get("content-type", "").partition(";")[0] != INDEX_JSON:
                raise IndexUnavailable("the index does not answer in JSON (PEP 691)")
            if len(self._projects) >= MAX_PROJECTS:
                self._projects.clear()
            base = str(response.url)
            self._projects[project] = {
                file["filename"]: file | {"url": urljoin(base, file["url"])}
                for file in response.json()["files"]
                if self._in_time(file)
            }
        return self._projects[project]

    def _in_time(self, file: Mapping[str, Any]) -> bool:
        try:
            return datetime.fromisoformat(file["upload-time"]) < self._index.before
        except (KeyError, TypeError, ValueError):
            return False

    def _page(self, project: str, files: Mapping[str, Mapping[str, Any]]) -> bytes:
        shown = [
            {key: file[key] for key in _KEPT if key in file} | {"url": f"/files/{project}/{quote(name, safe='')}"}
            for name, file in files.items()
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": project, "files": shown}).encode()

    async def _download(self, file: Mapping[str, Any]) -> IndexResponse:
        response = await self._client.send(self._client.build_request("GET", file["url"]), stream=True)
        if response.status_code != 200:
            await response.aclose()
            raise IndexUnavailable(f"the index answers {response.status_code}")

        async def chunks() -> AsyncGenerator[bytes, None]:
            try:
                async for chunk in response.aiter_raw():
                    yield chunk
            finally:
                await response.aclose()

        size = response.headers.get("content-length", "")
        return IndexResponse(200, "application/octet-stream", int(size) if size.isdecimal() else None, chunks())


def _whole(data: bytes) -> IndexResponse:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield data

    return IndexResponse(200, INDEX_JSON, len(data), chunks())
