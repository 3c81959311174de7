"""``audit_run``: the proof, from files alone, that nothing was lost, skipped or trained twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from perdure.audit import schema
from perdure.audit.files import (
    check_checkpoint,
    check_metrics,
    check_positions,
    read_metrics,
    require_readable,
)
from perdure.audit.groups import Groups
from perdure.audit.history import Event, History, read_history
from perdure.audit.payloads import Payloads
from perdure.audit.reader import RunLog, read_log
from perdure.audit.report import AuditReport, Findings
from perdure.audit.training import Training


def audit_run(path: Path) -> AuditReport:
    """Audit a run directory. Reads plain files, claims nothing and changes nothing.

    Args:
        path: The run directory; a live writer may be going on in it.

    Returns:
        Every damage and every broken promise that was found. The log's damage hides what comes
        after it, so that the experience in a damaged log is not judged.

    Raises:
        NothingToResumeError: There is no run.
        FutureFormatError: A newer version has written part of it.
        OSError: A directory cannot be read.
    """
    findings = Findings()
    require_readable(path)
    # Rows come after their records and references after what they lead to: read in this order, a
    # run that is being written never looks broken.
    rows = read_metrics(path, findings)
    log = read_log(path, findings)
    check_positions(path, log.run_id, findings)
    counts = _log_counts(log)
    if findings.damaged:
        findings.note(
            "log", "its records were not judged", "damage in the log hides what comes after it"
        )
        return AuditReport(path, tuple(findings.all), counts, script=not log.has_recipe)
    history = read_history(log, findings)
    groups = Groups(Payloads(log.payloads(), findings), findings)
    training = Training(groups, positions=history.positions, findings=findings)
    _fold(history, groups, training)
    states = groups.finish()
    check_metrics(rows, _known_digests(history), findings)
    checked, size = _check_checkpoints(path, training.checkpoints, findings)
    counts |= {
        "log.repeated_records": history.repeated,
        "log.void_decisions": sum(event.void for event in history.events),
        "groups.submitted": len(groups.known),
        **{f"groups.{state}": count for state, count in states.items()},
        "training.global_steps": len(training.steps),
        "training.local_updates": training.updates,
        "training.sessions": sum(len(group.sessions) for group in groups.known.values()),
        "training.tokens": groups.tokens,
        "unfinished.partial_tokens": groups.attempts.partial_tokens,
        "unfinished.tool_results": groups.attempts.tool_results,
        "unfinished.restarts": groups.attempts.restarts,
        "checkpoints.committed": checked,
        "checkpoints.bytes": size,
        "metrics.rows": len(rows),
    }
    return AuditReport(
        path, tuple(findings.all), counts, script=not (log.has_recipe or groups.known)
    )


def _fold(history: History, groups: Groups, training: Training) -> None:
    handlers: Mapping[int, Callable[[Event], None]] = {
        schema.SUBMITTED: groups.submit,
        schema.SESSIONS_DONE: groups.sessions_done,
        schema.SETTLED: groups.settle,
        schema.PARTIALS: groups.partials,
        schema.TOOL_RESULT: groups.tool_result,
        schema.RESTARTED: groups.restarted,
        schema.TAKEN: training.take,
        schema.STEP_DONE: training.step_done,
        schema.REDONE: training.redone,
        schema.PUBLISHED: training.published,
        schema.EVICTED: groups.evict,
        schema.REFILLED: groups.refill,
        schema.CHECKPOINTED: training.checkpointed,
        schema.COLLECT: training.collect,
        schema.EVALUATED: training.evaluated,
        schema.PHASE_STEP: training.phase_step,
        schema.UPDATE_FAILED: training.update_failed,
    }
    for event in history.events:
        if event.type in (schema.SESSIONS_DONE, schema.PARTIALS):
            training.check_versions(event)
        handler = handlers.get(event.type)
        if handler is not None and (not event.void or event.type == schema.PUBLISHED):
            handler(event)


def _log_counts(log: RunLog) -> dict[str, int]:
    streams = [s for i in log.incarnations.values() for s in (i.control, i.payload)]
    return {
        "incarnations.claimed": log.claimed,
        "incarnations.sealed": log.sealed,
        "log.segments": sum(len(stream.parts) for stream in streams),
        "log.control_records": sum(i.control.count for i in log.incarnations.values()),
        "log.payload_records": sum(i.payload.count for i in log.incarnations.values()),
        "log.tail_bytes_cut": sum(stream.tail_bytes for stream in streams),
        "log.fenced_bytes": sum(stream.fenced_bytes for stream in streams),
    }


def _known_digests(history: History) -> set[tuple[int, str]]:
    """What a metrics row may name; void ones too, since rows outlive a rewind for a moment."""
    types = (schema.STEP_DONE, schema.REDONE, schema.EVALUATED)
    return {
        (event.fields["global_step"], event.fields["digest"])
        for event in history.events
        if event.type in types
    }


def _check_checkpoints(
    run: Path, commits: Mapping[str, Event], findings: Findings
) -> tuple[int, int]:
    """Check all committed checkpoints; returns how many there are and their bytes."""
    size = 0
    for directory, commit in commits.items():
        found = Findings()
        size += check_checkpoint(run, commit, found)
        # A live run may have collected it since its log was read, and says so before it deletes.
        if not found.damaged or directory not in _collected(run):
            findings.all.extend(found.all)
    return len(commits), size


def _collected(run: Path) -> set[str]:
    """Directories that the log, as it is now, has given up."""
    ignored = Findings()
    history = read_history(read_log(run, ignored), ignored)
    return {
        directory
        for event in history.kept()
        if event.type == schema.COLLECT
        for directory in event.fields["directories"]
    }
