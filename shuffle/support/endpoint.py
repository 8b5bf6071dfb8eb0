"""Endpoints: where something listens, where others reach it, and how both are written.

A store is given as ``grpc://host:port``, an endpoint to listen on as ``host:port`` with port 0 for any free one. An
IPv6 address stands in brackets: ``grpc://[::1]:7070``. Nobody can connect to "all addresses of this machine", and
others may not reach a container under the address that it sees itself. So the endpoint that is published
(``advertised_endpoint``) may differ from the one that is listened on.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace

from shuffle.errors import BadInput

SCHEME = "grpc"

_HOST = r"\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]@?#]+"
_PORT = r"[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
HOST_PORT = re.compile(rf"({_HOST}):({_PORT})")
"""The form ``host:port``, with an IPv6 host in brackets."""
HOST_MAYBE_PORT = re.compile(rf"({_HOST})(?::({_PORT}))?")
"""The form ``host`` or ``host:port`` of an advertised endpoint."""

_EVERYWHERE = ("0.0.0.0", "::")
_FORM = f"it looks like {SCHEME}://host:port, for IPv6 {SCHEME}://[::1]:7070"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One host and port."""

    host: str
    """The name or address of the host, without brackets."""
    port: int
    """The port; 0 stands for any free one if the endpoint is one to listen on."""
    tls: bool = False
    """True if connections are encrypted. Nothing does so yet, and no text that is parsed can request it."""

    @classmethod
    def parse(cls, text: str, what: str = "an address", own_host: str | None = None) -> Endpoint:
        """The endpoint that ``text`` names: ``grpc://host:port``, or ``host:port``. Raises ``BadInput`` if it is none.

        ``what`` says in the error what was expected. A host that is left out (``grpc://:port``) stands for
        ``own_host``, the host under which the client has reached the server that sent ``text``.
        """
        rest = text.removeprefix(f"{SCHEME}://")
        if own_host is not None and rest.startswith(":"):
            rest = bracketed(own_host) + rest
        match = HOST_PORT.fullmatch(rest)
        if match is None or not int(match[2]):
            raise BadInput(f"not {what}: {text!r}; {_FORM}", address=text)
        return cls(match[1].strip("[]"), int(match[2]))

    @classmethod
    def parse_listen(cls, text: str) -> Endpoint:
        """The endpoint to listen on that ``text`` names; port 0 is any free one. Raises ``BadInput`` if it is none."""
        match = HOST_PORT.fullmatch(text.removeprefix(f"{SCHEME}://"))
        if match is None:
            raise BadInput(
                f"cannot listen on {text}: write it as host:port, port 0 for any free one; for IPv6 as [::1]:port"
            )
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def target(self) -> str:
        """``host:port``, as gRPC and a command line take it."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def is_everywhere(self) -> bool:
        """Whether this stands for all addresses of a machine, at which nobody else can reach it."""
        return self.host in _EVERYWHERE

    def __str__(self) -> str:
        return f"{SCHEME}{'+tls' if self.tls else ''}://{self.target}"


def bracketed(host: str) -> str:
    """``host`` as it stands before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_endpoint(text: str) -> bool:
    """Whether ``text`` is ``grpc://host:port``, the scheme included; anything else may be a folder."""
    try:
        Endpoint.parse(text)
    except BadInput:
        return False
    return has_scheme(text)


def has_scheme(text: str) -> bool:
    """Whether ``text`` is meant to be an endpoint and not a folder, even if it is not a valid one."""
    return text.startswith(f"{SCHEME}://")


def check_advertise(advertise: str) -> None:
    """Raises ``BadInput`` unless ``advertise`` is ``host`` or ``host:port`` that others can connect to."""
    match = HOST_MAYBE_PORT.fullmatch(advertise)
    if match is None or (match[2] is not None and not int(match[2])):
        raise BadInput(
            f"cannot advertise {advertise!r}: write it as host or host:port; for IPv6 as [::1] or [::1]:port"
        )
    if Endpoint(match[1].strip("[]"), 1).is_everywhere:
        raise BadInput(
            f"cannot advertise {advertise!r}: it stands for all addresses of a machine, and nobody can connect to "
            "that; write the name or the address under which others reach this one"
        )


def advertised_endpoint(listening: Endpoint, advertise: str | None) -> Endpoint:
    """The endpoint under which others reach what listens at ``listening``, with its real port.

    That is ``advertise`` (``host`` or ``host:port``) if it is given. Otherwise it is the endpoint that is listened on,
    with the name of this machine instead of "all addresses".
    """
    if advertise is not None:
        check_advertise(advertise)
        match = HOST_MAYBE_PORT.fullmatch(advertise)
        assert match is not None
        return replace(listening, host=match[1].strip("[]"), port=int(match[2] or listening.port))
    return replace(listening, host=socket.gethostname()) if listening.is_everywhere else listening


def host_towards(other: Endpoint) -> str:
    """The address of this machine on the network over which it reaches ``other``."""
    try:
        addresses = socket.getaddrinfo(other.host, other.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise BadInput(f"the host of {other} is not known here: {error.strerror}", address=str(other)) from None
    family, socket_type, protocol, _, address = addresses[0]
    with socket.socket(family, socket_type, protocol) as probe:
        # Nothing is sent: connecting a datagram socket only picks the route.
        probe.connect(address)
        return str(probe.getsockname()[0])
