"""The experience log, and the state that is folded from it."""

from perdure.experience.age_policy import AgePolicy, Decision, SamplingRules, decide
from perdure.experience.changes import GroupChanges
from perdure.experience.claims import RunInfo, create_run, read_run
from perdure.experience.continuation import Begun
from perdure.experience.finished import FinishedSession
from perdure.experience.held import OpenGroup
from perdure.experience.lifecycle import GroupEvent, GroupState
from perdure.experience.opening import ClaimedRun, claim_experience, read_experience
from perdure.experience.remote import RemoteOptions, RemoteStore, StoreServer
from perdure.experience.state import ExperienceState
from perdure.experience.step_metrics import metrics_of_step
from perdure.experience.store import ExperienceStore
from perdure.experience.writer import LogOptions

__all__ = [
    "AgePolicy",
    "Begun",
    "ClaimedRun",
    "Decision",
    "ExperienceState",
    "ExperienceStore",
    "FinishedSession",
    "GroupChanges",
    "GroupEvent",
    "GroupState",
    "LogOptions",
    "OpenGroup",
    "RemoteOptions",
    "RemoteStore",
    "RunInfo",
    "SamplingRules",
    "StoreServer",
    "claim_experience",
    "create_run",
    "decide",
    "metrics_of_step",
    "read_experience",
    "read_run",
]
