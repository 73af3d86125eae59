"""Addresses of a Redis broker."""

import pytest

from common.config.network_checks import RedisAddress, is_redis, parse_redis


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("redis://h:7/2", RedisAddress(scheme="redis", host="h", port=7, db=2)),
        ("rediss://h", RedisAddress(scheme="rediss", host="h", port=6379)),
        ("redis://[::1]:7", RedisAddress(scheme="redis", host="::1", port=7)),
        ("unix:///run/r.sock?db=3", RedisAddress(scheme="unix", path="/run/r.sock", db=3)),
    ],
)
def test_every_form_is_parsed(address, parsed):
    assert is_redis(address)
    assert parse_redis(address) == parsed


NONE = (
    "tcp://h:7 redis:// redis://h:high redis://h:99999 redis://h/zero redis://h?timeout=3 redis://h#x unix://h/r.sock"
)
REFUSED = [(address, "redis://HOST:PORT") for address in (*NONE.split(), "unix:///", "unix:///r?db=x")]
REFUSED += [(a, r"broker\.credentials") for a in ("redis://u:p@h/0", "redis://:p@h", "redis://h?password=p")]


@pytest.mark.parametrize(("address", "said"), REFUSED)
def test_what_is_no_address_or_has_a_password_is_refused_without_repeating_the_password(address, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_redis(address)
    assert "u:p" not in str(caught.value)
