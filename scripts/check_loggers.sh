#!/usr/bin/env bash
# check_loggers.sh FOLDER [PACKAGE ...]: the loggers against their real packages, offline. Each package is installed into a
# folder of its own below FOLDER, so that no environment changes, and its test is run with that folder in the path.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
status=0
for package in "${@:-wandb mlflow swanlab trackio}"; do
  for name in $package; do
    "$python" -m pip install --quiet --upgrade --target "$folder/$name" "$name" 2>/dev/null || { echo "$name: not installed, pip has none"; continue; }
    version=$(PYTHONPATH="$folder/$name" "$python" -c "from importlib.metadata import version; print(version('$name'))")
    if PYTHONPATH="$here:$folder/$name" "$python" -m pytest -q "$here/tests/tracking/test_tracking_services.py" -k "$name" > "$folder/$name.log" 2>&1; then
      echo "$name $version: ok"
    else
      echo "$name $version: FAILED, see $folder/$name.log"; status=1
    fi
  done
done
exit $status
