#!/bin/bash
# usage: conf/stack.sh start|stop|status
#
# The demo stack on this machine: Redis, two CPU workers, nginx with kvgate. Everything it writes lies in build/run/: a log and
# a .proc file each (pid and start time). `stop` ends only processes that `start` started.
#
# Environment: PORT (8080: nginx), REDIS_PORT (6380), WORKER_PORT (the workers' own APIs: 8081 and the next; behind the
# gateway: 10 above), RUN (build/run), B (build), and what conf/worker.env names.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
B=${B:-build}
PORT=${PORT:-8080}
REDIS_PORT=${REDIS_PORT:-6380}
WORKER_PORT=${WORKER_PORT:-$((PORT + 1))}
RUN=${RUN:-build/run}
. conf/worker.env
WORKERS="w1 w2"
REDIS_SERVER=$(command -v redis-server || command -v valkey-server || echo redis-server)
NGINX=$(PATH=$PATH:/usr/sbin:/usr/local/sbin command -v nginx || echo nginx)

say() { printf '%s\n' "kvgate: $*"; }

# ---- processes ----

# Field 22 of /proc/PID/stat; the command's name before it may hold blanks.
start_time() { sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

# The pid of a process that we started and that still runs; fails otherwise.
running() {
    local pid when
    read -r pid when 2>/dev/null <"$RUN/$1.proc" || return 1
    [ -n "$when" ] && [ "$(start_time "$pid")" = "$when" ] && [ "$(process_state "$pid")" != Z ] && echo "$pid"
}
process_state() { sed 's/^.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f1; }

# launch NAME COMMAND...: in its own session, so that ^C at the terminal does not reach it
launch() {
    local name=$1
    shift
    setsid "$@" >>"$RUN/$name.log" 2>&1 </dev/null &
    local pid=$!
    disown
    echo "$pid $(start_time $pid)" >"$RUN/$name.proc"
    started="$name ${started:-}"
}

# end NAME SIGNAL: asks, waits up to 10 s, then kills
end() {
    local pid i
    pid=$(running "$1") || { rm -f "$RUN/$1.proc"; return 0; }
    kill -s "$2" "$pid"
    for ((i = 0; i < 100; i++)); do
        running "$1" >/dev/null || break
        sleep 0.1
    done
    running "$1" >/dev/null && { say "$1 did not end within 10 s: killed"; kill -s KILL "$pid"; }
    rm -f "$RUN/$1.proc"
    say "$1 stopped"
}

# What went wrong, and nothing left behind.
give_up() {
    local name=$1 part
    say "$name: $2; the end of $RUN/$name.log:"
    tail -n 15 "$RUN/$name.log" >&2
    for part in $started; do end "$part" TERM; done
    exit 1
}

# wait_for NAME SECONDS COMMAND...: until the command succeeds, with a line every 5 s
wait_for() {
    local name=$1 seconds=$2 i
    shift 2
    for ((i = 0; i < seconds * 10; i++)); do
        "$@" >/dev/null 2>&1 && { say "$name ${reached:-is ready}"; return; }
        running "$name" >/dev/null || give_up "$name" "ended"
        ((i % 50 == 49)) && say "$name: waiting ($(((i + 1) / 10)) s) $(tail -n 1 "$RUN/$name.log" | cut -c1-100)"
        sleep 0.1
    done
    give_up "$name" "not ready after $seconds s"
}

# Refuses when somebody else listens on a port that a part of ours needs.
need_port() {
    local holder
    running "$1" >/dev/null && return
    holder=$(ss -Hltnp "sport = :$2" 2>/dev/null | head -n 1)
    [ -z "$holder" ] && return
    say "port $2, which $1 needs, is taken: $(sed -n 's/.*users:((\([^)]*\)).*/\1/p' <<<"$holder")"
    say "choose others: make run PORT=n REDIS_PORT=n (the workers take the ports above PORT)"
    exit 1
}

# ---- parts ----

api_port() { echo $((WORKER_PORT + ${1#w} - 1)); }
gateway_port() { echo $(($(api_port "$1") + 10)); }

start_redis() {
    running redis >/dev/null && return
    launch redis "$REDIS_SERVER" conf/redis.conf --port "$REDIS_PORT" --dir "$RUN"
    wait_for redis 10 redis-cli -p "$REDIS_PORT" ping
}

start_worker() {
    running "$1" >/dev/null && return
    # shellcheck disable=SC2086  # flags are words
    launch "$1" "$B/kvgate-worker" --model "$MODEL" --served-model-name "$MODEL_NAME" --host 127.0.0.1 --port "$(api_port "$1")" \
        --gateway-listen "127.0.0.1:$(gateway_port "$1")" --worker-id "$1" --redis "redis://127.0.0.1:$REDIS_PORT" ${WARM:+--warm "$WARM"} $WORKER_FLAGS
}

worker_ready() { curl -sf -m 2 "http://127.0.0.1:$(api_port "$1")/ready"; }
worker_listed() { redis-cli -p "$REDIS_PORT" exists "kvgate:{$MODEL_NAME}:w:$1" | grep -q 1; }
gateway_ready() { curl -sf -m 2 "http://127.0.0.1:$PORT/v1/models"; }

start_nginx() {
    running nginx >/dev/null && return
    PORT=$PORT REDIS=redis://127.0.0.1:$REDIS_PORT MODEL_NAME=$MODEL_NAME MODEL=$(realpath "$MODEL") \
        MODULE=$(realpath "$B/ngx_http_kvgate_module.so") SERVERS="127.0.0.1:$(gateway_port w1) 127.0.0.1:$(gateway_port w2)" \
        conf/render_nginx.sh conf/nginx.conf >"$RUN/nginx.conf"
    launch nginx "$NGINX" -p "$RUN" -c "$RUN/nginx.conf" -e stderr -g 'daemon off;'
    wait_for nginx 20 gateway_ready
}

# What runs keeps its ports: parts on other ones would be another stack, which make stop ends by halves.
same_ports() {
    local w kept any='' ports="PORT=$PORT REDIS_PORT=$REDIS_PORT WORKER_PORT=$WORKER_PORT"
    for w in redis $WORKERS nginx; do running "$w" >/dev/null && any=yes; done
    kept=$(cat "$RUN/ports" 2>/dev/null)
    [ -n "$any" ] && [ -n "$kept" ] && [ "$kept" != "$ports" ] && {
        say "what runs was started with $kept, not $ports: make run with the same ones, or make stop first"
        exit 1
    }
    mkdir -p "$RUN" && echo "$ports" >"$RUN/ports"
}

# ---- commands ----

start() {
    local w all=yes
    same_ports
    for w in redis $WORKERS nginx; do running "$w" >/dev/null || all=no; done
    [ $all = yes ] && { say "already running (make stop first, for another model or other flags)"; show_commands; return; }
    for w in "$B/kvgate-worker" "$B/kvgate-prompt" "$B/ngx_http_kvgate_module.so" "$MODEL"; do
        [ -e "$w" ] || { say "$w is missing: make run builds and fetches it"; exit 1; }
    done
    RUN=$(realpath "$RUN")
    need_port redis "$REDIS_PORT"
    for w in $WORKERS; do need_port "$w" "$(api_port "$w")"; need_port "$w" "$(gateway_port "$w")"; done
    need_port nginx "$PORT"
    started=
    start_redis
    for w in $WORKERS; do start_worker "$w"; done
    for w in $WORKERS; do wait_for "$w" 120 worker_ready "$w"; done
    for w in $WORKERS; do reached="is known to Redis" wait_for "$w" 15 worker_listed "$w"; done
    start_nginx
    show_commands
}

stop() {
    local w any=
    for w in redis $WORKERS nginx; do running "$w" >/dev/null && any=yes; done
    [ -n "$any" ] || say "nothing is running"
    end nginx QUIT
    for w in $WORKERS; do end "$w" TERM; done
    end redis TERM
}

status() {
    local w pid rc=0
    for w in redis $WORKERS nginx; do
        if pid=$(running "$w"); then say "$w runs, pid $pid"; else say "$w does not run"; rc=1; fi
    done
    return $rc
}

# Two questions behind one system prompt of about 1,900 tokens: this README's own text.
write_questions() {
    python3 - "$MODEL_NAME" "$RUN" <<'PYTHON'
import json, sys
model, run = sys.argv[1:]
system = "You answer questions about this document.\n\n" + open("README.md", encoding="utf-8").read()[:6000]
for i, question in enumerate(["What does the gateway do?", "What does a worker tell Redis?"], 1):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    with open(f"{run}/question-{i}.json", "w", encoding="utf-8") as f:
        json.dump({"model": model, "max_tokens": 48, "temperature": 0, "messages": messages}, f)
PYTHON
}

show_commands() {
    write_questions
    local questions
    questions=$(realpath --relative-to=. "$RUN")
    local json="-H 'Content-Type: application/json'" url="http://127.0.0.1:$PORT/v1/chat/completions"
    cat <<TEXT

kvgate is up: an OpenAI-compatible API on http://127.0.0.1:$PORT/v1 (model $MODEL_NAME, workers $WORKERS). Try:

# a streamed answer
curl -N $url $json -d '{"model":"$MODEL_NAME","stream":true,"max_tokens":64,"messages":[{"role":"user","content":"Why is the sky blue?"}]}'

# two questions behind one long system prompt: the second goes to the worker that holds it (X-Kvgate-*, cached_tokens)
curl -si $url $json -d @$questions/question-1.json
curl -si $url $json -d @$questions/question-2.json

# which workers are live, and who owns the first question's prompt (redis-schemas/README.md has more)
redis-cli -p $REDIS_PORT --raw --eval redis-schemas/workers.lua 'kvgate:{$MODEL_NAME}:meta' , table
redis-cli -p $REDIS_PORT --raw --eval redis-schemas/owners.lua 'kvgate:{$MODEL_NAME}:meta' , \$($B/kvgate-prompt chain --model $MODEL --name $MODEL_NAME <$questions/question-1.json | tail -n 1)

# the same at a glance: workers, load, hit rates, the last decisions and why (a page for browsers, JSON for curl)
curl -s http://127.0.0.1:$PORT/kvgate

# the end
make stop
TEXT
}

case ${1:-} in
start | stop | status) "$1" ;;
*) sed -n '2,3s/^# //p' "$0" >&2; exit 2 ;;
esac
