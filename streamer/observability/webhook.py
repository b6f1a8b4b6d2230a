"""A webhook: JSON in a POST, signed as Standard Webhooks describe (standardwebhooks.com).

The header ``webhook-signature`` has ``v1,`` and the base64 of an HMAC-SHA256 over id, time and
body. Errors name the server only, because the rest of the URL may be a secret.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from streamer.postgres.secret import Secret
from streamer.util.signing_key import signing_key
from streamer.util.waiting import in_thread

if TYPE_CHECKING:
    import httpx

SECONDS_MAX: Final = 10.0
"""The time for a whole delivery."""
_KEY_BYTES_MAX: Final = 64 * 1024


class UndeliveredError(Exception):
    """The receiver did not accept a message. The text contains no secret."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """The address of a receiver. ``key`` or ``key_file``: the secret that signs messages."""

    url: Secret
    key: Secret | None = None
    key_file: str | None = None

    @property
    def server(self) -> str:
        """Scheme, host and port of the URL."""
        url = urlsplit(self.url.reveal())
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"

    async def send(self, message_id: str, content: Mapping[str, Any]) -> None:
        """Deliver *content*. Raises UndeliveredError."""
        key = await in_thread(self._read_key)
        body = json.dumps(content, ensure_ascii=False).encode()
        headers = {"content-type": "application/json", **sign(key, message_id, body)}
        try:
            async with (
                await in_thread(_make_client) as client,
                asyncio.timeout(SECONDS_MAX),
                client.stream("POST", self.url.reveal(), content=body, headers=headers) as answer,
            ):
                status = answer.status_code
        except TimeoutError:
            raise UndeliveredError(f"{self.server}: no answer for {SECONDS_MAX:g} s") from None
        except Exception as exc:  # noqa: BLE001 also of a proxy in the environment
            raise UndeliveredError(f"{self.server}: {_reason(exc)}") from None
        if not 200 <= status < 300:
            raise UndeliveredError(f"{self.server}: the receiver answers {status}")

    def _read_key(self) -> Secret | None:
        if self.key_file is None:
            return self.key
        try:
            with Path(self.key_file).open("rb") as file:
                text = file.read(_KEY_BYTES_MAX).decode()
        except OSError as exc:
            raise UndeliveredError(f"notify.key_file {self.key_file}: {exc.strerror}") from None
        except UnicodeDecodeError:
            raise UndeliveredError(f"notify.key_file {self.key_file} is not UTF-8") from None
        lines = text.splitlines()
        if len(lines) != 1 or not lines[0]:
            raise UndeliveredError(f"notify.key_file {self.key_file}: expected one line")
        return Secret(lines[0])


def _make_client() -> "httpx.AsyncClient":
    """Make a client, which reads certificates from files. The import takes a while."""
    import httpx

    return httpx.AsyncClient(timeout=SECONDS_MAX, follow_redirects=False)


def _reason(error: Exception) -> str:
    """Return the kind of a failure: the text of *error* may contain the URL."""
    words = {"ConnectError": "no connection", "ConnectTimeout": "no connection in time"}
    name = type(error).__name__
    return words.get(name, f"the connection failed ({name})")


def sign(key: Secret | None, message_id: str, body: bytes) -> dict[str, str]:
    """Return the headers of a message; with *key*, also the signature."""
    moment = str(int(time.time()))
    headers = {"webhook-id": message_id, "webhook-timestamp": moment}
    if key is not None:
        signed = f"{message_id}.{moment}.".encode() + body
        try:
            key_bytes = signing_key(key.reveal())
        except ValueError as exc:  # only for a key in a file
            raise UndeliveredError(f"notify.key_file: {exc}") from None
        digest = hmac.new(key_bytes, signed, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers
