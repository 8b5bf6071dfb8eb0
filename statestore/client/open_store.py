"""Which stores there are, by the scheme of their address, and how each is opened.

A store is a folder, which is opened in this process or reached through the daemon that serves it, or it has an address
whose scheme says what kind of store it is. One more kind of store is one more ``Scheme``: whatever opens stores (the
client, specs, the command line, Spark) takes its addresses from then on.
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

_OPEN_WAIT_S = 3.0
"""How long a folder that another process holds is waited for: it may be a daemon on its way up, which then says where
it serves."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What is asked of a store when it is opened. A store for which an option means nothing ignores it."""

    timeout_s: float | None = None
    """How many seconds a call waits for its response; None is the store's own default."""
    local_files: bool = True
    """Whether files of the store may be read by this process, where it can."""
    lane: bool | None = None
    """Whether a daemon's lane for small requests is used, where it has one; None: as the environment says."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """One kind of store that has an address."""

    name: str
    """What an address begins with, before ``://``."""
    form: str
    """How an address looks, for messages: ``grpc://host:port``."""
    open: Callable[[str, OpenOptions], Store]
    """Opens the store at an address, or raises a ``ShuffleError`` that says why not."""
    fits: Callable[[str], bool] = lambda address: True
    """Whether an address has that form. It is asked when a spec is checked, without opening anything."""


_schemes: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> None:
    """From now on, addresses of this scheme are opened by it. Raises ``BadInput`` if the name is taken."""
    if scheme.name == FILE_SCHEME or scheme.name in _schemes:
        raise BadInput(f"stores of the scheme {scheme.name!r} are registered already")
    _schemes[scheme.name] = scheme


def address_forms() -> list[str]:
    """How the addresses of the registered schemes look, for messages."""
    return [scheme.form for scheme in _schemes.values()]


def is_address(text: str) -> bool:
    """Whether this is the address of a store of a registered scheme, and looks like one."""
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
        # The daemon that left its address is gone, or is being replaced; or something else has its port.
        return None
    if is_store_in(store, folder):
        return store
    # The daemon that left its address is gone, and that of another store has its port now.
    store.close()
    return None


def is_store_in(store: Store, folder: Path) -> bool:
    """Whether this is the store in ``folder``, as seen from this process."""
    found = store.folder
    return found is not None and found.exists() and folder.exists() and found.samefile(folder)


def _open_folder(folder: Path, options: OpenOptions) -> Store:
    deadline_s = time.monotonic() + _OPEN_WAIT_S
    while True:
        store = open_served(folder, options)
        if store is not None:
            return store
        try:
            # Imported only here: a process that has its store elsewhere does without RocksDB.
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
