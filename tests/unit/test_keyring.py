"""The key that encrypts stored passwords."""

from pathlib import Path

import pytest

from streamer.admin.mapping.keyring import Keyring, generate_key
from streamer.errors.error_classes import StoreError
from streamer.postgres.secret import Secret


def test_a_key_file_is_made_for_its_owner_alone_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "key"
    token = Keyring(None, path).encrypt("secret")

    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["key"]
    assert "secret" not in token
    assert Keyring(None, path).decrypt(token, "x") == "secret"


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    token = Keyring(None, path).encrypt("secret")
    path.chmod(0o640)

    with pytest.raises(StoreError, match="chmod 600"):
        Keyring(None, path).decrypt(token, "x")


def test_a_lost_key_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    token = Keyring(None, path).encrypt("secret")
    path.unlink()

    with pytest.raises(StoreError, match="restore the key file"):
        Keyring(None, path).decrypt(token, "x")
    assert not path.exists()


def test_another_key_says_whose_password_it_cannot_read() -> None:
    token = Keyring.temporary().encrypt("secret")

    with pytest.raises(StoreError, match=r"url 1 .* another key"):
        Keyring.temporary().decrypt(token, "url 1 (shop)")


def test_a_key_can_be_replaced() -> None:
    old, new = generate_key(), generate_key()
    token = Keyring(Secret(old), None).encrypt("secret")
    both = Keyring(Secret(f"{new},{old}"), None)

    assert both.decrypt(token, "x") == "secret"
    assert Keyring(Secret(new), None).decrypt(both.encrypt("secret"), "x") == "secret"


def test_an_invalid_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError, match="generate-key") as error:
        Keyring(Secret("hunter2"), None).encrypt("secret")
    assert "hunter2" not in str(error.value)
