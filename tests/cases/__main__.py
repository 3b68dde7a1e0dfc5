"""`make cases`: run every case, print the table, and end with one JSON line {"cases": n, "right": n}."""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

# First: it sets the environment that Ray and Triton read when they are imported.
import tests.conftest  # noqa: F401
from tests.cases.every import CASES
from tests.cases.registry import Result, run_case
from tests.cases.world import new_world


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; the status is 0 when all of them are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", default="", help="regex: run the rows whose name has a match")
    parser.add_argument("--wrong", action="store_true", help="print only the rows that are wrong")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    chosen = [case for case in CASES.values() if re.search(options.only, case.name)]
    results: list[Result] = []
    print("| | case | tried | expected | got | s |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="cases-") as folder, new_world(Path(folder)) as world:
        for case in chosen:
            result = run_case(case, world)
            results.append(result)
            if not (options.wrong and result.got.right):
                print(row(result), flush=True)
    num_right = sum(result.got.right for result in results)
    print(json.dumps({"cases": len(results), "right": num_right}))
    return 0 if results and num_right == len(results) else 1


def row(result: Result) -> str:
    """One line of the table."""
    case, got, wall_s = result
    cells = ("right" if got.right else "WRONG", case.origin, case.title, case.expected, got.text, f"{wall_s:.1f}")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
