"""``streamer notify``: sends a test message to the webhook of the section ``notify``.

`streamer check` sends no message, because people in a chat room would see each check.
"""

import uuid
from dataclasses import dataclass

from streamer.config.settings import Settings
from streamer.errors.error_classes import SettingsError
from streamer.observability.webhook import UndeliveredError, Webhook
from streamer.postgres.conninfo import server_name


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome. ``receiver``: its URL without path; ``problem``: why it got no message."""

    receiver: str
    problem: str | None = None


async def try_webhook(settings: Settings) -> Delivery:
    """Send a message without problems. Raises SettingsError if the configuration has no webhook."""
    notify = settings.notify
    if notify.webhook is None:
        raise SettingsError("notify.webhook is not set, so streamer sends no notifications")
    webhook = Webhook(notify.webhook, notify.key, notify.key_file)
    target = server_name(settings.target.url.reveal())
    text = f"streamer: this test message says that notifications about {target} arrive here"
    try:
        await webhook.send(
            f"msg_{uuid.uuid4().hex}", {"target": target, "text": text, "problems": []}
        )
    except UndeliveredError as exc:
        return Delivery(webhook.server, str(exc))
    return Delivery(webhook.server)
