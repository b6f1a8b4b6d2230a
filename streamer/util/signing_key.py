"""Reads a key of Standard Webhooks (standardwebhooks.com). Pure."""

import base64
from typing import Final

_BASE64_PREFIX: Final = "whsec_"


def signing_key(text: str) -> bytes:
    """Return the bytes of a key. Raises ValueError, whose text does not contain the key."""
    if not text.startswith(_BASE64_PREFIX):
        return text.encode()
    try:
        key = base64.b64decode(text.removeprefix(_BASE64_PREFIX), validate=True)
    except ValueError:
        raise ValueError("the text after whsec_ is not base64") from None
    if not key:
        raise ValueError("no text after whsec_")
    return key
