"""`run --watch-config`: each change of the file counts once, and a missing file does not count."""

from pathlib import Path

from streamer.runtime.configuration_watch import watching
from tests.support.waiting import until


async def test_each_change_of_the_content_counts_once(tmp_path: Path) -> None:
    """Kubernetes replaces a link in the path of a mounted file, and an editor replaces the file."""
    link, changes = tmp_path / "config.yaml", []

    def replace(text: str) -> None:
        new = tmp_path / f"new-{len(list(tmp_path.iterdir()))}"
        new.write_text(text)
        (tmp_path / "next").symlink_to(new)
        (tmp_path / "next").replace(link)

    replace("one")
    async with watching(link, lambda: changes.append(link.read_text()), seconds=0):
        replace("one")
        link.unlink()
        replace("two")
        await until(lambda: changes == ["two"])
        replace("three")
        await until(lambda: changes == ["two", "three"])
