"""`make chaos`: a real fleet under steady load, and one fault after another.

After each, what should be served is served by every replica, at the last epoch within 10 s of its being alive; no
request is lost but streams on what was killed, each of which ends with an error event; and no token differs from a
quiet run's. Ends with one JSON line: `faults`, `survived`, `lost_requests`, `wrong_tokens`.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from deployments.local_cluster import ENVIRONMENT

NUM_ADAPTERS = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="Part of a fault's name; may be given again.")
    arguments = parser.parse_args()
    # Ray reads its environment when it is imported.
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")  # PEFT's advice on tied heads
    logging.disable(logging.WARNING)
    from tests.chaos.faults import FAULTS
    from tests.chaos.fleet import chaos_fleet
    from tests.chaos.run import run, summary
    from tests.factories import make_adapter, tiny_llama

    faults = [fault for fault in FAULTS if not arguments.only or any(word in fault.name for word in arguments.only)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = tiny_llama(folder / "base")
        adapters = {
            f"a{seed}": make_adapter(base, folder / f"a{seed}", r=2 + seed, seed=seed) for seed in range(NUM_ADAPTERS)
        }
        with chaos_fleet(folder, base, adapters) as fleet:
            result = summary(faults, run(fleet, faults, seed=arguments.seed))
    print(json.dumps(result._asdict()))
    return 0 if result == (len(faults), len(faults), 0, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
