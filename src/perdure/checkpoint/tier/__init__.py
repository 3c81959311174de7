"""The remote tier: checkpoints and the log in an object store, behind training, never before it.

What is promised: ``docs/checkpoint.md``. The layout: ``docs/formats/checkpoint.md``.
"""

from perdure.checkpoint.tier.head import Head, RemoteCheckpoint, RemoteFile, read_head
from perdure.checkpoint.tier.local_objects import LocalObjects
from perdure.checkpoint.tier.objects import (
    ObjectStore,
    RemoteUnavailableError,
    RetryingObjects,
    RetryPolicy,
)
from perdure.checkpoint.tier.obstore_objects import ObstoreObjects, open_objects
from perdure.checkpoint.tier.options import TierContext, TierOptions
from perdure.checkpoint.tier.probe import probe_objects
from perdure.checkpoint.tier.pull import PullReport, pull
from perdure.checkpoint.tier.push import push
from perdure.checkpoint.tier.remote_tier import RemoteTier, TierStatus

__all__ = [
    "Head",
    "LocalObjects",
    "ObjectStore",
    "ObstoreObjects",
    "PullReport",
    "RemoteCheckpoint",
    "RemoteFile",
    "RemoteTier",
    "RemoteUnavailableError",
    "RetryPolicy",
    "RetryingObjects",
    "TierContext",
    "TierOptions",
    "TierStatus",
    "open_objects",
    "probe_objects",
    "pull",
    "push",
    "read_head",
]
