"""Agent loops, the tools in the box, and how calls are read from a model's text."""
