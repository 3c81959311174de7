"""Finished sessions from other processes. The frames are in ``docs/formats/remote.md``."""

from perdure.experience.remote.client import RemoteOptions, RemoteStore
from perdure.experience.remote.server import StoreServer

__all__ = ["RemoteOptions", "RemoteStore", "StoreServer"]
