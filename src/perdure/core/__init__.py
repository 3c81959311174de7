"""What every layer shares: ids, clock, records, protocols, fault points, errors and events."""
