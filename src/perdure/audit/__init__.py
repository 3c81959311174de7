"""The independent second reader: it proves a run, or compares two, from their files alone."""

from perdure.audit.checks import audit_run
from perdure.audit.diff import diff_runs
from perdure.audit.report import AuditReport, DiffReport, Divergence, Finding

__all__ = ["AuditReport", "DiffReport", "Divergence", "Finding", "audit_run", "diff_runs"]
