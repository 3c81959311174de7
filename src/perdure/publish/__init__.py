"""Weight publication: live weights from the learner to the rollout engines."""
