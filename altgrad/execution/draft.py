"""The report while cells still run: as soon as two entries of the grid are complete, and from time to time after that.

It is the page that `dvc repro` writes at the end, with the cells that are missing named as such. Writing it takes the
time of a cell or two from those that train, so that it is not done often.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from altgrad.config.files import read_json

NOT_WITHIN = 60  # seconds of the end, where the report itself is near
EVERY = 2  # seconds between two looks at which cells are there
TIMES_AS_LONG = 20  # seconds between two drafts, as a multiple of what the last one took
LOG = Path("scratch/workers/report.log")


class Draft:
    """Writes the report in a process of its own when it is time to."""

    def __init__(self) -> None:
        grid = Path("data/grid")
        keys = read_json(grid / "index.json")["cells"]
        self._entries = {key: read_json(grid / f"{key}.json")["format"] for key in keys}
        self._process: subprocess.Popen[bytes] | None = None
        self._shown: set[str] = set()  # the entries that were complete the last time
        self._began = self._ended = self._took = self._looked = 0.0

    def when_due(self, seconds_left: float) -> None:
        """Start writing if more entries are complete than the last time, and say when it is written.

        ``seconds_left``: about as long will the cells go on.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._ended = time.monotonic()
            self._took = self._ended - self._began
            if self._process.returncode == 0:
                tqdm.write(f"the report so far, of {', '.join(sorted(self._shown))}: reports/index.html")
            self._process = None
        now = time.monotonic()
        if now - self._looked < EVERY or now - self._ended < TIMES_AS_LONG * self._took or seconds_left < NOT_WITHIN:
            return
        self._looked = now
        complete = self._complete()
        if len(complete) >= 2 and complete > self._shown:
            self._shown, self._began = complete, time.monotonic()
            with open(LOG, "wb") as log:
                self._process = subprocess.Popen([sys.executable, "-m", "stages.report"], stdout=log, stderr=log)

    def close(self) -> None:
        """Stop writing: the last word is `dvc repro`'s."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _complete(self) -> set[str]:
        """Return the entries of the grid all of whose cells are trained and diagnosed."""
        missing = {entry for key, entry in self._entries.items() if not Path(f"data/diag/{key}.json").exists()}
        return set(self._entries.values()) - missing
