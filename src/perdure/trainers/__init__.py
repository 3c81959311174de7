"""Trainers: one readable loop per mode, and what brings a run to its frontier."""
