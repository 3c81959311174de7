"""Pure tensor functions of reinforcement learning: advantages, losses, divergences."""
