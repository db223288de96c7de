#!/bin/sh
# Tries another Python or another torch: in an environment of their own, the tests that depend on either, and the demo.
# Prints whether other environments got the same bits, and the row for the table of docs/gpus.md.
#
#     tests/try.sh PYTHON [TORCH [OPTIONS OF PYTEST ...]]
#
# `make try PYTHON=python3.12 TORCH=2.9.1` calls it. What pip is told by its configuration or environment holds, e.g.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for a torch without CUDA.
set -eu
cd "$(dirname "$0")/.."
python=$1 torch=${2:-}
shift "$(($# < 2 ? $# : 2))"
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
here=.try/python$version-torch-${torch:-newest}
bin=$here/bin
[ -x "$bin/pip" ] || "$python" -m venv --clear "$here"
"$bin/python" -m pip install --quiet --disable-pip-version-check $([ -n "$torch" ] || echo --upgrade) \
    "torch${torch:+==$torch}" --editable '.[test,examples]' hatchling

code=0
"$bin/python" -m pytest -n auto --dist worksteal "$@" \
    tests/pure tests/gpu/test_exchange.py tests/house/test_installed.py tests/house/test_completion.py \
    tests/workers/test_same_bits.py tests/workers/test_gradient_memory.py tests/workers/test_earlier_version.py \
    tests/workers/test_state.py || code=1
"$bin/python" examples/demo.py --directory "$here/demo" || code=1

for journal in .try/*/demo/workers-1/journal.jsonl; do
    other=${journal%/journal.jsonl}
    if [ -e "$journal" ] && [ "$other" != "$here/demo/workers-1" ]; then
        echo "the same bits as $other? $("$bin/python" -m unisono compare "$here/demo/workers-1" "$other" | head -n 1)"
    fi
done
"$bin/python" -c '
import platform, sys
from importlib.metadata import version
print("| Python %s, torch %s, numpy %s, %s %s | %s | `make try` |" % (
    platform.python_version(), version("torch"), version("numpy"), platform.system(), platform.machine(), sys.argv[1]))
' "$([ $code = 0 ] && echo "yes" || echo "fails: ...")"
exit $code
