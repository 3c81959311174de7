"""Publication inside one process: learner weights are copied into each engine and acknowledged.

Order (spec F1): pause, abort what runs, load, compare digests, resume. A version is published only
when every engine has acknowledged the digest of what it now holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.core.errors import TrainingError
from perdure.core.ids import PolicyVersion
from perdure.core.rollout_api import RolloutEngine


class InProcessPublisher:
    """Copies weights to engines that live in the learner's process."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = tuple(engines)

    async def publish(
        self, version: PolicyVersion, *, weights: Mapping[str, Any], digest: str
    ) -> None:
        """Load ``weights`` into every engine as ``version``.

        Engines are left paused if anything fails, so half-published weights never serve.

        Raises:
            TrainingError: An engine acknowledged another digest than ``digest``.
        """
        for engine in self._engines:
            await engine.pause()
            await engine.abort()
            held = await engine.load_weights(version, weights)
            if held != digest:
                raise TrainingError(
                    f"engine holds digest {held} instead of {digest}",
                    where=f"publication of policy version {version}",
                    rule="a version is published only when its digest is acknowledged",
                    way_out="resume the run; report this if it repeats",
                )
        for engine in self._engines:
            await engine.resume()
