"""Adopts changed passwords while the sources stream, at a reload of the configuration."""

import asyncio
from collections.abc import Sequence

import structlog

from streamer.postgres.credentials import password_generation, renew_password, replace_password
from streamer.postgres.password_source import PasswordUnavailableError
from streamer.postgres.secret import Secret
from streamer.runtime.session.supervisor import Supervisor

log = structlog.get_logger()


async def renew_passwords(url: Secret, now: Secret, supervisors: Sequence[Supervisor]) -> None:
    """Reconnect, in order, each source with a changed password; all sources for the target's.

    *url*: the target's url in use. *now*: the target's url as configured now. Streams continue
    until their dispatched changes are durable; workers reconnect before their next transaction.
    """
    former = password_generation(url)
    replace_password(url, now)
    runners = list(supervisors)
    _, *renewed = await asyncio.gather(
        _renew("the target", url),
        *(_renew(runner.source.label, runner.source.url) for runner in runners),
    )
    is_all = password_generation(url) != former
    for supervisor, is_new in zip(runners, renewed, strict=True):
        if is_all or is_new:
            log.info("password changed, reconnecting", source=supervisor.source.label)
            supervisor.begin_anew()


async def _renew(name: str, url: Secret) -> bool:
    try:
        return await renew_password(url)
    except PasswordUnavailableError as exc:
        log.error("password not renewed, keeping connections", of=name, error=str(exc))
        return False
