"""What is looked at after restoring. Nothing of it changes what was restored."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash

from perdure.core.errors import ConfigError, DamagedError
from perdure.core.events import EventSink
from perdure.standalone import tree
from perdure.standalone.registration import Parts, torch_parts


def check_restored(
    parts: Parts, *, sanity: Callable[[dict[str, Any]], object] | None, events: EventSink
) -> tuple[str, ...]:
    """Look for weights that are not numbers and for copies that disagree; run the user's check.

    Returns:
        Values kept in two places that did not agree; copies that were declared are set right.

    Raises:
        DamagedError: A parameter is not a number, or the check refuses.
        ConfigError: The check changed something.
    """
    if tree.torch_module() is not None:
        torch_parts().require_finite(parts.named)
    if sanity is not None:
        _run_on_copies(parts, sanity)
    mismatches = tuple(_mismatches(parts))
    for message in mismatches:
        events("warning", {"message": message})
    return mismatches


def check_mirrors(parts: Parts) -> None:
    """Look every declared copy up, so that a wrong name is learned of before the first restart.

    Raises:
        ConfigError: There is no such part or value.
    """
    for mirror in parts.mirrors:
        parts.value_at(mirror.source)
        parts.value_at(mirror.copy)


def _mismatches(parts: Parts) -> Iterator[str]:
    if tree.torch_module() is not None:
        yield from torch_parts().rate_mismatches(parts.named)
    for mirror in parts.mirrors:
        right, found = parts.value_at(mirror.source), parts.value_at(mirror.copy)
        if right != found:
            parts.set_at(mirror.copy, right)
            yield f"{mirror.copy} was {found}, {mirror.source} is {right}; it is {right} now"


def _run_on_copies(parts: Parts, sanity: Callable[[dict[str, Any]], object]) -> None:
    """Call the check with copies that belong together; the generators are set back afterwards."""
    before = _digest(parts)
    with _generators_kept():
        copies = _copies(parts)
        try:
            verdict = sanity(copies)
        except Exception as error:
            raise _refused(f"raised {type(error).__name__}: {error}") from error
    if verdict is False:
        raise _refused("returned False")
    if _digest(parts) != before:
        raise ConfigError(
            "the sanity check has changed the restored state",
            where="sanity",
            rule="it works on the copies it is given and on nothing else",
            way_out="use its argument in place of the registered objects",
        )


def _copies(parts: Parts) -> dict[str, Any]:
    try:
        # In one go, so that the copied optimizer updates the copied parameters.
        return copy.deepcopy(parts.named)
    except Exception as error:
        raise ConfigError(
            f"the registered parts cannot be copied ({error})",
            where="sanity",
            rule="the check works on copies of all of them; modules that are sharded have none",
            way_out="check in the script, after engine.start()",
        ) from error


def _refused(what: str) -> DamagedError:
    return DamagedError(
        f"the sanity check {what}",
        where="restored checkpoint",
        rule="training goes on only from a state that passes",
        way_out="move this checkpoint's directory away: the one before is used",
    )


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The global generators of python, numpy and torch are afterwards as they were before."""
    torch = tree.torch_module()
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch_state = torch.get_rng_state() if torch is not None else None
    cuda = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_available() else ()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(torch_state)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)


def _digest(parts: Parts) -> str:
    """Digest of the whole state of all parts."""
    hasher = xxhash.xxh3_128()
    for entry in parts.registry.entries():
        state = entry.component.state()
        hasher.update(repr((entry.name, state.values)).encode())
        for name, tensor in sorted(state.tensors.items()):
            hasher.update(name.encode())
            hasher.update(tree.as_bytes(tensor).data)
    return hasher.hexdigest()
