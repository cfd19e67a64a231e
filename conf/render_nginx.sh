#!/bin/sh
# usage: render_nginx.sh conf/nginx.conf > out
#
# The shipped configuration with other values, taken from the environment where they are set:
#   PORT (8080)  REDIS (redis://127.0.0.1:6380)  MODEL (the model's file)  MODULE (the .so)  ALLOW (a CIDR workers may live in,
#   besides loopback)
set -eu
sed -e "${PORT:+s#listen 8080#listen $PORT#}" \
    -e "${REDIS:+s#redis://127.0.0.1:6380#$REDIS#}" \
    -e "${MODEL:+s#[^ ]*SmolLM2-135M-Instruct.Q4_1.gguf#$MODEL#}" \
    -e "${MODULE:+s#^load_module .*#load_module $MODULE;#}" \
    -e "${ALLOW:+s#^\( *\)kvgate_redis .*#&\n\1kvgate_allow $ALLOW 127.0.0.0/8 unix:;#}" "$1"
