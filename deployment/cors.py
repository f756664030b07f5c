"""CORS: which web pages may call this server from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from deployment.errors import InvalidRequestError
from deployment.http_errors import error_response


class _Cors(CORSMiddleware):
    """Starlette's, with a refusal in the shape of all others."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser that asks before it sends."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = error_response(InvalidRequestError(bytes(response.body).decode() + "."))
        # What it says may be cached must not depend on who asked.
        refusal.headers["Vary"] = response.headers["Vary"]
        return refusal


def cors_middleware(origins: Sequence[str]) -> list[Middleware]:
    """What lets pages of these origins in; `*` stands for all. Without origins: nothing."""
    if not origins:
        return []
    return [
        Middleware(
            _Cors,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    ]
