#!/bin/sh
# usage: render_nginx.sh conf/nginx.conf > out
#
# The shipped configuration with other values, taken from the environment where they are set:
#   PORT (8080)  REDIS (redis://127.0.0.1:6380)  MODEL_NAME (smollm2)  MODEL (its file)  MODULE (the .so)
#   SERVERS (the upstream's addresses, two words)  ALLOW (a CIDR that workers may live in, besides loopback and unix)
set -eu
# shellcheck disable=SC2086  # words
set -- "$1" ${SERVERS:-}
# nginx that root did not start cannot write below /var/lib/nginx: bodies go under its prefix then.
[ "$(id -u)" = 0 ] && bodies= || bodies=body
sed -e "${PORT:+s#listen 8080 #listen $PORT #}" \
    -e "${REDIS:+s#redis://127.0.0.1:6380#$REDIS#}" \
    -e "${MODEL:+s#kvgate_model smollm2 [^ ;]*#kvgate_model ${MODEL_NAME:-smollm2} $MODEL#}" \
    -e "${MODULE:+s#^load_module .*#load_module $MODULE;#}" \
    -e "${2:+s#server 127.0.0.1:8091 #server $2 #}" \
    -e "${3:+s#server 127.0.0.1:8092 #server $3 #}" \
    -e "${bodies:+s#client_body_temp_path .*#client_body_temp_path $bodies;#}" \
    -e "${ALLOW:+s#^\( *\)kvgate_redis .*#&\n\1kvgate_allow $ALLOW 127.0.0.0/8 ::1 unix:;#}" "$1"
