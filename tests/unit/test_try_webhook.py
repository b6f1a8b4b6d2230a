"""``streamer notify`` tells whether the receiver of notifications accepts a message."""

import asyncio
import json
from pathlib import Path

from tests.support.process import command
from tests.support.receiver import Receiver, receiving

SECRET = "hook-of-the-team"


def configure(path: Path, receiver: Receiver) -> Path:
    path.write_text(
        "target: {url: 'postgresql://nobody@127.0.0.1:1/warehouse'}\n"
        f"notify: {{webhook: '{receiver.url}/{SECRET}', key: signing, 'on': [wal]}}\n"
        "sources: [{database: shop, urls: [{url: 'postgresql://nobody@127.0.0.1:1/shop'}], tables: {t: {}}}]\n"
    )
    return path


async def test_a_test_message_arrives_signed(tmp_path: Path) -> None:
    async with receiving() as receiver:
        config = configure(tmp_path / "config.yaml", receiver)
        done = await asyncio.to_thread(command, config, "notify")

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{receiver.url} has accepted a test message\n"
    (delivery,) = receiver.accepted
    assert delivery.path == f"/{SECRET}"
    assert delivery.content == {
        "target": "warehouse at 127.0.0.1:1",
        "text": "streamer: this test message says that notifications about warehouse at "
        "127.0.0.1:1 arrive here",
        "problems": [],
    }
    assert delivery.headers["webhook-signature"].startswith("v1,")


async def test_a_refusal_names_the_server_and_not_the_path(tmp_path: Path) -> None:
    async with receiving() as receiver:
        receiver.status = 404
        config = configure(tmp_path / "config.yaml", receiver)
        done = await asyncio.to_thread(command, config, "notify", "--json")

    assert done.returncode == 1
    problem = f"{receiver.url}: the receiver answers 404"
    assert json.loads(done.stdout) == {"receiver": receiver.url, "problem": problem}
    assert SECRET not in done.stdout + done.stderr
    assert problem in done.stderr


async def test_a_configuration_without_a_webhook_is_refused(tmp_path: Path) -> None:
    config = configure(tmp_path / "config.yaml", Receiver("http://127.0.0.1:1"))
    text = config.read_text()
    config.write_text("".join(line for line in text.splitlines(True) if "notify" not in line))

    done = await asyncio.to_thread(command, config, "notify")

    assert done.returncode == 2
    assert "notify.webhook is not set" in done.stderr
