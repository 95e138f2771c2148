"""Which interface holds an address."""

from perdure.host.interfaces import interface_of


def test_loopback_is_found_by_address_and_by_name() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"


def test_address_that_is_not_ours_has_no_interface() -> None:
    assert interface_of("192.0.2.123") is None
    assert interface_of("no.such.host.invalid") is None
