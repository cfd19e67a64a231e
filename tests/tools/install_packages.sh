#!/bin/sh
# Installs those of the named Debian packages that are missing. As root; otherwise names them and fails.
missing=
for p in "$@"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "kvgate: missing Debian packages; as root: apt-get install$missing" >&2
    exit 1
fi
echo "kvgate: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# A freshly installed nginx or Redis must not start as a service: they would take the ports of others.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' > $policy && chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
# shellcheck disable=SC2086  # a list of words
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
