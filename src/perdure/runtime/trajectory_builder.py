"""A trajectory as it grows, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perdure.core.errors import TrainingError
from perdure.core.ids import PolicyVersion, SessionId
from perdure.core.record_types import StopReason
from perdure.core.rollout_api import GenerationChunk
from perdure.core.trajectories import (
    Array,
    PartialDelta,
    Segment,
    SessionPrefix,
    Trajectory,
    joined_segments,
)


class TrajectoryBuilder:
    """Collects the tokens of one attempt of a session.

    Neighbours of one policy version share a segment; tool output belongs to the segment in front of
    it.
    """

    def __init__(self, session: SessionId, prompt_ids: Sequence[int], *, attempt: int = 0) -> None:
        self.session = session
        self.attempt = attempt
        self.prompt_ids = prompt_ids
        self._tokens: list[Array] = []
        self._logprobs: list[Array] = []
        self._masks: list[Array] = []
        self._segments: list[Segment] = []
        self.length = 0
        """Tokens so far."""
        self.logged = 0
        """Those of them that the log was given as partial tokens."""
        self._logged_parts = 0

    @classmethod
    def behind(cls, prefix: SessionPrefix, prompt_ids: Sequence[int]) -> TrajectoryBuilder:
        """Goes on behind what the log has of the session."""
        builder = cls(prefix.session, prompt_ids, attempt=prefix.attempt)
        builder._tokens.append(prefix.response_ids_T)
        builder._logprobs.append(prefix.logprobs_T)
        builder._masks.append(prefix.loss_mask_T)
        builder._segments.extend(prefix.segments)
        builder.length = len(prefix.response_ids_T)
        builder.note_logged()
        return builder

    def generated(self, chunk: GenerationChunk) -> None:
        """The policy chose these tokens."""
        count = len(chunk.token_ids)
        if count:
            self._add(chunk.token_ids, chunk.logprobs, chosen=1)
            self._extend_segments(chunk.version, count)

    def observed(self, token_ids: Sequence[int], version: PolicyVersion) -> None:
        """The environment put these tokens in; ``version`` counts if nothing stands before them."""
        count = len(token_ids)
        if count:
            ids = np.asarray(token_ids, dtype=np.int32)
            self._add(ids, np.zeros(count, np.float32), chosen=0)
            last = self._segments[-1].version if self._segments else version
            self._extend_segments(last, count)

    def response_ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple([token for part in self._tokens for token in part.tolist()])

    def chosen(self) -> list[int]:
        """For each token 1 if the policy chose it, else 0."""
        return [chosen for part in self._masks for chosen in part.tolist()]

    def unlogged(self) -> PartialDelta:
        """The tokens behind :attr:`logged`."""
        new = slice(self._logged_parts, None)
        return PartialDelta(
            self.session,
            self.logged,
            _joined(self._tokens[new], np.int32),
            _joined(self._logprobs[new], np.float32),
            _joined(self._masks[new], np.uint8),
            joined_segments(
                Segment(s.version, max(s.start, self.logged), s.end) for s in self._segments
            ),
            self.attempt,
        )

    def note_logged(self) -> None:
        """The log was given all there is."""
        self.logged, self._logged_parts = self.length, len(self._tokens)

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """What there is, as a trajectory that ended for ``stop_reason``."""
        return Trajectory(
            session=self.session,
            prompt_ids_P=np.asarray(self.prompt_ids, dtype=np.int32),
            response_ids_T=_joined(self._tokens, np.int32),
            logprobs_T=_joined(self._logprobs, np.float32),
            loss_mask_T=_joined(self._masks, np.uint8),
            segments=tuple(self._segments),
            stop_reason=stop_reason,
        )

    def _add(self, token_ids: Array, logprobs: Array, *, chosen: int) -> None:
        self._tokens.append(token_ids)
        self._logprobs.append(logprobs)
        self._masks.append(np.full(len(token_ids), chosen, np.uint8))

    def _extend_segments(self, version: PolicyVersion, count: int) -> None:
        start, self.length = self.length, self.length + count
        if self._segments and self._segments[-1].version == version:
            start = self._segments.pop().start
        self._segments.append(Segment(version, start, self.length))


def trajectory_from_chunks(
    session: SessionId, *, prompt_ids: Sequence[int], chunks: Sequence[GenerationChunk]
) -> Trajectory:
    """Join the chunks of one finished generation.

    Raises:
        TrainingError: The stream ended without a stop reason or was aborted.
    """
    builder = TrajectoryBuilder(session, prompt_ids)
    for chunk in chunks:
        builder.generated(chunk)
    return builder.trajectory(final_reason(chunks[-1].stop_reason if chunks else None, session))


def final_reason(reason: StopReason | None, session: SessionId) -> StopReason:
    """Raises ``TrainingError`` if a stream did not come to its end."""
    if reason is None or reason is StopReason.ABORTED:
        raise TrainingError(
            f"generation ended with {'no reason' if reason is None else reason.value}",
            where=session.key(),
            rule="a trajectory ends with a stop token or at its budget",
            way_out="resume the run; report this if it repeats",
        )
    return reason


def _joined(parts: Sequence[Array], dtype: type[np.generic]) -> Array:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)
