#!/usr/bin/env bash
# Checks this library on a GPU machine without a network: docs/device-check.md. Finds a Python; device_check.py does the rest.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    exec "$python" "$here/device_check.py" "$@"
  fi
done
echo "device_check: no Python of 3.10 or newer found; set PYTHON" >&2
exit 2
