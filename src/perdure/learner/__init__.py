"""The learner: settled groups in, updated weights out, each update a function of its inputs."""
