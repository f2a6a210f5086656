"""Who may ask: only a browser on this machine (or at the other end of an ssh tunnel) that was given the token.

- `Host` must name this machine, so that no web page reaches us under a name of its own (DNS rebinding).
- The token comes once in the address, is answered with a cookie, and leaves the address at once. The cookie is kept
  from scripts and is not sent along by other sites' pages.
- The answers' headers forbid the page everything that it does not need: other hosts, frames, inline scripts and styles.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

Headers = Mapping[str, str] | Message
LOCAL = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Holds the token of one viewer. `port` keeps the cookies of several viewers apart."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(18)
        self._cookie = f"posttrain_view_{port}"

    def is_local(self, headers: Headers) -> bool:
        """Whether the request was sent to this machine by one of its own names."""
        host = headers.get("Host") or ""
        try:
            return urlsplit(f"//{host}").hostname in LOCAL
        except ValueError:
            return False

    def is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def knows(self, headers: Headers) -> bool:
        """Whether the request carries the token, as a cookie or as `Authorization: Bearer`."""
        bearer = (headers.get("Authorization") or "").removeprefix("Bearer ")
        if bearer and self.is_token(bearer):
            return True
        try:
            found = SimpleCookie(headers.get("Cookie") or "").get(self._cookie)
        except CookieError:
            return False
        return found is not None and self.is_token(found.value)

    def cookie(self) -> str:
        """The `Set-Cookie` that lets a browser in until it is closed."""
        return f"{self._cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
