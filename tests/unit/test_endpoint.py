"""Endpoints: what is one, how it is written again, and which one is told to others."""

from __future__ import annotations

import re
import socket

import pytest

from shuffle.errors import BadInput
from shuffle.support.endpoint import (
    HOST_PORT,
    Endpoint,
    advertised_endpoint,
    check_advertise,
    has_scheme,
    host_towards,
    is_endpoint,
)


@pytest.mark.parametrize(
    ("text", "endpoint", "written"),
    [
        ("grpc://store:7070", Endpoint("store", 7070), "grpc://store:7070"),
        ("store.example.org:1", Endpoint("store.example.org", 1), "grpc://store.example.org:1"),
        ("127.0.0.1:65535", Endpoint("127.0.0.1", 65535), "grpc://127.0.0.1:65535"),
        ("grpc://[::1]:7070", Endpoint("::1", 7070), "grpc://[::1]:7070"),
        ("[fe80::1%eth0]:7070", Endpoint("fe80::1%eth0", 7070), "grpc://[fe80::1%eth0]:7070"),
    ],
)
def test_endpoint_is_read_and_written(text: str, endpoint: Endpoint, written: str) -> None:
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == written
    assert Endpoint.parse(written) == Endpoint.parse(endpoint.target) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        *("", "store", "store:", ":7070", "grpc://", "grpc://:7070", "grpc://store", "store:port", "store:-1"),
        *("store:0", "store:65536", "store:100000", "grpc://store:7070/", "a b:1", "::1:7070", "[]:1", "[store]:1"),
        *("http://store:7070", "grpc+tls://store:7070", "grpc://grpc://store:1", "me@store:1", "store:1\n", "store:٣"),
    ],
)
def test_what_is_none_is_refused_with_what_a_right_one_looks_like(text: str) -> None:
    expected = f"not the address of a store: {text!r}; it looks like grpc://host:port, for IPv6 grpc://[::1]:7070"
    with pytest.raises(BadInput, match=re.escape(expected)):
        Endpoint.parse(text, "the address of a store")
    assert not is_endpoint(text)


def test_only_with_its_scheme_is_a_text_an_endpoint_and_no_folder() -> None:
    assert is_endpoint("grpc://store:7070")
    assert not is_endpoint("store:7070")
    assert has_scheme("grpc://nonsense")
    assert not has_scheme("./grpc:/folder")


def test_host_that_is_left_out_is_the_own_one() -> None:
    assert Endpoint.parse(":7", own_host="store") == Endpoint("store", 7)
    assert Endpoint.parse("grpc://:7", own_host="::1") == Endpoint("::1", 7)
    assert Endpoint.parse("other:7", own_host="store") == Endpoint("other", 7)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:0", Endpoint("127.0.0.1", 0)),
        ("grpc://[::]:80", Endpoint("::", 80)),
        ("host:1", Endpoint("host", 1)),
    ],
)
def test_place_to_listen_may_have_any_port(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse_listen(text) == endpoint


@pytest.mark.parametrize("text", ["", "127.0.0.1", ":0", "::1:0", "host:99999", "http://host:1"])
def test_place_to_listen_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"cannot listen on .*: write it as host:port"):
        Endpoint.parse_listen(text)


def test_ports_are_those_there_are() -> None:
    assert [port for port in range(100_000) if HOST_PORT.fullmatch(f"h:{port}")] == list(range(65_536))


def test_encrypted_endpoint_has_another_scheme() -> None:
    assert str(Endpoint("store", 7070, tls=True)) == "grpc+tls://store:7070"


# ---- what is told to others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listening", "advertise", "told"),
    [
        (Endpoint("127.0.0.1", 5), None, Endpoint("127.0.0.1", 5)),
        (Endpoint("0.0.0.0", 5), None, Endpoint(socket.gethostname(), 5)),
        (Endpoint("::", 5), None, Endpoint(socket.gethostname(), 5)),
        (Endpoint("0.0.0.0", 5), "store.example.org", Endpoint("store.example.org", 5)),
        (Endpoint("0.0.0.0", 5), "store.example.org:7070", Endpoint("store.example.org", 7070)),
        (Endpoint("127.0.0.1", 5), "[fe80::1]", Endpoint("fe80::1", 5)),
        (Endpoint("127.0.0.1", 5), "[fe80::1]:9", Endpoint("fe80::1", 9)),
        (Endpoint("10.0.0.1", 5, tls=True), "store", Endpoint("store", 5, tls=True)),
    ],
)
def test_advertised_endpoint(listening: Endpoint, advertise: str | None, told: Endpoint) -> None:
    assert advertised_endpoint(listening, advertise) == told


@pytest.mark.parametrize("advertise", ["", "host:", "host:0", "grpc://host:1", "::1", "a b", "host:70000"])
def test_what_cannot_be_advertised_is_refused(advertise: str) -> None:
    with pytest.raises(BadInput, match=r"cannot advertise .*: write it as host or host:port"):
        check_advertise(advertise)
    with pytest.raises(BadInput):
        advertised_endpoint(Endpoint("127.0.0.1", 5), advertise)


@pytest.mark.parametrize("advertise", ["0.0.0.0", "0.0.0.0:7070", "[::]"])
def test_all_addresses_cannot_be_advertised(advertise: str) -> None:
    with pytest.raises(BadInput, match="stands for all addresses of a machine"):
        check_advertise(advertise)


def test_own_host_on_the_way_to_another() -> None:
    assert host_towards(Endpoint("127.0.0.1", 9)) == "127.0.0.1"
    with pytest.raises(BadInput, match=r"the host of grpc://no\.such\.host\.invalid:9 is not known here"):
        host_towards(Endpoint("no.such.host.invalid", 9))
