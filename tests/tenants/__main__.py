"""`make tenants`: try to see and change what is another tenant's, on a real fleet, by every way known.

Each try has the statuses that are right for it; beyond that, no answer may hold a word of another tenant's that the
request did not say itself, forbidden names must be answered as unknown ones are, and afterwards everything of the other
tenant must be as it was. The last line is one JSON object: {"tries": n, "leaks": 0}.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from deployments.local_cluster import ENVIRONMENT


def main() -> int:
    """Run all tries; the status is 0 when nothing leaked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=10_000, help="Loads that one tenant asks for at once.")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # Ray reads its environment when it is imported.
    from tests.tenants.attempt import attempt
    from tests.tenants.fleet import tenant_fleet

    with tempfile.TemporaryDirectory() as folder, tenant_fleet(Path(folder)) as fleet:
        report = asyncio.run(attempt(fleet, arguments.adapters))
    for leak in report.leaks:
        print(f"LEAK {leak}", file=sys.stderr)
    print(json.dumps({"tries": report.num_tries, "leaks": len(report.leaks)}))
    return 1 if report.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
