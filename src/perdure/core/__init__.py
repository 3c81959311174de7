"""Ids, versions, clock, records, protocols, fault points, errors and events shared by every layer."""
