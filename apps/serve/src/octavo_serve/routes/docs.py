"""GET /openapi.json, the description of the routes, and /docs, which shows it in a browser."""

from collections.abc import Sequence
from functools import cached_property
from types import FunctionType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

DOCUMENT, PAGE = "/openapi.json", "/docs"
DOCS_PATHS = (DOCUMENT, PAGE)


class Docs:
    """The description of an application's routes, made when it is first asked for."""

    def __init__(
        self, routes: Sequence[tuple[str, str, FunctionType]], *, needs_key: bool, root_path: str
    ) -> None:
        """Arguments as those of `openapi.document`."""
        self._routes = tuple(routes)
        self._needs_key = needs_key
        self._root_path = root_path

    async def show_document(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return Response(msgspec.json.encode(self._document), media_type="application/json")

    async def show_page(self, request: Request) -> Response:
        """Return the document as a page, which needs no script and nothing from elsewhere."""
        body, headers = self._page
        return Response(body, headers=headers, media_type="text/html")

    @cached_property
    def _document(self) -> dict[str, Any]:
        from octavo_serve.openapi import document

        return document(self._routes, needs_key=self._needs_key, root_path=self._root_path)

    @cached_property
    def _page(self) -> tuple[str, dict[str, str]]:
        from octavo_serve.docs_page import HEADERS, docs_page

        return docs_page(self._document), HEADERS
