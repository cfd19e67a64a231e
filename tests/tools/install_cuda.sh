#!/bin/sh
# usage: install_cuda.sh VENV DIR PACKAGE...   CUDA's headers, nvcc and libraries from NVIDIA's Python packages, as one folder DIR
# that looks like /usr/local/cuda
set -e
venv=$1
dir=$2
shift 2
echo "kvgate: CUDA headers and compiler (no CUDA is installed on this machine)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir.packages" "$@"
top=$(cd "$dir.packages/nvidia/cu13" && pwd)
for other in "$dir.packages"/nvidia/*/include; do
    [ "$(cd "$other/.." && pwd)" = "$top" ] || cp -r "$other"/. "$top/include/"
done
for library in "$top"/lib/*.so.* "$dir.packages"/nvidia/*/lib/*.so.*; do
    name=$(basename "$library")
    [ -e "$top/lib/$name" ] || ln -s "$(cd "$(dirname "$library")" && pwd)/$name" "$top/lib/$name"
    [ -e "$top/lib/${name%%.so.*}.so" ] || ln -s "$name" "$top/lib/${name%%.so.*}.so"
done
rm -rf "$dir"
ln -s "$(basename "$dir").packages/nvidia/cu13" "$dir"
