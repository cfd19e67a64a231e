#!/bin/sh
# usage: install_venv.sh DIR [PACKAGE...]   a Python environment for tests and tools
set -e
dir=$1
shift
[ -x "$dir/bin/python" ] || /usr/bin/python3 -m venv "$dir"
[ $# -eq 0 ] && exit 0
echo "kvgate: Python packages for the tests"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
