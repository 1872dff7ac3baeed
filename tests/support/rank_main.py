# SPDX-License-Identifier: Apache-2.0
"""What each spawned rank of a test runs: one function of the test's own file.

``python rank_main.py FILE FUNCTION OUTPUT_FOLDER ARGUMENTS_JSON DEADLINE_S``
writes what the function returned to OUTPUT_FOLDER/RANK.json. A process that ranks of
MPI have started while they ran writes nothing: it tells a rank what it has to say.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import sys
from pathlib import Path

from commrt.bootstrap.mpi_newcomers import guest_here
from commrt.launch.detect import detect


def main() -> None:
    """Run the function named on the command line."""
    file, function, folder, arguments, deadline_s = sys.argv[1:]
    # Before the launcher is killed, so that the test shows where each rank hangs.
    faulthandler.dump_traceback_later(float(deadline_s), exit=True)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(file).parent)]
    spec = importlib.util.spec_from_file_location("ranks_of_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    if guest_here() is None:
        rank = detect().rank
        partial = Path(folder, f"{rank}.partial")
        partial.write_text(json.dumps(result))
        partial.rename(Path(folder, f"{rank}.json"))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
