"""The policy anchor: a true copy of the policy as it was when the global step began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from perdure.learner.components import copy_weights
from perdure.models import Transformer, weights_of


class PolicyAnchor:
    """Weights that stand still through the local updates of one global step.

    They are never shared with the live ones and those are never exchanged for them, so nothing can
    be lost between the two. The anchor is no part of a checkpoint: checkpoints lie between steps,
    and it is taken anew when a step begins.
    """

    def __init__(self, policy: Transformer, *, device: torch.device, offload: bool) -> None:
        """Allocate a second model.

        Args:
            policy: Its shape is copied.
            device: Where log-probabilities are computed.
            offload: Keep the copy in host memory (pinned if ``device`` is another one), and bring
                it to the device for each pass only.
        """
        self._device = device
        self._model = Transformer(policy.config).requires_grad_(requires_grad=False)
        if not offload:
            self._model.to(device)
        elif device.type != "cpu":
            for parameter in self._model.parameters():
                parameter.data = parameter.data.pin_memory()

    def take(self, policy: Transformer) -> None:
        """Copy the weights as they are now."""
        copy_weights(policy, self._model)

    def weights(self) -> dict[str, torch.Tensor]:
        """The copy itself, by name."""
        return weights_of(self._model)

    @contextmanager
    def on_device(self) -> Iterator[Transformer]:
        """The anchor as a model that can be evaluated inside the block."""
        parameters = list(self._model.parameters())
        kept = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.data.to(self._device)
            yield self._model
        finally:
            for parameter, data in zip(parameters, kept, strict=True):
                parameter.data = data
