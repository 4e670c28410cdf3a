"""A growing file of lines, read by byte offset: each line once, whatever happens to the file meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

AT_ONCE = 1 << 20  # bytes that one look reads at most: what is left is for the next


class Lines:
    """The complete lines of ``path`` that have not been read yet.

    A resumed run puts a new file in the place of the old one, and what had been read no longer holds: then
    ``restarted`` is true after a look, and its lines are those of the new file from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarted = False
        self._offset = 0
        self._inode: int | None = None

    def new(self) -> list[bytes]:
        """Return the lines that have been completed since the last look, without their ends; none if there is no file.

        The last line counts once its end is written: a process may be in the middle of it.
        """
        self.restarted = False
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below; here only its absence is expected
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            known, self._inode = self._inode, status.st_ino
            if known not in (None, status.st_ino) or status.st_size < self._offset:
                self._offset, self.restarted = 0, True
            file.seek(self._offset)
            complete, end, _ = file.read(AT_ONCE).rpartition(b"\n")
        self._offset += len(complete) + len(end)
        return complete.split(b"\n") if end else []
