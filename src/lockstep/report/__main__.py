"""``python -m lockstep.report DIR...``: compare the runs of sweeps, from their files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.console import silence
from lockstep.errors import UsageError
from lockstep.report.files import write_report
from lockstep.report.reading import read_jobs
from lockstep.report.table import errors_of


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.report",
        description="Write report.csv, report.md, report.html and plots of the runs below DIR.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="where to write them; by default the first DIR")
    options = parser.parse_args(arguments)
    into: Path = options.into or options.directories[0]
    try:
        print(write_report(options.directories, into))
        for line in errors_of(read_jobs(options.directories)):
            print(line)
    except BrokenPipeError:
        silence(sys.stdout)  # `| head` has read enough; the files are written
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
