#!/usr/bin/env bash
# Sets up what this machine lacks: system libraries, one Python environment (.venv), the gyre command.
# Idempotent: a stamp over the requirement files makes a second run take well under a second.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${GYRE_VENV:-.venv}
stamp="$VENV/.gyre-setup"
want=$(cat deploy/setup.sh deploy/requirements/*.txt pyproject.toml | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi
started=$(date +%s)
say() { printf 'setup: %s\n' "$*"; }

PYTHON=${GYRE_PYTHON:-}
if [ -z "$PYTHON" ]; then
  for candidate in python3.11 python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
      PYTHON=$candidate; break
    fi
  done
fi
[ -n "$PYTHON" ] || { say "Python 3.11 is needed (megatron-core 0.16.1). Install it, or set GYRE_PYTHON=/path/to/python3.11."; exit 1; }

# System libraries: Mooncake's transports, and bubblewrap for the sandboxes.
packages=""
have_lib() { ldconfig -p 2>/dev/null | grep -q "$1"; }
have_lib libibverbs.so.1 || packages="$packages libibverbs1"
have_lib librdmacm.so.1 || packages="$packages librdmacm1"
have_lib liburing.so.2 || packages="$packages liburing2"
have_lib libglog.so || packages="$packages libgoogle-glog0v6"
command -v bwrap >/dev/null || packages="$packages bubblewrap"
if [ -n "$packages" ]; then
  sudo=""; [ "$(id -u)" = 0 ] || sudo="sudo"
  if command -v apt-get >/dev/null && { [ -z "$sudo" ] || command -v sudo >/dev/null; }; then
    say "installing system packages:$packages"
    $sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq $packages >/dev/null
  else
    say "please install these system packages (Debian names), then run again:$packages"; exit 1
  fi
fi

[ -x "$VENV/bin/python" ] || { say "creating $VENV"; "$PYTHON" -m venv "$VENV"; }
pip="$VENV/bin/pip --disable-pip-version-check -qq"
say "installing Python packages (about 4 GB on disk, a few minutes)"
$pip install -r deploy/requirements/base.txt -c deploy/requirements/constraints.txt
$pip install --no-deps -r deploy/requirements/no-deps.txt
# SGLang imports torchvision, whose package is built for CUDA: beside a CPU torch, plain transformers would fail on it.
# So on such a machine only the engine sees it (services/cell_agent/engine/launch.py).
if "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
  $pip install --no-deps --upgrade --target "$VENV/engine-only" -r deploy/requirements/engine-only.txt
else
  $pip install --no-deps -r deploy/requirements/engine-only.txt
fi
$pip install --no-deps --no-build-isolation -e .
"$VENV/bin/python" -W ignore -c 'import torch, msgspec, nats, megatron.core, mooncake.engine' || { say "the environment does not import; see above"; exit 1; }
echo "$want" > "$stamp"
say "done in $(( $(date +%s) - started )) s"
