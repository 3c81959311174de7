"""What is asked of a loop between two safe points, and what the next one does about it."""

from __future__ import annotations

from collections.abc import Callable

from perdure.checkpoint.team import Team
from perdure.core.clock import Clock
from perdure.standalone.ranks import Safety
from perdure.standalone.signals import SignalRequests


class LoopRequests:
    """Notes what the script, signals and other ranks ask for, and decides; the engine acts."""

    def __init__(self, clock: Clock) -> None:
        self.signals = SignalRequests(clock)
        """Of the loop in progress, or of the last one."""
        self._clock = clock
        self._save = False
        self._stop_handed_on = False

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM has come."""
        return self.signals.stop_requested_s is not None

    def begin(self) -> bool:
        """A loop begins; whether signals reach it."""
        self.signals = SignalRequests(self._clock)
        self._stop_handed_on = False
        return self.signals.listen()

    def save(self) -> None:
        """The script asks for a save; also from a signal handler."""
        self._save = True

    def saved(self) -> None:
        """A save was handed over: what was asked for is done."""
        self._save = self.signals.save_requested = False

    def hand_on(self, team: Team) -> None:
        """Tell the first rank what was asked of this one, once."""
        if self.stopping and not self._stop_handed_on:
            self._stop_handed_on = True
            team.ask(Safety.STOP)
        if self._save or self.signals.save_requested:
            self.saved()
            team.ask(Safety.SAVE)

    def decide(self, team: Team, *, last: bool, is_due: Callable[[], bool]) -> Safety:
        """What all ranks do at this safe point.

        Args:
            team: What other ranks were asked is asked of all.
            last: The loop's last step is complete.
            is_due: Whether the policy wants a save now; asked if nothing else decides.
        """
        if self.stopping or team.asked(Safety.STOP):
            return Safety.STOP
        if last:
            return Safety.SAVE_LAST
        due = is_due()
        if team.asked(Safety.SAVE):
            self._save = True
        return Safety.SAVE if due or self._save or self.signals.save_requested else Safety.GO_ON
