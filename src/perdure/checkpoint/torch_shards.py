"""Torch's distributed tensors as parts of whole ones, and back."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut

from perdure.core.boxes import box_on
from perdure.core.components import Shard
from perdure.core.errors import ConfigError


def shard_of(tensor: object) -> Shard | None:
    """The part of a distributed tensor that this rank holds; None for any other object.

    Of ranks that hold the same part, the first along every mesh axis that repeats it stores it.

    Raises:
        ConfigError: A placement that is neither ``Shard`` nor ``Replicate``, or a rank outside of
            the tensor's mesh.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise _refused("lies on ranks that this one is not among")
    cuts = [_axis_of(placement) for placement in tensor.placements]
    box = box_on(tuple(tensor.shape), mesh=tuple(mesh.shape), coordinate=coordinate, cuts=cuts)
    local = local_of(tensor)
    if tuple(local.shape) != box.sizes:
        raise _refused(f"has the part {tuple(local.shape)} here in place of {box.sizes}")
    repeated = [place for place, axis in zip(coordinate, cuts, strict=True) if axis is None]
    return Shard(tuple(tensor.shape), box.offsets, local, stored=not any(repeated))


def with_part(like: DTensor, part: Any) -> DTensor:
    """A distributed tensor that lies as ``like`` does; this rank's part of it is ``part``."""
    local = part if isinstance(part, torch.Tensor) else torch.as_tensor(np.asarray(part))
    return DTensor.from_local(
        local.to(local_of(like).device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local_of(tensor: DTensor) -> torch.Tensor:
    """The part of a distributed tensor that this rank has."""
    # Out of autograd's sight, and counting changes together with the live tensor.
    return cast("DTensor", tensor.detach()).to_local()


def _axis_of(placement: object) -> int | None:
    if type(placement) is Replicate:
        return None
    if type(placement) is Cut:
        return int(cast("Any", placement).dim)
    raise _refused(f"is placed as {placement}")


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"a distributed tensor {what}",
        where="checkpoint",
        rule="parts are cut by Shard and repeated by Replicate, on a mesh of all ranks",
        way_out="redistribute it before it is registered",
    )
