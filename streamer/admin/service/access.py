"""Authentication and roles: tokens, passwords, sessions, and protection from forged requests.

Reading needs the role `viewer`, changing needs `admin`. A browser never sends a bearer token
unasked, but always sends a session cookie. So changes in a session also need a CSRF token. Without
any credentials, the server accepts only this machine, with full access for every user there. The
Host header must then name this machine, so that a foreign name for this machine (DNS rebinding)
lets no web page in.

Wrong tokens and passwords slow down further attempts from the same address. Wrong passwords also
delay attempts with the same name.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import structlog
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from starlette.requests import HTTPConnection

from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.config.settings import AdminSettings, Role, UserSettings
from streamer.errors.error_classes import (
    ForbiddenError,
    SettingsError,
    ThrottledError,
    UnauthenticatedError,
)
from streamer.postgres.secret import Secret

COOKIE: Final = "streamer_session"
CSRF_COOKIE: Final = "streamer_csrf"
CSRF_HEADER: Final = "x-csrf-token"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

FAILURES_MAX: Final = 5
FAILURES_OF_NAME_MAX: Final = 20
"""Higher than the limit for an address, so that attackers cannot easily lock a user out."""
WINDOW_SECONDS: Final = 300.0
SESSIONS_MAX: Final = 1000
_KEYS_MAX: Final = 10_000
_NAME_SHOWN: Final = 100

log = structlog.get_logger()


def is_loopback(host: str) -> bool:
    """Whether *host*, an address or a name, is this machine."""
    return host.strip("[]").lower() in LOOPBACK


@dataclass(frozen=True, slots=True)
class LoginSession:
    """A logged-in user. ``csrf`` goes into forms and the header."""

    name: str
    role: Role
    csrf: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """The identity behind a request. ``name`` is written to the audit."""

    name: str
    role: Role
    session: LoginSession | None = None


def actor_of(request: HTTPConnection) -> str:
    """Return the name of the client, as written to the audit."""
    identity: UserIdentity | None = getattr(request.state, "identity", None)
    return identity.name if identity is not None else "nobody"


_OF_A_SESSION: Final = frozenset({"/logout", "/api/logout"})
_ONLY_READING: Final = frozenset({"/api/discover", "/api/login", "/login"})


def needed_role(path: str) -> Role:
    """Return the role for an unsafe request to *path*: any role may end its own session."""
    return Role.VIEWER if path in _OF_A_SESSION else Role.ADMIN


def has_effect(path: str) -> bool:
    """Whether an unsafe request to *path* edits the mapping or acts on running tables."""
    return path not in _OF_A_SESSION and path not in _ONLY_READING


_ACTS: Final = (
    *("/resync", "/pause", "/resume", "/retry", "/drop", "/purge"),
    *("/act", "/quarantine", "/session/end", "/restart"),
)
"""The ends of paths whose requests act on running tables, through the bookkeeping in the target."""


def edits_mapping(path: str) -> bool:
    """Whether an unsafe request to *path* edits the mapping, which needs a mapping database."""
    return has_effect(path) and not path.endswith(_ACTS)


class Throttle:
    """Counts failures by key, within a window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def check(self, key: str, most: int) -> None:
        """Raise ThrottledError after *most* recent failures."""
        now = self._clock()
        recent = [at for at in self._failures.get(key, ()) if now - at < WINDOW_SECONDS]
        if len(recent) >= most:
            seconds = max(1, int(WINDOW_SECONDS - (now - recent[-most])) + 1)
            log.warning("too many wrong tokens or passwords", throttled=key, seconds=seconds)
            raise ThrottledError(
                "too many wrong tokens or passwords", seconds=seconds, hint=f"wait {seconds} s"
            )

    def count(self, key: str) -> None:
        now = self._clock()
        recent = [at for at in self._failures.pop(key, ()) if now - at < WINDOW_SECONDS]
        self._failures[key] = [*recent[-FAILURES_OF_NAME_MAX:], now]
        while len(self._failures) > _KEYS_MAX:
            self._failures.popitem(last=False)

    def forget(self, key: str) -> None:
        self._failures.pop(key, None)


class Access:
    """Authenticates tokens, users and sessions."""

    def __init__(
        self, settings: AdminSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._hasher = PasswordHasher()
        self._users = {user.name: user for user in settings.users}
        if len(self._users) < len(settings.users):
            raise SettingsError("admin.users: two users have the same name")
        for user in settings.users:
            try:
                self._hasher.check_needs_rehash(user.password_hash.reveal())
            except InvalidHashError:
                raise SettingsError(
                    f"admin.users: password_hash of {user.name} is not an argon2 hash",
                    hint="`streamer admin hash-password` makes one",
                ) from None
        self._configured = dict(self._users)
        self._had_stored = False
        self._nobody = ""
        self._csrf = secrets.token_urlsafe(32)
        self._sessions: OrderedDict[bytes, LoginSession] = OrderedDict()
        self._throttle = Throttle(clock)
        # The computation of a hash takes 64 MB.
        self._hashing = asyncio.Semaphore(2)

    @property
    def has_users(self) -> bool:
        """Whether a user could log in with a password."""
        return bool(self._users)

    @property
    def is_open(self) -> bool:
        """Whether no credentials exist, so that every user of this machine has full access."""
        return not self._settings.has_credentials and not self._had_stored

    def set_stored(self, stored: Sequence[UserSettings]) -> None:
        """Adopt the users of the mapping database; users of the configuration take precedence.

        A session ends if the user is removed, or gets a new password or role. After the first
        stored user, access without credentials stays closed until a restart, because the server may
        listen on the network by then.
        """
        self._had_stored = self._had_stored or bool(stored)
        users = {user.name: user for user in stored} | self._configured
        for cookie, session in list(self._sessions.items()):
            if users.get(session.name) != self._users.get(session.name):
                del self._sessions[cookie]
        self._users = users

    # ---- requests ------------------------------------------------------------------------------

    def identify(self, request: HTTPConnection) -> UserIdentity | None:
        """Return the identity behind a request; None without credentials.

        Raises UnauthenticatedError, ForbiddenError or ThrottledError for wrong credentials, or a
        request from elsewhere.
        """
        if self.is_open:
            _check_host(request)
            return UserIdentity("local", Role.ADMIN)
        authorization = request.headers.get("authorization")
        if authorization is not None:
            return self._check_token(authorization, _address(request))
        session = self.session(request)
        if session is not None:
            return UserIdentity(session.name, session.role, session)
        return None

    def check_host(self, request: HTTPConnection) -> None:
        """Refuse a foreign name of this machine if requests need no credentials.

        Raises ForbiddenError.
        """
        if self.is_open:
            _check_host(request)

    def has_login(self, request: HTTPConnection) -> bool:
        """Whether a request has credentials, or needs none; records no failure."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        tokens = (self._settings.token, self._settings.viewer_token)
        is_token = scheme.lower() == "bearer" and any(_is_same(token.strip(), t) for t in tokens)
        return self.is_open or is_token or self.session(request) is not None

    def authorize(
        self, request: HTTPConnection, method: str, needed: Role = Role.ADMIN
    ) -> UserIdentity:
        """Return the identity, if the role suffices; *needed* is the role for a change.

        Raises UnauthenticatedError, ForbiddenError, ThrottledError.
        """
        identity = self.identify(request)
        if identity is None:
            raise UnauthenticatedError(
                "credentials are missing",
                hint="send the header Authorization: Bearer TOKEN (admin.token), or log in",
            )
        if method in SAFE_METHODS:
            return identity
        check_origin(request)
        if identity.session is not None:
            self.check_csrf(identity.session, request.headers.get(CSRF_HEADER))
        _check_role(identity, needed)
        return identity

    def authorize_form(
        self, request: HTTPConnection, identity: UserIdentity, needed: Role, csrf: str
    ) -> None:
        """Raise ForbiddenError unless *identity* may send a form of the page.

        *csrf*: the token in the form. A bearer token, which no browser sends unasked, needs none.
        """
        check_origin(request)
        expected = self.csrf_of(identity)
        if expected is not None and not _is_equal(csrf, expected):
            raise ForbiddenError(
                "the form belongs to another session",
                hint="reload the page, and send the form again",
            )
        _check_role(identity, needed)

    def csrf_of(self, identity: UserIdentity) -> str | None:
        """Return the CSRF token for forms of *identity*, which exists even without a login."""
        if identity.session is not None:
            return identity.session.csrf
        return self._csrf if self.is_open else None

    def check_csrf(self, session: LoginSession, token: str | None) -> None:
        """Raise ForbiddenError unless *token* belongs to *session*."""
        if not _is_equal(token or "", session.csrf):
            raise ForbiddenError(
                "the CSRF token is missing or wrong",
                hint="send the `csrf` of /api/session as X-CSRF-Token",
            )

    def _check_token(self, authorization: str, address: str) -> UserIdentity:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            sent = token.strip()
            # Accept a correct token even from a throttled address: the limit stops only guesses.
            if _is_same(sent, self._settings.token):
                return UserIdentity("token", Role.ADMIN)
            if _is_same(sent, self._settings.viewer_token):
                return UserIdentity("viewer token", Role.VIEWER)
        self._throttle.check(f"address {address}", FAILURES_MAX)
        self._throttle.count(f"address {address}")
        log.warning("refused a request with a wrong token", address=address)
        raise UnauthenticatedError(
            "the token is wrong" if scheme.lower() == "bearer" else "expected Bearer TOKEN",
            hint="send admin.token or admin.viewer_token of the configuration",
        )

    # ---- sessions ------------------------------------------------------------------------------

    async def log_in(
        self, request: HTTPConnection, name: str, password: str
    ) -> tuple[str, LoginSession]:
        """Return a session and the value of its cookie. Raises UnauthenticatedError,
        ThrottledError.
        """
        keys = {f"address {_address(request)}": FAILURES_MAX, f"name {name}": FAILURES_OF_NAME_MAX}
        async with self._hashing:
            # The lock covers the check: no parallel attempt passes before a failure is recorded.
            for key, most in keys.items():
                self._throttle.check(key, most)
            user = self._users.get(name)
            is_right = await in_admin_thread(self._verify, user, password)
            if user is None or not is_right:
                for key in keys:
                    self._throttle.count(key)
                log.warning("a login failed", address=_address(request), user=name[:_NAME_SHOWN])
                raise UnauthenticatedError("name or password is wrong")
        self._throttle.forget(f"name {name}")
        cookie = secrets.token_urlsafe(32)
        session = LoginSession(
            user.name,
            user.role,
            secrets.token_urlsafe(32),
            self._clock() + self._settings.session_hours * 3600,
        )
        self._sessions[_digest(cookie)] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return cookie, session

    def log_out(self, request: HTTPConnection) -> None:
        """End the session of a request, if any."""
        if cookie := request.cookies.get(COOKIE):
            self._sessions.pop(_digest(cookie), None)

    def session(self, request: HTTPConnection) -> LoginSession | None:
        """Return the session of the cookie of a request."""
        cookie = request.cookies.get(COOKIE)
        if not cookie:
            return None
        session = self._sessions.get(_digest(cookie))
        if session is not None and session.expires_at <= self._clock():
            del self._sessions[_digest(cookie)]
            return None
        return session

    def _verify(self, user: UserSettings | None, password: str) -> bool:
        # An unknown name takes as long as a known name.
        self._nobody = self._nobody or self._hasher.hash(secrets.token_hex())
        stored = user.password_hash.reveal() if user is not None else self._nobody
        try:
            return self._hasher.verify(stored, password)
        except VerificationError:
            return False


def hash_password(password: str) -> str:
    """Return the hash for `admin.users[].password_hash`."""
    return PasswordHasher().hash(password)


def check_origin(request: HTTPConnection) -> None:
    """Refuse a request that a page of a foreign site had a browser send. Raises ForbiddenError."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "none")
    host = request.headers.get("host", "")
    try:
        is_own = origin is None or (urlsplit(origin).netloc or "?").lower() == host.lower()
    except ValueError:
        is_own = False
    if not is_own or site not in ("same-origin", "none"):
        raise ForbiddenError("the request comes from another site")


def _check_host(request: HTTPConnection) -> None:
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise ForbiddenError(
            "without credentials, streamer answers only requests to this machine's loopback "
            "address",
            hint="use http://127.0.0.1, or set admin.token",
        )


def _address(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else "?"


def _digest(cookie: str) -> bytes:
    # The key is a hash, so the time of a lookup reveals no part of the cookie.
    return hashlib.sha256(cookie.encode(errors="replace")).digest()


def _check_role(identity: UserIdentity, needed: Role) -> None:
    if needed is Role.ADMIN and identity.role is not Role.ADMIN:
        raise ForbiddenError(
            f'"{identity.name}" has read access only',
            hint="use admin.token, or a user whose role is admin",
        )


def _is_same(sent: str, token: Secret | None) -> bool:
    return token is not None and _is_equal(sent, token.reveal())


def _is_equal(sent: str, expected: str) -> bool:
    return hmac.compare_digest(sent.encode(errors="replace"), expected.encode())
