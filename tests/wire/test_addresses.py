import socket

import pytest

from penstock.config import Config, load
from penstock.wire.addresses import AddressUnavailable, check_addresses
from tests.support.ports import free_port

FREE = {
    "http_server.port": 0,
    "tcp_server.port": 0,
    "kafka_server.port": 0,
    "websocket_server.port": 0,
}


def config(**flags: object) -> Config:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load(environ={}, flags=FREE | given).config


def refusal(**flags: object) -> str:
    with pytest.raises(AddressUnavailable) as refused:
        check_addresses(config(**flags))
    return str(refused.value)


def test_free_addresses_pass_and_are_free_afterwards():
    port = free_port()
    for _ in range(2):
        check_addresses(
            config(
                http_server__port=port, tcp_server__host="::1" if socket.has_ipv6 else "127.0.0.1"
            )
        )


def test_a_port_that_another_broker_shares_with_its_processes_is_taken():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        text = refusal(http_server__port=other.getsockname()[1], workers=2)
    assert "another program listens there" in text
    assert (
        "--http-port, by PENSTOCK_HTTP_SERVER_PORT, or by http_server.port in the"
        " configuration file" in text
    )


def test_two_listeners_of_one_broker_on_one_port_are_refused():
    port = free_port()
    assert "WebSocket cannot listen on" in refusal(
        tcp_server__port=port, websocket_server__port=port
    )
    check_addresses(
        config(tcp_server__port=port, websocket_server__port=port, websocket_server__enabled=False)
    )


def test_addresses_that_are_not_of_this_machine_name_the_setting_of_the_host():
    text = refusal(tcp_server__host="192.0.2.1")
    assert "TCP cannot listen on 192.0.2.1:0: this machine has no such address" in text
    assert "Another host is set by --set tcp_server.host=..., by PENSTOCK_TCP_SERVER_HOST" in text
    assert "no such host" in refusal(http_server__host="not a host name")
    assert "ports end at 65535. Another port is set by --http-port" in refusal(
        http_server__port=70000
    )
