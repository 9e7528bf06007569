"""Removes what a fleet keeps for a moment, if whoever made it is killed before it could: a program, and no module.

    python fleet_guardian.py        its input: one JSON line for each directory, then nothing until everybody is gone

The fleet and all its processes hold the other end of that input. It ends when the last of them has ended, however that
came about; only then are the directories removed, so nobody is left who uses them. Removed is what is still the very
directory that was named, by device and inode, and ours; never what a link points to.

It needs nothing but the standard library, and starts in some hundredths of a second.
"""

import json
import os
import shutil
import signal
import stat
import sys
from pathlib import Path


def describe(path: Path) -> str:
    """The line that names a directory."""
    found = path.lstat()
    return json.dumps({"path": str(path.absolute()), "device": found.st_dev, "inode": found.st_ino}) + "\n"


def remove(line: str) -> None:
    """Remove the directory that a line names, if it is still there."""
    named = json.loads(line)
    try:
        found = os.lstat(named["path"])
    except FileNotFoundError:
        return
    same = (found.st_dev, found.st_ino) == (named["device"], named["inode"])
    if same and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        shutil.rmtree(named["path"], ignore_errors=True)


def main() -> None:
    """Wait until everybody is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # who ends the fleet ends its input
    for line in sys.stdin.readlines():
        remove(line)


if __name__ == "__main__":
    main()
