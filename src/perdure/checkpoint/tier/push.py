"""Shipping a run once, from the command line or at its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from perdure.checkpoint.ledger import CommitLedger
from perdure.checkpoint.tier.head import Head
from perdure.checkpoint.tier.objects import ObjectStore, RetryingObjects
from perdure.checkpoint.tier.options import TierContext
from perdure.checkpoint.tier.shipment import Shipment
from perdure.core.ids import IncarnationNumber
from perdure.core.storage_api import Storage


def push(
    storage: Storage,
    objects: ObjectStore,
    *,
    ledger: CommitLedger,
    incarnation: IncarnationNumber,
    context: TierContext,
) -> Head:
    """Ship what the remote tier lacks of a run: log, small files, newest checkpoint.

    It may run beside the process that trains, as the same incarnation.

    Args:
        storage: The run's storage.
        objects: The run's prefix.
        ledger: Says what is committed.
        incarnation: The run's highest.
        context: Time, faults, a listener, bounds.

    Returns:
        The pointer as it is now.

    Raises:
        NothingToResumeError: There is no run here.
        FencedError: The run was resumed elsewhere.
        DamagedError: A local file is not what was committed.
        StorageError: The store failed too often; the next push goes on.
    """
    with ThreadPoolExecutor(context.options.parallel) as executor:
        shipment = Shipment(
            storage,
            RetryingObjects(objects, policy=context.options.retry, clock=context.clock),
            ledger=ledger,
            incarnation=incarnation,
            context=context,
            executor=executor,
        )
        shipment.ship_log()
        shipment.drop()
        while shipment.ship_checkpoint():
            pass
        return shipment.head
