"""The learner: settled groups in, updated weights out, each update a function of its inputs."""

from perdure.learner.api import Learner, LocalUpdateResult
from perdure.learner.config import LearnerConfig, SupervisedConfig
from perdure.learner.local import LearnerSetup, LocalLearner

__all__ = [
    "Learner",
    "LearnerConfig",
    "LearnerSetup",
    "LocalLearner",
    "LocalUpdateResult",
    "SupervisedConfig",
]
