"""The ``ray`` runtime: rollout engines on the nodes of a cluster. Nothing else imports ray."""
