"""AdamW whose state exists from the start and whose hyperparameters are given at every step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perdure.learner.config import AdamConfig

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""State of one parameter, as torch names it."""


class AdamW:
    """The optimizer of one model.

    Moments and gradients are allocated (zero) at construction, so that the state has one shape for
    life and is loaded in place, and a batch that moves nothing still lets the moments decay. Rates
    and coefficients are arguments of :meth:`step`: they belong to the configuration and the
    schedule, and there is no second copy that could disagree.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        matrices = [p for p in self.parameters.values() if p.dim() >= 2]
        vectors = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [{"params": group} for group in (matrices, vectors) if group]
        self._torch = torch.optim.AdamW(groups, fused=True)
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
            self._torch.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state(self) -> dict[str, Tensor]:
        """Live moments and step counts by ``<parameter>/<moment>``."""
        return {
            f"{name}/{moment}": self._torch.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in MOMENTS
        }

    def reset(self) -> None:
        """Forget every gradient seen."""
        for tensor in self.state().values():
            tensor.zero_()

    def clear_gradients(self) -> None:
        self._torch.zero_grad(set_to_none=False)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients down to a global norm of ``max_norm``; returns the norm before."""
        return nn.utils.clip_grad_norm_(self.parameters.values(), max_norm, foreach=True)

    def step(self, *, lr: float, adam: AdamConfig) -> None:
        """One step at rate ``lr``; gradients stay."""
        for group in self._torch.param_groups:
            group["lr"] = lr
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay if group["params"][0].dim() >= 2 else 0.0
        self._torch.step()
