# Sourced by train.sh, test.sh and .ci/run. Expects ROOT, the folder of the checkout.
#   find_python              sets PYTHON_BIN: a Python 3.11 or later ($PYTHON if set, else python3 on the PATH)
#   prepare_python [EXTRA]   sets RUN_PYTHON: an interpreter that has every requirement; makes ROOT/.venv only if needed

find_python() {
  local candidate candidates=(python3 python3.12 python3.11 python)
  if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      PYTHON_BIN="$candidate"
      return
    fi
  done
  echo "posttrain needs Python 3.11 or later; tried: ${candidates[*]}. Name one with PYTHON=/path/to/python3 $0" >&2
  exit 1
}

prepare_python() {
  local extra="${1:-}" venv="$ROOT/.venv" want stamp lacks
  # What a finished installation was made from; a changed requirement makes the next start install again.
  want="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
  stamp="$venv/.installed${extra:+-$extra}"
  find_python
  if lacks="$("$PYTHON_BIN" "$ROOT/scripts/requirements.py" $extra)"; then
    RUN_PYTHON="$PYTHON_BIN"
    return
  fi
  RUN_PYTHON="$venv/bin/python"
  if "$RUN_PYTHON" -c '' 2>/dev/null; then
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$want" ]]; then return; fi
    # An environment that somebody made by hand serves too, unless it is one of ours that was interrupted.
    if [[ ! -e "$venv/.installing" ]] && "$RUN_PYTHON" "$ROOT/scripts/requirements.py" $extra >/dev/null; then return; fi
  fi
  install_into "$venv" "$extra" "$lacks"
  echo "$want" >"$stamp"
  if [[ -n "$extra" ]]; then echo "$want" >"$venv/.installed"; fi
}

# Ray (240 MB) is for several workers: the extra `ray` where an argument asks for a second one, otherwise nothing.
wants_ray() {
  local argument before=""
  for argument in "$@"; do
    if [[ "$before" =~ ^--n[_-]gpus$ && "$argument" =~ ^[0-9]+$ && "$argument" -gt 1 ]]; then echo ray; return; fi
    if [[ "$argument" =~ ^actor_rollout_ref\.rollout\.(n_workers|n_gpus_per_node|nnodes)=[1-9][0-9]*$ ]]; then echo ray; return; fi
    if [[ "$argument" =~ ^(--n[_-]gpus|trainer\.(n_workers|n_gpus_per_node|nnodes))=([0-9]+)$ && "${BASH_REMATCH[3]}" -gt 1 ]]; then echo ray; return; fi
    before="$argument"
  done
}

install_into() {
  local venv="$1" extra="$2" lacks="$3" constraint=(-c "$ROOT/constraints.txt") index=()
  echo "posttrain: $PYTHON_BIN lacks some requirements:"
  echo "$lacks" | sed 's/^/  /'
  echo "posttrain: installing them into $venv (once; a few minutes, mostly the download of torch)"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$PYTHON_BIN" -m venv --clear "$venv" || fail_install "$PYTHON_BIN cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
  fi
  rm -f "$venv"/.installed*
  touch "$venv/.installing"
  # constraints.txt pins the CPU build; where there is a GPU, pip picks the newest build in pyproject.toml's range.
  if command -v nvidia-smi >/dev/null; then constraint=(); fi
  # TORCH_INDEX_URL: where to take torch from, for example an index of CPU-only or of CUDA builds.
  if [[ -n "${TORCH_INDEX_URL:-}" ]]; then index=(--index-url "$TORCH_INDEX_URL"); fi
  "$venv/bin/python" -m pip install ${constraint[@]+"${constraint[@]}"} ${index[@]+"${index[@]}"} "$(torch_requirement)" ||
    fail_install "pip could not install torch"
  # editable_mode=compat: a path file, where setuptools otherwise has every Python process import a finder (20 ms).
  "$venv/bin/python" -m pip install ${constraint[@]+"${constraint[@]}"} --config-settings editable_mode=compat \
    -e "$ROOT${extra:+[$extra]}" ||
    fail_install "pip could not install posttrain's requirements"
  rm -f "$venv/.installing"
}

torch_requirement() {
  "$PYTHON_BIN" -c 'import sys, tomllib
lines = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
print(next(line for line in lines if line.startswith("torch")))' "$ROOT/pyproject.toml"
}

fail_install() {
  echo "posttrain: $1; its own message is above. Starting again goes on where this stopped." >&2
  exit 1
}

# The working copy is what runs, also where nothing was installed; worker processes inherit it.
use_checkout() {
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONUNBUFFERED=1
  export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}" # OpenMP threads wait a moment for work, then sleep and leave the cores to others
}
