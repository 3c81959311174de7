"""Prompts, answers and verifiers behind one interface; no torch."""
