"""Keys: how they are written, whose they are, and that they are read again."""

import hashlib
import os
from pathlib import Path

import pytest

from cluster.access import AccessSettings, TenantSettings
from cluster.callers import FLEET_OPERATOR, NOBODY, Caller, owner_of
from cluster.keys import KeyText, read_keys
from deployments.key_store import LOOK_EVERY_S, KeyStore
from lora_core.errors import ConfigError

KEY, OTHER, THIRD = "k" * 20, "o" * 20, "t" * 20
TENANTS = {"acme": TenantSettings(), "globex": TenantSettings()}


def test_whose_keys_they_are() -> None:
    hashed = hashlib.sha256(THIRD.encode()).hexdigest()
    text = f"# comment\noperator={KEY}\n\nacme = {OTHER}, globex:operator=sha256:{hashed}\n"
    ring = read_keys([KeyText("here", text), KeyText("there", "acme=" + "=" * 20)], TENANTS)
    assert ring.caller(KEY) == FLEET_OPERATOR
    assert ring.caller(OTHER) == Caller("acme")
    assert ring.caller(THIRD) == Caller("globex", is_operator=True)
    assert ring.caller("=" * 20) == Caller("acme"), "two keys of one tenant, one with signs of equality"
    for wrong in ("", "operator", KEY[:-1], KEY + "k", hashed, f"sha256:{hashed}", "\ud800"):
        assert ring.caller(wrong) is None


def test_all_faults_are_told_with_lines_and_without_keys() -> None:
    text = f"operator\nnobody={KEY}\nacme=short\nacme:reader={KEY}\nacme:={KEY}\nacme=with space in the key {KEY}\n"
    text += f"acme={OTHER}\nglobex={OTHER}\n"
    with pytest.raises(ConfigError) as caught:
        read_keys([KeyText("/the/file", text)], TENANTS)
    message = str(caught.value)
    for fault in (
        "/the/file, line 1: no '='", "line 2: 'nobody' is no tenant; access.tenants has: acme, globex",
        "line 3: the key of 'acme' has 5 characters", "line 4: 'acme:reader' is nobody", "line 5: 'acme:' is nobody",
        "line 6: the key of 'acme' is empty, or has other", "line 8: this key is another one's",
    ):  # fmt: skip
        assert fault in message
    assert KEY not in message
    assert OTHER not in message


def test_who_sees_and_owns_what() -> None:
    acme, operator = Caller("acme"), Caller("acme", is_operator=True)
    for caller in (acme, operator):
        assert caller.may_see("shared")
        assert caller.may_see("acme/a")
        assert not any(
            map(
                caller.may_see,
                (
                    "globex/a",
                    "/a",
                    "acme2/a",
                    "ACME/a",
                    "gone/a",
                    "ac\u200bme/a",
                    "acme/../globex/a",
                    "acme//a",
                    "acme/",
                ),
            )
        )
        assert caller.owns("acme/a/b")
        assert not any(map(caller.owns, ("shared", "acme", "globex/a", "/acme/a")))
        assert not caller.is_fleet_operator
    assert FLEET_OPERATOR.may_see("globex/a")
    assert not NOBODY.may_see("shared")
    assert [owner_of(name) for name in ("a", "a/b", "/b", "a/./b", "a..b/c")] == [None, "a", "", "", "a..b"]


def test_keys_are_read_again_when_their_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now, file = [0.0], tmp_path / "keys"
    file.write_text(f"acme={KEY}\n")
    settings = AccessSettings(keys_file=str(file), tenants=TENANTS)
    store = KeyStore(settings, {"LORA_FLEET_KEYS": f"operator={THIRD}"}, clock=lambda: now[0])
    assert store.caller(KEY) == Caller("acme")
    assert store.caller(THIRD) == FLEET_OPERATOR
    file.write_text(f"acme={OTHER}\nglobex={KEY}xx\n")
    os.utime(file, ns=(1, 1))
    assert store.caller(OTHER) is None, "it is not looked at for every request"
    now[0] += LOOK_EVERY_S
    assert (store.caller(OTHER), store.caller(KEY)) == (Caller("acme"), None)
    for broken in ("acme=short\n", ""):
        file.write_text(broken)
        os.utime(file, ns=(len(broken) + 2, 2))
        now[0] += LOOK_EVERY_S
        expected = Caller("acme") if broken else None
        assert store.caller(OTHER) == expected, "faulty keys change nothing; the variable's alone are keys, too"
    assert "go on being used" in caplog.text
    assert "the keys have changed" in caplog.text


def test_the_file_is_named_absolutely() -> None:
    with pytest.raises(ValueError, match="write an absolute path"):
        AccessSettings(keys_file="keys")
    assert AccessSettings(keys_file="~/keys").keys_file == "~/keys"


def test_a_server_that_should_have_keys_does_not_start_without(tmp_path: Path) -> None:
    assert KeyStore(AccessSettings(), {}).is_empty
    assert not KeyStore(AccessSettings(keys_variable="MINE"), {"MINE": f"operator={KEY}"}).is_empty
    (tmp_path / "empty").write_text("# nothing\n")
    for settings in (
        AccessSettings(tenants=TENANTS), AccessSettings(keys_file=str(tmp_path / "empty")),
        AccessSettings(keys_file=str(tmp_path / "absent")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"there are no keys|cannot be read"):
            KeyStore(settings, {})
