"""Runtimes: what joins rollout, learner, publication, checkpoints and experience."""
