"""Where rollout, learner, publication, checkpoints and experience are joined on machines."""
