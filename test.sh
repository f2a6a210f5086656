#!/usr/bin/env bash
# Runs the tests, after installing what they need:
#   ./test.sh                         all but those marked `slow`: several ranks, Megatron, many whole runs
#   ./test.sh --slow                  those
#   ./test.sh tests/config -k alias   any pytest arguments
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "$ROOT/scripts/env.sh"

use_checkout
prepare_python dev
cd "$ROOT"
# The suite runs in three processes of one thread each: on two cores, one works while another waits for a program or a
# deadline. What is named runs in one, as plain pytest does.
if [[ $# -eq 0 || $* == --slow ]]; then
  export OMP_NUM_THREADS=1
  # Each of the many programs that tests start would compile all modules anew, and each of the three all tests.
  unset PYTHONDONTWRITEBYTECODE
  if [[ $# -eq 0 ]]; then MARKED="not slow"; else MARKED="slow"; fi
  set -- -n 3 --dist loadfile --no-loadscope-reorder -m "$MARKED"
fi
exec "$RUN_PYTHON" -m pytest "$@"
