#!/bin/bash
# nginx-module/build.sh BUILD_DIR OUT.so: builds the module against the nginx sources of Debian's nginx-dev (NGINX_SRC for another
# tree), with nginx's own flags. Writes only below BUILD_DIR; configure runs again only when it has to.
set -euo pipefail

module=$(cd "$(dirname "$0")" && pwd)
build=$(mkdir -p "$1" && cd "$1" && pwd)
out=$(mkdir -p "$(dirname "$2")" && cd "$(dirname "$2")" && pwd)/$(basename "$2")
source=${NGINX_SRC:-/usr/share/nginx/src}
tree=$build/nginx
version=$(sed -n "s/^VERSION *:= *//p" "$(dirname "$module")/Makefile")
KVGATE_ROOT=$(dirname "$module")
KVGATE_BUILD=$build
export KVGATE_ROOT KVGATE_BUILD
# Of all of it only the module: nginx must be started with the sanitizer's library in LD_PRELOAD.
sanitize=${SAN:+-fsanitize=$SAN -fno-sanitize=vptr -fno-omit-frame-pointer -Wno-error}

[ -f "$source/conf_flags" ] || { echo "build.sh: $source: no nginx sources (Debian package nginx-dev)" >&2; exit 1; }

if [ ! -f "$tree/objs/Makefile" ] || [ "$module/config" -nt "$tree/objs/Makefile" ] || [ "$0" -nt "$tree/objs/Makefile" ] ||
   [ "$module/status.html" -nt "$tree/objs/Makefile" ] ||
   [ "$source/configure" -nt "$tree/objs/Makefile" ]; then
    rm -rf "$tree"
    cp -r "$source" "$tree"
    cd "$tree"
    # shellcheck source=/dev/null
    . ./conf_flags
    ./configure --with-cc-opt="$(dpkg-buildflags --get CFLAGS) -fPIC $(dpkg-buildflags --get CPPFLAGS) -DKVGATE_VERSION=$version $sanitize" \
        --with-ld-opt="$(dpkg-buildflags --get LDFLAGS) -fPIC $sanitize" \
        "${NGX_CONF_FLAGS[@]}" --add-dynamic-module="$module" --builddir="$tree/objs" > "$build/nginx-configure.log" 2>&1 ||
        { cat "$build/nginx-configure.log" >&2; rm -f "$tree/objs/Makefile"; exit 1; }
fi

cd "$tree"
make -s -f objs/Makefile modules > "$build/nginx-make.log" 2>&1 || { cat "$build/nginx-make.log" >&2; exit 1; }
# nginx resolves what its binary has; anything of ours that is missing would only show when nginx starts.
if missing=$(nm -D --undefined-only objs/ngx_http_kvgate_module.so | grep -E ' (kvg|ngx_http_kvgate)_'); then
    printf 'build.sh: undefined:\n%s\n' "$missing" >&2
    exit 1
fi
cp objs/ngx_http_kvgate_module.so "$out.tmp"
mv "$out.tmp" "$out"
