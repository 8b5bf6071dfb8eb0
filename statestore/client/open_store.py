"""Opening stores by the scheme of their address.

A store is a folder, which is opened in this process or reached through the daemon that serves it, or it has an address
whose scheme says what kind of store it is. A further kind of store is a further ``Scheme``: whatever opens stores (the
client, specs, the command line, Spark) then accepts its addresses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from shuffle.errors import BadInput, ShuffleError, StoreLocked
from shuffle.statestore.local.store_folder import folder_path, scheme_of
from shuffle.statestore.store import Store
from shuffle.statestore.wire.announcement import served_at
from shuffle.support import endpoint

FILE_SCHEME = "file"
"""The scheme that names a folder of this machine."""

_OPEN_WAIT_S = 3.0
"""The time in seconds to wait for a folder that another process has locked: that may be a daemon that is starting and
will soon announce its address."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """Options for opening a store. A store to which an option does not apply ignores it."""

    timeout_s: float | None = None
    """The number of seconds that a call waits for its response; None is the store's own default."""
    local_files: bool = True
    """True if this process may read the store's files directly, where it has access to them."""
    lane: bool | None = None
    """True to use a daemon's lane for small requests, if it has one; None leaves it to the environment variable."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One kind of store that has an address."""

    name: str
    """The part of an address before ``://``."""
    form: str
    """The form of an address, for messages: ``grpc://host:port``."""
    open: Callable[[str, OpenOptions], Store]
    """A function that opens the store at an address, or raises a ``ShuffleError`` that says why it cannot."""
    fits: Callable[[str], bool] = lambda address: True
    """A function that says whether an address has that form. It is called when a spec is checked, and opens nothing."""


_schemes: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> None:
    """Open addresses of this scheme with it from now on. Raises ``BadInput`` if the name is taken."""
    if scheme.name == FILE_SCHEME or scheme.name in _schemes:
        raise BadInput(f"stores of the scheme {scheme.name!r} are registered already")
    _schemes[scheme.name] = scheme


def address_forms() -> list[str]:
    """The forms of the addresses of the registered schemes, for messages."""
    return [scheme.form for scheme in _schemes.values()]


def is_address(text: str) -> bool:
    """Says whether this is an address of a registered scheme, in the form of that scheme."""
    scheme = _schemes.get(scheme_of(text) or "")
    return scheme is not None and scheme.fits(text)


def folder_of(url: str | os.PathLike[str]) -> Path | None:
    """The folder that ``url`` names, as a path or with ``file:``; None if it is an address."""
    text = os.fspath(url)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(text)
    if scheme != FILE_SCHEME:
        return None
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise BadInput(f"{text!r} does not name a folder of this machine: write file:///path, or the path alone")
    return Path(unquote(parts.path))


def open_store(url: str | os.PathLike[str], options: OpenOptions = OpenOptions()) -> Store:  # noqa: B008
    """The store at ``url``: a folder (also as ``file:///path``), or an address of a registered scheme."""
    folder = folder_of(url)
    if folder is not None:
        return _open_folder(folder_path(folder), options)
    text = os.fspath(url)
    scheme = _schemes.get(scheme_of(text) or "")
    if scheme is None or not scheme.fits(text):
        raise BadInput(
            f"{text!r} is not the address of a state store: it looks like {' or '.join(address_forms())}, and a store "
            "that no daemon serves is named by its folder",
            address=text,
        )
    return scheme.open(text, options)


def open_served(folder: Path, options: OpenOptions = OpenOptions()) -> Store | None:  # noqa: B008
    """The store in ``folder`` through the daemon that serves it; None if there is none."""
    address = served_at(folder.absolute())
    if address is None:
        return None
    try:
        store = open_store(address, options)
    except ShuffleError:
        # The daemon that announced this address is gone or is being replaced, or another program uses its port.
        return None
    if is_store_in(store, folder):
        return store
    # The daemon that announced this address is gone, and the daemon of another store uses its port now.
    store.close()
    return None


def is_store_in(store: Store, folder: Path) -> bool:
    """Says whether this is the store in ``folder``, as seen from this process."""
    own = store.folder
    return own is not None and own.exists() and folder.exists() and own.samefile(folder)


def _open_folder(folder: Path, options: OpenOptions) -> Store:
    deadline_s = time.monotonic() + _OPEN_WAIT_S
    while True:
        store = open_served(folder, options)
        if store is not None:
            return store
        try:
            # Imported only here: a process whose store is elsewhere does not load RocksDB.
            from shuffle.statestore.local.local import LocalStore

            return LocalStore(folder)
        except StoreLocked:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def open_remote(address: str, options: OpenOptions) -> Store:
    """The store of the daemon at ``grpc://host:port``, or at ``host:port``."""
    from shuffle.statestore.remote.remote import RemoteStore

    return RemoteStore(address, timeout_s=options.timeout_s, local_files=options.local_files, lane=options.lane)


register_scheme(Scheme(endpoint.SCHEME, f"{endpoint.SCHEME}://host:port", open_remote, endpoint.is_endpoint))
