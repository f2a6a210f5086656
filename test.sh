#!/usr/bin/env bash
# Runs the tests, after installing what they need: `./test.sh`, `./test.sh tests/config -k alias`, any pytest arguments.
set -euo pipefail
ROOT="$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "$ROOT/scripts/env.sh"

use_checkout
prepare_python dev
cd "$ROOT"
exec "$RUN_PYTHON" -m pytest "$@"
