"""What leaves the remote tier, and which segments stay because a checkpoint there names them."""

from __future__ import annotations

from dataclasses import dataclass, field

from perdure.checkpoint.manifest import MANIFEST, directory_path
from perdure.checkpoint.retention import segments_in
from perdure.checkpoint.segments.store import SEGMENTS
from perdure.checkpoint.tier.head import Pointer
from perdure.checkpoint.tier.objects import ObjectStore


@dataclass(slots=True)
class Leaving:
    """Deletes what the pointer lists as dropped; belongs to the thread that ships."""

    objects: ObjectStore
    pointer: Pointer
    _named: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]], init=False)
    """Stored checkpoint → paths of the segments that it names."""

    def piece_bytes(self) -> dict[str, int]:
        """Path of every segment that the pointer's checkpoints name → how long its pieces are."""
        sizes: dict[str, int] = {}
        for one in self.pointer.head.checkpoints:
            for path in self._named_by(one.directory) or ():
                # The oldest was there when it was stored.
                sizes.setdefault(path, one.piece_bytes_of(path))
        return sizes

    def delete(self, name: str) -> bool:
        """Delete the objects of a dropped checkpoint or segment; whether all are gone.

        Of a checkpoint first the segments that no other names: its manifest says which they are.
        Without it, those are looked for that nothing names.

        Raises:
            FencedError: The run was resumed elsewhere.
            StorageError: The store refused.
        """
        if name.startswith(f"{SEGMENTS}/"):
            return self._delete_unnamed({name})
        root = directory_path(name)
        manifest = f"{root}/{MANIFEST}"
        keys = self.objects.list(root)
        if manifest in keys:
            complete = self._delete_unnamed(set(self._named_by(name) or ()))
            if complete:
                self.objects.delete([manifest])
        else:
            complete = self._delete_orphans()
        self.objects.delete([key for key in keys if key != manifest])
        self._named.pop(name, None)
        return complete

    def _delete_orphans(self) -> bool:
        """Delete every segment that nothing names; False, and none, if that cannot be known.

        What is stored now was announced before: the pointer is read after the objects are listed.
        """
        there = {key.rpartition("/")[0] for key in self.objects.list(SEGMENTS)}
        sequence = self.pointer.head.sequence
        self.pointer.load()
        head = self.pointer.head
        if head.sequence != sequence or head.uploading:
            return False
        return self._delete_unnamed(there)

    def _delete_unnamed(self, paths: set[str]) -> bool:
        """Delete those that no checkpoint names; False, and none, if that cannot be known."""
        paths = paths - {*self.pointer.head.uploading_segments}
        for one in self.pointer.head.checkpoints if paths else ():
            named = self._named_by(one.directory)
            if named is None:
                return False
            paths -= named
        for path in sorted(paths):
            self.objects.delete(list(self.objects.list(path)))
        return True

    def _named_by(self, directory: str) -> frozenset[str] | None:
        """Paths of the segments that a stored checkpoint names; None if its manifest is missing."""
        if directory not in self._named:
            try:
                data = self.objects.read(f"{directory_path(directory)}/{MANIFEST}")
            except FileNotFoundError:
                return None
            # Of a damaged one, too: what it names may be all that is left of its rows.
            self._named[directory] = frozenset(segments_in(data))
        return self._named[directory]
